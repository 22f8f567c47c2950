"""Policy-gradient losses: arrays in, per-token arrays out, one weighted sum at the end.

A loss never averages. The host computes one weight per token for the *whole* batch (`token_weights`), the
device adds up loss × weight (`aggregate`):

    weights = token_weights(mask, sequence, mode)      # host, whole batch, before it is split
    per_token, stats = token_pg(logp, old_logp, advantage, mask, ...)
    loss = aggregate(per_token, weights)               # device; plain sums of micro-batches and hosts

Every way of averaging is a choice of weights, so the sum over micro-batches, packed rows, padding or devices
is the same number, and so is its gradient. (Averaging per micro-batch, as older trainers did, is not.)

All device functions take [B, T] arrays, check shapes before anything else, compute in float32, and work with
and without jit. What stands at masked places, NaN included, reaches neither a value nor a gradient.
Statistics are (sum, count) over the unmasked tokens and carry no gradient: add both up, divide when logging.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Stats = dict[str, tuple[jax.Array, jax.Array]]

MODES = ('token', 'seq_mean_token_mean', 'seq_mean_token_sum', 'constant')

# exp(20) is 5e8: far beyond any useful ratio, and finite when multiplied by an advantage.
_LOG_RATIO_LIMIT = 20.0


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
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f'token_pg: needs 0 ≤ clip_low ≤ 1 and clip_high ≥ 0, got {clip_low}, {clip_high}')
    if dual_clip and dual_clip <= 1:
        raise ValueError(f'token_pg: dual_clip {dual_clip} must exceed 1; None turns it off')
    stats = agreement(logp, old_logp, mask)
    mask, logp, old_logp, advantage = _masked('token_pg', mask, logp, old_logp, advantage)
    ratio = jnp.exp(_log_ratio(logp, jax.lax.stop_gradient(old_logp)))
    plain = -advantage * ratio
    loss = jnp.maximum(plain, -advantage * jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    stats['clip_share'] = _total(loss > plain, mask)
    bounded = jnp.zeros(mask.shape, bool)
    if dual_clip:
        ceiling = -advantage * dual_clip
        bounded = (advantage < 0) & (loss > ceiling)
        loss = jnp.where(bounded, ceiling, loss)
    stats['dual_clip_share'] = _total(bounded, mask)
    return jnp.where(mask, loss, 0.0), stats


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
    mask, logp, advantage = _masked('reinforce', mask, logp, advantage)
    return jnp.where(mask, -advantage * logp, 0.0), {'logp': _total(logp, mask)}


def kl(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array, kind: str = 'k3') -> tuple[jax.Array, Stats]:
    """Estimates KL(policy ‖ reference) at the sampled tokens; with d = logp − ref_logp:

    k1 = d;  k2 = d²/2;  k3 = exp(−d) + d − 1 with −d held within ±20 and the result within ±10, as in verl.
    Gradients with respect to logp: 1, d, 1 − exp(−d). So k1 is a fair *value* but as a loss pulls nowhere on
    average; k2 has, on policy, the gradient of the KL itself (Schulman, "Approximating KL divergence", 2020).

    Args:
      logp: float [B, T].   ref_logp: float [B, T], no gradient flows here.   mask: bool [B, T].
      kind: 'k1', 'k2' or 'k3'.

    Returns:
      float32 [B, T], 0 where masked; statistic `kl`.

    Raises:
      ValueError: shapes that differ or an unknown kind.
    """
    if kind not in ('k1', 'k2', 'k3'):
        raise ValueError(f"kl: kind is {kind!r}; choose 'k1', 'k2' or 'k3'")
    mask, logp, ref_logp = _masked('kl', mask, logp, ref_logp)
    gap = logp - jax.lax.stop_gradient(ref_logp)
    if kind == 'k1':
        value = gap
    elif kind == 'k2':
        value = 0.5 * gap**2
    else:
        minus = _log_ratio(jax.lax.stop_gradient(ref_logp), logp)
        # expm1 keeps the digits that exp(−d) − 1 loses near d = 0, where this estimator lives.
        value = jnp.clip(jnp.expm1(minus) - minus, -10.0, 10.0)
    value = jnp.where(mask, value, 0.0)
    return value, {'kl': _total(value, mask)}


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
    mask, logp, old_logp = _masked('agreement', mask, logp, old_logp)
    log_ratio = _log_ratio(logp, old_logp)
    return {
        'ratio': _total(jnp.exp(log_ratio), mask),
        'approx_kl': _total(jnp.expm1(log_ratio) - log_ratio, mask),
        'prob_gap': _total(jnp.abs(jnp.exp(logp) - jnp.exp(old_logp)), mask),
    }


def aggregate(per_token: jax.Array, weights: jax.Array) -> jax.Array:
    """The loss: Σ per_token · weights over the places whose weight is not 0.

    Args:
      per_token: float [B, T], from one of the losses above, or a sum of several.
      weights: float32 [B, T], this micro-batch's part of `token_weights`.

    Returns:
      float32 scalar. Scalars and gradients of the micro-batches of a batch add up to those of the batch.

    Raises:
      ValueError: shapes that differ.
    """
    mask, per_token, weights = _masked('aggregate', weights != 0, per_token, weights)
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
        raise ValueError(f'denominator: mode {mode!r} has none of its own; choose one of {MODES[:3]}')
    return float(np.sum(lengths) if mode == 'token' else np.count_nonzero(lengths))


def token_weights(mask: np.ndarray, sequence: np.ndarray | None, mode: str, total: float | None = None) -> np.ndarray:
    """Weight of each token in the loss. Host function, for the whole batch before it is cut into parts.

    With |y| the trained tokens of a token's own rollout and D the denominator:
      'token': 1/D, D all trained tokens (DAPO; Dr. Zero's code).
      'seq_mean_token_mean': 1/(|y|·D), D the rollouts that have trained tokens (GRPO paper, SSP eq. 4).
      'seq_mean_token_sum': 1/D, D as before (the sums of Dr. Zero eq. 2 and SSP eq. 5).
      'constant': 1/D, D given (Dr. GRPO).

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
      ValueError: shapes that differ, an unknown mode, a trained token outside every rollout, a missing or
        negative total.
    """
    mask = np.asarray(mask, bool)
    sequence = np.indices(mask.shape)[0] if sequence is None else np.asarray(sequence)
    if mask.ndim != 2 or sequence.shape != mask.shape:
        raise ValueError(f'token_weights: mask {mask.shape}, sequence {sequence.shape}: both must be [B, T]')
    if mode not in MODES:
        raise ValueError(f'token_weights: mode is {mode!r}; choose one of {MODES}')
    owner = sequence[mask]
    if np.any(owner < 0):
        raise ValueError('token_weights: a trained token has sequence -1; mask it or give it its rollout')
    lengths = np.bincount(owner)
    if total is None and mode == 'constant':
        raise ValueError("token_weights: mode 'constant' needs `total`, what to divide by")
    if total is None:
        total = denominator(lengths, mode)
    if total < 0 or (total == 0 and owner.size):
        raise ValueError(f'token_weights: total {total} must be positive')
    weights = np.zeros(mask.shape, np.float32)
    if owner.size:
        weights[mask] = 1.0 / (total * lengths[owner]) if mode == 'seq_mean_token_mean' else 1.0 / total
    return weights


def _masked(name, mask, *arrays):
    """Checks that all are [B, T] alike; puts 0 where masked, before any arithmetic, so NaN cannot spread."""
    shapes = [jnp.shape(x) for x in (mask, *arrays)]
    if len(shapes[0]) != 2 or len(set(shapes)) != 1:
        raise ValueError(f'{name}: every array must be [B, T] of one shape, got {shapes} (mask first)')
    mask = jnp.asarray(mask).astype(bool)
    return mask, *(jnp.where(mask, jnp.asarray(x).astype(jnp.float32), 0.0) for x in arrays)


def _log_ratio(logp, old_logp):
    return jnp.clip(logp - old_logp, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def _total(values, mask):
    """(sum, count) over masked tokens, without gradient."""
    values = jax.lax.stop_gradient(values)
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32)
