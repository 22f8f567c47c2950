"""The value network of PPO: a copy of the policy with one output per token, trained beside it.

It starts from the policy's initial weights with an output of 0. Before the updates of a step it gives the values from
which advantages are computed (objectives/values.py); it is then trained on the same minibatches as the policy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zeroplay_jax.learner import optimizer
from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.learner.learner import host_statistics
from zeroplay_jax.learner.role_update import (
    Trained,
    add_gradients,
    apply_program,
    zeros_program,
)
from zeroplay_jax.learner.weights_view import copy_tree
from zeroplay_jax.objectives import aggregation
from zeroplay_jax.objectives.types import DeviceStats, Stats
from zeroplay_jax.objectives.values import gae, token_rewards, value_loss
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.runtime.hosts import Hosts

# Added to the variance before the root, as in verl.
_EPSILON = 1e-8
# Variance below which rewards count as equal.
_EQUAL = 1e-12


@dataclasses.dataclass(frozen=True)
class ValueBatch:
    """A micro-batch of the value network: the rows of a `Batch`.

    Attributes (all [B, L]):
      tokens, positions, segment: int32, as in `Batch`.
      mask: bool, the policy's trained tokens, whose values are trained.
      old_values: float32, from which the advantages were computed.
      returns: float32, the targets.
      weight: float32, weight of the token in the loss, global denominator included.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment: np.ndarray
    mask: np.ndarray
    old_values: np.ndarray
    returns: np.ndarray
    weight: np.ndarray


_VALUE_FIELDS = [field.name for field in dataclasses.fields(ValueBatch)]
jax.tree_util.register_dataclass(ValueBatch, data_fields=_VALUE_FIELDS, meta_fields=[])


class Estimate(NamedTuple):
    """What a value network says about the rollouts of a step.

    Attributes:
      minibatches: micro-batches by minibatch, with advantages per token.
      value_minibatches: the same rows as the value network is trained on; [] for a minibatch without a trained token.
      is_informative: whether any trained token of the step, of all processes, has an advantage other than 0.
      stats: 'value_network/value', the mean value, and 'value_network/explained_variance', the share of the variance of
        the rewards that the values explain (1: all; below 0: a constant would be better), as (sum, count).
    """

    minibatches: list[list[Batch]]
    value_minibatches: list[list[ValueBatch]]
    is_informative: bool
    stats: Stats


