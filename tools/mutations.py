"""Measures what the tests notice: makes single mutations of source files and runs the tests of each file.

    python -m tools.mutations --count 200 --seed 0
    python -m tools.mutations --again                  # survivors once more, after a test was added
    python -m tools.mutations --count 50 --files zeroplay_jax/learner/batch.py

Works in a copy of the working tree. Every mutation is one line of benchmarks/results/mutations.tsv: 'caught' with the
first test that failed, 'survived', or 'timeout'. Mutations in the table are not run again. The column `reason` is
written by hand: why a surviving mutation changes nothing that a user could notice ('equivalent: …').
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

from tools.mutation_operators import Key, chosen

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / 'benchmarks/results/mutations.tsv'
COLUMNS = ('file', 'line', 'column', 'mutation', 'result', 'test', 'reason')
# Seconds for the tests of one mutation, on a machine that others use too.
_LIMIT = 600.0

_REWARDS = 'test_rewards test_wrong_arguments'
_UPDATES = 'test_learner test_teacher test_update_modes'
_ROLLOUTS = 'test_scheduler test_placement test_versions'
_RULES = 'test_config_values test_config_adapters test_config_recipes test_config_roles'
# Source file below zeroplay_jax/ → its test files, the quick and telling ones first: in the folder of the package if no
# other one is given.
TESTS = {
    'objectives/advantages.py': 'test_advantages test_wrong_arguments',
    'objectives/aggregation.py': 'test_aggregation test_wrong_arguments',
    'objectives/answers.py': _REWARDS,
    'objectives/corrections.py': 'test_corrections test_wrong_arguments',
    'objectives/distillation.py': 'test_distillation test_wrong_arguments',
    'objectives/format_scores.py': _REWARDS,
    'objectives/loss_checks.py': 'test_loss_checks',
    'objectives/losses.py': 'test_losses test_wrong_arguments learner/test_batch_means',
    'objectives/masking.py': 'test_masking test_corrections',
    'objectives/policy_gradient.py': 'test_policy_gradient test_losses test_wrong_arguments',
    'objectives/registry.py': 'test_wrong_arguments test_losses test_rewards',
    'objectives/rewards.py': _REWARDS,
    'objectives/values.py': 'test_values test_wrong_arguments',
    'learner/batch.py': f'{_UPDATES} test_batch_means',
    'learner/loss.py': f'{_UPDATES} test_elementwise_losses',
    'learner/checkpoint.py': 'test_checksums test_checkpoint',
    'rollout/tokens.py': 'test_tokens test_tokenizer_rules test_chat_templates',
    'rollout/scheduler.py': _ROLLOUTS,
    'rollout/slots.py': f'{_ROLLOUTS} test_paged_rollouts',
    'rollout/placement.py': f'{_ROLLOUTS} test_pages test_paged_rollouts',
    'configuration/rules.py': _RULES,
}
FILES = [f'zeroplay_jax/{name}' for name in TESTS]
# Imported once; every test process is forked from this one and has them already.
_LIBRARIES = (
    *('pytest', 'numpy', 'jax', 'jaxtyping', 'optax', 'orbax.checkpoint'),
    *('tokenizers', 'transformers', 'ml_collections', 'pydantic'),
)
# All runs share one folder of compiled programs. The other variables are those of tests/conftest.py.
_ENVIRONMENT = {
    'JAX_COMPILATION_CACHE_DIR': str(pathlib.Path(tempfile.gettempdir(), 'mutation_programs')),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
    ' --xla_cpu_use_fusion_emitters=false',
}


def tests_of(file: str) -> list[str]:
    """Returns the paths of the test files that concern a source file."""
    name = file.removeprefix('zeroplay_jax/')
    folder = name.partition('/')[0]
    paths = []
    for test in TESTS[name].split():
        path = test if '/' in test else f'{folder}/{test}'
        paths.append(f'tests/{path}.py')
    return paths


def read_table() -> dict[Key, dict[str, str]]:
    """Returns the lines of the table by mutation."""
    if not TABLE.is_file():
        return {}
    table = {}
    for line in TABLE.read_text(encoding='utf-8').splitlines()[1:]:
        values = line.split('\t')
        table[Key(*values[:4])] = dict(zip(COLUMNS, values, strict=True))
    return table


def write_table(table: dict[Key, dict[str, str]]) -> None:
    """Writes the table, sorted by place."""

    def place(key: Key) -> tuple[str, int, int, str]:
        return key.file, int(key.line), int(key.column), key.mutation

    lines = ['\t'.join(COLUMNS)]
    for key in sorted(table, key=place):
        lines.append('\t'.join(table[key][name] for name in COLUMNS))
    temporary = TABLE.with_suffix('.part')
    temporary.write_text('\n'.join(lines) + '\n', encoding='utf-8')
    os.replace(temporary, TABLE)


def copy_tree(folder: pathlib.Path) -> None:
    """Copies all files that git tracks or would track, as they are now."""
    command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split('\0')):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def run_tests(copy: pathlib.Path, tests: Iterable[str]) -> tuple[str, str]:
    """Runs test files in the copy; returns ('caught' | 'survived' | 'timeout', first test that failed)."""
    log = copy / 'tests.log'
    child = os.fork()
    if child == 0:
        _be_pytest(copy, tests, log)
    ends = time.monotonic() + _LIMIT
    status = None
    while status is None and time.monotonic() < ends:
        time.sleep(0.05)
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = code
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return 'timeout', ''
    if status == 0:
        return 'survived', ''
    text = log.read_text(encoding='utf-8', errors='replace')
    # The line of the summary; a file or a conftest that cannot be imported has another one.
    match = re.search(r'^(?:FAILED|ERROR) (\S+)|^ImportError while (.+)$', text, re.M)
    if match is None:
        return 'caught', f'exit status {os.waitstatus_to_exitcode(status)}'
    return 'caught', match[1] or match[2]


def _be_pytest(copy: pathlib.Path, tests: Iterable[str], log: pathlib.Path) -> None:
    """Becomes a process that runs tests in the copy and ends."""
    os.setsid()
    os.chdir(copy)
    with log.open('w') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # `python -m` put the original folder first.
    sys.path[0] = str(copy)
    for name in [name for name in sys.modules if name.split('.')[0] == 'tools']:
        del sys.modules[name]
    pytest = importlib.import_module('pytest')
    options = ['-x', '-q', '-rfE', '--tb=no', '-p', 'no:cacheprovider', '-m', 'not long']
    status = 1
    try:
        status = pytest.main([*options, *tests])
    finally:
        os._exit(int(status))


def run(mutations: list[tuple[Key, str]]) -> None:
    """Runs the tests of all mutations; writes the table after each."""
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix='mutations.') as folder:
        copy = pathlib.Path(folder)
        copy_tree(copy)
        for number, (key, source) in enumerate(mutations, 1):
            tests = tests_of(key.file)
            started = time.monotonic()
            path = copy / key.file
            original = path.read_bytes()
            _replace(path, source.encode())
            result, test = run_tests(copy, tests)
            _replace(path, original)
            # With its parameters a name may have blanks.
            function = test.partition('[')[0]
            if test.startswith('tests/') and function not in sound:
                if run_tests(copy, [function])[0] != 'survived':
                    raise SystemExit(f'{function} fails without a mutation too')
                sound.add(function)
            # Reasons may have been written into the file meanwhile.
            table = read_table()
            reason = table.get(key, {}).get('reason', '')
            table[key] = key._asdict() | {'result': result, 'test': test, 'reason': reason}
            write_table(table)
            seconds = time.monotonic() - started
            place = f'{number}/{len(mutations)} {key.file}:{key.line}'
            print(f'{place} {result} {seconds:.0f} s {key.mutation}', flush=True)


def _replace(path: pathlib.Path, content: bytes) -> None:
    """Writes a source file; Python would take compiled code of the same second and size for that of the new text."""
    path.write_bytes(content)
    for compiled in (path.parent / '__pycache__').glob(f'{path.stem}.*.pyc'):
        compiled.unlink()


def _is_open(line: dict[str, str] | None) -> bool:
    """Returns whether a line of the table is of a mutation that nothing catches and that has no reason."""
    return line is not None and line['result'] != 'caught' and not line['reason']


def main() -> None:
    """Runs the campaign and prints the counts."""
    parser = argparse.ArgumentParser(
        prog='python -m tools.mutations',
        description=__doc__.split('\n')[0],
        epilog='example:\n  python -m tools.mutations --count 50 --files zeroplay_jax/learner/batch.py',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--count', type=int, default=200, help='mutations over all files')
    parser.add_argument('--seed', type=int, default=0, help='another seed chooses other mutations')
    parser.add_argument(
        '--files',
        nargs='+',
        default=FILES,
        choices=FILES,
        metavar='FILE',
        help='files to mutate; all of the campaign',
    )
    parser.add_argument('--again', action='store_true', help='only survivors without a reason')
    arguments = parser.parse_args()
    table = read_table()
    sources = {name: (ROOT / name).read_text(encoding='utf-8') for name in arguments.files}
    mutations = chosen(sources, arguments.count, arguments.seed)
    if arguments.again:
        mutations = [pair for pair in mutations if _is_open(table.get(pair[0]))]
    else:
        mutations = [pair for pair in mutations if pair[0] not in table]
    # Before the libraries are imported, which comes before tests/conftest.py.
    os.environ.update(_ENVIRONMENT)
    for name in _LIBRARIES:
        importlib.import_module(name)
    run(mutations)
    table = read_table()
    counts = collections.Counter(line['result'] for line in table.values())
    counts['equivalent'] = sum(line['reason'].startswith('equivalent') for line in table.values())
    print(dict(counts))


if __name__ == '__main__':
    main()
