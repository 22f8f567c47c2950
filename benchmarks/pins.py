"""Compares what small runs leave behind in this checkout with another commit, on the same machine.

    python -m benchmarks.pins --against HEAD~1
    python -m benchmarks.pins --against v1.0 --only drzero,adapters

Each workload is a command that runs once in each checkout, with the packages and the compiled programs of this one. The
SHA-256 of the exported weights, of the rollouts and tasks, and of the metrics must be equal. Metrics and rollouts are
hashed without clocks, versions and paths. Prints one line per workload and part, with the CPU seconds of both sides;
exit status 1 if anything differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.command import cpu_environment, parser
from benchmarks.kills import FLAGS, log_records

ROOT = pathlib.Path(__file__).parents[1]
# A fraction of a minute each, and every role is updated.
_SHORT = (*FLAGS, '--config.schedule.iterations=1')
# Fewer pages than the slots can fill: rollouts wait for pages and are evicted.
_FEW_PAGES = (
    '--config.sampler.page=32',
    '--config.sampler.pages=64',
    '--config.sampler.token_budget=16',
)
# What steps that begin early need of the trained roles.
_AHEAD = ['--config.rollout.ahead=1']
for _role in ('proposer', 'solver'):
    _AHEAD += [f'--config.{_role}.old_logp=trainer', f'--config.{_role}.tis_cap=2.0']
_TEXTS = ('-m', 'zeroplay_jax.quickstart', '--corpus', 'zeroplay_jax/mini/texts', '--workdir')
_TEXTS_SHORT = (
    '--config.progress=False',
    '--config.schedule.iterations=1',
    '--config.proposer.steps=1',
    '--config.solver.steps=2',
    '--config.eval.questions=8',
)
# Fields that name the run, or depend on the clock.
_VARYING = ('run', 'programs/cached', 'programs/compiled', 'evictions', 'refilled_tokens')
# Part of a workload → its files, from the folder of the run.
_PARTS = {
    'weights': ('policy/*/*.safetensors', 'policy/*/*/*.safetensors'),
    'rollouts': ('trajectories.jsonl', 'tasks.jsonl'),
    'metrics': ('metrics.jsonl',),
}


def _main(recipe: str, *flags: str) -> tuple[str, ...]:
    return ('-m', 'zeroplay_jax.main', f'--config=configs/{recipe}.py:mini', *_SHORT, *flags)


# Name → arguments of Python; '{workdir}' stands for the folder of the run.
WORKLOADS: dict[str, tuple[str, ...]] = {
    **{name: _main(name) for name in ('drzero', 'piplay', 'ssp', 'dspo', 'scope')},
    'texts': (*_TEXTS, '{workdir}', *_TEXTS_SHORT),
    'adapters': _main('drzero', '--config.policy.adapters.rank=4'),
    'pages': _main('drzero', *_FEW_PAGES),
    'ahead': _main('drzero', *_AHEAD),
    'ppo': _main(
        'dspo',
        '--config.solver.baseline=value',
        '--config.solver.scale=batch',
        '--config.solver.loss=token_pg',
    ),
    'processes': _main('drzero'),
    # For its CPU seconds: the others are dominated by what a process loads and compiles.
    'quickstart': ('-m', 'zeroplay_jax.main', '--config=configs/quickstart.py'),
}


def command(name: str, workdir: pathlib.Path, cache: pathlib.Path) -> list[str]:
    """Returns the command of a workload, for the folder of a checkout.

    Args:
      workdir: of the run.
      cache: folder of compiled programs.
    """
    arguments = [part.format(workdir=workdir) for part in WORKLOADS[name]]
    if '{workdir}' not in WORKLOADS[name]:
        arguments.append(f'--workdir={workdir}')
    arguments.append(f'--config.compilation.cache={cache}')
    if name == 'processes':
        # The script adds the interpreter and the module.
        return ['launch/local_2proc.sh', '--', *arguments[2:]]
    return ['.venv/bin/python', *arguments]


def hashes(workdir: pathlib.Path) -> dict[str, str]:
    """Returns part → SHA-256 of what a run has left; '' for a part without files."""
    # The quickstart with texts makes the run in a folder beside its inputs.
    run = workdir / 'run' if (workdir / 'run').is_dir() else workdir
    result = {}
    for part, patterns in _PARTS.items():
        files = sorted(path for pattern in patterns for path in run.glob(pattern))
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.relative_to(run).as_posix().encode())
            digest.update(_content(path))
        result[part] = digest.hexdigest() if files else ''
    return result


def _content(path: pathlib.Path) -> bytes:
    """Returns the bytes of a file; of a log without the fields that change from run to run."""
    if path.suffix != '.jsonl':
        return path.read_bytes()
    records = log_records(path)
    for record in records:
        for name in _VARYING:
            record.pop(name, None)
    return json.dumps(records, sort_keys=True).encode()


def play(
    name: str, tree: pathlib.Path, folder: pathlib.Path, cache: pathlib.Path
) -> dict[str, str]:
    """Runs a workload in a checkout and returns `hashes`.

    Args:
      tree: the checkout.
      folder: of the run and of its output.
      cache: folder of compiled programs.

    Raises:
      subprocess.CalledProcessError: the run failed.
    """
    workdir = folder / name
    with (folder / f'{name}.log').open('w') as log:
        subprocess.run(
            command(name, workdir, cache),
            cwd=tree,
            env=cpu_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )
    return hashes(workdir)


@contextlib.contextmanager
def checkout(commit: str, folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a checkout of a commit with the packages of this one; removes it at the end."""
    tree = folder / 'checkout'
    git = ['git', '-C', str(ROOT), 'worktree']
    subprocess.run([*git, 'add', '--quiet', '--detach', str(tree), commit], check=True)
    try:
        (tree / '.venv').symlink_to(ROOT / '.venv')
        yield tree
    finally:
        subprocess.run([*git, 'remove', '--force', str(tree)], check=True)


