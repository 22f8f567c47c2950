"""Breaks promises on purpose, one at a time, and says whether a test notices: `python tests/mutate.py [--draw 10]`.

A mutation of mutations.toml replaces one text of one file, and the test that stands there has to fail. Tests run in
copies of the project, two at a time, in processes that fork from those of this command after it has loaded the
libraries.
"""

import argparse
import concurrent.futures
import contextlib
import importlib.util
import multiprocessing
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import tomllib

from project_copy import ROOT, copy_project

TABLE = ROOT / 'tests' / 'mutations.toml'
JOBS = 2
FORK = multiprocessing.get_context('fork')
# For a test that a mutant makes wait for ever.
SECONDS = 300
# What most tests import. No module of the project: those are what is mutated.
LIBRARIES = """
    jax.experimental.pallas flax.linen optax orbax.checkpoint transformers.tokenization_utils_tokenizers scipy.stats
    pydantic jaxtyping xdist pytest_timeout
""".split()


def mutations():
    """The rows of the table: dictionaries of file, text, replacement, test and promise."""
    return tomllib.loads(TABLE.read_text(encoding='utf-8'))['mutation']


def mutated(row):
    """A row's file with its replacement; raises ValueError where the text does not stand there exactly once."""
    source = (ROOT / row['file']).read_text(encoding='utf-8')
    count = source.count(row['text'])
    if count != 1:
        raise ValueError(f'{row["file"]}: stands there {count} times: {row["text"]!r}')
    return source.replace(row['text'], row['replacement'])


def drawn(rows, count):
    """So many rows, chosen by the commit."""
    head = subprocess.check_output(['git', 'rev-parse', 'HEAD'], cwd=ROOT)
    return random.Random(head).sample(rows, min(count, len(rows)))


def run_test(test, project):
    """The process of a test, whose output is the file output.txt of a copy of the project."""
    os.setsid()
    output = os.open(project / 'output.txt', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(project)
    # In place of this file's folder.
    sys.path[0] = str(project)
    del sys.modules['project_copy']
    import pytest

    sys.exit(pytest.main(['-qx', '-p', 'no:cacheprovider', test]))


def result_of(test, project):
    """'passed', 'failed', 'skipped', or why none of them is known."""
    process = FORK.Process(target=run_test, args=(test, project))
    process.start()
    process.join(SECONDS)
    code = process.exitcode
    # Also what the test has started.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if code is None:
        return f'no end after {SECONDS} s'
    # A test that lacks a program here is skipped.
    if not code and ' passed' not in (project / 'output.txt').read_text(encoding='utf-8'):
        return 'skipped'
    return {0: 'passed', 1: 'failed'}.get(code, f'pytest ended with {code}')


def write(path, content):
    path.write_bytes(content)
    # Python takes compiled files by the time and size of their source. Both may be equal within a second.
    pathlib.Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def trial(folder, is_mutated, row):
    """(row, result, seconds, output) of a test with the replacement of a row, or, without one, as the project is."""
    project = folder / str(os.getpid())
    if not project.is_dir():
        copy_project(project)
    path, started = project / row['file'], time.monotonic()
    original = path.read_bytes()
    write(path, mutated(row).encode() if is_mutated else original)
    result = result_of(row['test'], project)
    write(path, original)
    output = (project / 'output.txt').read_text(encoding='utf-8')
    return row, result, time.monotonic() - started, output


def load_libraries(folder):
    """Loads what tests import, as tests/conftest.py would have it."""
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(folder / 'programs'))
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    for name in LIBRARIES:
        importlib.import_module(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--draw', type=int, help='so many, chosen by the commit; default: all')
    of_text = 'those with this text in their file, test or promise'
    parser.add_argument('--only', default='', help=of_text)
    as_it_is = 'without the replacements: every test has to pass'
    parser.add_argument('--unbroken', action='store_true', help=as_it_is)
    args = parser.parse_args()
    places = '{file} {test} {promise}'
    rows = [row for row in mutations() if args.only in places.format(**row)]
    if args.draw:
        rows = drawn(rows, args.draw)
    expected = 'passed' if args.unbroken else 'failed'
    words = {'failed': 'caught', 'passed': 'SURVIVED'}
    misses = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        load_libraries(folder)
        jobs = concurrent.futures.ProcessPoolExecutor(JOBS, FORK)
        trials = [jobs.submit(trial, folder, not args.unbroken, row) for row in rows]
        for ended in concurrent.futures.as_completed(trials):
            row, result, seconds, output = ended.result()
            misses += result not in (expected, 'skipped')
            word = result if args.unbroken else words.get(result, result)
            print(f'{word} {seconds:.0f} s {row["file"]}: {row["promise"]}', flush=True)
            if result != expected:
                print(f'  {row["test"]}\n{output[-2000:]}')
    print(f'{len(rows) - misses} of {len(rows)}: {expected}, as it should be')
    return int(misses > 0)


if __name__ == '__main__':
    sys.exit(main())
