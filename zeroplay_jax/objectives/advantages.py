"""Computes advantages from rewards: the value of a rollout or of a turn relative to its group.

Host arithmetic in float64. Letters: R rows of a step, U turns of the longest of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Num, Real, Shaped

from zeroplay_jax.objectives.registry import resolve
from zeroplay_jax.objectives.types import Stats

# Group sizes are reported in fixed classes, name → largest size, so that the set of metric names never changes.
_SIZE_CLASSES = {
    '1': 1,
    '2': 2,
    '3_4': 4,
    '5_8': 8,
    '9_16': 16,
    '17_up': math.inf,
}

# Squares of larger rewards, in deviations and in the loss of a value network, leave the numbers of float32.
LARGEST_REWARD = 1e18
# Rewards of a group that differ by less, of their size, differ by the rounding of equal sums.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class RewardTable:
    """What all rows of one role earned in a step.

    Attributes:
      reward: float64 [R], of the outcome.
      turn_reward: float64 [R, U], NaN where a turn has none or a row has no such turn.
      turn_mask: bool [R, U], whether the row has this turn: the first ones of each row.
      tokens: int64 [R, U], sampled tokens of a turn; 0 without it.
      group: int64 [R], any keys.
      valid: bool [R], False for dropped rows: they count for nobody, and their advantage is 0 whatever is returned.
    """

    reward: Float[np.ndarray, ' rows']
    turn_reward: Float[np.ndarray, 'rows turns']
    turn_mask: Bool[np.ndarray, 'rows turns']
    tokens: Int[np.ndarray, 'rows turns']
    group: Int[np.ndarray, ' rows']
    valid: Bool[np.ndarray, ' rows']


class AdvantageError(ValueError):
    """A function returns something else than advantages."""


# (table, `config.<role>`) → advantages, float64, per row [R] or per turn [R, U], and statistics. It must be pure, and
# the advantages of a group may depend on its valid rows alone: other rows depend on the batch and on the rounds
# of its tasks.
AdvantageFunction = Callable[[RewardTable, Any], tuple[np.ndarray, Stats]]


def of_rollouts(table: RewardTable, settings: Any) -> tuple[Float[np.ndarray, ' rows'], Stats]:
    """Returns one advantage per row, from outcomes alone: `group_advantages` with the options of `config.<role>`."""
    lengths = table.tokens.sum(1)
    options = _options(settings)
    return group_advantages(
        table.reward, table.group, valid=table.valid, lengths=lengths, **options
    )


def of_turns(table: RewardTable, settings: Any) -> tuple[Float[np.ndarray, 'rows turns'], Stats]:
    """Returns one advantage per turn: the return from this turn on, above that of the group's other rows.

    A_iu = G_iu − mean_{j≠i} G_ju with G_iu = R_i + Σ_{v≥u} r_iv, the outcome R and the turn rewards r. A rollout that
    ended before turn u has G_iu = R_i. Derivation and assumptions: objectives/README.md.

    Args:
      table: rewards of the rows.
      settings: `config.<role>`. baseline 'loo' as above; 'mean' is (n − 1)/n of it in a group of n; 'none', and 'value'
        for a value network, give G. `scale` is not read.

    Returns:
      advantages: float64 [R, U], 0 where there is no turn.
      stats: as of `group_advantages`, of the whole returns G_i1.
    """
    earned = np.where(np.isnan(table.turn_reward), 0.0, table.turn_reward)
    later = np.cumsum(earned[:, ::-1], 1)[:, ::-1]
    returns = table.reward[:, None] + later
    options = _options(settings) | {'scale': 'none'}
    advantages = np.zeros(returns.shape)
    stats: Stats = {}
    for turn, column in enumerate(returns.T):
        above, turn_stats = group_advantages(column, table.group, valid=table.valid, **options)
        advantages[:, turn] = np.where(table.turn_mask[:, turn], above, 0.0)
        stats = stats or turn_stats
    return advantages, stats


ADVANTAGES: Mapping[str, AdvantageFunction] = {'group': of_rollouts, 'turn': of_turns}


def resolve_advantage(name: str) -> AdvantageFunction:
    """Returns the advantage of a built-in name, or the function that 'package.module:function' refers to.

    Raises:
      ValueError: there is no such function; the message is one line.
    """
    return resolve('advantage', name, ADVANTAGES, ('table', 'settings'))


def evaluate(name: str, table: RewardTable, settings: Any) -> tuple[np.ndarray, Stats]:
    """Returns what a function says about a table: advantages float64, [R] or [R, U], and statistics.

    Args:
      name: as of `resolve_advantage`.
      table: rewards of the rows.
      settings: `config.<role>`.

    Raises:
      AdvantageError: one line; there is no such function, or it returns something else.
    """
    try:
        function = resolve_advantage(name)
    except ValueError as error:
        raise AdvantageError(str(error)) from None
    try:
        result = function(table, settings)
    except Exception as error:
        error.add_note(f'config.<role>.advantage={name}: raised this error; correct it there')
        raise
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        fix = 'return (advantages, {name: (sum, count)})'
        raise AdvantageError(f'advantage {name!r}: returned a {type(result).__name__}; {fix}')
    values = np.asarray(result[0], np.float64)
    shapes = (table.reward.shape, table.turn_mask.shape)
    if values.shape not in shapes:
        raise AdvantageError(
            f'advantage {name!r}: returned shape {values.shape}; return {shapes[0]}, one per row, or {shapes[1]}, '
            'one per turn'
        )
    used = table.valid if values.ndim == 1 else table.turn_mask & table.valid[:, None]
    if not np.isfinite(values[used]).all():
        raise AdvantageError(f'advantage {name!r}: returned numbers that are not finite; return 0')
    for statistic, pair in result[1].items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise AdvantageError(
                f'advantage {name!r}: statistic {statistic!r} is no pair; return (sum, count)'
            )
        if not np.isfinite(pair).all():
            raise AdvantageError(
                f'advantage {name!r}: statistic {statistic!r} is {pair}; return finite numbers, such as those of valid '
                'rows alone'
            )
    return values, dict(result[1])


def _options(settings: Any) -> dict[str, Any]:
    """Returns the options of `group_advantages` in `config.<role>`."""
    # A value network compares the plain rewards with its values.
    has_values = settings.baseline == 'value'
    return {
        'baseline': 'none' if has_values else settings.baseline,
        'scale': 'none' if has_values else settings.scale,
        'ddof': 1,
        'singleton': settings.singleton,
    }


def group_advantages(
    rewards: Real[np.ndarray, ' rows'],
    groups: Shaped[np.ndarray, ' rows'],
    *,
    baseline: str = 'mean',
    scale: str = 'std',
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = 'zero',
    valid: Bool[np.ndarray, ' rows'] | None = None,
    lengths: Int[np.ndarray, ' rows'] | None = None,
) -> tuple[Float[np.ndarray, ' rows'], Stats]:
    """Computes advantages A_i = (r_i − mean_g) / (std_g + eps) within groups of rows that share a key.

    The key selects the method, the arithmetic is the same: grouped by question it is GRPO (Dr. Zero eq. 5), grouped by
    hop count HRPO (Dr. Zero eq. 3). `scale='none'` gives SSP eq. 4 and Dr. GRPO; `baseline='none'` with it is the
    plain reward of REINFORCE (SSP eq. 5); `baseline='loo'` is RLOO; `scale='batch'` is REINFORCE++-baseline.
    Where the papers leave a choice open, the defaults are those of verl's GRPO.

    Args:
      rewards: float [B].
      groups: int [B], any keys; rows of a group need not be adjacent.
      baseline: 'mean' of the group, 'loo' (mean of the other rows of the group) or 'none'.
      scale: 'std' of the group, which needs a baseline; 'none'; or 'batch': `whiten` over all trained tokens.
      ddof: 1 for the sample deviation (verl, torch), 0 for the population deviation.
      eps: added to the deviation, outside the root.
      singleton: a row alone in its group gets zero advantage ('zero'), or its raw reward ('raw': mean 0 and deviation
        1, as in the code of verl and Dr. Zero). Without a baseline the option has no effect.
      valid: bool [B]; False excludes a row from its group's mean and gives it advantage 0.
      lengths: int [B], trained tokens of each row; needed for scale='batch', where a row counts once per token.

    Returns:
      advantages: float64 [B]. Exactly 0 for rows that are invalid or have a non-finite reward and, with a baseline,
        for every row of a group whose rewards are all equal (scale='batch' then shifts it with all other rows).
      stats: `invalid_rows` and `nonfinite_rows` per row; `singleton_groups`, `informative_groups` (rewards differ),
        `group_size` and the shares `group_size/1` to `group_size/17_up` per group.

    Raises:
      ValueError: a reward is beyond `LARGEST_REWARD`.
    """
    rewards, valid = _check_rows('group_advantages', rewards, valid)
    # A wrong name would be computed as another one.
    if baseline not in ('mean', 'loo', 'none') or scale not in ('std', 'batch', 'none'):
        raise ValueError(f'baseline={baseline!r}, scale={scale!r}: see the arguments')
    has_baseline = baseline != 'none'
    # A reward function may return NaN. One such row must not make its whole group NaN.
    finite = np.isfinite(rewards)
    used = valid & finite
    valid_rewards = rewards[used]
    group_index, group_sizes, informative = _group_rows(valid_rewards, groups[used])
    # bincount with weights sums within groups in one pass, for keys in any order.
    group_sums = np.bincount(group_index, valid_rewards, len(group_sizes))
    group_means = group_sums / group_sizes
    deviations = valid_rewards - group_means[group_index]
    row_group_size = group_sizes[group_index]
    advantages = valid_rewards
    if has_baseline:
        is_informative = informative[group_index]
        advantages = _above_baseline(deviations, is_informative, row_group_size, baseline)
    is_singleton = (row_group_size == 1) & has_baseline
    if singleton == 'raw':
        advantages = np.where(is_singleton, valid_rewards, advantages)
    if scale == 'std':
        group_std = _group_std(deviations, group_index, group_sizes, ddof)
        advantages = advantages / (group_std[group_index] + eps)
    elif scale == 'batch':
        counts = np.asarray(lengths)[used]
        if singleton == 'zero':
            # Count 0 keeps a singleton at zero advantage; whitening would shift it by the batch mean.
            counts = np.where(is_singleton, 0, counts)
        advantages = whiten(advantages, counts)

    # Excluded rows get 0, which adds nothing to the policy gradient.
    all_advantages = np.zeros(rewards.shape)
    all_advantages[used] = advantages
    stats = _group_statistics(group_sizes, informative, valid, finite)
    return all_advantages, stats


def _above_baseline(
    deviations: Float[np.ndarray, ' rows'],
    is_informative: Bool[np.ndarray, ' rows'],
    group_size: Int[np.ndarray, ' rows'],
    baseline: str,
) -> Float[np.ndarray, ' rows']:
    """Returns rewards minus the baseline 'mean' or 'loo' of their groups, 0 in groups of equal rewards.

    Args:
      deviations: rewards minus the mean of their groups.
      is_informative: whether rewards differ in the group of a row.
      group_size: rows in the group of a row.
      baseline: as of `group_advantages`.
    """
    # Groups of equal rewards are found by comparison: the mean of equal numbers may differ from them in the last
    # bit, and dividing that difference by a deviation of about 0 would give advantages of order 1.
    advantages = np.where(is_informative, deviations, 0.0)
    if baseline == 'loo':
        # r − mean of the others = n/(n − 1) · (r − mean of all).
        num_others = np.maximum(group_size - 1, 1)
        advantages = advantages * (group_size / num_others)
    return advantages


def informative_groups(
    rewards: Real[np.ndarray, ' rows'],
    groups: Shaped[np.ndarray, ' rows'],
    valid: Bool[np.ndarray, ' rows'] | None = None,
) -> Bool[np.ndarray, ' rows']:
    """Returns which rows belong to groups with reward variance (DSPO eq. 9, DAPO's dynamic sampling).

    For rewards of 0 and 1 the condition is 0 < number of ones < G. Rows that are invalid or have a non-finite reward
    are excluded and do not count for their group.

    Args:
      rewards: float [B].
      groups: int [B], any keys.
      valid: bool [B].

    Returns:
      bool [B].

    Raises:
      ValueError: a reward is beyond `LARGEST_REWARD`.
    """
    rewards, valid = _check_rows('informative_groups', rewards, valid)
    used = valid & np.isfinite(rewards)
    group_index, _, informative = _group_rows(rewards[used], groups[used])
    # Excluded rows are False even in a group with variance, because they are not trained on.
    in_informative_group = np.zeros(rewards.shape, bool)
    in_informative_group[used] = informative[group_index]
    return in_informative_group


def whiten(
    values: Num[np.ndarray, '*shape'], counts: Shaped[np.ndarray, '*shape'], eps: float = 1e-8
) -> Float[np.ndarray, '*shape']:
    """Returns (v − mean)/√(var + eps) over the whole batch, with the unbiased variance, as in verl.

    Args:
      values: float, any shape.
      counts: weight of each value in mean and variance: a mask [B, T] for values of tokens, lengths [B] for values of
        rows.
      eps: added to the variance, inside the root.

    Returns:
      float64, the shape of values; 0 where counts is 0, and everywhere if all counted values are equal.
    """
    values = np.asarray(values, np.float64)
    counts = np.asarray(counts, np.float64)
    counted = counts > 0
    values = np.where(counted, values, 0.0)
    # Equal values are found by comparison, because rounding in the mean would be blown up by √eps = 1e-4.
    counted_values = values[counted]
    if np.all(counted_values == counted_values[:1]):
        return np.zeros(values.shape)

    # Counts act as repetitions: whitening rows by length equals whitening their tokens.
    num_counted = counts.sum()
    weighted_values = counts * values
    mean = weighted_values.sum() / num_counted
    deviations = values - mean
    weighted_squares = counts * deviations**2
    variance = weighted_squares.sum() / (num_counted - 1)
    whitened = deviations / np.sqrt(variance + eps)
    return np.where(counted, whitened, 0.0)


def _check_rows(name, rewards, valid):
    """Returns (rewards float64, valid bool), [B]; raises ValueError for a reward beyond `LARGEST_REWARD`."""
    rewards = np.asarray(rewards, np.float64)
    valid = np.ones(rewards.shape, bool) if valid is None else valid
    too_large = np.flatnonzero(valid & np.isfinite(rewards) & (np.abs(rewards) > LARGEST_REWARD))
    if too_large.size:
        raise ValueError(
            f'{name}: rewards[{too_large[0]}] is {rewards[too_large[0]]}; give at most {LARGEST_REWARD}'
        )
    return rewards, valid


def _group_rows(rewards, groups):
    """Groups rows by key.

    Args:
      rewards: float64 [N], finite.
      groups: int [N], any keys.

    Returns:
      group_index: int [N], index of each row's group from 0 to G − 1.
      sizes: int [G], rows per group.
      informative: bool [G], whether the rewards of a group differ (`differ`).
    """
    # Keys are arbitrary integers, such as item numbers of a long run: number them 0, 1, … first.
    keys, group_index = np.unique(groups, return_inverse=True)
    num_groups = len(keys)
    lowest = np.full(num_groups, np.inf)
    highest = np.full(num_groups, -np.inf)
    np.minimum.at(lowest, group_index, rewards)
    np.maximum.at(highest, group_index, rewards)
    sizes = np.bincount(group_index, minlength=num_groups)
    return group_index, sizes, differ(lowest, highest)


def differ(lowest: Any, highest: Any) -> Any:
    """Returns whether the lowest and the highest reward of a group differ by more than rounding."""
    return highest - lowest > _ROUNDING * np.maximum(np.abs(lowest), np.abs(highest))


def _group_std(deviations, group_index, group_sizes, ddof):
    """Returns the standard deviation of each group; 1 for groups of one row."""
    squares = np.bincount(group_index, deviations**2, len(group_sizes))
    degrees_of_freedom = np.maximum(group_sizes - ddof, 1)
    group_std = np.sqrt(squares / degrees_of_freedom)
    # A group of one has no deviation. Dividing by 1 keeps the raw reward of singleton='raw'.
    return np.where(group_sizes > 1, group_std, 1.0)


def check_group_sizes(groups: Int[np.ndarray, ' rows'], group_size: int | None) -> None:
    """Raises ValueError if a group does not have `group_size` rows, invalid ones included; None allows any.

    Two prompts that got the same key by mistake would be compared with each other.
    """
    if group_size is None:
        return
    keys, counts = np.unique(groups, return_counts=True)
    for key, count in zip(keys, counts):
        if count != group_size:
            raise ValueError(
                f'key {key} has {count} rows, not group_size={group_size}; '
                'give each prompt a distinct key'
            )


def _group_statistics(group_sizes, informative, valid, finite) -> Stats:
    """Returns the statistics of `group_advantages`.

    Args:
      group_sizes, informative: [G], per group that has a usable row (valid, finite reward); only usable rows count.
      valid, finite: bool [B], per row.
    """
    stats = {
        'invalid_rows': _sum_and_count(~valid),
        'nonfinite_rows': _sum_and_count(valid & ~finite),
        'singleton_groups': _sum_and_count(group_sizes == 1),
        'informative_groups': _sum_and_count(informative),
        'group_size': _sum_and_count(group_sizes),
    }
    # Classes are half-open intervals (lower, upper], so each group is counted once.
    lower: float = 0
    for name, upper in _SIZE_CLASSES.items():
        above_lower = group_sizes > lower
        in_class = above_lower & (group_sizes <= upper)
        stats[f'group_size/{name}'] = _sum_and_count(in_class)
        lower = upper
    return stats


def _sum_and_count(values) -> tuple[float, float]:
    total = np.sum(values)
    return float(total), float(len(values))
