"""From rewards to advantages: what a rollout is worth relative to its group. Host arithmetic in float64."""

from __future__ import annotations

import math

import numpy as np

# Classes (upper bounds) in which group sizes are reported, so that the names of metrics never change.
_SIZES = ((1, '1'), (2, '2'), (4, '3_4'), (8, '5_8'), (16, '9_16'), (math.inf, '17_up'))


def group_advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    baseline: str = 'mean',
    scale: str = 'std',
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = 'zero',
    valid: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    group_size: int | None = None,
) -> tuple[np.ndarray, dict[str, tuple[float, float]]]:
    """Advantages A_i = (r_i − mean_g) / (std_g + eps) within groups of rows that share a key.

    The key says which method this is, the arithmetic is the same: the question gives GRPO (Dr. Zero eq. 5), the
    hop count gives HRPO (Dr. Zero eq. 3). `scale='none'` gives SSP eq. 4 and Dr. GRPO; `baseline='none'` with it
    is the plain reward of REINFORCE (SSP eq. 5), `baseline='loo'` RLOO, `scale='batch'` REINFORCE++-baseline.
    Where the papers leave it open, the defaults are those of verl's GRPO: sample deviation, eps outside the root.

    Args:
      rewards: float [B].
      groups: int [B], any keys; rows of a group need not be neighbours.
      baseline: 'mean' of the group, 'loo' (mean of the *other* rows: n/(n − 1) times the difference) or 'none'.
      scale: 'std' of the group, which needs a baseline; 'none'; or 'batch': `whiten` over all trained tokens.
      ddof: 1 for the sample deviation (verl, torch), 0 for the population deviation.
      eps: added to the deviation, outside the root.
      singleton: a row alone in its group has nothing to be compared with: 'zero' says nothing about it, 'raw'
        takes mean 0 and deviation 1 as verl and Dr. Zero's code do, which pushes it up unconditionally. Without
        a baseline there is nothing to decide and the reward stands.
      valid: bool [B]; False keeps a row out of its group's mean and gives it advantage 0.
      lengths: int [B], trained tokens of each row; for scale='batch', where a long row counts for more.
      group_size: rows per key where it is known, invalid ones included; None: any. Prompts that got the same key
        by mistake would otherwise be compared with one another in silence.

    Returns:
      advantages: float64 [B]. Exactly 0 for rows that are invalid or whose reward is not finite and, with a
        baseline, for every row of a group whose rewards are all equal ('batch' then moves it with all others).
      stats as (sum, count): `invalid_rows` and `nonfinite_rows` per row; `singleton_groups`, `informative_groups`
        (rewards differ), `group_size` and the shares `group_size/1` … `group_size/17_up` per group.

    Raises:
      ValueError: shapes that differ, keys that are no integers, an unknown option, 'batch' without lengths, a
        group of another size.
    """
    rewards, groups, used, finite, valid = _rows('group_advantages', rewards, groups, valid)
    _check(baseline, scale, ddof, singleton, lengths, rewards.shape)
    _check_sizes(groups, group_size)
    reward = rewards[used]
    index, sizes, informative = _groups(reward, groups[used])
    size = sizes[index]
    gap = reward - (np.bincount(index, reward, len(sizes)) / sizes)[index]
    # Equal rewards are tested as such: the mean of equal numbers may differ from them in the last bit.
    value = np.where(informative[index], gap, 0.0)
    if baseline == 'loo':
        value = value * (size / np.maximum(size - 1, 1))
    elif baseline == 'none':
        value = reward
    alone = (size == 1) & (baseline != 'none')
    if singleton == 'raw':
        value = np.where(alone, reward, value)
    if scale == 'std':
        squares = np.bincount(index, gap**2, len(sizes))
        std = np.where(sizes > 1, np.sqrt(squares / np.maximum(sizes - ddof, 1)), 1.0)
        value = value / (std[index] + eps)
    elif scale == 'batch':
        value = whiten(value, np.where(alone & (singleton == 'zero'), 0, np.asarray(lengths)[used]))
    advantages = np.zeros(rewards.shape)
    advantages[used] = value
    return advantages, _stats(sizes, informative, valid, finite)


def informative_groups(
    rewards: np.ndarray, groups: np.ndarray, valid: np.ndarray | None = None
) -> np.ndarray:
    """Which rows have something to teach: those of groups whose rewards differ (DSPO eq. 9, DAPO's dynamic sampling).

    For rewards of 0 and 1 this is 0 < number of ones < G. Rows that are invalid or whose reward is not finite are
    out and do not count for their group.

    Args:
      rewards: float [B].   groups: int [B], any keys.   valid: bool [B].

    Returns:
      bool [B].

    Raises:
      ValueError: shapes that differ or keys that are no integers.
    """
    rewards, groups, used, _, _ = _rows('informative_groups', rewards, groups, valid)
    index, _, informative = _groups(rewards[used], groups[used])
    kept = np.zeros(rewards.shape, bool)
    kept[used] = informative[index]
    return kept