class ValueNetwork(Trained):
    """The value network of one role, with its optimiser.

    Attributes:
      state: {'params', 'opt'}; the checkpointed tree.
      shardings: tree of shardings with the structure of `state`.
      mesh: devices.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: jax.sharding.Mesh,
        settings: Any,
        params: Params,
        *,
        offload: bool = False,
    ):
        """Builds state and programs; each program is compiled at its first call.

        Args:
          model: static shape of the policy.
          mesh: devices.
          settings: fields of `config.value_network`, and of the role for the optimiser.
          params: initial weights of the policy; they are copied.
          offload: whether the state lies in host memory and is moved to the devices only while it is used.
        """
        self.mesh = mesh
        self._settings = settings
        self._offload = offload
        self._row_sharding = sharding.rows(mesh)
        transform = optimizer.make(settings)
        initial_params = _initial_params(model, mesh, params)
        param_shardings = sharding.parameter_shardings(initial_params, mesh, training_layout=True)
        opt_shapes = jax.eval_shape(transform.init, initial_params)
        opt_shardings = sharding.state_shardings(opt_shapes, initial_params, mesh)
        self.shardings = {'params': param_shardings, 'opt': opt_shardings}
        copied = jax.jit(copy_tree, out_shardings=param_shardings)(initial_params)
        opt_state = jax.jit(transform.init, out_shardings=opt_shardings)(copied)
        self.state = {'params': self._to_host(copied), 'opt': self._to_host(opt_state)}

        replicated = sharding.replicated(mesh)
        self._predict = jax.jit(
            functools.partial(_predict, model), out_shardings=self._row_sharding
        )
        zero = jax.ShapeDtypeStruct((), jnp.float32)
        stats = dict.fromkeys(('squared_error', 'clip_share', 'loss'), (zero, zero))
        shapes = jax.eval_shape(copy_tree, initial_params)
        self._zeros = zeros_program((shapes, stats), (param_shardings, replicated))
        self._accumulate = jax.jit(
            functools.partial(_accumulate, model, settings.value_clip),
            donate_argnums=(1, 2),
            out_shardings=(param_shardings, replicated),
        )
        self._apply = apply_program(transform, shapes, param_shardings, opt_shardings, replicated)

    def estimate(
        self, minibatches: Sequence[Sequence[Batch]], hosts: Hosts, whitens: bool
    ) -> Estimate:
        """Returns the rows of a step with advantages per token, and as the value network is trained on them.

        Args:
          minibatches: micro-batches by minibatch, of which `advantage` holds what the rollout earns from a token
            on; with several processes, those of this one. All processes must call it.
          hosts: processes of the run.
          whitens: whether the advantages get mean 0 and variance 1 over all trained tokens of the step, as in verl.
        """
        batches = [batch for minibatch in minibatches for batch in minibatch]
        if not batches:
            return Estimate([[] for _ in minibatches], [[] for _ in minibatches], False, {})
        old_values = np.concatenate(self._old_values(batches))
        mask = np.concatenate([batch.mask for batch in batches])
        segment = np.concatenate([batch.segment for batch in batches])
        given_returns = np.concatenate([batch.advantage for batch in batches])
        advantages, returns = gae(
            token_rewards(given_returns, mask, segment),
            old_values,
            mask,
            segment,
            discount=self._settings.discount,
            decay=self._settings.gae_lambda,
        )
        errors = given_returns - old_values
        moments = _moments(hosts, mask, [old_values, advantages, given_returns, errors])
        (value, _), (mean, variance), (_, of_rewards), (_, of_errors) = moments
        stats: Stats = {'value_network/value': (value, 1.0)}
        # Equal rewards have no variance to explain; rounding would give them a little.
        if of_rewards > _EQUAL:
            stats['value_network/explained_variance'] = (1 - of_errors / of_rewards, 1.0)
        is_informative = bool(mean or variance)
        if whitens:
            deviation = np.sqrt(variance + _EPSILON)
            advantages = np.where(mask, (advantages - mean) / deviation, 0.0)
        policy_minibatches, value_minibatches = _divided(
            minibatches, hosts, old_values, advantages, returns
        )
        return Estimate(policy_minibatches, value_minibatches, is_informative, stats)

    def _old_values(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """Returns the values before the tokens of every batch, float32 [B, L]."""
        params = self._to_device(self.state['params'])
        scores = []
        for batch in batches:
            rows = sharding.put_rows(
                (batch.tokens, batch.positions, batch.segment), self._row_sharding
            )
            scores.append(self._predict(params, *rows))
        # All are dispatched before the first is read: a read waits for the device.
        return sharding.local_rows(scores)

    def update(self, batches: Sequence[ValueBatch]) -> Stats:
        """Takes one optimiser step; replaces `state`, whose values stay if the gradient is not finite.

        Args:
          batches: the micro-batches of one minibatch; with several processes, those of this one. Without any, nothing
            is done: a step with a gradient of 0 would still decay weights and advance the schedule.

        Returns:
          Statistics as (sum, count), with names that begin with 'value_network/'.
        """
        if not batches:
            return {}
        params = self._to_device(self.state['params'])
        gradients, device_stats = self._zeros()
        for batch in batches:
            rows = sharding.put_rows(batch, self._row_sharding)
            gradients, device_stats = self._accumulate(params, gradients, device_stats, rows)
        opt_state = self._to_device(self.state['opt'])
        params, opt_state, gradient_norm = self._apply(params, opt_state, gradients)
        self.state = {'params': self._to_host(params), 'opt': self._to_host(opt_state)}
        stats = host_statistics(device_stats, gradient_norm)
        # Here an update is skipped for no other reason.
        stats['nonfinite_updates'] = stats.pop('skipped_updates')
        return {f'value_network/{name}': value for name, value in stats.items()}


def _initial_params(model: ModelConfig, mesh: jax.sharding.Mesh, params: Params) -> Params:
    """Returns the policy's weights without its output layer, and an output of one number that is 0."""
    trunk = {name: weights for name, weights in params.items() if name != 'head'}
    output = {
        'kernel': np.zeros((model.hidden_size, 1), np.float32),
        'bias': np.zeros(1, np.float32),
    }
    shardings = sharding.parameter_shardings({'value': output}, mesh)
    return trunk | jax.tree.map(jax.device_put, {'value': output}, shardings)


