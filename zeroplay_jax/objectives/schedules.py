"""What runs when, and how many of each: plans of batches as pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def stratify(ratio: Sequence[float], n: int) -> list[int]:
    """Splits n items in a given ratio exactly: largest remainder, ties to the smaller index.

    Dr. Zero asks for 1-, 2-, 3- and 4-hop questions as 4:3:2:1. Its code draws them independently, so small
    batches miss hops; here every batch holds the same counts.

    Args:
      ratio: non-negative weights, not all zero; read as the decimal numbers they are written as.
      n: how many items, at least 0.

    Returns:
      One count per weight; they sum to n.

    Raises:
      ValueError: a negative or non-finite weight, only zeros, or a negative n.
    """
    if n < 0 or not ratio or not all(math.isfinite(w) and w >= 0 for w in ratio) or not any(ratio):
        raise ValueError(
            f'stratify: cannot split {n} as {tuple(ratio)}; give n ≥ 0, weights ≥ 0, not all 0'
        )
    weights = [Fraction(str(w)) for w in ratio]
    shares = [n * w / sum(weights) for w in weights]
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i])
    for i in order[: n - sum(counts)]:
        counts[i] += 1
    return counts


def alpha_at(schedule: Sequence[float], iteration: int) -> float:
    """The value of an iteration counted from 0; the last one holds from there on (π-Play's weight of distillation).

    Raises:
      ValueError: an empty schedule or a negative iteration.
    """
    if not schedule or iteration < 0:
        raise ValueError(
            f'alpha_at: no value for iteration {iteration} in {tuple(schedule)}; give one per iteration'
        )
    return float(schedule[min(iteration, len(schedule) - 1)])


def closes_window(step: int, period: int) -> bool:
    """Whether a window of `period` steps ends with this step, counted from 1; a period of 0 never ends.

    SSP's pool is emptied at the end of such a step, so that every window has its full length. (The released code
    asks after the counter has moved on, which makes the first window one step short.)

    Raises:
      ValueError: a step below 1 or a negative period.
    """
    if step < 1 or period < 0:
        raise ValueError(
            f'closes_window: step {step} counts from 1 and period {period} must not be negative'
        )
    return period > 0 and step % period == 0
