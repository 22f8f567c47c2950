"""Policy-gradient losses: arrays in, per-token losses and statistics out.

A loss never averages. The host computes token weights for the whole batch, and the device sums loss × weight:

    weights = aggregation.token_weights(mask, sequence, mode)      # host, whole batch, before it is split
    per_token, stats = token_pg(logp, old_logp, advantage, mask, segment, clip_low=0.2, clip_high=0.28)
    loss = aggregation.aggregate(per_token, weights)               # device; micro-batches and hosts add up

All losses have one signature. Its arguments are documented once, at `losses.LossFunction`; a function below states only
how it uses them: the range of its clips, and the arguments that it ignores.

Letters: B packed rows, T positions of a row. All functions check shapes before anything else, compute in float32, and
work with and without jit. Values at masked positions, NaN included, reach neither a value nor a gradient. Statistics
are (sum, count) over the unmasked tokens unless stated otherwise, and carry no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from zeroplay_jax.objectives.corrections import agreement
from zeroplay_jax.objectives.masking import (
    check_shapes,
    log_ratio,
    masked,
    segment_sum,
    spread,
    total,
)
from zeroplay_jax.objectives.types import (
    DevicePerToken,
    DeviceStats,
    PerToken,
    Segments,
    TokenMask,
)

# Bound of a rollout's log-ratio, as in verl: a ratio of exp(10) is the largest that enters a loss.
_SEQUENCE_LOG_RATIO_LIMIT = 10.0


def reinforce(
    logp: PerToken,
    old_logp: PerToken,
    advantage: PerToken,
    mask: TokenMask,
    segment: Segments | None = None,
    *,
    clip_low: float = 0.0,
    clip_high: float = 0.0,
    dual_clip: float | None = None,
) -> tuple[DevicePerToken, DeviceStats]:
    """REINFORCE: L = −A·logp, no ratio and no clip (Dr. Zero eq. 2, SSP eq. 5).

    Both formulas sum over tokens and average over rollouts: mode 'seq_mean_token_sum'. Dr. Zero's code takes the token
    mean: mode 'token'.

    Args: those of `losses.LossFunction`, and here
      old_logp: for the statistics only.
      segment, clip_low, clip_high, dual_clip: not used.

    Returns:
      float32 [B, T], to be minimised, 0 where masked; the statistics of `corrections.agreement` plus `logp` (its
      negated mean estimates the entropy on policy).

    Raises:
      ValueError: shapes differ.
    """
    del segment, clip_low, clip_high, dual_clip
    # The loss has no ratio; the statistics still show how far the sampler's weights are from the trained ones.
    stats = agreement(logp, old_logp, mask)
    mask, logp, advantage = masked('reinforce', mask, logp, advantage)
    # −A·logp of zeroed inputs is −0.0 or 0.0; the selection makes it 0.0.
    loss = jnp.where(mask, -advantage * logp, 0.0)
    stats['logp'] = total(logp, mask)
    return loss, stats


def token_pg(
    logp: PerToken,
    old_logp: PerToken,
    advantage: PerToken,
    mask: TokenMask,
    segment: Segments | None = None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[DevicePerToken, DeviceStats]:
    """Clipped policy gradient with one ratio per token (PPO; GRPO; Dr. Zero eq. 5 in the form of its code).

    r = exp(clip(logp − old_logp, ±20)) and L = max(−A·r, −A·clip(r, 1 − clip_low, 1 + clip_high)). Where A < 0, dual
    clip bounds the loss: L = min(L, −A·dual_clip). At r = 1 the gradient is that of `reinforce`.

    Args: those of `losses.LossFunction`, and here
      old_logp: no gradient flows into it.
      segment: not used.
      clip_low: distance that the ratio may fall below 1.
      clip_high: distance that the ratio may rise above 1 (two distances: DAPO).
      dual_clip: greater than 1; None or 0 switches it off.

    Returns:
      float32 [B, T], to be minimised, 0 where masked; the statistics of `corrections.agreement` plus `clip_share` and
      `dual_clip_share`, the shares of tokens whose gradient a clip removed.

    Raises:
      ValueError: shapes differ.
    """
    del segment
    stats = agreement(logp, old_logp, mask)
    mask, logp, old_logp, advantage = masked('token_pg', mask, logp, old_logp, advantage)
    # old_logp may be computed by the trainer; the ratio's gradient must flow through logp alone.
    old_logp = jax.lax.stop_gradient(old_logp)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    loss, is_clipped = _clipped_loss(ratio, advantage, clip_low, clip_high)
    stats['clip_share'] = total(is_clipped, mask)

    is_bounded = jnp.zeros(mask.shape, bool)
    if dual_clip:
        # The ordinary clip does not bound large ratios where A < 0: one token could dominate the batch.
        upper_bound = -advantage * dual_clip
        is_negative = advantage < 0
        is_bounded = is_negative & (loss > upper_bound)
        loss = jnp.where(is_bounded, upper_bound, loss)
    stats['dual_clip_share'] = total(is_bounded, mask)
    loss = jnp.where(mask, loss, 0.0)
    return loss, stats


def sequence_pg(
    logp: PerToken,
    old_logp: PerToken,
    advantage: PerToken,
    mask: TokenMask,
    segment: Segments,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    means: Mapping[str, PerToken] | None = None,
) -> tuple[DevicePerToken, DeviceStats]:
    """Clipped policy gradient with one ratio per rollout (GSPO; DSPO eqs. 6 and 11).

    log s = Σ m·(logp − old_logp)/|y|, m the mask and |y| the rollout's trained tokens. Each of its tokens carries
    L = max(−A·s, −A·clip(s, 1 − clip_low, 1 + clip_high)). The token log-ratios are not clipped before the mean; log s
    is limited to 10 after it. The gradient reaches each token through its own logp (GSPO's token form), so under
    'seq_mean_token_mean' value and gradient are those of the formula. Under other modes they are not, because a rollout
    then counts by its length.

    Args: those of `losses.LossFunction`, and here
      advantage: constant within a rollout.
      segment: numbers of rollouts, at most T.
      clip_low, clip_high: as in `token_pg`, but about 1000 times smaller, since a mean of log-ratios varies little
        (GSPO: 3e-4 and 4e-4).
      dual_clip: not used.
      means: 'rollout' → mean of logp − old_logp over a rollout with contexts elsewhere (`losses.PolicyLoss`).

    Returns:
      float32 [B, T], to be minimised, 0 where masked; the statistics of `corrections.agreement` (per token) plus
      `sequence_ratio` (s) and `clip_share`, both per segment that has trained tokens.

    Raises:
      ValueError: shapes differ.
    """
    del dual_clip
    stats = agreement(logp, old_logp, mask)
    check_shapes('sequence_pg', mask, segment)
    mask, logp, old_logp, advantage = masked('sequence_pg', mask, logp, old_logp, advantage)
    # Rollouts share rows, so the mean of a rollout is taken over its segment.
    lengths = segment_sum(mask, segment)
    constant_logp = jax.lax.stop_gradient(logp)
    log_ratios = jax.lax.stop_gradient(logp - old_logp)
    mean_log_ratio = _rollout_mean(log_ratios, lengths, segment, means)
    # logp − stop_gradient(logp) is 0 in value and gives each token a gradient through its own logp alone.
    log_s = logp - constant_logp + mean_log_ratio
    ratio = _limited_ratio(log_s)
    loss, is_clipped = _clipped_loss(ratio, advantage, clip_low, clip_high)
    stats['sequence_ratio'] = _rollout_total(ratio, lengths, mask, segment)
    stats['clip_share'] = _rollout_total(is_clipped, lengths, mask, segment)
    loss = jnp.where(mask, loss, 0.0)
    return loss, stats


def geometric_pg(
    logp: PerToken,
    old_logp: PerToken,
    advantage: PerToken,
    mask: TokenMask,
    segment: Segments,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    means: Mapping[str, PerToken] | None = None,
) -> tuple[DevicePerToken, DeviceStats]:
    """Policy gradient with the geometric mean of clipped token ratios (GMPO, Zhao et al. 2025, arXiv:2507.20673).

    Each log-ratio l = logp − old_logp is bounded on the side where the bound raises the loss: from above by clip_high
    for A > 0, from below by −clip_low for A < 0. Every trained token of a rollout carries L = −A·exp(Σ m·l/|y|), m the
    mask and |y| the rollout's trained tokens, the exponent limited to 10. The gradient reaches each token through its
    own logp unless the bound removed it. As in `sequence_pg`, value and gradient are the paper's under
    'seq_mean_token_mean'. The paper and verl divide by all rollouts; the denominator of that mode leaves out rollouts
    without a trained token. Pass the number of all rollouts as `total` of `token_weights` to count them too.

    Args: those of `losses.LossFunction`, and here
      advantage, segment: as in `sequence_pg`.
      clip_low, clip_high: bounds of log-ratios (GMPO: 0.4).
      dual_clip: not used.
      means: 'rollout' → mean of the bounded log-ratios over a rollout with contexts elsewhere (`losses.PolicyLoss`).

    Returns:
      float32 [B, T], to be minimised, 0 where masked; the statistics of `corrections.agreement` plus `clip_share`
      (tokens whose gradient the bound removed) and `sequence_ratio` (the geometric mean, per segment).

    Raises:
      ValueError: shapes differ.
    """
    del dual_clip
    stats = agreement(logp, old_logp, mask)
    check_shapes('geometric_pg', mask, segment)
    mask, logp, old_logp, advantage = masked('geometric_pg', mask, logp, old_logp, advantage)
    lengths = segment_sum(mask, segment)
    # `log_ratio`, which clips to ±20, is not used: the bounds below apply first, and the mean is limited after them.
    old_logp = jax.lax.stop_gradient(old_logp)
    log_ratios = logp - old_logp
    bounded = bounded_log_ratio(logp, old_logp, advantage, clip_low=clip_low, clip_high=clip_high)
    constant = jax.lax.stop_gradient(bounded)
    mean_log_ratio = _rollout_mean(constant, lengths, segment, means)
    # The first two terms cancel in value and carry each token's own gradient, as in `sequence_pg`.
    log_mean = bounded - constant + mean_log_ratio
    ratio = _limited_ratio(log_mean)
    stats['sequence_ratio'] = _rollout_total(ratio, lengths, mask, segment)
    is_clipped = bounded != log_ratios
    stats['clip_share'] = total(is_clipped, mask)
    loss = jnp.where(mask, -advantage * ratio, 0.0)
    return loss, stats


def cispo(
    logp: PerToken,
    old_logp: PerToken,
    advantage: PerToken,
    mask: TokenMask,
    segment: Segments | None = None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[DevicePerToken, DeviceStats]:
    """CISPO: REINFORCE with a clipped importance weight per token (MiniMax-M1, arXiv:2506.13585, eq. 4).

    w = stop_gradient(clip(r, 1 − clip_low, 1 + clip_high)) with r = exp(clip(logp − old_logp, ±20)), and
    L = −w·A·logp. The clip bounds the weight of a token and never removes its gradient, unlike the clip of `token_pg`.
    The paper averages over the tokens of a group: mode 'token'.

    Args: those of `losses.LossFunction`, and here
      segment: not used.
      clip_low: distance that the weight may fall below 1; 1 leaves it unbounded from below, as in the paper.
      clip_high: distance that the weight may rise above 1.
      dual_clip: not used.

    Returns:
      float32 [B, T], to be minimised, 0 where masked; the statistics of `corrections.agreement` plus `clip_share`, the
      share of tokens whose weight was clipped.

    Raises:
      ValueError: shapes differ.
    """
    del segment, dual_clip
    stats = agreement(logp, old_logp, mask)
    mask, logp, old_logp, advantage = masked('cispo', mask, logp, old_logp, advantage)
    # The weight corrects for the sampling policy and is not part of the objective. Its gradient is stopped, so the
    # loss of a token has the gradient −weight · A · ∇logp.
    ratio = jnp.exp(log_ratio(logp, old_logp))
    ratio = jax.lax.stop_gradient(ratio)
    weight = _clip_ratio(ratio, clip_low, clip_high)
    is_clipped = weight != ratio
    stats['clip_share'] = total(is_clipped, mask)
    loss = -weight * advantage * logp
    loss = jnp.where(mask, loss, 0.0)
    return loss, stats


def plain_log_ratio(logp, old_logp, advantage, *, clip_low, clip_high):
    """Returns logp − old_logp [B, T], whose mean over a rollout `sequence_pg` reads."""
    del advantage, clip_low, clip_high
    return logp - old_logp


def bounded_log_ratio(logp, old_logp, advantage, *, clip_low, clip_high):
    """Returns logp − old_logp [B, T], bounded on the side of the advantage, whose mean `geometric_pg` reads."""
    log_ratios = logp - old_logp
    bounded_above = jnp.minimum(log_ratios, clip_high)
    bounded_below = jnp.maximum(log_ratios, -clip_low)
    return jnp.where(advantage > 0, bounded_above, bounded_below)


# `losses.PolicyLoss.rollout_values` of the losses with a ratio per rollout.
ROLLOUT_VALUES = {'sequence_pg': plain_log_ratio, 'geometric_pg': bounded_log_ratio}


def _clipped_loss(ratio, advantage, clip_low, clip_high):
    """Returns PPO's pessimistic loss [B, T], and where the clip determines it, which removes the gradient."""
    unclipped_loss = -advantage * ratio
    clipped_ratio = _clip_ratio(ratio, clip_low, clip_high)
    clipped_loss = -advantage * clipped_ratio
    # The larger loss is the pessimistic one. Where it is the clipped one, it is constant in the ratio.
    loss = jnp.maximum(unclipped_loss, clipped_loss)
    is_clipped = loss > unclipped_loss
    return loss, is_clipped


def _clip_ratio(ratio, clip_low, clip_high):
    """Returns the ratio, limited to the trust region around 1."""
    return jnp.clip(ratio, 1 - clip_low, 1 + clip_high)


def _limited_ratio(rollout_log_ratio):
    """Returns the ratio of rollouts, of which exp(10) is the largest."""
    limited = jnp.minimum(rollout_log_ratio, _SEQUENCE_LOG_RATIO_LIMIT)
    return jnp.exp(limited)


def _rollout_mean(values, lengths, segment, means):
    """Returns the mean [B, T] over the trained tokens of each position's rollout.

    Args:
      values: [B, T], 0 where masked.
      lengths: [B, T + 1], trained tokens of each segment (`segment_sum` of the mask).
      means: as of `losses.PolicyLoss.rollout_values`, or None.
    """
    segment_means = _segment_means(values, lengths, segment)
    mean = spread(segment_means, segment)
    if means is None:
        return mean
    return jnp.where(jnp.isnan(means['rollout']), mean, means['rollout'])


def _segment_means(values, lengths, segment):
    """Returns the mean [B, T + 1] over the trained tokens of each segment; arguments as in `_rollout_mean`."""
    sums = segment_sum(values, segment)
    # The maximum avoids 0/0 in segments without trained tokens, such as segment 0 of empty positions.
    return sums / jnp.maximum(lengths, 1)


def _rollout_total(values, lengths, mask, segment):
    """Returns the (sum, count) of a value that all tokens of a rollout share, once per rollout with trained tokens."""
    # The mean over the trained tokens of a rollout is the value that they share.
    values = jnp.where(mask, values, 0.0)
    values = jax.lax.stop_gradient(values)
    means = _segment_means(values, lengths, segment)
    is_trained = lengths > 0
    count = jnp.sum(is_trained, dtype=jnp.float32)
    return jnp.sum(means), count
