"""Terms in addition to the policy gradient: KL to a reference, entropy, and the mismatch of sampler and trainer.

Arrays and masks as in policy_gradient.py: float32 [B, T] per token, 0 where masked; statistics as (sum, count).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

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

# Bound of the k3 estimate, as in verl: one token of a far-off policy must not dominate the batch.
_K3_LIMIT = 10.0


def kl(
    logp: PerToken,
    ref_logp: PerToken,
    mask: TokenMask,
    kind: str = 'k3',
) -> tuple[DevicePerToken, DeviceStats]:
    """Estimates KL(policy ‖ reference) at the sampled tokens (Schulman 2020, "Approximating KL divergence").

    With d = logp − ref_logp:
      'k1': d. Gradient 1: an unbiased value, but as a loss its expected gradient is 0.
      'k2': d²/2. Gradient d: on policy its expectation is the gradient of the KL.
      'k3': exp(−d) + d − 1. Gradient 1 − exp(−d). As in verl, −d is clipped to ±20 and the result to ±10.
      'k1+', 'k3+': straight-through estimators with the value of k1 or k3 and the gradient of k2.

    Args:
      logp: float [B, T].
      ref_logp: float [B, T]; no gradient flows into it.
      mask: bool [B, T].
      kind: one of these.

    Returns:
      float32 [B, T], 0 where masked; statistic `kl`.

    Raises:
      ValueError: shapes differ.
    """
    mask, logp, ref_logp = masked('kl', mask, logp, ref_logp)
    # The reference is a constant of the gradient, even where both log-probs come from the same weights.
    ref_logp = jax.lax.stop_gradient(ref_logp)
    log_difference = logp - ref_logp
    k2 = 0.5 * log_difference**2
    if kind.startswith('k1'):
        estimate = log_difference
    elif kind == 'k2':
        estimate = k2
    elif kind.rstrip('+') != 'k3':
        raise ValueError(f'kind={kind!r}: give k1, k2 or k3, k1+ or k3+')
    else:
        negative_difference = log_ratio(ref_logp, logp)
        # expm1 keeps the digits that exp(−d) − 1 loses near d = 0, where most tokens lie.
        k3 = jnp.expm1(negative_difference) - negative_difference
        estimate = jnp.clip(k3, -_K3_LIMIT, _K3_LIMIT)
    if kind.endswith('+'):
        # k2 − stop_gradient(k2) is 0 in value and carries the gradient of k2.
        estimate = jax.lax.stop_gradient(estimate) + k2 - jax.lax.stop_gradient(k2)
    # At masked positions k3 is exp(0) + 0 − 1 = 0 already; the selection guarantees it for every kind.
    estimate = jnp.where(mask, estimate, 0.0)
    return estimate, {'kl': total(estimate, mask)}


def entropy_bonus(entropy: PerToken, mask: TokenMask) -> tuple[DevicePerToken, DeviceStats]:
    """Returns the negated entropy of each token's distribution, a term to minimise.

    Args:
      entropy: float [B, T], nats, from the scorer. It must carry a gradient where the term is part of the loss.
      mask: bool [B, T].

    Returns:
      float32 [B, T], 0 where masked; statistic `entropy` (not negated).

    Raises:
      ValueError: shapes differ.
    """
    # Negated, because all terms are minimised: a positive coefficient raises the entropy.
    mask, entropy = masked('entropy_bonus', mask, entropy)
    return -entropy, {'entropy': total(entropy, mask)}


def agreement(
    logp: PerToken,
    old_logp: PerToken,
    mask: TokenMask,
) -> DeviceStats:
    """Measures the distance between the trained weights and the weights that sampled the tokens.

    Args:
      logp: float [B, T], under the trained weights.
      old_logp: float [B, T], under the sampling weights.
      mask: bool [B, T].

    Returns:
      Statistics `ratio` r = π/π_old, `approx_kl` r − 1 − log r (never negative; its mean estimates KL(π_old ‖ π)) and
      `prob_gap` |π − π_old|. Before the first update of a batch they show the rounding between sampler and trainer.

    Raises:
      ValueError: shapes differ.
    """
    mask, logp, old_logp = masked('agreement', mask, logp, old_logp)
    # The log-ratios are clipped, so that one token of probability near 0 does not make the mean of a step infinite.
    log_ratios = log_ratio(logp, old_logp)
    return {
        'ratio': total(jnp.exp(log_ratios), mask),
        'approx_kl': total(jnp.expm1(log_ratios) - log_ratios, mask),
        'prob_gap': total(jnp.abs(jnp.exp(logp) - jnp.exp(old_logp)), mask),
    }


def truncated_importance(
    trainer_logp: PerToken,
    sampler_logp: PerToken,
    mask: TokenMask,
    cap: float = 2.0,
    level: str = 'token',
    segment: Segments | None = None,
) -> tuple[DevicePerToken, DeviceStats]:
    """Computes importance weights, truncated from above, for a sampler whose probabilities differ from the trainer's.

    w = min(exp(clip(trainer_logp − sampler_logp, ±20)), cap) per token or, with the sum of the differences over a
    rollout, per rollout (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    Both log-probs are of the same policy, or the sampler's is one training step older (`rollout.ahead`). Those of the
    same policy differ by the arithmetic of two implementations.

    Args:
      trainer_logp: float [B, T], log-probs of the sampled tokens computed by the trainer before an update.
      sampler_logp: float [B, T], log-probs reported by the sampler, after temperature.
      mask: bool [B, T].
      cap: largest weight, above 0; there is no smallest.
      level: 'token' or 'sequence' (the product of the token ratios).
      segment: int32 [B, T], the rollout of its row that a position belongs to, for level 'sequence'; None: every row
        is one rollout.

    Returns:
      float32 [B, T] without gradient, 0 where masked: a factor for a per-token loss. Statistics `importance` (the
      weight) and `importance_capped` (share of tokens at the cap).

    Raises:
      ValueError: shapes differ.
    """
    mask, trainer_logp, sampler_logp = masked(
        'truncated_importance', mask, trainer_logp, sampler_logp
    )
    # The weight is a constant of the gradient: it corrects the sampling distribution and is not part of the objective.
    log_weight = jax.lax.stop_gradient(trainer_logp - sampler_logp)
    if level == 'sequence':
        if segment is None:
            segment = jnp.ones(mask.shape, jnp.int32)
        # The product over a rollout is unbiased before truncation, but its variance is high; single token ratios have
        # a bias and a low variance.
        check_shapes('truncated_importance', mask, segment)
        log_weight = spread(segment_sum(log_weight, segment), segment)
    # `log_ratio` with the second argument 0 only clips, here after the sum over a rollout.
    untruncated = jnp.exp(log_ratio(log_weight, jnp.zeros_like(log_weight)))
    weight = jnp.where(mask, jnp.minimum(untruncated, cap), 0.0)
    stats = {
        'importance': total(weight, mask),
        'importance_capped': total(untruncated > cap, mask),
    }
    return weight, stats
