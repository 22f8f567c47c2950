"""Values of runs and verdicts about claims: paired by seed and question, with intervals, looks and Holm's correction.

A run is a dict with 'curve', one point per evaluation: [solver steps, rollouts, correct by question (0 or 1),
rubrics met by open task (where there are any)].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from scipy import stats

# Half-width of an interval that counts as narrow.
NARROW = 0.05
# Upper limit of the search for the number of seeds.
MAX_SEEDS = 1000
# Probability of a wrong verdict: of each one, or with Holm's correction of any.
LEVEL = 0.05
# Columns of a point.
STEPS, ROLLOUTS = 0, 1
COLUMNS = {'exact_match': 2, 'rubrics': 3}
MEASURES = ('area', 'final', 'gain', 'area_of_rollouts', 'worst_drop')
Measured = Literal['exact_match', 'rubrics']
Run = dict[str, Any]


def value(
    run: Run, other: Run, measure: str, of: Measured = 'exact_match'
) -> Float[np.ndarray, ' items']:
    """Returns the value of a run, higher is better: per question or open task, or one number for 'worst_drop'.

    Args:
      run: the run.
      other: the run that it is compared with; both are measured up to the smaller end of the two.
      measure: one of MEASURES (benchmarks/claims.toml explains them). For 'gain' the value at the end.
      of: what is measured.
    """
    axis = ROLLOUTS if measure == 'area_of_rollouts' else STEPS
    end = min(run['curve'][-1][axis], other['curve'][-1][axis])
    positions, values = _until(run, axis, end, COLUMNS[of])
    if measure in ('final', 'gain'):
        return values[-1]
    if measure == 'worst_drop':
        means = values.mean(1)
        maxima = np.maximum.accumulate(means)
        # 0 where nothing was reached from which the mean could fall.
        falls = np.divide(maxima - means, maxima, out=np.zeros_like(means), where=maxima > 0)
        return np.array([-np.max(falls)])
    length = positions[-1] - positions[0]
    if not length:
        return values[-1]
    return np.trapezoid(values, positions, axis=0) / length


def _until(
    run: Run, axis: int, end: float, column: int
) -> tuple[Float[np.ndarray, ' points'], Float[np.ndarray, 'points items']]:
    """Returns the points of a curve before `end`, and the one there, interpolated between two evaluations.

    Args:
      axis: what `end` counts: STEPS or ROLLOUTS.
      column: what is measured, a value of COLUMNS.
    """
    positions = np.array([point[axis] for point in run['curve']], float)
    values = np.array([point[column] for point in run['curve']], float)
    at_end = np.array([np.interp(end, positions, item) for item in values.T])
    is_before = positions < end
    return np.append(positions[is_before], end), np.vstack([values[is_before], at_end])


def differences(
    better: Sequence[Run], worse: Sequence[Run], measure: str, of: Measured = 'exact_match'
) -> Float[np.ndarray, 'seeds items']:
    """Returns better minus worse per seed and item; for 'gain' the end minus the start of the `better` runs."""
    rows = []
    if measure == 'gain':
        for run in better:
            start = np.array(run['curve'][0][COLUMNS[of]], float)
            rows.append(value(run, run, measure, of) - start)
        return np.array(rows)
    for better_run, worse_run in zip(better, worse, strict=True):
        better_value = value(better_run, worse_run, measure, of)
        rows.append(better_value - value(worse_run, better_run, measure, of))
    return np.array(rows)


def judge(
    by_seed_and_item: Float[np.ndarray, 'seeds items'], level: float = LEVEL
) -> dict[str, Any]:
    """Returns the mean difference, its interval, its p-value and the verdict without correction.

    There are two sources of chance: the seeds, and the sample of questions, which all seeds share. The interval is the
    wider one of Student's intervals over the seeds' means and over the questions' means, and p the larger of the two
    p-values.

    Args:
      by_seed_and_item: differences, see `differences`.
      level: probability that the interval misses the mean, and below which p decides.

    Returns:
      {'verdict': 'holds', 'does not hold' or 'undecided'; 'difference', the mean, better minus worse; 'by_seed', the
      difference of each seed; 'interval': [low, high]; 'p'; 'seeds_needed' and 'questions_needed', how many of each
      would give a half-width of NARROW}.
    """
    seed_means = by_seed_and_item.mean(1)
    question_means = by_seed_and_item.mean(0)
    samples = [seed_means]
    question_half_width = 0.0
    if len(question_means) > 1:
        samples.append(question_means)
        question_half_width = _half_width(question_means, level)
    half_width = max(_half_width(seed_means, level), question_half_width)
    mean = float(seed_means.mean())
    p = max(map(_p_value, samples))
    # The width of an interval falls with the square root of the number of questions.
    questions_needed = int(np.ceil(len(question_means) * (question_half_width / NARROW) ** 2))
    return dict(
        verdict=verdict(mean, p, level),
        difference=round(mean, 4),
        by_seed=[round(float(seed_mean), 4) for seed_mean in seed_means],
        interval=[round(mean - half_width, 4), round(mean + half_width, 4)],
        p=float(f'{p:.3g}'),
        seeds_needed=_seeds_needed(seed_means, level),
        questions_needed=max(len(question_means), questions_needed),
    )


def verdict(difference: float, p: float, level: float = LEVEL) -> str:
    """Returns 'holds', 'does not hold' or 'undecided'."""
    if p >= level or not difference:
        return 'undecided'
    return 'holds' if difference > 0 else 'does not hold'


def sequential_p(p_values: Sequence[float], shares: Sequence[float]) -> float:
    """Returns the p-value of a claim that was tested at several looks, after each of which it could have been closed.

    The smallest p / share is a p-value whatever rule stops the looks: that some look k has p <= share_k · u is at most
    as probable as the sum of all share_k · u, which is u (Bonferroni's inequality with weights). Intervals that miss
    with probability share_k · LEVEL at look k are valid at all looks together for the same reason.

    Args:
      p_values: of the looks that were taken, in order.
      shares: of all looks that may be taken; they sum to at most 1.
    """
    return min([1.0, *(p / share for p, share in zip(p_values, shares))])


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number by Holm's method (1979), in the same order.

    A verdict at corrected p < 0.05 for each of them is wrong for any of them with a probability of at most 5 %.
    """
    count = len(p_values)
    corrected = [1.0] * count
    largest = 0.0
    for rank, index in enumerate(sorted(range(count), key=p_values.__getitem__)):
        # Never below that of a smaller p-value.
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def correct_verdicts(rows: Sequence[dict[str, Any]], family: int) -> None:
    """Adds 'p_holm' and 'verdict_holm' to the rows of a table, each of which has 'p' and 'difference'.

    Args:
      rows: one per claim that has results.
      family: number of all registered claims. Those without results count with p = 1, so that a verdict does not
        depend on which claims are executed first.
    """
    p_values = [row['p'] for row in rows] + [1.0] * (family - len(rows))
    for row, p in zip(rows, holm(p_values), strict=False):
        row['p_holm'] = float(f'{p:.3g}')
        row['verdict_holm'] = verdict(row['difference'], p)


def _p_value(values: Float[np.ndarray, ' values']) -> float:
    """Returns the two-sided p-value of Student's test that the mean is 0; 1 for a single value."""
    if len(values) < 2:
        return 1.0
    if not np.ptp(values):
        # Equal values have no interval: their mean is 0, or it is not.
        return float(values[0] == 0)
    statistic = values.mean() / np.std(values, ddof=1) * np.sqrt(len(values))
    return float(2 * stats.t.sf(abs(statistic), len(values) - 1))


def _half_width(values: Float[np.ndarray, ' values'], level: float) -> float:
    """Returns the half-width of Student's interval for the mean of `values`; it misses with probability `level`."""
    if len(values) < 2:
        return np.inf
    quantile = stats.t.ppf(1 - level / 2, len(values) - 1)
    return float(quantile * np.std(values, ddof=1) / np.sqrt(len(values)))


def _seeds_needed(seed_means: Float[np.ndarray, ' seeds'], level: float) -> int:
    """Returns the smallest number of seeds whose interval would have a half-width of NARROW; at most MAX_SEEDS.

    Args:
      seed_means: mean difference of each seed that was run; more seeds are assumed to vary like these.
      level: as of `judge`.
    """
    if len(seed_means) < 2:
        return MAX_SEEDS
    counts = np.arange(len(seed_means), MAX_SEEDS)
    quantiles = stats.t.ppf(1 - level / 2, counts - 1)
    half_widths = quantiles * np.std(seed_means, ddof=1) / np.sqrt(counts)
    is_narrow = half_widths <= NARROW
    return int(counts[np.argmax(is_narrow)]) if is_narrow.any() else MAX_SEEDS
