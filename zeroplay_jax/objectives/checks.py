"""For the tests of who writes a loss: what shares a micro-batch with a rollout must not change the rollout's own loss.

What shares it depends on `micro.rows`, on packing and on the number of devices. A loss that reads it, by a mean over
[B, T] for instance, computes another objective with each of them. A run does not try this.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroplay_jax.objectives.losses import LossError, LossFunction, PolicyLoss, resolve_loss

# Two rows of three rollouts, empty at their ends, as columns: [8, 1].
_SEGMENTS = np.array([[1], [2], [3], [0]] * 2, np.int32)
_TOKENS = 256
_OPTIONS = {'clip_low': 0.2, 'clip_high': 0.28, 'dual_clip': 3.0}
# Sums of another order differ by less: of the value, and of the largest one.
_RELATIVE, _OF_LARGEST = 1e-3, 1e-5


def check_loss(loss: str | LossFunction) -> None:
    """Compares a loss of random rollouts that are packed with that of each alone; of halves if it is elementwise.

    Args:
      loss: a function, a `PolicyLoss`, or the name of one.

    Raises:
      LossError: losses, gradients, statistics or sums of `batch_means` differ; one line.
    """
    policy_loss = resolve_loss(loss)
    rng = np.random.default_rng(0)
    # On policy, and from almost on policy to far beyond usual clips in some rollouts alone.
    for deviation in (np.zeros(_SEGMENTS.shape), 10 ** rng.uniform(-3, 1, _SEGMENTS.shape)):
        _compare(policy_loss, rng, deviation)


def _compare(loss: PolicyLoss, rng: np.random.Generator, deviation: np.ndarray) -> None:
    """Checks a loss where logp − old_logp of each rollout has a standard deviation, [8, 1]."""
    segment = np.repeat(_SEGMENTS, _TOKENS, axis=1)
    mask = (rng.random(segment.shape) < 0.6) & (segment > 0)
    logp = -rng.exponential(size=segment.shape)
    old_logp = -np.abs(logp - deviation * rng.normal(size=segment.shape))
    # Around a value per rollout, as with a value network.
    advantage = rng.uniform(-2, 2, _SEGMENTS.shape) + 0.3 * rng.normal(size=segment.shape)
    floats = np.array([logp, old_logp, advantage, rng.random(segment.shape)], np.float32)

    # Packed, masked places have other values, and rollouts other numbers.
    packed = (np.where(mask, floats, -7.0), mask, segment)
    means, whole = _measure(
        loss, None, *(array.reshape(*array.shape[:-2], 2, -1) for array in packed)
    )
    tokens = _TOKENS // 2 if loss.elementwise else _TOKENS
    in_parts = floats.reshape(4, -1, 1, tokens).swapaxes(0, 1)
    parts = []
    for values, trained in zip(in_parts, mask.reshape(-1, 1, tokens), strict=True):
        if trained.any():
            _, part = _measure(loss, means, values, trained, np.ones(trained.shape, np.int32))
            parts.append(part)
    for name, expected in whole.items():
        add_up = np.concatenate if name in ('losses', 'gradients') else np.sum
        added_up = add_up([part[name] for part in parts], axis=0)
        tolerance = _OF_LARGEST * np.abs(expected).max(initial=0.0, where=np.isfinite(expected))
        if not np.allclose(added_up, expected, _RELATIVE, tolerance, equal_nan=True):
            raise LossError(
                f'loss {getattr(loss.function, "__name__", loss)}: {name} of a rollout depend on what shares its '
                'micro-batch, on values where mask is False or, if it is declared elementwise, on other tokens; see '
                'objectives/README.md'
            )


def _measure(
    loss: PolicyLoss, means: dict | None, floats: Any, mask: Any, segment: Any
) -> tuple[dict, dict]:
    """Returns means that the loss reads, those of this batch if none are given; and what it computes, by name.

    These are losses and gradients of the trained tokens, and sums of statistics and means.
    """
    logp, old_logp, advantage, weight = floats
    arrays = (old_logp, advantage, mask, segment)
    sums = loss.batch_sums(logp, *arrays) if loss.batch_means else {}
    if means is None:
        means = {name: total / count for name, (total, count) in sums.items()}
    # No rollout has several contexts.
    everywhere = {name: jnp.full(mask.shape, mean) for name, mean in means.items()}
    everywhere['rollout'] = jnp.full(mask.shape, jnp.nan)

    def weighted(logp):
        losses, stats = loss(logp, *arrays, **_OPTIONS, means=everywhere)
        return jnp.sum(jnp.where(mask, losses * weight, 0.0)), (losses, stats)

    gradients, (losses, stats) = jax.grad(weighted, has_aux=True)(logp)
    measured = {'losses': losses[mask], 'gradients': gradients[mask]}
    measured |= {f'statistics {name}': np.array(pair) for name, pair in stats.items()}
    measured |= {f'means {name}': np.array(pair) for name, pair in sums.items()}
    return means, measured
