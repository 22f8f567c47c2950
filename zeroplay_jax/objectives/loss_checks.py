"""Tries a loss on rollouts drawn at random: packed together they must have the losses that each has alone.

What shares a micro-batch with a rollout depends on `micro.rows`, on packing and on the number of devices. A loss that
reads it, by a mean over [B, T] for instance, computes another objective with each of these settings.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zeroplay_jax.objectives import aggregation
from zeroplay_jax.objectives.losses import LossError, PolicyLoss

# Enough tokens for a loss that selects a small share of a batch, such as the 0.2 % with the largest covariance.
_ROWS, _ROLLOUTS_PER_ROW, _TOKENS = 2, 4, 256
_EMPTY_TOKENS = 32
# Standard deviations of logp − old_logp in each rollout of a batch: on policy, around usual clips, and far beyond them
# in some rollouts alone, so that a condition on the whole batch is not met by each of them.
_RATIO_SCALES = (
    (0.0,) * 8,
    (0.001, 0.03, 0.1, 0.2, 0.1, 0.03, 0.3, 1.0),
    (0.1, 2.0, 0.01, 20.0, 0.3, 0.1, 5.0, 0.0),
)
# Sums of another order differ by less, also within an exponential: of the value, and of the largest one.
_RELATIVE, _OF_LARGEST = 1e-3, 1e-5


@functools.lru_cache
def check_loss(
    loss: PolicyLoss,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> None:
    """Compares losses, gradients and statistics of packed rollouts with those of each rollout alone.

    If the loss is declared elementwise, they are compared with those of halves of rollouts as well.

    Args:
      loss: of the user; one that passed is not tried again.
      clip_low, clip_high, dual_clip: the settings with which it will be called.

    Raises:
      LossError: they differ; the message is one line.
    """
    name = getattr(loss.function, '__name__', repr(loss.function))
    options = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    evaluate = jax.jit(functools.partial(_evaluate, loss, options))
    rng = np.random.default_rng(0)
    for scales in _RATIO_SCALES:
        rollouts = _draw(rng, scales)
        packed = _packed(rng, rollouts)
        means = _batch_means(loss, packed, _parts(rollouts, _TOKENS))
        whole = _evaluate_parts(evaluate, [packed], means)
        alone = _evaluate_parts(evaluate, _parts(rollouts, _TOKENS), means)
        differences = _differences(whole, alone)
        if '' in differences:
            raise LossError(
                f'loss {name}: the loss of a token changes with other rollouts of its micro-batch or with values '
                'where mask is False, so that it would depend on micro.rows, packing and devices; reduce over the '
                'trained tokens of one rollout (masking.masked, masking.segment_sum), or declare PolicyLoss.batch_means'
            )
        if differences:
            raise LossError(
                f'loss {name}: statistic {differences[0]!r} of a micro-batch is not the sum over its rollouts, so that '
                'it would depend on micro.rows, packing and devices; return (sum, count), as masking.total does'
            )
        if loss.rollout_values is not None:
            contexts = _parts(rollouts, _TOKENS // 2)
            _set_rollout_means(loss, clip_low, clip_high, rollouts, contexts)
            in_contexts = _evaluate_parts(evaluate, contexts, means)
            if _differences({'': whole['']}, in_contexts):
                raise LossError(
                    f'loss {name}: losses or gradients of a rollout change where it has two contexts; take the mean of '
                    "rollout_values from means['rollout'] where it is not NaN"
                )
        if not loss.elementwise:
            continue
        halves = _evaluate_parts(evaluate, _parts(rollouts, _TOKENS // 2), means)
        if _differences(whole, halves):
            raise LossError(
                f'loss {name}: declared elementwise, but losses or statistics of a rollout differ from those of its '
                'halves; set elementwise=False'
            )


def _draw(rng: np.random.Generator, scales: Sequence[float]) -> dict[str, np.ndarray]:
    """Returns arrays [rollouts, tokens]: those of a loss without `segment`, and the weights of the tokens."""
    shape = (_ROWS * _ROLLOUTS_PER_ROW, _TOKENS)
    per_rollout = (shape[0], 1)
    logp = -rng.exponential(size=shape) * rng.uniform(0.1, 2, per_rollout)
    log_ratio = rng.normal(size=shape) * np.reshape(scales, per_rollout)
    old_logp = -np.abs(logp - log_ratio)
    # Around a value per rollout, as with a value network.
    advantage = rng.uniform(-2, 2, per_rollout) + 0.3 * rng.normal(size=shape)
    mask = rng.random(shape) < rng.uniform(0.3, 1, per_rollout)
    # A rollout begins with its prompt.
    mask[:, : _TOKENS // 16] = False
    weight = rng.random(shape) * mask
    floats = dict(logp=logp, old_logp=old_logp, advantage=advantage, weight=weight)
    return {name: array.astype(np.float32) for name, array in floats.items()} | {'mask': mask}


def _packed(rng: np.random.Generator, rollouts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the rollouts in rows with empty positions at their ends, and other values where masked."""
    empty = ((0, 0), (0, _EMPTY_TOKENS))
    packed = {name: np.pad(array.reshape(_ROWS, -1), empty) for name, array in rollouts.items()}
    for name in ('logp', 'old_logp', 'advantage'):
        other_values = -rng.exponential(size=packed[name].shape)
        packed[name] = np.where(packed['mask'], packed[name], other_values).astype(np.float32)
    segment = np.repeat(np.arange(1, _ROLLOUTS_PER_ROW + 1, dtype=np.int32), _TOKENS)
    packed['segment'] = np.pad(np.tile(segment, (_ROWS, 1)), empty)
    packed['rollout'] = np.full(packed['segment'].shape, np.nan, np.float32)
    return packed


