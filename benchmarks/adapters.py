"""Does self-play learn as well with adapters? Quickstart, DSPO and π-Play with rank 4, rank 16 and whole weights.

    python -m benchmarks.adapters          # stored runs are not executed again

DSPO and π-Play are arms of benchmarks/claims.toml with more steps and a smaller rate: they gain most of all, and their
seeds differ least. DSPO has a KL term, whose reference is the base, and π-Play has a teacher. With adapters the
learning rates of all roles are FACTOR times those of whole weights (docs/adapters.md explains the default);
nothing else differs.

Every result is stored in benchmarks/results/adapters, named by arm, rank, factor and seed, with the hash of the code
that it ran; the runs there are those of commit 2184f7c4 and of the two days before it. A run whose file is removed is
executed again. The table of all stored runs is written to benchmarks/results/adapters.tsv, and printed. Its columns are
means over seeds:

- final: exact match on held-out questions after the last step, the mean over numbers of hops, and its range over seeds
- area: area under the curve of exact match over solver steps, divided by their number
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from typing import Any

import numpy as np

from benchmarks import claims_runs, command
from zeroplay_jax.configs import quickstart
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.selfplay.recipe import trained_roles

QUICKSTART = 'quickstart'
ARMS = (QUICKSTART, 'dspo', 'piplay')
# 0: whole weights.
RANKS = (0, 4, 16)
SEEDS = 3
# Learning rates of adapters, as multiples of those of whole weights.
FACTOR = 5.0
# The quickstart of the stored runs, which began with mini/base.
STORED = {
    'policy.path': '',
    'policy.attention': 'dense',
    'policy.logits': 'all',
    'prompts': 'mini',
    'rollout.max_turns': 5,
    'sampler.context': 512,
    'micro.rows': 8,
    'micro.tokens': 512,
    'schedule.hop_ratio': (4, 3, 2, 1),
    'solver.learning_rate': 3e-4,
    'solver.steps': 18,
    'world.evaluation': (0, 12),
    'eval.every': 6,
    'eval.questions': 100,
    'eval.hops': (1, 2, 3, 4),
}
COLUMNS = ('run', 'weights', 'learning rate', 'seeds', 'before', 'final (range)', 'area')
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
        config.update_from_flattened_dict(STORED)
        config.seed = seed
        config.progress = False
    else:
        config = claims_runs.config_of(arm, seed)
        _lengthen(config)
    claims_runs.never_stop(config)
    if rank:
        config.policy.adapters.rank = rank
        for role in trained_roles(config):
            config[role].learning_rate *= factor
    return config


def _lengthen(config: Any) -> None:
    """Sets an arm of the claims, in place, to more steps at a smaller rate, in which adapters are not cut off early."""
    for role in trained_roles(config):
        config[role].learning_rate = 1e-4
    if 'proposer' in config:
        config.proposer.steps = 4
    config.solver.steps *= 2
    config.schedule.hop_ratio = (4, 3, 2, 1)
    config.eval.update(every=4, questions=50)
    config.micro.rows = 8
    config.sampler.attention = 'xla'


def run_arm(arm: str, rank: int, factor: float, seed: int) -> dict[str, Any]:
    """Executes a run in this process; returns its result."""
    _, records, facts = claims_runs.execute(config_of(arm, rank, factor, seed))
    identity = dict(arm=arm, rank=rank, factor=factor if rank else 1.0, seed=seed)
    return identity | dict(curve=curve(records)) | facts


def curve(records: list[dict[str, Any]]) -> list[list[float]]:
    """Returns [solver steps, exact match] for every evaluation.

    Args:
      records: of metrics.jsonl, in order.
    """
    steps = 0
    points: list[list[float]] = []
    for record in records:
        if record['phase'] == 'evaluation':
            points.append([steps, record['em/mean']])
        steps += record['phase'] in SOLVER_PHASES
    return points


def stored_path(
    arm: str, rank: int, factor: float, seed: int, folder: pathlib.Path
) -> pathlib.Path:
    """Returns the file of a finished run."""
    rates = f'-{factor:g}' if rank else ''
    return folder / f'{arm}-{rank}{rates}-{seed}.json'


def table_row(runs: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Returns the cells of the runs of one arm and rank, which differ in their seeds: means over these."""
    # All of them are evaluated after the same steps.
    steps, values = np.moveaxis(np.array([run['curve'] for run in runs]), 2, 0)
    finals = values[:, -1]
    areas = np.trapezoid(values, steps, axis=1) / (steps[:, -1] - steps[:, 0])
    first = runs[0]
    return (
        first['arm'],
        f'rank {first["rank"]}' if first['rank'] else 'whole',
        f'× {first["factor"]:g}',
        len(runs),
        f'{values[:, 0].mean():.3f}',
        f'{finals.mean():.3f} ({finals.min():.3f} to {finals.max():.3f})',
        f'{areas.mean():.3f}',
    )


def table(folder: pathlib.Path) -> str:
    """Returns the text of adapters.tsv: a row per arm, rank and factor of the runs in the folder."""
    runs_of_row: dict[tuple[int, int, float], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob('*.json')):
        run = json.loads(path.read_text())
        row_key = (ARMS.index(run['arm']), run['rank'], run['factor'])
        runs_of_row.setdefault(row_key, []).append(run)
    rows = [table_row(runs_of_row[row_key]) for row_key in sorted(runs_of_row)]
    return command.tab_separated(COLUMNS, rows)


def main() -> None:
    """Executes the runs that are not stored, and prints the table."""
    command.parser('adapters', __doc__).parse_args()
    folder = command.RESULTS / 'adapters'
    # Seeds are the outer loop, so that an interrupted benchmark has runs of every row.
    runs = []
    for seed, arm, rank in itertools.product(range(SEEDS), ARMS, RANKS):
        runs.append((arm, rank, FACTOR, seed))
    path_of = functools.partial(stored_path, folder=folder)
    with claims_runs.Runner(path_of, run_arm, processes=1) as runner:
        runner.run(runs)
    write_text(folder.with_suffix('.tsv'), table(folder))
    print(table(folder), end='')


if __name__ == '__main__':
    main()
