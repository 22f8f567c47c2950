"""From rewards to advantages: what a rollout is worth relative to its group. Host arithmetic in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

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
) -> tuple[np.ndarray, dict[str, tuple[float, float]]]:
    """Advantages A_i = (r_i − mean_g) / (std_g + eps) within groups of rows that share a key.

    The key says which method this is, the arithmetic is the same: the question gives GRPO (Dr. Zero eq. 5),
    the hop count gives HRPO (Dr. Zero eq. 3). `scale='none'` gives SSP eq. 4 and Dr. GRPO; `baseline='none'`
    with `scale='none'` is the plain reward of REINFORCE (SSP eq. 5). Where the papers leave it open, the
    defaults are those of verl's GRPO: sample deviation, eps outside the root.

    Args:
      rewards: float [B].
      groups: int [B], any keys; rows of a group need not be neighbours.
      baseline: 'mean' of the group or 'none'.
      scale: 'std' of the group or 'none'; 'std' needs the mean as baseline.
      ddof: 1 for the sample deviation (verl, torch), 0 for the population deviation.
      eps: added to the deviation, outside the root.
      singleton: a row alone in its group has nothing to be compared with: 'zero' says nothing about it,
        'raw' takes mean 0 and deviation 1 as verl and Dr. Zero's code do, which pushes it up unconditionally.
        Without a baseline there is nothing to decide and the reward stands.
      valid: bool [B]; False keeps a row out of its group's mean and gives it advantage 0.

    Returns:
      advantages: float64 [B]. Exactly 0 for every row of a group whose rewards are all equal (with a
        baseline) and for rows that are invalid or whose reward is not finite.
      stats as (sum, count): `invalid_rows` and `nonfinite_rows` per row; `singleton_groups`,
        `informative_groups` (rewards differ), `group_size` and the shares `group_size/1` …
        `group_size/17_up` per group.

    Raises:
      ValueError: shapes that differ, keys that are no integers, an unknown option.
    """
    rewards, groups = np.asarray(rewards, np.float64), np.asarray(groups)
    valid = np.ones(rewards.shape, bool) if valid is None else np.asarray(valid, bool)
    _check(rewards, groups, valid, baseline, scale, ddof, singleton)
    finite = np.isfinite(rewards)
    used = valid & finite
    keys, index = np.unique(groups[used], return_inverse=True)
    reward = rewards[used]
    sizes = np.bincount(index, minlength=len(keys))
    low, high = np.full(len(keys), np.inf), np.full(len(keys), -np.inf)
    np.minimum.at(low, index, reward)
    np.maximum.at(high, index, reward)
    informative = high > low

    value = reward
    if baseline == 'mean':
        mean = np.bincount(index, reward, len(keys)) / sizes
        # Equal rewards are tested as such: the mean of equal numbers may differ from them in the last bit.
        value = np.where(informative[index], reward - mean[index], 0.0)
        if singleton == 'raw':
            value = np.where(sizes[index] == 1, reward, value)
    if scale == 'std':
        squares = np.bincount(index, (reward - mean[index]) ** 2, len(keys))
        std = np.where(sizes > 1, np.sqrt(squares / np.maximum(sizes - ddof, 1)), 1.0)
        value = value / (std[index] + eps)

    advantages = np.zeros(rewards.shape)
    advantages[used] = value
    return advantages, _stats(sizes, informative, valid, finite)


def _check(rewards, groups, valid, baseline, scale, ddof, singleton):
    if rewards.ndim != 1 or not rewards.shape == groups.shape == valid.shape:
        raise ValueError(
            f'group_advantages: rewards {rewards.shape}, groups {groups.shape} and valid {valid.shape} '
            'must be one-dimensional and equally long'
        )
    if groups.size and not np.issubdtype(groups.dtype, np.integer):
        raise ValueError(f'group_advantages: groups are {groups.dtype}, not integers; number the keys first')
    options = (
        ('baseline', baseline, ('mean', 'none')),
        ('scale', scale, ('std', 'none')),
        ('ddof', ddof, (0, 1)),
        ('singleton', singleton, ('zero', 'raw')),
    )
    for name, given, allowed in options:
        if given not in allowed:
            raise ValueError(f'group_advantages: {name} is {given!r}; choose one of {allowed}')
    if baseline == 'none' and scale == 'std':
        raise ValueError("group_advantages: scale='std' would explode without a baseline; take scale='none'")


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
        raise ValueError(f'stratify: cannot split {n} as {tuple(ratio)}; give n ≥ 0, weights ≥ 0, not all 0')
    weights = [Fraction(str(w)) for w in ratio]
    shares = [n * w / sum(weights) for w in weights]
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i])
    for i in order[: n - sum(counts)]:
        counts[i] += 1
    return counts
