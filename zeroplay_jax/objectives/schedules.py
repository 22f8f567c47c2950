"""Pure functions for schedules: exact ratios, values per iteration, windows of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def stratify(ratio: Sequence[float | int], n: int) -> list[int]:
    """Splits n items in a given ratio, by the largest-remainder method with ties to the smaller index.

    Dr. Zero asks for 1-, 2-, 3- and 4-hop questions as 4:3:2:1. Its code draws hop counts independently, so a small
    batch may lack some; with this function every batch has the same counts.

    Args:
      ratio: non-negative weights, not all zero.
      n: number of items, at least 0.

    Returns:
      One count per weight; the counts sum to n.

    Raises:
      ValueError: a weight is negative or not finite, all weights are 0, or n is negative.
    """
    weights_are_valid = all(math.isfinite(weight) and weight >= 0 for weight in ratio)
    if n < 0 or not weights_are_valid or not any(ratio):
        raise ValueError(
            f'stratify: cannot split {n} as {tuple(ratio)}; give n ≥ 0, weights ≥ 0, not all 0'
        )
    # Converted from text, a weight is the decimal that the user wrote: 0.1 becomes 1/10, so that equal remainders
    # compare as equal.
    weights = [Fraction(str(weight)) for weight in ratio]
    total = sum(weights)
    shares = [n * weight / total for weight in weights]
    counts = [math.floor(share) for share in shares]

    def negative_remainder(index):
        return counts[index] - shares[index]

    # sorted is stable: of equal remainders the smaller index comes first.
    by_remainder = sorted(range(len(counts)), key=negative_remainder)
    num_unassigned = n - sum(counts)
    for index in by_remainder[:num_unassigned]:
        counts[index] += 1
    return counts


def alpha_at(schedule: Sequence[float | int], iteration: int) -> float:
    """Returns the value of an iteration; the last value holds for all further ones (π-Play's distillation weight).

    Args:
      schedule: one value per iteration.
      iteration: counted from 0.

    Raises:
      ValueError: the schedule is empty or the iteration is negative.
    """
    if not schedule or iteration < 0:
        raise ValueError(
            f'alpha_at: no value for iteration {iteration} in {tuple(schedule)}; give one per iteration'
        )
    last = len(schedule) - 1
    return float(schedule[min(iteration, last)])


def closes_window(step: int, period: int) -> bool:
    """Returns whether a window of `period` steps ends with this step; with a period of 0 no step ends one.

    SSP empties its pool after such a step, so every window has its full length. (The released code tests the counter
    after its increment, which makes the first window one step shorter.)

    Args:
      step: number of finished steps, this one included; at least 1.
      period: steps per window.

    Raises:
      ValueError: the step is below 1 or the period is negative.
    """
    if step < 1 or period < 0:
        raise ValueError(
            f'closes_window: step {step} counts from 1 and period {period} must not be negative'
        )
    return period > 0 and step % period == 0
