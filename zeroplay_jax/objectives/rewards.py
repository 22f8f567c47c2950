"""Rewards: difficulty of a question, answer metrics by name, lengths, rubrics, schedules. Numbers in and out; no JAX.

`reward.difficulty` and `reward.answer` of a config name a function here, or 'package.module:function' outside this
project, with one of these signatures:

    def my_difficulty(solved, n, target): ...      # float: reward of a question that `solved` of n rollouts answered
    def my_metric(prediction, golds): ...          # bool or float in [0, 1]: score of an answer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from zeroplay_jax.objectives.answers import exact_match, f1, sub_exact_match
from zeroplay_jax.objectives.registry import resolve


def stratify(ratio: Sequence[float | int], n: int) -> list[int]:
    """Splits n items in a given ratio, by the largest-remainder method with ties to the smaller index.

    Dr. Zero asks for 1-, 2-, 3- and 4-hop questions as 4:3:2:1. Its code draws hop counts independently, so a small
    batch may lack some; with this function every batch has the same counts.

    Args:
      ratio: non-negative weights, not all zero.
      n: number of items, at least 0.

    Returns:
      One count per weight; the counts sum to n.
    """
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
    """
    last = len(schedule) - 1
    return float(schedule[min(iteration, last)])


def closes_window(step: int, period: int) -> bool:
    """Returns whether a window of `period` steps ends with this step; with a period of 0 no step ends one.

    SSP empties its pool after such a step, so every window has its full length. (The released code tests the counter
    after its increment, which makes the first window one step shorter.)

    Args:
      step: number of finished steps, this one included; at least 1.
      period: steps per window.
    """
    return period > 0 and step % period == 0


# (solved, n, target) as in `difficulty` → reward of a question to its proposer.
DifficultyFunction = Callable[[float, int, float], float]

# (prediction or None, accepted answers) → score of the answer.
AnswerMetric = Callable[[str | None, Sequence[str] | str], float]


def difficulty(solved: float | int, n: int, kind: str = 'linear', target: float = 0.5) -> float:
    """Returns the reward of a question to its proposer when `solved` of n solver rollouts answered it.

    Args:
      solved: number of correct rollouts, or the sum of graded scores.
      n: number of rollouts.
      kind: a key of DIFFICULTIES, or 'package.module:function'.
      target: mean score with the highest reward, for 'triangle'.

    Raises:
      ValueError: n is below 1, `solved` is outside 0 … n, or there is no such kind.
    """
    if n < 1 or not 0 <= solved <= n:
        raise ValueError(
            f'difficulty: {solved} of {n} solved; needs n ≥ 1 rollouts and 0 ≤ solved ≤ n'
        )
    # The range is checked here, so that functions outside this project need not check it.
    difficulty_function = resolve_difficulty(kind)
    return difficulty_function(solved, n, target)


def _linear_difficulty(solved, n, target):
    """Returns (n − k)/(n − 1) for 0 < k < n, else 0; highest at k = 1 (Dr. Zero eq. 4, π-Play eq. 4)."""
    # A question that no or every rollout solves has no reward variance and teaches the solver nothing.
    del target
    if not 0 < solved < n:
        return 0.0
    # Dividing by n − 1 makes the reward of k = 1, the hardest solvable question, exactly 1.
    return (n - solved) / max(n - 1, 1)


def _one_minus_difficulty(solved, n, target):
    """Returns 1 − k/n (SSP eq. 7).

    It is 1 for a question that no rollout solved: unanswerable questions must be rejected before (SSP verifies them).
    """
    del target
    return 1 - solved / n


def _parabolic_difficulty(solved, n, target):
    """Returns 4·p·(1 − p) with p = k/n, highest at one half (Dr. Zero's ablation, table 7)."""
    del target
    return 4.0 * solved * (n - solved) / n**2


def _solvable_difficulty(solved, n, target):
    """Returns 1 for 0 < k < n, else 0 (SQLM; there k counts the answers that agree with the most frequent one)."""
    del target
    return float(0 < solved < n)


def _triangle_difficulty(solved, n, target):
    """Returns `triangle` of the mean score (SCOPE eq. 5; with target ½ 1 − 2·|p − ½|, R-Zero's uncertainty reward)."""
    return triangle(solved / n, target)


# The names of `config.reward.difficulty`.
DIFFICULTIES: Mapping[str, DifficultyFunction] = {
    'linear': _linear_difficulty,
    'parabolic': _parabolic_difficulty,
    'one_minus': _one_minus_difficulty,
    'solvable': _solvable_difficulty,
    'triangle': _triangle_difficulty,
}

