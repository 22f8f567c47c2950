"""Advantages from a value network (PPO), and the loss that trains it.

A value is the expected reward of a rollout given its tokens so far. Advantages are host arithmetic in float64; the loss
runs on the device, like the losses of policy_gradient.py. Letters: B packed rows, T positions of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Real

from zeroplay_jax.objectives.masking import masked, total
from zeroplay_jax.objectives.types import DevicePerToken, DeviceStats, PerToken, TokenMask


def token_rewards(
    returns: Real[np.ndarray, 'batch length'],
    mask: Bool[np.ndarray, 'batch length'],
    segment: Int[np.ndarray, 'batch length'],
) -> Float[np.ndarray, 'batch length']:
    """Returns the reward of every token, by which the return falls from it to the next trained token of the rollout.

    A return that is the same at all tokens is a reward at the last one; returns per turn (`advantages.of_turns`) are
    rewards at the last tokens of turns.

    Args:
      returns: float [B, T], what the rollout earns from this token on.
      mask: bool [B, T], True on trained tokens.
      segment: int [B, T], the rollout of every position within its row.

    Returns:
      float64 [B, T], 0 where masked.

    Raises:
      ValueError: shapes differ.
    """
    mask, segment, returns = _checked('token_rewards', mask, segment, returns)
    row, position = np.nonzero(mask)
    rollout = segment[row, position]
    has_next = (row[1:] == row[:-1]) & (rollout[1:] == rollout[:-1])
    given = returns[row, position]
    next_return = np.zeros(given.shape)
    next_return[:-1][has_next] = given[1:][has_next]
    rewards = np.zeros(mask.shape)
    rewards[row, position] = given - next_return
    return rewards


def gae(
    rewards: Real[np.ndarray, 'batch length'],
    values: Real[np.ndarray, 'batch length'],
    mask: Bool[np.ndarray, 'batch length'],
    segment: Int[np.ndarray, 'batch length'],
    *,
    discount: float = 1.0,
    decay: float = 1.0,
) -> tuple[Float[np.ndarray, 'batch length'], Float[np.ndarray, 'batch length']]:
    """Computes generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    With δ_t = r_t + γ·V_{t+1} − V_t the advantage is A_t = Σ_k (γλ)^k · δ_{t+k}. Only trained tokens are actions: t + 1
    is the next trained token of the rollout, and retrieved text in between neither counts as a step nor has a value.
    After the last one, V is 0. With γ = λ = 1 and a reward at the end, A_t is that reward minus V_t.

    Args:
      rewards: float [B, T], per token (`token_rewards`).
      values: float [B, T], the value before the token, i.e. given the tokens before it.
      mask: bool [B, T], True on trained tokens.
      segment: int [B, T], the rollout of every position within its row.
      discount: γ, in [0, 1].
      decay: λ, in [0, 1].

    Returns:
      advantages, and returns A_t + V_t, which the value network is trained on: float64 [B, T], 0 where masked.

    Raises:
      ValueError: shapes differ.
    """
    mask, segment, rewards, values = _checked('gae', mask, segment, rewards, values)
    num_rows, num_positions = mask.shape
    advantages = np.zeros(mask.shape)
    # Of the next trained token of the same rollout.
    next_value = np.zeros(num_rows)
    next_advantage = np.zeros(num_rows)
    next_segment = np.full(num_rows, -1)
    for position in reversed(range(num_positions)):
        continues = segment[:, position] == next_segment
        next_value = np.where(continues, next_value, 0.0)
        next_advantage = np.where(continues, next_advantage, 0.0)
        is_trained = mask[:, position]
        value = values[:, position]
        temporal_difference = rewards[:, position] + discount * next_value - value
        advantage = temporal_difference + discount * decay * next_advantage
        advantages[:, position] = np.where(is_trained, advantage, 0.0)
        next_value = np.where(is_trained, value, next_value)
        next_advantage = np.where(is_trained, advantage, next_advantage)
        next_segment = segment[:, position]
    return advantages, advantages + values


def value_loss(
    values: PerToken,
    old_values: PerToken,
    returns: PerToken,
    mask: TokenMask,
    clip: float = 0.0,
) -> tuple[DevicePerToken, DeviceStats]:
    """Computes L = ½·max((V − R)², (V° + clip(V − V°, ±clip) − R)²), as in verl; without a clip ½·(V − R)².

    Args:
      values: float [B, T], V, with a gradient.
      old_values: float [B, T], V°, those from which the advantages were computed; no gradient flows into them.
      returns: float [B, T], R (`gae`).
      mask: bool [B, T].
      clip: distance that a value may move from V°; 0: none.

    Returns:
      float32 [B, T], to be minimised, 0 where masked; the statistics `squared_error` and `clip_share`, the share of
      tokens whose gradient the clip removed.

    Raises:
      ValueError: shapes differ.
    """
    mask, values, old_values, returns = masked('value_loss', mask, values, old_values, returns)
    old_values = jax.lax.stop_gradient(old_values)
    squared_error = (values - returns) ** 2
    loss = squared_error
    is_clipped = jnp.zeros(mask.shape, bool)
    if clip:
        change = values - old_values
        clipped_values = old_values + jnp.clip(change, -clip, clip)
        clipped_error = (clipped_values - returns) ** 2
        # Within the clip both errors are equal but for rounding.
        is_clipped = (jnp.abs(change) > clip) & (clipped_error > squared_error)
        loss = jnp.where(is_clipped, clipped_error, squared_error)
    stats = {
        'squared_error': total(squared_error, mask),
        'clip_share': total(is_clipped, mask),
    }
    return jnp.where(mask, 0.5 * loss, 0.0), stats


def _checked(name, mask, segment, *arrays):
    """Returns (mask bool, segment, *arrays float64 with 0 where masked), all [B, T], or raises ValueError."""
    mask = np.asarray(mask, bool)
    segment = np.asarray(segment)
    arrays = [np.asarray(array, np.float64) for array in arrays]
    shapes = [array.shape for array in (mask, segment, *arrays)]
    if mask.ndim != 2 or len(set(shapes)) > 1:
        raise ValueError(
            f'{name}: every array must be [B, T] of one shape, got {shapes} (mask and segment first)'
        )
    return mask, segment, *(np.where(mask, array, 0.0) for array in arrays)
