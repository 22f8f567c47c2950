"""Policy-gradient losses: arrays in, per-token arrays out, one weighted sum at the end.

A loss never averages; aggregation.py does, by weights that the host computes for the whole batch:

    weights = token_weights(mask, sequence, mode)      # host, whole batch, before it is split
    per_token, stats = token_pg(logp, old_logp, advantage, mask, ...)
    loss = aggregate(per_token, weights)               # device; plain sums of micro-batches and hosts

Letters: B packed rows, T places of a row. All device functions take [B, T] arrays, check shapes before anything
else, compute in float32, and work with and without jit. What stands at masked places, NaN included, reaches neither
a value nor a gradient. Statistics are (sum, count), over the unmasked tokens unless said otherwise, and carry no
gradient: add both up, divide when logging.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zeroplay_jax.objectives.aggregation import MODES, aggregate, denominator, token_weights
from zeroplay_jax.objectives.corrections import agreement, kl
from zeroplay_jax.objectives.masking import (
    Stats,
    check_shapes,
    log_ratio,
    masked,
    segment_sum,
    spread,
    total,
)

__all__ = [
    'MODES',
    'aggregate',
    'agreement',
    'denominator',
    'geometric_pg',
    'kl',
    'reinforce',
    'sequence_pg',
    'token_pg',
    'token_weights',
]

# exp(10): the largest ratio of a whole rollout that enters a loss, as in verl.
_SEQUENCE_LIMIT = 10.0


def token_pg(
    logp: jax.Array,
    old_logp: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[jax.Array, Stats]:
    """Clipped policy gradient with one ratio per token (PPO; Dr. Zero eq. 5 as its code has it).

    r = exp(clip(logp − old_logp, ±20));  L = max(−A·r, −A·clip(r, 1 − clip_low, 1 + clip_high)).
    Where A < 0, dual clip bounds the loss: L = min(L, −A·dual_clip). At r = 1 it has `reinforce`'s gradient.

    Args:
      logp: float [B, T], log-probs of the tokens under the weights being trained.
      old_logp: float [B, T], log-probs under the weights that wrote them; no gradient flows here.
      advantage: float [B, T].
      mask: bool [B, T], True on tokens to learn from.
      clip_low, clip_high: how far the ratio may fall below and rise above 1 (DAPO's two-sided clip).
      dual_clip: greater than 1; None or 0 turns it off.

    Returns:
      float32 [B, T], to be minimised, 0 where masked; and the statistics of `agreement` plus `clip_share` and
      `dual_clip_share`, the shares of tokens whose gradient a clip removed.

    Raises:
      ValueError: shapes that differ or a clip out of range.
    """
    _check_clip('token_pg', clip_low, clip_high)
    if dual_clip and dual_clip <= 1:
        raise ValueError(f'token_pg: dual_clip {dual_clip} must exceed 1; None turns it off')
    stats = agreement(logp, old_logp, mask)
    mask, logp, old_logp, advantage = masked('token_pg', mask, logp, old_logp, advantage)
    ratio = jnp.exp(log_ratio(logp, jax.lax.stop_gradient(old_logp)))
    plain = -advantage * ratio
    loss = jnp.maximum(plain, -advantage * jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    stats['clip_share'] = total(loss > plain, mask)
    bounded = jnp.zeros(mask.shape, bool)
    if dual_clip:
        ceiling = -advantage * dual_clip
        bounded = (advantage < 0) & (loss > ceiling)
        loss = jnp.where(bounded, ceiling, loss)
    stats['dual_clip_share'] = total(bounded, mask)
    return jnp.where(mask, loss, 0.0), stats


def sequence_pg(
    logp: jax.Array,
    old_logp: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    segment: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, Stats]:
    """Clipped policy gradient with one ratio per rollout (GSPO; DSPO eqs. 6 and 11).

    log s = Σ m·(logp − old_logp)/|y|, |y| the rollout's trained tokens; every one of them carries
    L = max(−A·s, −A·clip(s, 1 − clip_low, 1 + clip_high)). The sum is not held within bounds before it is divided,
    log s is held below 10 after. The gradient reaches each token through its own logp (GSPO's token form), so under
    'seq_mean_token_mean' value and gradient are those of the formula. Under other modes they are not: a rollout
    then counts by its length.

    Args:
      logp, old_logp, advantage, mask: as in `token_pg`; the advantage is that of the rollout.
      segment: int32 [B, T], which rollout of its row a place belongs to: 1, 2, …, T at most; 0 where empty.
      clip_low, clip_high: how far the ratio may fall below and rise above 1; some 1000 times closer than for
        tokens, since a mean of log-ratios hardly moves (GSPO: 3e-4 and 4e-4).

    Returns:
      float32 [B, T], to be minimised, 0 where masked; the statistics of `agreement` (per token) plus
      `sequence_ratio` (s) and `clip_share`, both per rollout that has trained tokens.

    Raises:
      ValueError: shapes that differ or a clip out of range.
    """
    _check_clip('sequence_pg', clip_low, clip_high)
    stats = agreement(logp, old_logp, mask)
    check_shapes('sequence_pg', mask, segment)
    mask, logp, old_logp, advantage = masked('sequence_pg', mask, logp, old_logp, advantage)
    lengths = segment_sum(mask, segment)
    log_s = _mean(jax.lax.stop_gradient(logp - old_logp), lengths, segment)
    ratio = jnp.exp(jnp.minimum(logp - jax.lax.stop_gradient(logp) + log_s, _SEQUENCE_LIMIT))
    plain = -advantage * ratio
    loss = jnp.maximum(plain, -advantage * jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    stats['sequence_ratio'] = _per_rollout(ratio, lengths, mask, segment)
    stats['clip_share'] = _per_rollout(loss > plain, lengths, mask, segment)
    return jnp.where(mask, loss, 0.0), stats


def geometric_pg(
    logp: jax.Array,
    old_logp: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    segment: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, Stats]:
    """Policy gradient with the geometric mean of clipped token ratios (GMPO, Zhao et al. 2025, arXiv 2507.20673).

    Each log-ratio l = logp − old_logp is bounded where the bound makes the loss larger: at clip_high for A > 0, at
    −clip_low for A < 0. Every trained token of a rollout carries L = −A·exp(Σ m·l/|y|), the exponent held below 10;
    the gradient reaches each through its own logp, where the bound let it. As in `sequence_pg`, value and gradient
    are the paper's under 'seq_mean_token_mean'. The paper and verl divide by *all* rollouts; that mode's own
    denominator leaves out those without a trained token. Give `token_weights` their number as `total` to count
    them too.

    Args:
      as in `sequence_pg`; clip_low and clip_high bound log-ratios (GMPO: 0.4).

    Returns:
      float32 [B, T], to be minimised, 0 where masked; the statistics of `agreement` plus `clip_share` (tokens
      whose gradient the bound removed) and `sequence_ratio` (the geometric mean, per rollout).

    Raises:
      ValueError: shapes that differ or a negative clip.
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(
            f'geometric_pg: needs clip_low ≥ 0 and clip_high ≥ 0, got {clip_low}, {clip_high}'
        )
    stats = agreement(logp, old_logp, mask)
    check_shapes('geometric_pg', mask, segment)
    mask, logp, old_logp, advantage = masked('geometric_pg', mask, logp, old_logp, advantage)
    lengths = segment_sum(mask, segment)
    plain = logp - jax.lax.stop_gradient(old_logp)
    bounded = jnp.where(advantage > 0, jnp.minimum(plain, clip_high), jnp.maximum(plain, -clip_low))
    fixed = jax.lax.stop_gradient(bounded)
    ratio = jnp.exp(jnp.minimum(bounded - fixed + _mean(fixed, lengths, segment), _SEQUENCE_LIMIT))
    stats['sequence_ratio'] = _per_rollout(ratio, lengths, mask, segment)
    stats['clip_share'] = total(bounded != plain, mask)
    return jnp.where(mask, -advantage * ratio, 0.0), stats


def reinforce(logp: jax.Array, advantage: jax.Array, mask: jax.Array) -> tuple[jax.Array, Stats]:
    """REINFORCE: L = −A·logp, no ratio and no clip (Dr. Zero eq. 2, SSP eq. 5).

    Both formulas sum over tokens and average over rollouts: mode 'seq_mean_token_sum'. Dr. Zero's code takes
    the token mean: mode 'token'.

    Args:
      logp: float [B, T].   advantage: float [B, T].   mask: bool [B, T].

    Returns:
      float32 [B, T], 0 where masked; statistic `logp` (its mean, negated, estimates the entropy on policy).

    Raises:
      ValueError: shapes that differ.
    """
    mask, logp, advantage = masked('reinforce', mask, logp, advantage)
    return jnp.where(mask, -advantage * logp, 0.0), {'logp': total(logp, mask)}


def _check_clip(name, clip_low, clip_high):
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f'{name}: needs 0 ≤ clip_low ≤ 1 and clip_high ≥ 0, got {clip_low}, {clip_high}'
        )


def _mean(values, lengths, segment):
    """Means [B, T] of masked values over the rollout of each place; `lengths` [B, T + 1] as segment_sum gives."""
    return spread(segment_sum(values, segment) / jnp.maximum(lengths, 1), segment)


def _per_rollout(values, lengths, mask, segment):
    """Statistic of a value that all tokens of a rollout share, counted once per rollout with trained tokens."""
    values = jax.lax.stop_gradient(jnp.where(mask, values, 0.0))
    means = segment_sum(values, segment) / jnp.maximum(lengths, 1)
    return jnp.sum(means), jnp.sum(lengths > 0, dtype=jnp.float32)