# The names of `config.reward.answer`.
ANSWER_METRICS: Mapping[str, AnswerMetric] = {
    'em': exact_match,
    'subem': sub_exact_match,
    'f1': f1,
}


def resolve_difficulty(name: str) -> DifficultyFunction:
    """Returns the difficulty function of a built-in name, or the one that 'package.module:function' refers to.

    Raises:
      ValueError: there is no such function; the message is one line.
    """
    return resolve('difficulty', name, DIFFICULTIES, ('solved', 'n', 'target'))


def resolve_answer_metric(name: str | AnswerMetric) -> AnswerMetric:
    """Returns the answer metric of a built-in name or of 'package.module:function', or the function that is given.

    'judge' is not among them, because it asks a model (`selfplay.answers.score`).

    Raises:
      ValueError: there is no such metric; the message is one line.
    """
    return resolve('answer metric', name, ANSWER_METRICS, ('prediction', 'golds'))


def is_score(value: object) -> bool:
    """Returns whether a metric may return a value: a number in [0, 1]."""
    # Bool, NumPy scalars and the like count as numbers; NaN fails the comparison.
    try:
        return not isinstance(value, str) and 0.0 <= float(value) <= 1.0  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def try_answer_metric(name: str) -> None:
    """Calls an answer metric as a run does, also without an answer.

    Raises:
      ValueError: there is no such metric, or it raises without an answer, or returns no score; the message is one line.
    """
    metric = resolve_answer_metric(name)
    for prediction in ('1', None):
        try:
            value = metric(prediction, ('1',))
        except Exception as error:
            # Accepted answers may need a form of their own. A rollout without an answer depends on none.
            if prediction and not isinstance(error, (NameError, ImportError)):
                continue
            problem = f'raises {error!r}'
        else:
            if is_score(value):
                continue
            problem = f'returns {value!r}'
        raise ValueError(
            f'answer metric {name!r}: {problem} for the answer {prediction!r}; return a number from 0 to 1, for None '
            '(no answer) 0'
        )


def triangle(score: float, target: float = 0.5) -> float:
    """Returns the reward of a task of this mean score: max(0, 1 − |ḡ − τ|/min(τ, 1 − τ)) (SCOPE eq. 5).

    Highest at the target τ. At τ = ½ it is zero at both ends; for other targets it reaches zero before the farther end,
    where the released code declines more slowly to reach zero exactly there.
    """
    # The distance from the target to the nearer end determines the slope on both sides.
    return max(0.0, 1 - abs(score - target) / min(target, 1 - target))


def length_factor(tokens: int, soft: int = 1024, hard: int = 2048, floor: float = 0.05) -> float:
    """Returns the factor of an answer's score for its length: 1 up to `soft`, then a cosine to `floor` (SCOPE eq. 7).

    Args:
      tokens: length of the answer.
      soft: length at which the decline begins.
      hard: length at which it ends.
      floor: the factor from `hard` on, of answers of any length, as in the paper; the released code has 0 above
        2·hard.
    """
    # The cosine has slope 0 at both ends, so the factor has no kink there.
    excess = max(tokens - soft, 0)
    progress = min(excess / (hard - soft), 1.0)
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * progress))


def search_bonus(calls: int, enough: int = 3) -> float:
    """Returns min(calls/enough, 1): the bonus for searching, saturated at `enough` calls (SCOPE appendix F.2)."""
    return min(calls / enough, 1.0)


def rubric_score(
    grades: Sequence[bool | None],
    weights: Sequence[float | int] | None = None,
    coverage: float = 0.5,
) -> float | None:
    """Returns Σ w·b / Σ w over the items of a rubric (SCOPE eq. 1; all weights are 1 in the paper).

    Items of negative weight take away where they are met, and do not count below the stroke (HealthBench); a sum below
    0 is 0.

    Args:
      grades: per item whether it is met; None where the judge's grade could not be parsed, which counts as not met.
      weights: per item, at least one above 0.
      coverage: smallest share of items with a grade (the released code's ½).

    Returns:
      A number in [0, 1], or None where fewer items have a grade: the answer has no score.
    """
    if weights is None:
        weights = [1.0] * len(grades)
    best = sum(max(weight, 0.0) for weight in weights)
    # An unparsable grade is a failure of the judge. With too many of them a score would measure the judge.
    num_ungraded = grades.count(None)
    if len(grades) - num_ungraded < coverage * len(grades):
        return None
    weight_met = sum(weight for weight, is_met in zip(weights, grades, strict=True) if is_met)
    return max(weight_met / best, 0.0)