def _parts(rollouts: Mapping[str, np.ndarray], tokens: int) -> list[dict[str, np.ndarray]]:
    """Returns the rollouts cut into parts of so many tokens, a micro-batch [1, tokens] for each."""
    cut = {name: array.reshape(-1, 1, tokens) for name, array in rollouts.items()}
    cut['segment'] = np.ones_like(cut['mask'], np.int32)
    cut['rollout'] = np.full(cut['mask'].shape, np.nan, np.float32)
    return [{name: array[part] for name, array in cut.items()} for part in range(len(cut['mask']))]


def _set_rollout_means(loss, clip_low, clip_high, rollouts, contexts) -> None:
    """Gives the tokens of halves of rollouts the mean of the loss's `rollout_values` over the whole rollout."""
    arrays = (rollouts[name] for name in ('logp', 'old_logp', 'advantage'))
    with jax.ensure_compile_time_eval():
        values = loss.rollout_values(*arrays, clip_low=clip_low, clip_high=clip_high)
    means = np.mean(values, axis=1, where=rollouts['mask'])
    for index, context in enumerate(contexts):
        context['rollout'][:] = means[index // 2]


def _batch_means(loss, packed, parts) -> dict[str, np.ndarray]:
    """Returns the means that the loss declares; raises LossError if their sums are not those over rollouts."""
    if loss.batch_means is None:
        return {}
    names = ('logp', 'old_logp', 'advantage', 'mask', 'segment')
    with jax.ensure_compile_time_eval():
        sums_of = jax.jit(lambda batch: loss.batch_sums(*(batch[name] for name in names)))
        whole, *of_rollouts = jax.device_get([sums_of(batch) for batch in (packed, *parts)])
    means = {}
    for key, sums in whole.items():
        expected = np.sum([rollout[key] for rollout in of_rollouts], axis=0)
        if not np.allclose(sums, expected, _RELATIVE, _OF_LARGEST, equal_nan=True):
            name = getattr(loss.function, '__name__', repr(loss.function))
            raise LossError(
                f'loss {name}: batch_means: {key!r} of a token changes with other rollouts of its micro-batch or '
                'with values where mask is False; return (values, weights) of each token alone'
            )
        means[key] = sums[0] / max(sums[1], 1e-30)
    return means


def _evaluate(loss, options, batch, means):
    """Returns losses and gradients of the tokens, and statistics, of one micro-batch."""

    def weighted(logp):
        arrays = (batch[name] for name in ('old_logp', 'advantage', 'mask', 'segment'))
        everywhere = {name: jnp.full(logp.shape, mean) for name, mean in means.items()}
        everywhere['rollout'] = batch['rollout']
        token_losses, stats = loss(logp, *arrays, **options, means=everywhere)
        return aggregation.aggregate(token_losses, batch['weight']), (token_losses, stats)

    gradient, (token_losses, stats) = jax.grad(weighted, has_aux=True)(batch['logp'])
    return token_losses, gradient, stats


def _evaluate_parts(
    evaluate, batches: Sequence[Mapping[str, np.ndarray]], means: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns '' → (losses, gradients) of all trained tokens in order, and name → sum of the statistic."""
    tokens = []
    sums: dict[str, np.ndarray] = {}
    # Also where the caller is traced: the result decides here and now.
    with jax.ensure_compile_time_eval():
        results = jax.device_get([evaluate(batch, means) for batch in batches])
    for batch, (token_losses, gradient, stats) in zip(batches, results, strict=True):
        tokens.append(np.stack([token_losses, gradient])[:, batch['mask']])
        for name, pair in stats.items():
            sums[name] = sums.get(name, 0) + np.array(pair)
    return {'': np.concatenate(tokens, 1)} | sums


def _differences(whole: Mapping[str, np.ndarray], parts: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the names whose values differ."""
    names = []
    for name, expected in whole.items():
        finite = np.abs(expected[np.isfinite(expected)])
        tolerance = _OF_LARGEST * finite.max(initial=0.0)
        if not np.allclose(parts[name], expected, _RELATIVE, tolerance, equal_nan=True):
            names.append(name)
    return names
