"""Turns scored rollouts into the packed batch of one optimiser step and its loss, by the settings of a role."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zeroplay_jax.learner import loss as losses
from zeroplay_jax.learner.batch import Batch, pack, with_means
from zeroplay_jax.objectives import advantages, aggregation
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.policy import transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.selfplay.metrics import reward_columns, rows_per_context
from zeroplay_jax.types import Row


def set_advantages(rows: Sequence[Row], settings: Any, group_size: int | None = None) -> Stats:
    """Sets `Row.advantage` from the rewards of each group; returns statistics as (sum, count).

    Args:
      rows: all rows of one role in a step, dropped ones included; those get advantage 0.
      settings: `config.<role>`. With baseline 'value' the advantage is the plain reward, from which a value network
        computes those of the tokens (`ValueNetwork.estimate`).
      group_size: required number of rows per group, dropped ones included, which detects prompts that got the same key
        by mistake; None: any number.

    Raises:
      ValueError: a group has another size.
    """
    # Dropped rows keep their place, so that values and rows stay aligned.
    rewards, groups, valid = reward_columns(rows)
    lengths = np.array([row.trajectory.policy_tokens for row in rows], np.int64)
    has_values = settings.baseline == 'value'
    values, stats = advantages.group_advantages(
        rewards,
        groups,
        baseline='none' if has_values else settings.baseline,
        scale='none' if has_values else settings.scale,
        ddof=settings.std_ddof,
        singleton=settings.singleton,
        valid=valid,
        lengths=lengths,
        group_size=group_size,
    )
    for row, value in zip(rows, values):
        row.advantage = float(value)
    if has_values:
        # Groups mean nothing to a value network.
        return {name: stats[name] for name in ('invalid_rows', 'nonfinite_rows')}
    return stats


def split_minibatches(
    rows: Sequence[Row], count: int, rng: np.random.Generator, groups_span_prompts: bool = False
) -> list[list[Row]]:
    """Divides the rows of a step at random into the minibatches of its optimiser steps.

    All rollouts of a prompt get into the same minibatch, and the numbers of prompts differ by at most one. Rows keep
    their order within a minibatch; a single minibatch holds the rows as they are.

    Args:
      rows: all rows of one role, with advantages.
      count: number of minibatches.
      rng: source of the permutation; not used for a single minibatch.
      groups_span_prompts: whether `Row.group` combines several prompts (`RoleSpec`).
    """
    if count == 1:
        return [list(rows)]
    # Tasks are issued by hop count, so that minibatches in the order of issue would hold one hop count each, and the
    # last update of every step would always be on the longest questions.
    rows_of_prompt: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        prompt: Any = row.group
        if groups_span_prompts:
            # The task: (step, index within the step).
            prompt = row.trajectory.identity[:2]
        rows_of_prompt.setdefault(prompt, []).append(index)
    prompts = list(rows_of_prompt.values())
    minibatches = []
    for part in np.array_split(rng.permutation(len(prompts)), count):
        indices = []
        for number in part:
            indices += prompts[number]
        minibatches.append([rows[index] for index in sorted(indices)])
    return minibatches


def trained_rows(rows: Sequence[Row], settings: Any, distill_coef: float) -> list[Row]:
    """Returns the rows that an update computes: those that are not dropped and have a gradient.

    Args:
      rows: rows with advantages.
      settings: `config.<role>`.
      distill_coef: weight of the distillation term.
    """
    # Rows of advantage 0 have no policy gradient, but they count in the mean, and KL, entropy
    # and distillation act on them.
    keeps_all = settings.kl_coef or settings.entropy_coef or distill_coef
    # A reward of 0 is informative if more was expected.
    keeps_all = keeps_all or settings.baseline == 'value'
    return [row for row in rows if row.drop is None and (keeps_all or row.advantage)]


def pack_rows(
    rows: Sequence[Row],
    settings: Any,
    micro_shape: tuple[int, int],
    distill_coef: float = 0.0,
    teacher_tokens: int = 0,
    order: str = 'arrival',
) -> list[Batch]:
    """Packs rows with advantages into the micro-batches of one optimiser step.

    Dropped rows are left out, and rows without any gradient too; those still count in the
    denominator of the loss.

    Args:
      rows: rows of one role with advantages.
      settings: `config.<role>`.
      micro_shape: (B, L) of a micro-batch.
      distill_coef: weight of the distillation term.
      teacher_tokens: length M of a packed teacher row; 0 without a teacher.
      order: in which rollouts are packed, see `batch.pack`.
    """
    valid = rows_per_context([row for row in rows if row.drop is None])
    # Only policy tokens count: tool output has no loss and must not change a mean over a sequence.
    lengths = np.array([row.trajectory.policy_tokens for row in valid], np.int64)
    # All valid rows of the optimiser step share one denominator. With a mean per micro-batch the weight of
    # a token would depend on the rows that are packed with it.
    if settings.aggregation == 'constant':
        denominator = settings.constant_norm * len(valid)
    else:
        denominator = aggregation.denominator(lengths, settings.aggregation)
    # A row without a teacher prompt (its path was too long) is trained but not distilled.
    distilled_tokens = 0
    for row in valid:
        if row.teacher_tokens:
            distilled_tokens += row.trajectory.policy_tokens
    micro_rows, tokens = micro_shape
    return pack(
        trained_rows(valid, settings, distill_coef),
        micro_rows=micro_rows,
        tokens=tokens,
        mode=settings.aggregation,
        total=denominator,
        teacher_tokens=teacher_tokens,
        teacher_total=float(distilled_tokens),
        order=order,
    )


def rows_loss(
    model: ModelConfig,
    params: Params,
    reference: Params,
    rows: Sequence[Row],
    settings: Any,
    micro_shape: tuple[int, int],
) -> tuple[Float[Array, ''], dict[str, Any]]:
    """Returns the loss that one optimiser step on these rows minimises, without distillation.

    Args:
      params: weights to evaluate; the loss can be differentiated with respect to them.
      reference: weights that a KL term compares them with.
      rows: rollouts with advantages.
      settings: `config.<role>`.
      micro_shape: (B, L) of a micro-batch.

    Returns:
      The loss, float32 scalar; statistics as name → (sum, count), with the loss among them.
    """
    loss_config = losses.LossConfig.of(settings)
    total_loss = jnp.float32(0)
    stats: dict[str, Any] = {}
    batches = with_means(
        loss_config.policy_loss,
        pack_rows(rows, settings, micro_shape),
        lambda params, batch, _: _token_logp(model, params, batch, settings.temperature),
        params,
    )
    for batch in batches:
        # Without a KL term the values are not used; any array of the shape will do.
        reference_logp: Any = batch.old_logp
        if settings.kl_coef:
            reference_logp = _token_logp(model, reference, batch, settings.temperature)
        batch_loss, batch_stats = _batch_loss(
            model, loss_config, params, batch, reference_logp, None, jnp.float32(0)
        )
        total_loss = total_loss + batch_loss
        for name, (batch_sum, batch_count) in batch_stats.items():
            previous_sum, previous_count = stats.get(name, (0.0, 0.0))
            stats[name] = (previous_sum + batch_sum, previous_count + batch_count)
    # The token weights contain the denominator of the whole batch: the sum over micro-batches is the mean.
    return total_loss, stats | {'loss': (total_loss, 1.0)}


# model and config are static: they select the compiled program.
_batch_loss = jax.jit(losses.loss, static_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _token_logp(
    model: ModelConfig, params: Params, batch: Batch, temperature: float
) -> Float[Array, 'batch length']:
    logp, _ = transformer.score(
        model,
        params,
        batch.tokens,
        batch.positions,
        batch.segment,
        temperature,
        wanted=losses.wanted_tokens(model, batch),
    )
    return logp
