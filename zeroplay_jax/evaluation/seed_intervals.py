"""Differences between several runs of two sides, with 95 % intervals over runs, such as runs of different seeds.

The interval of one pair of runs (`question_sets.compare`) covers the choice of questions only. Two seeds of one config
can differ by more than it says, so a claim about a method needs several runs of each side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import special

Interval = tuple[float, float, float]
# Two-sided 95 % interval.
_UPPER = 0.975


def difference(baseline: Sequence[float], candidate: Sequence[float], paired: bool) -> Interval:
    """Returns the mean score of the candidate's runs minus that of the baseline's, and its 95 % interval over runs.

    Args:
      baseline: mean score per run.
      candidate: mean score per run.
      paired: whether run i of one side belongs to run i of the other, such as by its seed.

    Returns:
      (difference, low, high). With `paired` Student's t interval of the differences; with one baseline, such as the
      policy before training, that of the candidate's runs, and the baseline counts as exact; else Welch's (Biometrika
      34:28, 1947), for sides of different variances.

    Raises:
      ValueError: fewer than two runs to compute a variance from, or unequal numbers of paired runs.
    """
    before = np.asarray(baseline, float)
    after = np.asarray(candidate, float)
    if paired:
        if before.size != after.size:
            raise ValueError(f'{before.size} and {after.size} runs cannot be paired')
        return _student(after - before)
    if before.size == 1:
        return _student(after - before[0])
    if after.size == 1:
        return _student(after[0] - before)
    return _welch(before, after)


def statistic(baseline: int, candidate: int, paired: bool) -> str:
    """Returns what the interval of `difference` is, in words, by the numbers of runs of both sides."""
    if paired:
        return f"Student's t interval of {baseline} paired differences"
    if 1 in (baseline, candidate):
        runs = max(baseline, candidate)
        return f"Student's t interval over {runs} runs; the single result of the other side counts as exact"
    return f"Welch's t interval over {baseline} and {candidate} runs"


def _student(differences: np.ndarray) -> Interval:
    """Returns the mean of float [N] and its t interval."""
    runs = differences.size
    if runs < 2:
        raise ValueError('an interval over runs needs two runs of a side or more')
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / np.sqrt(runs)
    half_width = float(special.stdtrit(runs - 1, _UPPER) * error)
    return mean, mean - half_width, mean + half_width


def _welch(before: np.ndarray, after: np.ndarray) -> Interval:
    """Returns the difference of the means of float [N] and float [M], each of two or more runs, and its interval."""
    mean = float(after.mean() - before.mean())
    # Squared standard errors of both means.
    squared_errors = [side.var(ddof=1) / side.size for side in (before, after)]
    variance = float(sum(squared_errors))
    if not variance:
        return mean, mean, mean
    # Degrees of freedom by Welch and Satterthwaite.
    weights = [error**2 / (side.size - 1) for error, side in zip(squared_errors, (before, after))]
    freedom = variance**2 / float(sum(weights))
    half_width = float(special.stdtrit(freedom, _UPPER) * np.sqrt(variance))
    return mean, mean - half_width, mean + half_width
