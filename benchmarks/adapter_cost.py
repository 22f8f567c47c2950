"""What the updates of a step cost with whole weights and with adapters.

The rows are those of the first step of `configs/ssp.py:mini` with weights of its own for each role, and both kinds of
updates get the same rows. Programs are compiled before anything is measured, and the kinds take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from zeroplay_jax.configs import ssp
from zeroplay_jax.configuration.rules import check
from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.selfplay import update as role_update
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import Step, all_steps
from zeroplay_jax.training import build
from zeroplay_jax.types import Row

RANK = 8
# Timed updates of each kind.
REPEATS = 8
# Kind of update → rank of the adapters.
KINDS = {'whole weights': 0, f'rank {RANK}': RANK}


def make_engine(rank: int) -> Engine:
    """Returns the engine of the miniature with adapters of a rank; 0: whole weights."""
    config = ssp.get_config('mini')
    config.weights = 'separate'
    config.policy.adapters.rank = rank
    config.progress = False
    check(config)
    return build.build_engine(config, build.build(config, for_training=True))


def first_rows(engine: Engine) -> tuple[Step, list[Row]]:
    """Plays and updates the first step of a run; returns it with its rows, whose rewards differ within every group."""
    step = all_steps(engine.recipe.phases())[0]
    with mock.patch.object(engine.updates, 'run', wraps=engine.updates.run) as run:
        engine.run_step(step, lambda: None)
    rows = list(run.call_args.args[1])
    # Groups of equal rewards have no gradient, and a small step has few others.
    for number, row in enumerate(rows):
        row.reward = float(number % 2)
    return step, rows


class PackedPlaces:
    """Counts micro-batches and their empty places while updates are packed.

    Attributes:
      micro_batches: so far.
      places: of all micro-batches.
      used: places with a token.
    """

    def __init__(self) -> None:
        self.micro_batches = 0
        self.places = 0
        self.used = 0

    def counted(self, pack: Callable[..., Sequence[Batch]]) -> Callable[..., Any]:
        """Returns a packing function that counts what it returns."""

        def pack_and_count(*args: Any, **settings: Any) -> Sequence[Batch]:
            packed = pack(*args, **settings)
            for batch in packed:
                self.micro_batches += 1
                self.places += batch.segment.size
                self.used += int((batch.segment > 0).sum())
            return packed

        return pack_and_count


def update(engine: Engine, step: Step, rows: list[Row]) -> dict[str, float]:
    """Makes the updates of a step; returns their CPU seconds, micro-batches and share of empty places."""
    count = PackedPlaces()
    with mock.patch.object(role_update, 'pack_rows', count.counted(role_update.pack_rows)):
        before = time.process_time()
        # It ends with a check of the new weights, so nothing is computed afterwards.
        engine.updates.run(step, rows)
        cpu_seconds = time.process_time() - before
    return {
        'cpu_seconds': cpu_seconds,
        'micro_batches': count.micro_batches,
        'empty': 1 - count.used / count.places,
    }


def measure(repeats: int = REPEATS) -> tuple[int, dict[str, dict[str, float]]]:
    """Returns the number of rows, and kind of update → medians of its figures."""
    engines: dict[int, Engine] = {}
    for rank in KINDS.values():
        engines[rank] = make_engine(rank)
        # A fresh adapter is its base, so that both engines play the same rollouts.
        step, rows = first_rows(engines[rank])
    figures: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    # The first one compiles.
    for number in range(repeats + 1):
        for kind, rank in KINDS.items():
            figure = update(engines[rank], step, rows)
            if number:
                figures[kind].append(figure)
    medians: dict[str, dict[str, float]] = {}
    for kind, of_kind in figures.items():
        names = of_kind[0]
        medians[kind] = {name: statistics.median(x[name] for x in of_kind) for name in names}
    return len(rows), medians


def markdown(rows: int, medians: dict[str, dict[str, float]]) -> str:
    """Returns the table of `measure`."""
    lines = [
        f'| updates of {rows} rollouts | micro-batches | empty places | CPU seconds |',
        '|---|---|---|---|',
    ]
    for kind, median in medians.items():
        cells = [kind, f'{median["micro_batches"]:.0f}', f'{100 * median["empty"]:.0f} %']
        cells.append(f'{median["cpu_seconds"]:.2f}')
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'
