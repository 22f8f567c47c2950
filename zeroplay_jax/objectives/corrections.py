"""Terms beside the policy gradient: distance to a reference, entropy, and what sampler and trainer disagree on.

Arrays and masks as in policy_gradient.py: float32 [B, T] per token out, 0 where masked, statistics as (sum, count).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zeroplay_jax.objectives.masking import (
    Stats,
    check_shapes,
    log_ratio,
    masked,
    segment_sum,
    spread,
    total,
)

KL_KINDS = ('k1', 'k2', 'k3', 'k1+', 'k3+')
LEVELS = ('token', 'sequence')


def kl(
    logp: jax.Array, ref_logp: jax.Array, mask: jax.Array, kind: str = 'k3'
) -> tuple[jax.Array, Stats]:
    """Estimates KL(policy ‖ reference) at the sampled tokens; with d = logp − ref_logp:

    k1 = d;  k2 = d²/2;  k3 = exp(−d) + d − 1 with −d held within ±20 and the result within ±10, as in verl.
    Gradients with respect to logp: 1, d, 1 − exp(−d). So k1 is a fair *value* but as a loss pulls nowhere on
    average; k2 has, on policy, the gradient of the KL itself (Schulman, "Approximating KL divergence", 2020).
    'k1+' and 'k3+' are straight through: the value of one, the gradient of k2.

    Args:
      logp: float [B, T].   ref_logp: float [B, T], no gradient flows here.   mask: bool [B, T].
      kind: one of KL_KINDS.

    Returns:
      float32 [B, T], 0 where masked; statistic `kl`.

    Raises:
      ValueError: shapes that differ or an unknown kind.
    """
    if kind not in KL_KINDS:
        raise ValueError(f'kl: kind is {kind!r}; choose one of {KL_KINDS}')
    mask, logp, ref_logp = masked('kl', mask, logp, ref_logp)
    ref_logp = jax.lax.stop_gradient(ref_logp)
    gap = logp - ref_logp
    k2 = 0.5 * gap**2
    if kind.startswith('k1'):
        value = gap
    elif kind == 'k2':
        value = k2
    else:
        minus = log_ratio(ref_logp, logp)
        # expm1 keeps the digits that exp(−d) − 1 loses near d = 0, where this estimator lives.
        value = jnp.clip(jnp.expm1(minus) - minus, -10.0, 10.0)
    if kind.endswith('+'):
        value = jax.lax.stop_gradient(value) + k2 - jax.lax.stop_gradient(k2)
    value = jnp.where(mask, value, 0.0)
    return value, {'kl': total(value, mask)}


def entropy_bonus(entropy: jax.Array, mask: jax.Array) -> tuple[jax.Array, Stats]:
    """The entropy of each token's distribution as a term to minimise: −H.

    Args:
      entropy: float [B, T], nats, from the scorer (with its gradient where the term is to pull).
      mask: bool [B, T].

    Returns:
      float32 [B, T], 0 where masked; statistic `entropy` (H itself).

    Raises:
      ValueError: shapes that differ.
    """
    mask, entropy = masked('entropy_bonus', mask, entropy)
    return -entropy, {'entropy': total(entropy, mask)}


def agreement(logp: jax.Array, old_logp: jax.Array, mask: jax.Array) -> Stats:
    """How far the trained weights are from those that sampled, as statistics.

    Args:
      logp, old_logp: float [B, T].   mask: bool [B, T].

    Returns:
      `ratio` r = π/π_old, `approx_kl` r − 1 − log r (never negative; its mean estimates KL(π_old ‖ π)) and
      `prob_gap` |π − π_old|. Before the first update of a batch they compare sampler and trainer: rounding.

    Raises:
      ValueError: shapes that differ.
    """
    mask, logp, old_logp = masked('agreement', mask, logp, old_logp)
    gap = log_ratio(logp, old_logp)
    return {
        'ratio': total(jnp.exp(gap), mask),
        'approx_kl': total(jnp.expm1(gap) - gap, mask),
        'prob_gap': total(jnp.abs(jnp.exp(logp) - jnp.exp(old_logp)), mask),
    }


def truncated_importance(
    trainer_logp: jax.Array,
    sampler_logp: jax.Array,
    mask: jax.Array,
    cap: float = 2.0,
    level: str = 'token',
    segment: jax.Array | None = None,
) -> tuple[jax.Array, Stats]:
    """Weights that correct for a sampler whose probabilities differ from the trainer's, cut off from above.

    w = min(exp(clip(trainer_logp − sampler_logp, ±20)), cap), per token or, with the sum of the differences, per
    rollout (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). Both
    log-probs are of the same weights: what differs is arithmetic, or the weights grew old while a rollout ran.

    Args:
      trainer_logp: float [B, T], log-probs of the sampled tokens as the trainer computes them, before an update.
      sampler_logp: float [B, T], as the sampler reported them, after temperature.
      mask: bool [B, T].
      cap: largest weight; there is no smallest.
      level: 'token' or 'sequence' (the product of the token ratios).
      segment: int32 [B, T], which rollout of its row a place belongs to; None: every row is one. For 'sequence'.

    Returns:
      float32 [B, T] without gradient, 0 where masked, to multiply a per-token loss with; statistics `importance`
      (the weight) and `importance_capped` (share of tokens at the cap).

    Raises:
      ValueError: shapes that differ, an unknown level or a cap that is not positive.
    """
    if level not in LEVELS:
        raise ValueError(f'truncated_importance: level is {level!r}; choose one of {LEVELS}')
    if not cap > 0:
        raise ValueError(f'truncated_importance: cap {cap} must be positive')
    mask, trainer_logp, sampler_logp = masked(
        'truncated_importance', mask, trainer_logp, sampler_logp
    )
    gap = jax.lax.stop_gradient(trainer_logp - sampler_logp)
    if level == 'sequence':
        segment = jnp.ones(mask.shape, jnp.int32) if segment is None else segment
        check_shapes('truncated_importance', mask, segment)
        gap = spread(segment_sum(gap, segment), segment)
    ratio = jnp.exp(log_ratio(gap, jnp.zeros_like(gap)))
    weight = jnp.where(mask, jnp.minimum(ratio, cap), 0.0)
    return weight, {
        'importance': total(weight, mask),
        'importance_capped': total(ratio > cap, mask),
    }