def _cpu_seconds() -> float:
    """Returns the CPU seconds of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare(names: Sequence[str], commit: str, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Runs the workloads in this checkout and in that of a commit; prints and returns a row per workload and part."""
    rows = []
    with checkout(commit, folder) as other:
        sides = {'ours': ROOT, 'theirs': other}
        for side in sides:
            (folder / side).mkdir()
        for name in names:
            results, cpu_seconds = {}, {}
            for side, tree in sides.items():
                before = _cpu_seconds()
                results[side] = play(name, tree, folder / side, folder / 'programs')
                cpu_seconds[side] = round(_cpu_seconds() - before, 1)
            for part, ours in results['ours'].items():
                is_equal = ours != '' and ours == results['theirs'][part]
                row = {'workload': name, 'part': part, 'equal': is_equal, 'sha256': ours[:16]}
                print(json.dumps(row | {'cpu_seconds': cpu_seconds}), flush=True)
                rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares this checkout with a commit; returns the exit status."""
    flags = parser('pins', __doc__)
    flags.add_argument('--against', required=True, metavar='COMMIT', help='the other commit')
    flags.add_argument('--only', metavar='NAMES', help=f'some of {",".join(WORKLOADS)}')
    flags.add_argument('--keep', action='store_true', help='keep the runs, for a closer look')
    options = flags.parse_args(arguments)
    names = options.only.split(',') if options.only else list(WORKLOADS)
    unknown = sorted(set(names) - set(WORKLOADS))
    if unknown:
        flags.error(f'--only: no workload {unknown[0]}; give some of {",".join(WORKLOADS)}')
    folder = pathlib.Path(tempfile.mkdtemp(prefix='pins.'))
    try:
        rows = compare(names, options.against, folder)
    except subprocess.CalledProcessError as error:
        options.keep = True
        print(f'{" ".join(map(str, error.cmd))} failed with status {error.returncode}')
        return 1
    finally:
        if options.keep:
            print(f'runs and their output: {folder}')
        else:
            shutil.rmtree(folder)
    differing = [row for row in rows if not row['equal']]
    print(f'{len(rows) - len(differing)} of {len(rows)} parts equal')
    return int(bool(differing))


if __name__ == '__main__':
    raise SystemExit(main())