def discounted_returns(rewards: np.ndarray, mask: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """What each trained token is followed by: G_t = r_t + γ·G_u, u the next trained token (REINFORCE++).

    Text of tools between two turns is no action: it neither adds, nor discounts, nor cuts the credit off. (verl's
    first version set the running return to 0 there, so that only the last turn learnt.)

    Args:
      rewards: float [B, T], one rollout per row; what stands at masked places is ignored.
      mask: bool [B, T], True on tokens to learn from.
      gamma: 0 to 1, per trained token.

    Returns:
      float64 [B, T], 0 where masked.

    Raises:
      ValueError: shapes that differ or a gamma outside 0 … 1.
    """
    mask = np.asarray(mask, bool)
    if mask.ndim != 2 or np.shape(rewards) != mask.shape or not 0 <= gamma <= 1:
        raise ValueError(
            f'discounted_returns: rewards {np.shape(rewards)} and mask {mask.shape} must both be [B, T], '
            f'gamma {gamma} in 0 … 1'
        )
    rewards = np.where(mask, np.asarray(rewards, np.float64), 0.0)
    returns, running = np.zeros(mask.shape), np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        running = np.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = np.where(mask[:, t], running, 0.0)
    return returns


def whiten(values: np.ndarray, counts: np.ndarray, eps: float = 1e-8) -> np.ndarray:
    """(v − mean)/√(var + eps) over the whole batch, mean and unbiased variance as verl takes them.

    Args:
      values: float, any shape.
      counts: how often each value counts: a mask [B, T] for values of tokens, lengths [B] for values of rows.
      eps: added to the variance, inside the root.

    Returns:
      float64 like values; 0 where counts is 0, and everywhere if all values that count are equal.

    Raises:
      ValueError: shapes that differ or a negative count.
    """
    counts = np.asarray(counts, np.float64)
    if np.shape(values) != counts.shape or np.any(counts < 0):
        raise ValueError(
            f'whiten: values {np.shape(values)} and counts {counts.shape} must be alike, no count below 0'
        )
    used = counts > 0
    values = np.where(used, np.asarray(values, np.float64), 0.0)
    if not used.any() or np.ptp(values[used]) == 0:
        return np.zeros(values.shape)
    total = counts.sum()
    gap = values - (counts * values).sum() / total
    return np.where(used, gap / np.sqrt((counts * gap**2).sum() / (total - 1) + eps), 0.0)


def _rows(name, rewards, groups, valid):
    rewards, groups = np.asarray(rewards, np.float64), np.asarray(groups)
    valid = np.ones(rewards.shape, bool) if valid is None else np.asarray(valid, bool)
    if rewards.ndim != 1 or not rewards.shape == groups.shape == valid.shape:
        raise ValueError(
            f'{name}: rewards {rewards.shape}, groups {groups.shape} and valid {valid.shape} '
            'must be one-dimensional and equally long'
        )
    if groups.size and not np.issubdtype(groups.dtype, np.integer):
        raise ValueError(f'{name}: groups are {groups.dtype}, not integers; number the keys first')
    finite = np.isfinite(rewards)
    return rewards, groups, valid & finite, finite, valid


def _groups(reward, groups):
    """Per row the number of its group; per group its size and whether its rewards differ."""
    keys, index = np.unique(groups, return_inverse=True)
    low, high = np.full(len(keys), np.inf), np.full(len(keys), -np.inf)
    np.minimum.at(low, index, reward)
    np.maximum.at(high, index, reward)
    return index, np.bincount(index, minlength=len(keys)), high > low


def _check(baseline, scale, ddof, singleton, lengths, shape):
    options = (
        ('baseline', baseline, ('mean', 'loo', 'none')),
        ('scale', scale, ('std', 'none', 'batch')),
        ('ddof', ddof, (0, 1)),
        ('singleton', singleton, ('zero', 'raw')),
    )
    for name, given, allowed in options:
        if given not in allowed:
            raise ValueError(f'group_advantages: {name} is {given!r}; choose one of {allowed}')
    if baseline == 'none' and scale == 'std':
        raise ValueError(
            "group_advantages: scale='std' would explode without a baseline; take scale='none'"
        )
    if scale == 'batch' and np.shape(lengths) != shape:
        raise ValueError(
            f"group_advantages: scale='batch' needs lengths, the trained tokens of each of the {shape[0]} rows"
        )


def _check_sizes(groups, group_size):
    keys, counts = np.unique(groups, return_counts=True)
    other = counts != (counts if group_size is None else group_size)
    if other.any():
        raise ValueError(
            f'group_advantages: key {keys[other][0]} has {counts[other][0]} rows, not group_size={group_size}; '
            'give every prompt a key of its own'
        )


def _stats(sizes, informative, valid, finite):
    count = float(len(sizes))
    stats = {
        'invalid_rows': (float(np.sum(~valid)), float(len(valid))),
        'nonfinite_rows': (float(np.sum(valid & ~finite)), float(len(valid))),
        'singleton_groups': (float(np.sum(sizes == 1)), count),
        'informative_groups': (float(np.sum(informative)), count),
        'group_size': (float(np.sum(sizes)), count),
    }
    below = 0
    for bound, name in _SIZES:
        stats[f'group_size/{name}'] = (float(np.sum((sizes > below) & (sizes <= bound))), count)
        below = bound
    return stats
