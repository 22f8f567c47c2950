"""From per-token losses to one number: every way of averaging is a choice of token weights.

The host computes one weight per token for the *whole* batch (`token_weights`), the device adds up loss × weight
(`aggregate`). So the sum over micro-batches, packed rows, padding or devices is the same number, and so is its
gradient. (Averaging per micro-batch, as older trainers did, is not.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from zeroplay_jax.objectives.masking import masked

MODES = ('token', 'seq_mean_token_mean', 'seq_mean_token_sum', 'constant')


def aggregate(per_token: jax.Array, weights: jax.Array) -> jax.Array:
    """The loss: Σ per_token · weights over the places whose weight is not 0.

    Args:
      per_token: float [B, T], from one of the losses, or a sum of several.
      weights: float32 [B, T], this micro-batch's part of `token_weights`.

    Returns:
      float32 scalar. Scalars and gradients of the micro-batches of a batch add up to those of the batch.

    Raises:
      ValueError: shapes that differ.
    """
    mask, per_token, weights = masked('aggregate', weights != 0, per_token, weights)
    return jnp.sum(per_token * weights)


def denominator(lengths: np.ndarray, mode: str) -> float:
    """What the weighted sum is divided by: the trained tokens ('token') or the rollouts that have any.

    Host function. Give it every rollout that the average is over, also those left out of the packed batch
    because their advantage is 0 and they would add nothing. Parts of several hosts add up.

    Args:
      lengths: int [N], trained tokens of each rollout; rollouts with none do not count.
      mode: 'token', 'seq_mean_token_mean' or 'seq_mean_token_sum'.

    Returns:
      A number ≥ 0.

    Raises:
      ValueError: an unknown mode, or 'constant', whose denominator is the caller's own.
    """
    if mode not in MODES[:3]:
        raise ValueError(
            f'denominator: mode {mode!r} has none of its own; choose one of {MODES[:3]}'
        )
    return float(np.sum(lengths) if mode == 'token' else np.count_nonzero(lengths))


def token_weights(
    mask: np.ndarray, sequence: np.ndarray | None, mode: str, total: float | None = None
) -> np.ndarray:
    """Weight of each token in the loss. Host function, for the whole batch before it is cut into parts.

    With |y| the trained tokens of a token's own rollout and D the denominator:
      'token': 1/D, D all trained tokens (DAPO; Dr. Zero's code).
      'seq_mean_token_mean': 1/(|y|·D), D the rollouts that have trained tokens (GRPO paper, SSP eq. 4).
      'seq_mean_token_sum': 1/D, D as before (the sums of Dr. Zero eq. 2 and SSP eq. 5).
      'constant': 1/D, D given: the longest response (verl's Dr. GRPO), times the rollouts for a mean over them.

    Args:
      mask: bool [B, T], True on tokens to learn from.
      sequence: int [B, T], which rollout of the batch a place belongs to, -1 where empty; several may share
        a row. None: every row is one rollout.
      mode: one of MODES.
      total: D where it is not that of this batch alone: 'constant', several hosts, rollouts left out
        (`denominator`).

    Returns:
      float32 [B, T], 0 where masked. All zeros when there is nothing to learn: the caller skips the update.

    Raises:
      ValueError: shapes that differ, an unknown mode, a trained token outside every rollout, a missing,
        negative or infinite total.
    """
    mask = np.asarray(mask, bool)
    sequence = np.indices(mask.shape)[0] if sequence is None else np.asarray(sequence)
    if mask.ndim != 2 or sequence.shape != mask.shape:
        raise ValueError(
            f'token_weights: mask {mask.shape}, sequence {sequence.shape}: both must be [B, T]'
        )
    if mode not in MODES:
        raise ValueError(f'token_weights: mode is {mode!r}; choose one of {MODES}')
    owner = sequence[mask]
    if np.any(owner < 0):
        raise ValueError(
            'token_weights: a trained token has sequence -1; mask it or give it its rollout'
        )
    lengths = np.bincount(owner)
    if total is None and mode == 'constant':
        raise ValueError("token_weights: mode 'constant' needs `total`, what to divide by")
    if total is None:
        total = denominator(lengths, mode)
    if not 0 <= total < np.inf or (total == 0 and owner.size):
        raise ValueError(f'token_weights: total {total} must be positive and finite')
    weights = np.zeros(mask.shape, np.float32)
    if owner.size:
        weights[mask] = (
            1.0 / (total * lengths[owner]) if mode == 'seq_mean_token_mean' else 1.0 / total
        )
    return weights
