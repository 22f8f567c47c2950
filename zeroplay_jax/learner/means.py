"""Means that a loss reads of a whole rollout or of the batch of an optimiser step: a pass before that of the gradients.

Sums and weights of micro-batches, shards and processes are added up before the division, so that a mean is the same
number however the batch is cut.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.objectives.losses import LossError, PolicyLoss
from zeroplay_jax.objectives.types import DeviceStats
from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.types import UserError


def with_means(
    loss: PolicyLoss,
    batches: Iterable[Batch],
    score: Callable,
    weights: Params,
    base: Params | None = None,
) -> Iterable[Batch]:
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
        return batches
    batches = list(batches)
    micro_batches = [_sums(loss, score(weights, batch, base), batch) for batch in batches]
    totals = jax.tree.map(lambda *x: jnp.sum(jnp.stack(x)), *micro_batches)
    result = []
    for batch in batches:
        means = (batch.means or {}) | _spread(totals, batch)
        result.append(dataclasses.replace(batch, means=means))
    return result


def with_rollout_means(
    loss: PolicyLoss,
    batches: Sequence[Batch],
    scores: Callable[[], Sequence[Any]],
    clips: Mapping[str, float],
) -> Sequence[Batch]:
    """Returns the micro-batches with the means of rollouts that have several contexts; unchanged where none are read.

    The contexts of a rollout lie in several rows, which may be in other micro-batches and processes.

    Args:
      loss: of the role.
      batches: the micro-batches of an optimiser step, of this process.
      scores: returns log-probs of their tokens under the weights that are trained, [B, L] each.
      clips: clip_low and clip_high of the role.

    Raises:
      UserError: there is such a rollout, and the loss reads the ratio of whole rollouts without declaring it.
    """
    if loss.ratio_per_token:
        return batches
    last = max((int(np.max(batch.rollout)) for batch in batches), default=-1)
    count = int(_over_processes(np.array(last), np.max)) + 1
    if count and loss.rollout_values is None:
        raise UserError(
            'a rollout has several contexts, and the loss compares whole rollouts; declare '
            'PolicyLoss.rollout_values, or take token_pg'
        )
    if loss.rollout_values is None:
        return batches
    sums = jnp.zeros((2, count + 1))
    if count:
        for batch, logp in zip(batches, scores(), strict=True):
            values = loss.rollout_values(logp, batch.old_logp, batch.advantage, **clips)
            is_counted = batch.mask & (batch.rollout >= 0)
            # Tokens that do not count are added behind the last rollout.
            index = np.where(is_counted, batch.rollout, count)
            added = jnp.stack([jnp.where(is_counted, values, 0.0), is_counted])
            sums = sums.at[:, index].add(added)
        sums = _over_processes(sums, np.sum)
    totals, tokens = sums
    means = jax.lax.stop_gradient(totals / jnp.maximum(tokens, 1))
    # Index −1 is that of rollouts with one context.
    means = means.at[-1].set(jnp.nan)
    result = []
    for batch in batches:
        of_tokens = {'rollout': means[batch.rollout]}
        result.append(dataclasses.replace(batch, means=of_tokens))
    return result


def _over_processes(value: Any, combine: Callable) -> Any:
    """Returns a value combined with those of all other processes."""
    if jax.process_count() == 1:
        return value
    return combine(multihost_utils.process_allgather(value), axis=0)


def with_blank_means(loss: PolicyLoss, batch: Batch) -> Batch:
    """Returns a batch (`Batch.for_devices`) with shapes of the means, of which only the names are used.

    Raises:
      UserError: as of `with_means`.
    """
    names = ['rollout'] if loss.rollout_values else []
    if loss.batch_means:
        names += jax.eval_shape(functools.partial(_sums, loss), batch.old_logp, batch)
    return dataclasses.replace(batch, means=dict.fromkeys(names, batch.weight)) if names else batch


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
