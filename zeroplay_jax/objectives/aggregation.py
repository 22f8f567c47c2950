"""Averages per-token losses: every way of averaging is a choice of token weights.

The host computes one weight per token for the whole batch (`token_weights`); the device sums loss × weight
(`aggregate`). The sum over micro-batches, packed rows, padding and devices is therefore the same number, and so is its
gradient. Averaging within each micro-batch, as older trainers do, lacks this property.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from zeroplay_jax.objectives.masking import masked
from zeroplay_jax.objectives.types import PerToken

# 'constant' has no denominator of its own: the caller chooses it.
_MODES_WITH_DENOMINATOR = ('token', 'seq_mean_token_mean', 'seq_mean_token_sum')


def aggregate(per_token: PerToken, weights: PerToken) -> Float[Array, '']:
    """Returns the loss: Σ per_token · weights over the positions whose weight is not 0.

    Args:
      per_token: float [B, T], from one of the losses, or a sum of several.
      weights: float32 [B, T], the rows of `token_weights` that belong to this micro-batch.

    Returns:
      float32 scalar. Values and gradients of the micro-batches of a batch add up to those of the batch.

    Raises:
      ValueError: shapes differ.
    """
    # Positions of weight 0 are masked and not multiplied: a NaN in padding times 0 would be NaN.
    mask, per_token, weights = masked('aggregate', weights != 0, per_token, weights)
    return jnp.sum(per_token * weights)


def denominator(lengths: Int[np.ndarray, ' rollouts'], mode: str) -> float:
    """Returns the denominator of an average: trained tokens ('token'), or rollouts that have any.

    Host function. Pass every rollout that the average covers, including those left out of the packed batch because
    their advantage is 0 and they add nothing to the sum. Denominators of several hosts add up.

    Args:
      lengths: int [N], trained tokens of each rollout; rollouts without any do not count.
      mode: 'token', 'seq_mean_token_mean' or 'seq_mean_token_sum'.

    Returns:
      A number ≥ 0.

    Raises:
      ValueError: the mode is unknown, or 'constant', whose denominator the caller chooses.
    """
    if mode not in _MODES_WITH_DENOMINATOR:
        raise ValueError(
            f'denominator: mode {mode!r} has no denominator of its own; choose one of {_MODES_WITH_DENOMINATOR}'
        )
    if mode == 'token':
        return float(np.sum(lengths))
    # The other modes divide by rollouts. One without trained tokens adds nothing to the sum and must not lower the
    # mean.
    return float(np.count_nonzero(lengths))


def token_weights(
    mask: Bool[np.ndarray, 'batch length'],
    sequence: Int[np.ndarray, 'batch length'] | None,
    mode: str,
    total: float | int | None = None,
) -> Float[np.ndarray, 'batch length']:
    """Returns the weight of each token in the loss. Host function, for the whole batch before it is split.

    With |y| the number of trained tokens of the token's rollout and D the denominator:
      'token': 1/D, D the trained tokens of the batch (DAPO; Dr. Zero's code).
      'seq_mean_token_mean': 1/(|y|·D), D the rollouts that have trained tokens (GRPO paper, SSP eq. 4).
      'seq_mean_token_sum': 1/D, D the rollouts that have trained tokens (the sums of Dr. Zero eq. 2 and SSP eq. 5).
      'constant': 1/D, D = `total`: the longest response (verl's Dr. GRPO), times the number of rollouts for a mean
        over them.

    Args:
      mask: bool [B, T], True on tokens to learn from.
      sequence: int [B, T], index of the rollout that a position belongs to, -1 where empty; several rollouts may
        share a row. None: every row is one rollout.
      mode: one of these.
      total: D where it is not the denominator of this batch alone: for 'constant', with several hosts, or when
        rollouts were left out of the batch (see `denominator`).

    Returns:
      float32 [B, T], 0 where masked. All zeros when the batch has no trained token: the caller skips the update.

    Raises:
      ValueError: `total` is missing, not positive, or infinite.
    """
    if sequence is None:
        sequence = np.indices(mask.shape)[0]
    token_rollout = sequence[mask]
    # Indices count the rollouts of the whole batch, so bincount gives |y| of each at its index.
    lengths = np.bincount(token_rollout)

    if total is None:
        total = denominator(lengths, mode)
    # A total of 0 is right for a batch without trained tokens: its weights are all 0.
    if not 0 <= total < np.inf or (total == 0 and token_rollout.size):
        raise ValueError(f'token_weights: total {total} must be positive and finite')

    # The quotient is computed in float64 and rounded once.
    weights = np.zeros(mask.shape, np.float32)
    if not token_rollout.size:
        return weights
    if mode == 'seq_mean_token_mean':
        weights[mask] = 1.0 / (total * lengths[token_rollout])
    else:
        weights[mask] = 1.0 / total
    return weights
