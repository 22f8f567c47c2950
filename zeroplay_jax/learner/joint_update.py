"""The update of several roles in one pass: each trains an adapter of its own, and all have one frozen base.

Rollouts of all roles share micro-batches (`packing.pack_roles`). Decoder and output head compute log-probs of all
tokens, each with the adapter of its role. The loss of a role reads the tokens of this role alone, so that losses,
coefficients, clips and denominators differ freely. Every role has its own optimiser, clip and schedule, and the
gradients are those of separate updates up to the order of sums.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float

from zeroplay_jax.learner.batch import Batch, JointBatch
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.loss import LossConfig, policy_terms, wanted_tokens
from zeroplay_jax.learner.update_statistics import host_statistics
from zeroplay_jax.objectives import aggregation
from zeroplay_jax.objectives.losses import resolve_loss
from zeroplay_jax.objectives.types import AnyArray, DeviceStats, Stats
from zeroplay_jax.policy import adapters, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params


def joint_groups(learners: Mapping[str, Learner], config: Any) -> list[tuple[str, ...]]:
    """Divides the roles of a step into groups, each of which is updated in one pass; most are of one role.

    Roles can be updated together if each has an adapter of its own and no teacher or means. Those of a group have the
    same temperature, which is a constant of the program, and the same `old_logp`. If one of them has a loss per
    sequence, the logits of all are computed twice (`LossConfig.elementwise`): one pass through the decoder saves more.

    Args:
      learners: role → learner of its weights, in the order of the updates.
      config: config of the run.
    """
    groups: dict[Any, list[str]] = {}
    for role, learner in learners.items():
        settings = config[role]
        # Roles that share weights are updated one after the other: the second starts from what the first has learnt.
        shares_weights = list(learners.values()).count(learner) > 1
        # Means over the batch are those of one role.
        has_means = resolve_loss(settings.loss).batch_means is not None
        if learner.base is None or shares_weights or settings.distill_top_k or has_means:
            groups[role] = [role]
        else:
            key = (settings.temperature, settings.old_logp)
            groups.setdefault(key, []).append(role)
    return [tuple(roles) for roles in groups.values()]


class JointUpdate:
    """The programs of a group of roles, of which each has a learner of its own."""

    def __init__(self, learners: Mapping[str, Learner]):
        """Builds the programs; each is compiled at its first call.

        Args:
          learners: role → learner of its adapter, in the order of the adapter indices. All have the same base, mesh
            and shapes.
        """
        self._learners = dict(learners)
        first, *_ = self._learners.values()
        assert first.base is not None
        self._base = first.base.params
        self._mesh = first.mesh
        self._updates = [learner.role_update(role) for role, learner in self._learners.items()]
        self._configs = tuple(update.config for update in self._updates)
        weight_shardings = tuple(x.weight_shardings for x in self._learners.values())
        param_shardings = tuple(x.shardings['params'] for x in self._learners.values())
        rows = sharding.rows(self._mesh)
        replicated = sharding.replicated(self._mesh)
        base_shardings = first.base.shardings
        self._accumulate = jax.jit(
            functools.partial(_accumulate, first.model, self._configs),
            donate_argnums=(1, 2),
            in_shardings=(
                weight_shardings,
                param_shardings,
                replicated,
                rows,
                rows,
                base_shardings,
            ),
            out_shardings=(param_shardings, replicated),
        )
        self._score = jax.jit(
            functools.partial(_score, first.model, self._configs[0].temperature),
            in_shardings=(weight_shardings, rows, base_shardings),
            out_shardings=rows,
        )

    def recompute_old_logp(self, batches: Sequence[JointBatch]) -> list[JointBatch]:
        """Returns the batches with log-probs of the current adapters, as `Learner.recompute_old_logp` does."""
        weights = self._readable_weights()
        # All are dispatched before the first is read, as `Learner` does.
        scores = [
            self._score(weights, self._put(joint_batch.batch), self._base)
            for joint_batch in batches
        ]
        rescored = []
        for joint_batch, logp in zip(batches, sharding.local_rows(scores), strict=True):
            batch = joint_batch.batch
            trainer_logp = np.where(batch.mask, logp, 0)
            batch = dataclasses.replace(batch, old_logp=trainer_logp, sampler_logp=batch.old_logp)
            rescored.append(JointBatch(batch, joint_batch.roles))
        return rescored

    def update(self, batches: Sequence[JointBatch], roles: Sequence[str]) -> dict[str, Stats]:
        """Takes one optimiser step of each of these roles; replaces the state of their learners.

        Args:
          batches: micro-batches with the rollouts of these roles; with several processes, those of this one.
          roles: some roles of the group. The adapters of the others stay as they are.

        Returns:
          Role → statistics as `Learner.update` returns them.
        """
        names = list(self._learners)
        has_weight = _roles_with_weight(batches, len(names))
        trained = [role for role in roles if has_weight[names.index(role)]]
        if not trained:
            return {role: {'skipped_updates': (1.0, 1.0)} for role in roles}
        gradients, device_stats = self._gradients(batches)
        norms = {}
        for role, gradient in zip(names, gradients, strict=True):
            if role in trained:
                norms[role] = self._learners[role].apply_gradients(role, gradient)
        # One transfer for all roles, because each transfer waits for the device.
        device_stats, norms = jax.device_get((device_stats, norms))

        stats: dict[str, Stats] = {}
        for role in roles:
            index = names.index(role)
            if role not in trained:
                stats[role] = {'skipped_updates': (1.0, 1.0)}
            elif np.isfinite(norms[role]):
                stats[role] = host_statistics(device_stats[index], norms[role])
            else:
                # A NaN at a token of one role makes the gradients of all adapters NaN: this one may be finite alone.
                # Adapter and moments of this role are still those before the update.
                own_batches = [x.of_role(index) for x in batches if index in x.roles]
                stats[role] = self._learners[role].update(role, own_batches)
        return stats

    def _gradients(self, batches: Sequence[JointBatch]) -> tuple[tuple, tuple]:
        """Returns the gradients of all roles, summed over the micro-batches, and their statistics."""
        zeros = [update.zero_gradients() for update in self._updates]
        gradients = tuple(gradient for gradient, _ in zeros)
        stats = tuple(role_stats for _, role_stats in zeros)
        weights = self._readable_weights()
        for joint_batch in batches:
            batch = self._put(joint_batch.batch)
            ref_logp = self._reference_logp(joint_batch, batch)
            gradients, stats = self._accumulate(
                weights, gradients, stats, batch, ref_logp, self._base
            )
        return gradients, stats

    def _reference_logp(self, joint_batch: JointBatch, batch: Batch) -> Any:
        """Returns log-probs of the base where a role of the micro-batch has a KL term, else any array of the shape."""
        for index in joint_batch.roles:
            if self._configs[index].kl_coef:
                # The base has no adapter, so that this is the program of a separate update.
                without_adapters = dataclasses.replace(batch, adapter=None)
                return self._updates[index].score_reference({}, without_adapters, self._base)
        return batch.old_logp

    def _readable_weights(self) -> tuple[Params, ...]:
        return tuple(learner.readable_weights() for learner in self._learners.values())

    def _put(self, batch: Batch) -> Batch:
        return sharding.put_rows(batch, sharding.rows(self._mesh))


def joint_loss(
    model: ModelConfig,
    configs: Sequence[LossConfig],
    params: Sequence[Params],
    batch: Batch,
    ref_logp: Float[AnyArray, 'batch length'],
    base: Params,
) -> tuple[Float[Array, ''], tuple[DeviceStats, ...]]:
    """Computes the sum of the losses of all roles of one micro-batch.

    Args:
      model: static shape of the decoder.
      configs: static part of the loss of every role, without a teacher; all have the same temperature.
      params: the adapter of every role.
      batch: arrays [B, L] with `adapter`.
      ref_logp: float32 [B, L], log-probs of the base where a role has a KL term.
      base: frozen weights under the adapters.

    Returns:
      The sum, float32; and the statistics of every role, as (sum, count).
    """
    scores = transformer.token_scores(
        model,
        adapters.join_several(base, params),
        batch.tokens,
        batch.positions,
        batch.segment,
        configs[0].temperature,
        any(config.entropy_coef > 0 for config in configs),
        wanted_tokens(model, batch),
        batch.adapter,
    )
    elementwise = all(config.elementwise for config in configs)
    function = functools.partial(_losses_of_scores, configs)
    return scores.loss(function, (batch, ref_logp), (), elementwise)


def _losses_of_scores(configs, scores, rows, shared):
    """Returns the sum of the losses of all roles, and the statistics of every role, as `TokenScores.loss` needs it."""
    logp, entropy, _ = scores
    batch, ref_logp = rows
    total_loss = jnp.float32(0)
    stats = []
    for index, config in enumerate(configs):
        is_own = batch.adapter == index
        # Values outside of the mask reach neither the loss of the role nor its gradient.
        role_batch = dataclasses.replace(batch, mask=batch.mask & is_own)
        per_token, role_stats = policy_terms(config, role_batch, logp, entropy, ref_logp)
        role_loss = aggregation.aggregate(per_token, jnp.where(is_own, batch.weight, 0.0))
        role_stats['loss'] = (jax.lax.stop_gradient(role_loss), jnp.float32(0))
        stats.append(role_stats)
        total_loss = total_loss + role_loss
    return total_loss, tuple(stats)


def _accumulate(model, configs, weights, gradients, stats, batch, ref_logp, base):
    """Returns gradients and statistics of all roles with those of one micro-batch added (`role_update._accumulate`)."""

    def widen(weight, gradient):
        return weight.astype(gradient.dtype)

    params = jax.tree.map(widen, weights, gradients)
    gradient_function = jax.grad(joint_loss, argnums=2, has_aux=True)
    batch_gradients, batch_stats = gradient_function(model, configs, params, batch, ref_logp, base)
    gradients = jax.tree.map(jnp.add, gradients, batch_gradients)
    stats = jax.tree.map(jnp.add, stats, batch_stats)
    return gradients, stats


def _score(model, temperature, weights, batch, base):
    """Returns the log-probs of the tokens that the losses read, float32 [B, L]."""
    logp, _ = transformer.score(
        model,
        adapters.join_several(base, weights),
        batch.tokens,
        batch.positions,
        batch.segment,
        temperature,
        wanted=wanted_tokens(model, batch),
        adapter=batch.adapter,
    )
    return logp


def _roles_with_weight(batches: Sequence[JointBatch], count: int) -> list[bool]:
    """Returns for every role whether any of its tokens adds to its loss, in any process."""
    has_weight = np.zeros(count, bool)
    for joint_batch in batches:
        adapter = joint_batch.batch.adapter
        for index in range(count):
            has_weight[index] |= bool(joint_batch.batch.weight[adapter == index].any())
    # The rows of one process may all be empty; the decision must be the same in all of them.
    if jax.process_count() > 1:
        has_weight = multihost_utils.process_allgather(has_weight).any(0)
    return has_weight.tolist()
