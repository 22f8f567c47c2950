"""Does self-play learn as well with adapters? Quickstart, DSPO and π-Play with rank 4, rank 16 and whole weights.

    python -m benchmarks.adapters                          # everything; stored runs are not executed again
    python -m benchmarks.adapters --only quickstart --ranks 16 --seeds 1
    python -m benchmarks.adapters --factor 3               # other learning rates of the adapters
    python -m benchmarks.adapters --cost                   # only the time of updates (adapter_cost.py): two minutes

DSPO and π-Play are arms of benchmarks/claims.toml with more steps and a smaller rate: they gain most of all, and their
seeds differ least. DSPO has a KL term, whose reference is the base, and π-Play has a teacher. With adapters the
learning rates of all roles are `--factor` times those of whole weights (docs/adapters.md explains the default);
nothing else differs.

Every run has a process of its own. Its result is stored in benchmarks/results/adapters, named by arm, rank, factor,
seed and a hash of its config. The table of all stored runs is written to benchmarks/results/adapters.json and
adapters.md, and printed. Its columns are means over seeds:

- final: exact match on held-out questions after the last step, the mean over numbers of hops, and its range over seeds
- area: area under the curve of exact match over solver steps, divided by their number
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks import claims_arms
from benchmarks.claims_runs import code_hash, config_hash, keep_programs
from zeroplay_jax.configs import quickstart
from zeroplay_jax.configuration import rules
from zeroplay_jax.runtime.disk import write_text

RESULTS = pathlib.Path(__file__).parent / 'results'
QUICKSTART = 'quickstart'
ARMS = (QUICKSTART, 'dspo', 'piplay')
# 0: whole weights.
RANKS = (0, 4, 16)
SEEDS = 3
# Learning rates of adapters, as multiples of those of whole weights.
FACTOR = 5.0
# Phases whose steps train the solver.
SOLVER_PHASES = ('solver', 'selfplay')


def config_of(arm: str, rank: int, factor: float, seed: int) -> Any:
    """Returns the config of a run.

    Args:
      arm: one of ARMS.
      rank: of the adapters; 0 for whole weights, whose learning rates stay as they are.
      factor: multiple of the learning rates with adapters.
      seed: of the run.
    """
    if arm == QUICKSTART:
        config = quickstart.get_config()
        config.seed = seed
        config.progress = False
    else:
        config = claims_arms.config_of(arm, seed)
        _lengthen(config)
    # A run is never stopped, because one that trains nothing is a result, too.
    config.stop_after_empty_steps = 0
    for name, (warn, _, steps) in config.alarms.items():
        config.alarms[name] = (warn, 0.0, steps)
    if rank:
        config.policy.adapters.rank = rank
        for role in (config.proposer, config.solver):
            role.learning_rate *= factor
    return config


def _lengthen(config: Any) -> None:
    """Sets an arm of the claims, in place, to more steps at a smaller rate, in which adapters are not cut off early."""
    for role in (config.proposer, config.solver):
        role.learning_rate = 1e-4
    config.proposer.steps = 4
    config.solver.steps *= 2
    config.schedule.hop_ratio = (4, 3, 2, 1)
    config.eval.update(every=4, questions=50)
    config.micro.rows = 8
    config.sampler.attention = 'xla'


def run_here(arm: str, rank: int, factor: float, seed: int, path: pathlib.Path) -> None:
    """Executes a run in this process and writes its result."""
    from zeroplay_jax.training import loop

    # All seeds of an arm have the same programs.
    keep_programs()
    # Before the run, because files may be edited meanwhile.
    code = code_hash()
    config = config_of(arm, rank, factor, seed)
    rules.check(config)
    workdir = pathlib.Path(tempfile.mkdtemp(prefix='adapters.'))
    try:
        loop.run(config, workdir / 'run')
        lines = (workdir / 'run' / 'metrics.jsonl').read_text().strip().split('\n')
    finally:
        shutil.rmtree(workdir, ignore_errors=True)
    result = dict(arm=arm, rank=rank, factor=factor if rank else 1.0, seed=seed)
    result['curve'] = curve(lines)
    result['code'] = code
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result))


def curve(lines: list[str]) -> list[list[float]]:
    """Returns [solver steps, exact match] for every evaluation.

    Args:
      lines: lines of metrics.jsonl, in order.
    """
    steps = 0
    points: list[list[float]] = []
    for line in lines:
        record = json.loads(line)
        if record['phase'] == 'evaluation':
            points.append([steps, record['em/mean']])
        steps += record['phase'] in SOLVER_PHASES
    return points


def stored_path(
    arm: str, rank: int, factor: float, seed: int, folder: pathlib.Path
) -> pathlib.Path:
    """Returns the file of a finished run; its name has the hash of the config and of `claims_runs.CODE`."""
    rates = f'-{factor:g}' if rank else ''
    digits = config_hash(config_of(arm, rank, factor, seed))
    return folder / f'{arm}-{rank}{rates}-{seed}-{digits}.json'


def stored_run(
    arm: str, rank: int, factor: float, seed: int, folder: pathlib.Path
) -> dict[str, Any]:
    """Returns the result of a run; it is executed in a new process unless it is in the folder."""
    path = stored_path(arm, rank, factor, seed, folder)
    if not path.exists():
        values = [arm, str(rank), str(factor), str(seed), str(path)]
        command = [sys.executable, '-m', 'benchmarks.adapters', '--here', *values]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads(path.read_text())


def table_row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the means over the runs of one arm and rank, which differ in their seeds."""
    starts = []
    finals = []
    areas = []
    for run in runs:
        steps, values = np.array(run['curve']).T
        starts.append(values[0])
        finals.append(values[-1])
        areas.append(np.trapezoid(values, steps) / (steps[-1] - steps[0]))
    first = runs[0]
    return dict(
        arm=first['arm'],
        rank=first['rank'],
        factor=first['factor'],
        seeds=len(runs),
        before=round(float(np.mean(starts)), 3),
        final=round(float(np.mean(finals)), 3),
        final_range=[round(float(min(finals)), 3), round(float(max(finals)), 3)],
        area=round(float(np.mean(areas)), 3),
    )


