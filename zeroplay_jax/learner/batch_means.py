"""Means over the batch of an optimiser step, for losses that declare them: a pass before that of the gradients.

Sums and weights of micro-batches, shards and processes are added up before the division, so that a mean is the same
number however the batch is cut.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.objectives.losses import LossError, PolicyLoss
from zeroplay_jax.objectives.types import DeviceStats
from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.types import UserError


def with_means(
    loss: PolicyLoss,
    batches: Sequence[Batch],
    score: Callable,
    weights: Params,
    base: Params | None = None,
) -> list[Batch]:
    """Returns the micro-batches of an optimiser step with the means that the loss declares; unchanged without any.

    Args:
      loss: of the role.
      batches: arrays [B, L], those of all processes.
      score: (weights, micro-batch, base) → log-probs of its tokens, [B, L].
      weights, base: those being trained, and the frozen base of adapters or None.

    Raises:
      UserError: the function of the means returns something else.
    """
    if loss.batch_means is None:
        return list(batches)
    micro_batches = [_sums(loss, score(weights, batch, base), batch) for batch in batches]
    totals = jax.tree.map(lambda *x: jnp.sum(jnp.stack(x)), *micro_batches)
    return [dataclasses.replace(batch, means=_spread(totals, batch)) for batch in batches]


def with_blank_means(loss: PolicyLoss, batch: Batch) -> Batch:
    """Returns the batch with shapes of the means, of which only the names are used; raises as `with_means` does."""
    if loss.batch_means is None:
        return batch
    names = jax.eval_shape(functools.partial(_sums, loss), batch.old_logp, batch)
    return dataclasses.replace(batch, means=dict.fromkeys(names, batch.weight))


@functools.partial(jax.jit, static_argnums=0)
def _sums(loss: PolicyLoss, logp: Any, batch: Batch) -> DeviceStats:
    try:
        return loss.batch_sums(logp, batch.old_logp, batch.advantage, batch.mask, batch.segment)
    except LossError as error:
        raise UserError(str(error)) from error


@jax.jit
def _spread(totals: DeviceStats, batch: Batch) -> dict[str, Any]:
    """Returns every mean at all tokens, sharded as the rows are: a loss may be called with chunks of tokens."""
    means = {}
    for name, (total, count) in totals.items():
        mean = jax.lax.stop_gradient(total / jnp.maximum(count, 1e-30))
        means[name] = jnp.where(batch.segment >= 0, mean, 0.0)
    return means