def _predict(model, params, tokens, positions, segment) -> Float[Array, 'batch length']:
    """Returns the value before every token of packed rows, float32; that of a row's first token is 0."""
    trunk = {name: weights for name, weights in params.items() if name != 'value'}
    states = transformer.hidden(model, trunk, tokens, positions, segment)
    output = params['value']
    after_token = states.astype(jnp.float32) @ output['kernel'] + output['bias']
    # The value before a token is read where the token is predicted: at the one before it.
    return jnp.pad(after_token[:, :-1, 0], ((0, 0), (1, 0)))


def _loss(model, clip, params, batch: ValueBatch) -> tuple[Float[Array, ''], DeviceStats]:
    """Returns Σ weight · loss of the values of one micro-batch, and statistics as (sum, count)."""
    token_values = _predict(model, params, batch.tokens, batch.positions, batch.segment)
    per_token, stats = value_loss(token_values, batch.old_values, batch.returns, batch.mask, clip)
    loss = aggregation.aggregate(per_token, batch.weight)
    return loss, stats | {'loss': (jax.lax.stop_gradient(loss), jnp.float32(0))}


def _accumulate(model, clip, params, gradients, stats, batch):
    """Returns gradients and statistics with those of one micro-batch added."""
    return add_gradients(functools.partial(_loss, model, clip), params, gradients, stats, batch)


def _moments(
    hosts: Hosts, mask: np.ndarray, arrays: Sequence[np.ndarray]
) -> list[tuple[float, float]]:
    """Returns mean and unbiased variance of every array at the trained tokens of all processes; 0 without any."""
    trained = [array[mask] for array in arrays]
    sums = [float(mask.sum())]
    sums += [float(array.sum()) for array in trained]
    count, *totals = np.sum(hosts.gather(sums), axis=0)
    means = [float(total / max(count, 1)) for total in totals]
    squares = []
    for array, mean in zip(trained, means, strict=True):
        squares.append(float(((array - mean) ** 2).sum()))
    total_squares = np.sum(hosts.gather(squares), axis=0)
    variances = [float(total / max(count - 1, 1)) for total in total_squares]
    return list(zip(means, variances, strict=True))


def _divided(
    minibatches: Sequence[Sequence[Batch]],
    hosts: Hosts,
    old_values: np.ndarray,
    advantages: np.ndarray,
    returns: np.ndarray,
) -> tuple[list[list[Batch]], list[list[ValueBatch]]]:
    """Returns the micro-batches of policy and value network, by minibatch.

    Args:
      minibatches: the policy's micro-batches, of which the advantages are replaced.
      hosts: processes of the run.
      old_values, advantages, returns: [rows of all micro-batches, L].
    """
    local_tokens = []
    for minibatch in minibatches:
        local_tokens.append(sum(int(batch.mask.sum()) for batch in minibatch))
    tokens = np.sum(hosts.gather(local_tokens), axis=0)
    policy_minibatches: list[list[Batch]] = []
    value_minibatches: list[list[ValueBatch]] = []
    start = 0
    for minibatch, num_tokens in zip(minibatches, tokens, strict=True):
        policy_batches = []
        value_batches = []
        for batch in minibatch:
            rows = slice(start, start + len(batch.tokens))
            start = rows.stop
            advantage = advantages[rows].astype(np.float32)
            policy_batches.append(dataclasses.replace(batch, advantage=advantage))
            # The denominator is that of all processes.
            weight = np.float32(1 / max(num_tokens, 1))
            value_batches.append(
                ValueBatch(
                    tokens=batch.tokens,
                    positions=batch.positions,
                    segment=batch.segment,
                    mask=batch.mask,
                    old_values=old_values[rows].astype(np.float32),
                    returns=returns[rows].astype(np.float32),
                    weight=np.where(batch.mask, weight, np.float32(0)),
                )
            )
        policy_minibatches.append(policy_batches)
        value_minibatches.append(value_batches if num_tokens else [])
    return policy_minibatches, value_minibatches
