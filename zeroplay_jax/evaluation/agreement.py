"""Agreement of two judges on the same items: raw agreement and Cohen's kappa, with intervals over tasks.

Cohen's kappa (Educational and Psychological Measurement 20:37, 1960) is (p_o - p_e) / (1 - p_e): p_o is the share of
items on which both judges give the same verdict, p_e that share for two independent judges with the same margins. It
is 1 for judges that always agree, 0 for agreement by chance, and undefined if both give one and the same verdict for
all items, because then chance alone explains everything (p_e = 1).

The rubrics of one task are graded on the same answer and are not independent, so intervals resample whole tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from zeroplay_jax.evaluation.statistics import Interval

# Both verdicts of an item, in this order: of the first and of the second judge.
Pair = tuple[bool, bool]
# Columns of a table of pairs.
CELLS = ('both_met', 'first_only', 'second_only', 'neither')
_CELL_OF_PAIR = {(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 3}
_QUANTILES = (0.025, 0.975)
# Bootstrap draws computed at once: a draw has a weight per task, and thousands of tasks times all draws fill a memory.
_DRAWS_AT_ONCE = 250
# With more draws without a kappa than this share the remaining ones would be a selection, not an interval.
_MAX_UNDEFINED = 0.05


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Agreement of two judges.

    Attributes:
      items: items with a verdict of both.
      tasks: tasks with such items.
      table: number of items per cell of `CELLS`.
      raw: share of items with equal verdicts, and its 95 % interval (mean, low, high).
      kappa: Cohen's kappa; None if it is undefined.
      kappa_interval: its 95 % interval (low, high); None if more than 5 % of the bootstrap draws have no kappa.
    """

    items: int
    tasks: int
    table: dict[str, int]
    raw: Interval
    kappa: float | None
    kappa_interval: tuple[float, float] | None


def count_pairs(pairs_of_tasks: Sequence[Sequence[Pair]]) -> Int[np.ndarray, 'tasks 4']:
    """Returns the number of items per task and cell of `CELLS`; tasks without items are left out."""
    rows = []
    for pairs in pairs_of_tasks:
        row = [0] * len(CELLS)
        for pair in pairs:
            row[_CELL_OF_PAIR[pair]] += 1
        if pairs:
            rows.append(row)
    return np.array(rows, np.int64).reshape(-1, len(CELLS))


def kappa(tables: Int[np.ndarray, '*batch 4']) -> Float[np.ndarray, '*batch']:
    """Returns Cohen's kappa of tables of counts in the order of `CELLS`; NaN where it is undefined."""
    both, first_only, second_only, neither = np.moveaxis(np.asarray(tables, np.int64), -1, 0)
    items = both + first_only + second_only + neither
    # Everything is multiplied by items², so that the subtractions are exact and 1 - p_e is 0 only where it should be.
    observed = items * (both + neither)
    met_by_chance = (both + first_only) * (both + second_only)
    unmet_by_chance = (second_only + neither) * (first_only + neither)
    expected = met_by_chance + unmet_by_chance
    beyond_chance = np.asarray(items * items - expected, float)
    values = np.full(beyond_chance.shape, np.nan)
    np.divide(observed - expected, beyond_chance, out=values, where=beyond_chance > 0)
    return values


def agreement(
    counts: Int[np.ndarray, 'tasks 4'], draws: int = 10_000, seed: int = 0
) -> Agreement | None:
    """Returns the agreement of two judges with percentile intervals of a bootstrap over tasks; None without items.

    Args:
      counts: result of `count_pairs`.
      draws: number of bootstrap samples.
      seed: seed of the bootstrap.
    """
    num_tasks = len(counts)
    if not num_tasks:
        return None
    table = counts.sum(0)
    num_items = int(table.sum())
    rng = np.random.default_rng(seed)
    equal_weights = np.full(num_tasks, 1 / num_tasks)
    raw_draws = []
    kappa_draws = []
    for start in range(0, draws, _DRAWS_AT_ONCE):
        size = min(_DRAWS_AT_ONCE, draws - start)
        # How often each task occurs in a sample of as many tasks with replacement.
        occurrences = rng.multinomial(num_tasks, equal_weights, size=size)
        drawn_tables = occurrences @ counts
        raw_draws.append(_share_equal(drawn_tables))
        kappa_draws.append(kappa(drawn_tables))
    raw_low, raw_high = np.quantile(np.concatenate(raw_draws), _QUANTILES)
    value = float(kappa(table))
    return Agreement(
        items=num_items,
        tasks=num_tasks,
        table=dict(zip(CELLS, table.tolist(), strict=True)),
        raw=(float(_share_equal(table)), float(raw_low), float(raw_high)),
        kappa=None if np.isnan(value) else value,
        kappa_interval=_kappa_interval(np.concatenate(kappa_draws)),
    )


def _share_equal(tables: Int[np.ndarray, '*batch 4']) -> Float[np.ndarray, '*batch']:
    """Returns the share of items with equal verdicts."""
    # Always floating, also for a single table.
    return np.asarray((tables[..., 0] + tables[..., 3]) / tables.sum(-1))


def _kappa_interval(draws: Float[np.ndarray, ' draws']) -> tuple[float, float] | None:
    """Returns the 95 % interval of the draws that have a kappa; None if too few have one."""
    defined = draws[~np.isnan(draws)]
    if len(defined) < (1 - _MAX_UNDEFINED) * len(draws):
        return None
    low, high = np.quantile(defined, _QUANTILES)
    return float(low), float(high)
