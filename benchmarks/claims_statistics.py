"""Values of runs and verdicts about claims: paired by seed and question, with intervals, looks and Holm's correction.

A run is a dict with 'curve', one point per evaluation: [solver steps, rollouts, correct by question (0 or 1),
rubrics met by open task (where there are any)].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

# An effect that matters, unless the paper's is smaller.
NARROW = 0.05
# Probability of a wrong verdict: of each one, or with Holm's correction of any.
LEVEL = 0.05
# Columns of a point.
STEPS, ROLLOUTS = 0, 1
COLUMNS = {'exact_match': 2, 'rubrics': 3}
MEASURES = (
    'final',
    'area',
    'at_rollouts',
    'gain',
    'area_of_rollouts',
    'first_iteration',
    'worst_drop',
)
# Of the systems that play in iterations.
ITERATIONS = 3
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
    axis = ROLLOUTS if measure in ('area_of_rollouts', 'at_rollouts') else STEPS
    end = min(run['curve'][-1][axis], other['curve'][-1][axis])
    if measure == 'at_rollouts':
        # Not interpolated, because curves bend: the arm with more rollouts has a few more here, too.
        point = next(point for point in run['curve'] if point[ROLLOUTS] >= end)
        return np.array(point[COLUMNS[of]], float)
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
    is_before = positions < end
    after = int(is_before.sum())
    at_end = values[after]
    if positions[after] != end:
        share = (end - positions[after - 1]) / (positions[after] - positions[after - 1])
        at_end = values[after - 1] + share * (at_end - values[after - 1])
    return np.append(positions[is_before], end), np.vstack([values[is_before], at_end])


def differences(
    better: Sequence[Run], worse: Sequence[Run], measure: str, of: Measured = 'exact_match'
) -> Float[np.ndarray, 'seeds items']:
    """Returns better minus worse per seed and item.

    For 'gain' the end minus the start of the `better` runs; for 'first_iteration' their value after the first of
    ITERATIONS minus the end of the `worse` runs.
    """
    rows = []
    for run, other in zip(better, worse, strict=True):
        if measure == 'gain':
            before = np.array(run['curve'][0][COLUMNS[of]], float)
            rows.append(value(run, run, measure, of) - before)
        elif measure == 'first_iteration':
            iteration = run['curve'][-1][STEPS] / ITERATIONS
            values = _until(run, STEPS, iteration, COLUMNS[of])[1]
            rows.append(values[-1] - value(other, other, 'final', of))
        else:
            rows.append(value(run, other, measure, of) - value(other, run, measure, of))
    return np.array(rows)


class Spread(NamedTuple):
    """Where the variance of a mean over seeds and questions comes from.

    Attributes:
      seeds: variance of the mean of the seeds' means, which includes `both`.
      questions: variance of the mean of the questions' means, which includes `both`.
      both: the part of chance that is neither the seed's nor the question's.
      counts: numbers of seeds and of questions.
    """

    seeds: float
    questions: float
    both: float
    counts: tuple[int, int]

    @property
    def estimates(self) -> list[tuple[float, float]]:
        """(variance of the mean, degrees of freedom): of the seeds alone, the questions alone, and of both.

        The last is that of Cameron, Gelbach & Miller (2011) for seeds and questions that are both drawn at random, with
        Satterthwaite's degrees of freedom. With few seeds these are uncertain, so that whichever estimate gives the
        widest interval is used.
        """
        seed_count, question_count = self.counts
        estimates = [(self.seeds, float(seed_count - 1))]
        if question_count > 1:
            estimates.append((self.questions, float(question_count - 1)))
            weighted = self.seeds**2 / (seed_count - 1) + self.questions**2 / (question_count - 1)
            if weighted:
                freedom = (self.seeds + self.questions) ** 2 / weighted
                estimates.append((self.seeds + self.questions - self.both, freedom))
        return [(variance, freedom) for variance, freedom in estimates if variance > 0]


def spread(by_seed_and_item: Float[np.ndarray, 'seeds items']) -> Spread:
    """Returns the spread of differences; with a single item, all of it is that of the seeds."""
    seed_count, question_count = by_seed_and_item.shape
    seed_means = by_seed_and_item.mean(1)
    question_means = by_seed_and_item.mean(0)
    of_seeds = float(np.var(seed_means, ddof=1) / seed_count)
    if question_count == 1:
        return Spread(of_seeds, 0.0, 0.0, (seed_count, 1))
    of_questions = float(np.var(question_means, ddof=1) / question_count)
    residuals = by_seed_and_item - seed_means[:, None] - question_means + by_seed_and_item.mean()
    freedom = (seed_count - 1) * (question_count - 1)
    of_both = float((residuals**2).sum() / freedom / by_seed_and_item.size)
    return Spread(of_seeds, of_questions, of_both, (seed_count, question_count))


def judge(
    by_seed_and_item: Float[np.ndarray, 'seeds items'], level: float = LEVEL
) -> dict[str, Any]:
    """Returns the mean difference, its interval, its p-value and the verdict without correction.

    There are two sources of chance: the seeds, and the sample of questions, which all seeds share. Interval and p-value
    are Student's, with the variance that both have together (`Spread.estimates`).

    Args:
      by_seed_and_item: differences, see `differences`.
      level: probability that the interval misses the mean, and below which p decides.

    Returns:
      {'verdict': 'holds', 'does not hold' or 'open'; 'difference', the mean, better minus worse; 'by_seed', the
      difference of each seed; 'interval': [low, high]; 'upper': the one-sided upper limit at the same level; 'p'}.
    """
    seed_means = by_seed_and_item.mean(1)
    mean = float(seed_means.mean())
    p, half_width, one_sided = 1.0, float('inf'), float('inf')
    if len(seed_means) > 1:
        sources = spread(by_seed_and_item)
        half_width = _half_width(sources, level)
        # A two-sided interval at twice the level has half of it on each side.
        one_sided = _half_width(sources, 2 * level)
        p = _p_value(mean, sources)
    return dict(
        verdict=verdict(mean, p, level),
        difference=round(mean, 4),
        by_seed=[round(float(seed_mean), 4) for seed_mean in seed_means],
        interval=[round(mean - half_width, 4), round(mean + half_width, 4)],
        upper=round(mean + one_sided, 4),
        p=float(f'{p:.3g}'),
    )


def verdict(difference: float, p: float, level: float = LEVEL) -> str:
    """Returns 'holds', 'does not hold' or 'open'."""
    if p >= level or not difference:
        return 'open'
    return 'holds' if difference > 0 else 'does not hold'


def judge_looks(
    by_seed_and_item: Float[np.ndarray, 'seeds items'], looks: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """Returns `judge` of the last look, with p, interval, upper limit and verdict of all looks together.

    Args:
      by_seed_and_item: differences, see `differences`.
      looks: (seeds, share of LEVEL) of each look that was taken, in order; the shares sum to at most 1.
    """
    results = []
    for seeds, share in looks:
        results.append(judge(by_seed_and_item[:seeds], LEVEL * share))
    return results[-1] | combine_looks(results, [share for _, share in looks])


def combine_looks(
    results: Sequence[dict[str, Any]], shares: Sequence[float]
) -> dict[str, float | list[float] | str]:
    """Returns p, interval, upper limit and verdict of a claim that was tested at several looks.

    Valid whatever rule stops the looks: that some look k has p <= share_k · u is at most as probable as the sum of all
    share_k · u, which is u (Bonferroni's inequality with weights). So the smallest p / share is a p-value. Limits that
    miss with probability share_k · LEVEL at look k are valid at all looks together for the same reason, and so is the
    intersection of the intervals; it excludes 0 exactly if p is below LEVEL. The verdict has the sign of the interval,
    because that of the last look's mean may be another one. Looks whose intervals have no point in common decide
    nothing; that happens with a probability of at most LEVEL.

    Args:
      results: of `judge` at the looks, in order.
      shares: of LEVEL, of the looks.
    """
    p = min([1.0, *(result['p'] / share for result, share in zip(results, shares, strict=True))])
    lows = [result['interval'][0] for result in results]
    highs = [result['interval'][1] for result in results]
    uppers = [result['upper'] for result in results]
    low, high, upper = max(lows), min(highs), min(uppers)
    if low > high:
        p, low, high, upper = 1.0, min(lows), max(highs), max(uppers)
    p = float(f'{p:.3g}')
    return dict(p=p, interval=[low, high], upper=upper, verdict=verdict(low + high, p))


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
    """Adds 'p_holm' and 'verdict_holm' to results of `judge_looks`.

    Args:
      rows: one per claim that has results, all by the measures that decide, or all by another one.
      family: number of all registered claims. Those without results count with p = 1, so that a verdict does not
        depend on which claims are executed first.
    """
    p_values = [row['p'] for row in rows] + [1.0] * (family - len(rows))
    for row, p in zip(rows, holm(p_values), strict=False):
        row['p_holm'] = float(f'{p:.3g}')
        row['verdict_holm'] = verdict(sum(row['interval']), p)


def _p_value(mean: float, sources: Spread) -> float:
    """Returns the two-sided p-value of Student's test that the mean is 0, the largest of all estimates."""
    if not sources.estimates:
        # Equal values have no interval: their mean is 0, or it is not.
        return float(mean == 0)
    p_values = []
    for variance, freedom in sources.estimates:
        statistic = abs(mean) / np.sqrt(variance)
        p_values.append(float(2 * stats.t.sf(statistic, freedom)))
    return max(p_values)


def _half_width(sources: Spread, level: float) -> float:
    """Returns the half-width of Student's interval for the mean, the widest of all estimates.

    It misses with probability `level`.
    """
    half_widths = [0.0]
    for variance, freedom in sources.estimates:
        quantile = stats.t.ppf(1 - level / 2, freedom)
        half_widths.append(float(quantile * np.sqrt(variance)))
    return max(half_widths)
