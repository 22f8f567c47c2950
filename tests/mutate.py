"""Breaks promises on purpose, one at a time, and says whether a test notices: `python tests/mutate.py [--draw 10]`.

A mutation of mutations.toml replaces one text of one file, and the test that stands there has to fail. Tests run in
copies of the project, two at a time, in processes that fork from this one after it has loaded the libraries.
"""

import argparse
import contextlib
import importlib
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


class Trial:
    """A test that runs in a copy of the project with the replacement of a row, or, without one, as the project is."""

    def __init__(self, row, project, is_mutated):
        self.row, self.project = row, project
        self.started = time.monotonic()
        self._path = project / row['file']
        self._original, self._status = self._path.read_bytes(), self._path.stat()
        if is_mutated:
            self._path.write_text(mutated(row), encoding='utf-8')
            # Python takes compiled files by the time and size of their source. Both may be equal within a second.
            os.utime(self._path, ns=(time.time_ns(), self._status.st_mtime_ns + time.time_ns()))
        self.output = project / 'output.txt'
        self._process = os.fork()
        if not self._process:
            self._run_test()

    def _run_test(self):
        """The process of the test."""
        os.setsid()
        code = 3
        with contextlib.suppress(BaseException):
            descriptor = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.chdir(self.project)
            # In place of this file's folder.
            sys.path[0] = str(self.project)
            del sys.modules['project_copy']
            import pytest

            code = int(pytest.main(['-qx', '-p', 'no:cacheprovider', self.row['test']]))
        sys.stdout.flush()
        os._exit(code)

    def result(self):
        """None while it runs, then 'passed', 'failed', or why neither is known."""
        process, status = os.waitpid(self._process, os.WNOHANG)
        is_late = time.monotonic() - self.started > SECONDS
        if not process and not is_late:
            return None
        # Also what the test has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        if not process:
            os.waitpid(self._process, 0)
        self._path.write_bytes(self._original)
        os.utime(self._path, ns=(self._status.st_atime_ns, self._status.st_mtime_ns))
        if not process:
            return f'no end after {SECONDS} s'
        code = os.waitstatus_to_exitcode(status)
        # A test that lacks a program here is skipped.
        if not code and ' passed' not in self.output.read_text(encoding='utf-8'):
            return 'skipped'
        return {0: 'passed', 1: 'failed'}.get(code, f'pytest ended with {code}')


def trials(rows, folder, is_mutated):
    """Yields (trial, result) of all rows, in the order in which they end."""
    free = [folder / str(job) for job in range(min(JOBS, len(rows)))]
    for project in free:
        copy_project(project)
    waiting, running = list(rows), []
    while waiting or running:
        while waiting and free:
            running.append(Trial(waiting.pop(0), free.pop(), is_mutated))
        time.sleep(0.05)
        for trial in list(running):
            result = trial.result()
            if result:
                yield trial, result
                running.remove(trial)
                free.append(trial.project)


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
    parser.add_argument(
        '--only', default='', help='those with this text in their file, test or promise'
    )
    parser.add_argument(
        '--unbroken', action='store_true', help='without the replacements: every test has to pass'
    )
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
        for trial, result in trials(rows, folder, not args.unbroken):
            misses += result not in (expected, 'skipped')
            seconds = time.monotonic() - trial.started
            word = result if args.unbroken else words.get(result, result)
            row = trial.row
            print(f'{word} {seconds:.0f} s {row["file"]}: {row["promise"]}', flush=True)
            if result != expected:
                print(f'  {row["test"]}\n{trial.output.read_text(encoding="utf-8")[-2000:]}')
    print(f'{len(rows) - misses} of {len(rows)}: {expected}, as it should be')
    return 1 if misses else 0


if __name__ == '__main__':
    sys.exit(main())