def table(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row per arm, rank and factor of the runs in the folder.

    Runs of other configs than the present ones, or of another `claims_runs.CODE`, are left out.
    """
    runs_of_row: dict[tuple[int, int, float], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob('*.json')):
        run = json.loads(path.read_text())
        identity = (run['arm'], run['rank'], run['factor'], run['seed'])
        if path != stored_path(*identity, folder):
            continue
        row_key = (ARMS.index(run['arm']), run['rank'], run['factor'])
        runs_of_row.setdefault(row_key, []).append(run)
    return [table_row(runs_of_row[row_key]) for row_key in sorted(runs_of_row)]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Returns the table as markdown."""
    lines = [
        '| run | weights | learning rate | seeds | before | final (range) | area |',
        '|---|---|---|---|---|---|---|',
    ]
    for row in rows:
        weights = f'rank {row["rank"]}' if row['rank'] else 'whole'
        low, high = row['final_range']
        final = f'{row["final"]:.3f} ({low:.3f} to {high:.3f})'
        cells = [row['arm'], weights, f'× {row["factor"]:g}', row['seeds'], f'{row["before"]:.3f}']
        cells += [final, f'{row["area"]:.3f}']
        lines.append('| ' + ' | '.join(map(str, cells)) + ' |')
    return '\n'.join(lines) + '\n'


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.adapters',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--only', choices=ARMS, help='one arm')
    parser.add_argument('--ranks', type=int, nargs='+', default=RANKS, help='0: whole weights')
    parser.add_argument('--seeds', type=int, default=SEEDS, help=f'seeds per row ({SEEDS})')
    parser.add_argument('--factor', type=float, default=FACTOR, help=f'of the rates ({FACTOR:g})')
    parser.add_argument('--out', type=pathlib.Path, default=RESULTS, help='folder of the results')
    cost_help = 'print what the updates of a step cost, and do nothing else'
    parser.add_argument('--cost', action='store_true', help=cost_help)
    # The command of a single run, which `stored_run` starts.
    parser.add_argument('--here', nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Executes the runs that are not stored, and prints the table."""
    args = parse_arguments(argv)
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    if args.here:
        from zeroplay_jax.configuration import command_line

        arm, rank, factor, seed, path = args.here
        command_line.load_libraries()
        run_here(arm, int(rank), float(factor), int(seed), pathlib.Path(path))
        return
    if args.cost:
        from benchmarks import adapter_cost
        from zeroplay_jax.configuration import command_line

        command_line.load_libraries()
        print(adapter_cost.markdown(*adapter_cost.measure()), end='')
        return
    # Seeds are the outer loop, so that an interrupted benchmark has runs of every row.
    for seed in range(args.seeds):
        for arm in [args.only] if args.only else ARMS:
            for rank in args.ranks:
                run = stored_run(arm, rank, args.factor, seed, args.out / 'adapters')
                last = run['curve'][-1][1]
                print(f'{arm}, rank {rank}, seed {seed}: {last:.3f}', file=sys.stderr, flush=True)
    rows = table(args.out / 'adapters')
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / 'adapters.json', json.dumps({'rows': rows}, indent=1))
    write_text(args.out / 'adapters.md', markdown(rows))
    print(markdown(rows), end='')


if __name__ == '__main__':
    main()
