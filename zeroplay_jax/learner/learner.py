"""The learner: sums the gradients of micro-batches and takes one optimiser step.

Losses are sums of weighted tokens (objectives/policy_gradient.py), so gradients of micro-batches add up. Any number of
micro-batches runs through one compiled program, and the division of a batch into micro-batches does not change the
result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zeroplay_jax.learner import optimizer
from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.learner.loss import LossConfig
from zeroplay_jax.learner.role_update import RoleUpdate, make_role_update
from zeroplay_jax.objectives import distillation
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.types import UserError


def publisher(
    model: ModelConfig, mesh: jax.sharding.Mesh, params: Params
) -> Callable[[Params], Params]:
    """Returns a function from a learner's weights to those that a sampler reads: whole on every data shard.

    If layout and dtype are the same, the function returns the learner's own buffers, which the next update
    invalidates.

    Args:
      model: static shape of the decoder.
      mesh: the learner's mesh.
      params: tree of arrays or of jax.ShapeDtypeStruct.
    """
    view = WeightsView(model, mesh, params)

    def publish(params: Params) -> Params:
        return sharding.sampler_view(view.make(params), mesh)

    return publish


class WeightsView:
    """The weights in the dtype of the activations and whole in every replica: what a sampler reads.

    Attributes:
      shapes: tree of jax.ShapeDtypeStruct.
      shardings: tree of shardings.
    """

    def __init__(self, model: ModelConfig, mesh: jax.sharding.Mesh, params: Params):
        """Args as of `publisher`."""
        training_shardings = sharding.parameter_shardings(params, mesh, training_layout=True)
        self.shardings = sharding.parameter_shardings(params, mesh, training_layout=False)
        publish = functools.partial(transformer.published, model)
        self.shapes = jax.eval_shape(publish, params)
        self._convert = jax.jit(publish, out_shardings=self.shardings)
        same_dtype = all(x.dtype == model.dtype for x in jax.tree.leaves(params))
        # With one replica and equal dtypes the sampler can read the learner's buffers themselves.
        self._needs_conversion = not same_dtype or training_shardings != self.shardings

    def make(self, params: Params) -> Params:
        """Returns the view of a learner's weights, which are the weights themselves if layout and dtype are equal."""
        return self._convert(params) if self._needs_conversion else params


class Learner:
    """One set of trained weights, the optimisers of the roles that train it, and a teacher where a role distils.

    Attributes:
      state: {'params', 'opt': {name: optimiser state}} and, where a role distils, 'teacher'; the checkpointed tree.
      shardings: tree of shardings with the structure of `state`.
      reference: the initial weights where a role has a KL term, else None.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: jax.sharding.Mesh,
        roles: Mapping[str, Any],
        params: Params,
        micro_shape: tuple[int, int],
        *,
        shared_optimizer: bool = False,
        teacher_tokens: int = 0,
        offload: bool = False,
        weights: str = 'masters',
    ):
        """Builds the state and the update programs of all roles.

        Args:
          model: static shape of the decoder.
          mesh: devices.
          roles: role name to `config.<role>`. The roles share the weights.
          params: initial weights; they are copied, never donated. If they are shapes (jax.ShapeDtypeStruct), the state
            consists of shapes too, which suffices for `lower` but not for `update`.
          micro_shape: (B, L) of a micro-batch.
          shared_optimizer: whether all roles share one optimiser, built from the config of the first role.
          teacher_tokens: M, length of the rows that the teacher reads; 0 without a teacher.
          offload: whether the state lies in host memory and each part is moved to the devices only while it is used.
          weights: what a micro-batch reads: 'masters', the float32 weights, gathered every time; or 'published', those
            that samplers read, gathered once per update. The gradients are the same.

        Raises:
          UserError: B is not divisible by the data axes of the mesh, or a role names a loss that does not exist.
        """
        self.model = model
        self.mesh = mesh
        self.micro_shape = micro_shape
        self.teacher_tokens = teacher_tokens
        self._offload = offload
        _check_micro_rows(micro_shape[0], mesh)
        self._row_sharding = sharding.rows(mesh)
        self._view = WeightsView(model, mesh, params)
        self._reads_view = weights == 'published'
        # (weights, their view) where updates read the view and it is on the devices anyway, for a sampler.
        self._published: tuple[Params, Params] | None = None

        loss_configs = {name: _loss_config(name, role) for name, role in roles.items()}
        has_teacher = any(config.distills for config in loss_configs.values())
        has_reference = any(config.kl_coef for config in loss_configs.values())

        optimizer_names = _optimizer_names(roles, shared_optimizer)
        # One optimiser per name: roles that share one use the config of the first role.
        transforms = {
            name: optimizer.make(roles[name]) for name in sorted(set(optimizer_names.values()))
        }

        # Parameters, moments, gradients and teacher are split over replicas too (ZeRO); samplers get whole weights.
        param_shardings = sharding.parameter_shardings(params, mesh, training_layout=True)
        opt_shardings = _optimizer_shardings(transforms, params, mesh)
        self.shardings = {'params': param_shardings, 'opt': opt_shardings}
        if has_teacher:
            self.shardings['teacher'] = param_shardings

        self.state = self._initial_state(params, transforms)
        # The reference of the KL term never changes and is not checkpointed: a continued run builds it from the same
        # initial weights.
        self.reference = None
        if has_reference:
            self.reference = self._to_host(jax.device_put(params, param_shardings))

        self._role_updates = {}
        for name, optimizer_name in optimizer_names.items():
            self._role_updates[name] = self._make_role_update(
                loss_configs[name], optimizer_name, transforms[optimizer_name], params
            )

        self._ema = jax.jit(
            functools.partial(distillation.ema, rate=_ema_rate(roles)),
            donate_argnums=0,
            out_shardings=param_shardings,
        )

    def _initial_state(self, params: Params, transforms: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state before the first step, with the structure of `shardings`."""
        opt_states = {}
        for name, transform in transforms.items():
            opt_states[name] = self._initialize(transform.init, params, self.shardings['opt'][name])
        initial_params = self._initialize(_copy_tree, params, self.shardings['params'])
        state = {'params': initial_params, 'opt': opt_states}
        if 'teacher' in self.shardings:
            state['teacher'] = self._initialize(_copy_tree, params, self.shardings['teacher'])
        return state

    def _initialize(self, initializer: Any, params: Params, shardings: Any) -> Any:
        """Returns initializer(params) with these shardings, or its shapes if `params` are shapes."""
        is_shape = [isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)]
        if all(is_shape):
            shapes = jax.eval_shape(initializer, params)
            return jax.tree.map(_with_sharding, shapes, shardings)
        # jit with out_shardings creates each shard where it belongs; the whole tree never exists on one device.
        arrays = jax.jit(initializer, out_shardings=shardings)(params)
        return self._to_host(arrays)

    def _make_role_update(
        self, config: LossConfig, optimizer_name: str, transform: Any, params: Params
    ) -> RoleUpdate:
        # Shapes suffice for building the programs, whether `params` are arrays or shapes.
        param_shapes = jax.eval_shape(_copy_tree, params)
        weight_shapes, weight_shardings = self._readable_layout(param_shapes)
        return make_role_update(
            self.model,
            self.mesh,
            config,
            optimizer_name,
            transform,
            param_shapes,
            self.shardings['params'],
            self.shardings['opt'][optimizer_name],
            weight_shapes,
            weight_shardings,
            self._blank_batch(config),
        )

    def _blank_batch(self, config: LossConfig) -> Batch:
        """Returns a micro-batch of zeros, of which only the shapes are used."""
        teacher_tokens = 0
        if config.distills:
            teacher_tokens = self.teacher_tokens
        return Batch.blank(self.micro_shape, teacher_tokens)

    def _to_device(self, tree: Any) -> Any:
        """Returns the tree on the devices; with `offload` it is copied from host memory."""
        if self._offload:
            return sharding.to_device(tree)
        return tree

    def _to_host(self, tree: Any) -> Any:
        """Returns the tree where the state lies: with `offload` in host memory, else unchanged."""
        if self._offload:
            return sharding.to_host(tree)
        return tree

    @property
    def params(self) -> Params:
        """Current weights, on the devices; without `offload` the next update invalidates them."""
        return self._to_device(self.state['params'])

    def _readable_layout(self, params: Params) -> tuple[Any, Any]:
        """Returns shapes and shardings of what `_readable` returns; of `params` only the shapes are used."""
        if self._reads_view:
            return self._view.shapes, self._view.shardings
        return params, self.shardings['params']

    def _readable(self, params: Params) -> Params:
        """Returns weights on the devices as the programs of an update read them."""
        return self._view.make(params) if self._reads_view else params

    def _readable_weights(self) -> Params:
        """Returns the current weights as the programs of an update read them."""
        if self._published is not None:
            params, view = self._published
            # Not if `state` was replaced since.
            if params is self.state['params']:
                return view
        return self._readable(self.params)

    def restore(self, state: dict[str, Any]) -> None:
        """Sets `state` to a tree of the same structure, such as a checkpoint's."""

        # A checkpoint may come from a run with another mesh, or with another setting of `offload`.
        def place(x, x_sharding):
            return self._to_host(jax.device_put(x, x_sharding))

        self.state = jax.tree.map(place, state, self.shardings)

    def published(self) -> Params:
        """Returns current weights for a sampler, whole on every data shard; the next update may invalidate them."""
        view = self._view.make(self.params)
        if self._reads_view and not self._offload:
            # The next update reads the same arrays. With `offload` the sampler's are freed during an update.
            self._published = (self.state['params'], view)
        return sharding.sampler_view(view, self.mesh)

    def lower(self, role: str) -> dict[str, jax.stages.Lowered]:
        """Returns the programs of an update, traced but not compiled: 'accumulate' (one micro-batch) and 'apply'."""
        role_update = self._role_updates[role]
        batch = self._blank_batch(role_update.config)
        params = self.state['params']
        opt_state = self.state['opt'][role_update.optimizer]
        weights = jax.tree.map(_with_sharding, *self._readable_layout(params))
        teacher = weights if role_update.config.distills else None
        coefficient = jax.ShapeDtypeStruct((), jnp.float32)

        # eval_shape drops shardings; gradients have those of the parameters.
        gradient_shapes, stats = jax.eval_shape(role_update.zero_gradients)
        gradients = jax.tree.map(
            lambda x, param: _with_sharding(x, param.sharding), gradient_shapes, params
        )
        accumulate = role_update.accumulate.lower(
            weights, gradients, stats, batch, batch.old_logp, teacher, coefficient
        )
        apply = role_update.apply.lower(params, opt_state, gradients)
        return {'accumulate': accumulate, 'apply': apply}

    def recompute_old_logp(self, role: str, batches: Sequence[Batch]) -> list[Batch]:
        """Returns the batches with this learner's log-probs as `old_logp`; the sampler's move to `sampler_logp`."""
        score = self._role_updates[role].score
        weights = self._readable_weights()
        rescored = []
        for batch in batches:
            logp = score(weights, sharding.put_rows(batch, self._row_sharding))
            # 0 at unmasked positions, as the sampler reports them; the scorer has values for prompts as well.
            trainer_logp = np.where(batch.mask, sharding.local_rows(logp), 0)
            rescored.append(
                dataclasses.replace(batch, old_logp=trainer_logp, sampler_logp=batch.old_logp)
            )
        return rescored

    def update(self, role: str, batches: Sequence[Batch], distill_coef: float = 0.0) -> Stats:
        """Takes one optimiser step with the summed gradients of the micro-batches of one batch; replaces `state`.

        Args:
          role: role whose loss and optimiser are used.
          batches: the micro-batches; with several processes, those of this one (`sharding.held_rows`).
          distill_coef: weight of the distillation term.

        Returns:
          Statistics as (sum, count). A batch in which all weights are 0 skips the step, as does a gradient that is not
          finite; both are counted in `skipped_updates`.
        """
        role_update = self._role_updates[role]
        # A step with zero gradients would still decay weights and advance the schedule.
        if not _any_weight(batches):
            return {'skipped_updates': (1.0, 1.0)}
        batches = [sharding.put_rows(batch, self._row_sharding) for batch in batches]

        # Without a KL term the values are not used, and any array of the shape will do. With it, the reference is
        # used first and released before parameters and gradients are on the devices: with `offload` they need not
        # fit at the same time.
        ref_logps = [batch.old_logp for batch in batches]
        if role_update.config.kl_coef:
            reference = self._readable(self._to_device(self.reference))
            ref_logps = [role_update.score(reference, batch) for batch in batches]
            del reference

        gradients, device_stats = role_update.zero_gradients()
        weights = self._readable_weights()
        teacher = None
        if role_update.config.distills:
            teacher = self._readable(self._to_device(self.state['teacher']))
        # An array: a Python float would be a constant of the program, and each new value would compile it again.
        coefficient = jnp.float32(distill_coef)
        for batch, ref_logp in zip(batches, ref_logps):
            gradients, device_stats = role_update.accumulate(
                weights, gradients, device_stats, batch, ref_logp, teacher, coefficient
            )
        # Teacher and view are freed before the optimiser's moments are allocated.
        del teacher
        params = weights
        if self._reads_view:
            del weights
            self._published = None
            params = self.params

        opt_state = self._to_device(self.state['opt'][role_update.optimizer])
        params, opt_state, gradient_norm = role_update.apply(params, opt_state, gradients)
        # New dicts: a caller that holds the previous `state` does not see it change.
        opt_states = self.state['opt'] | {role_update.optimizer: self._to_host(opt_state)}
        self.state = self.state | {'params': self._to_host(params), 'opt': opt_states}
        return _host_statistics(device_stats, gradient_norm)

    def update_ema_teacher(self) -> None:
        """Moves the teacher towards the student (π-Play eq. 10); call it once per rollout batch.

        Does nothing without a teacher.
        """
        if 'teacher' not in self.state:
            return
        teacher = self._ema(self._to_device(self.state['teacher']), self.params)
        self.state = self.state | {'teacher': self._to_host(teacher)}


def _check_micro_rows(micro_rows: int, mesh: jax.sharding.Mesh) -> None:
    """Raises UserError if the rows of a micro-batch cannot be split evenly over the data axes of the mesh."""
    num_shards = mesh.shape['replica'] * mesh.shape['fsdp']
    if micro_rows % num_shards:
        raise UserError(
            f'micro.rows={micro_rows} must be divisible by mesh axes replica × fsdp = {num_shards}'
        )


def _optimizer_names(roles: Mapping[str, Any], shared: bool) -> dict[str, str]:
    """Returns role → name of its optimiser, which is the name of the role whose config it is built from."""
    if not shared:
        return {name: name for name in roles}
    first_role = next(iter(roles))
    return dict.fromkeys(roles, first_role)


def _optimizer_shardings(
    transforms: Mapping[str, Any], params: Params, mesh: jax.sharding.Mesh
) -> dict[str, Any]:
    """Returns name → tree of shardings of that optimiser's state."""
    shardings = {}
    for name, transform in transforms.items():
        shapes = jax.eval_shape(transform.init, params)
        shardings[name] = sharding.state_shardings(shapes, params, mesh)
    return shardings


def _ema_rate(roles: Mapping[str, Any]) -> float:
    """Returns the EMA rate of the teacher; 0 if no role distils."""
    # The roles share one teacher, so one rate has to be chosen: the largest.
    rates = [role.distill_ema_rate for role in roles.values() if role.distill_top_k]
    return max(rates, default=0.0)


def _loss_config(name: str, role: Any) -> LossConfig:
    """Returns the loss config of a role; raises UserError for a loss that does not exist."""
    # objectives/ raises ValueError, which does not name the field that the user has to change.
    try:
        return LossConfig.of(role)
    except ValueError as error:
        raise UserError(f'config.{name}.loss: {error}') from error


def _copy_tree(tree: Params) -> Params:
    return jax.tree.map(jnp.copy, tree)


def _with_sharding(x: Any, x_sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x_sharding)


def _any_weight(batches: Sequence[Batch]) -> bool:
    """Returns whether any token of the batches adds to the loss, in any process."""
    has_weight = False
    for batch in batches:
        # Weights are 0 at prompts, at retrieved passages and in the empty rows that fill up a micro-batch.
        has_weight |= bool(batch.weight.any())
        if batch.teacher is not None:
            has_weight |= bool(batch.teacher.weight.any())
    # The rows of one process may all be empty; the decision must be the same in all of them.
    if jax.process_count() > 1:
        return bool(multihost_utils.process_allgather(np.array(has_weight)).any())
    return has_weight


def _host_statistics(device_stats: Any, gradient_norm: jax.Array) -> Stats:
    """Returns the statistics of an update as floats, 'gradient_norm' and 'skipped_updates' among them; waits for it."""
    # All values are fetched in one transfer, because each transfer waits for the device.
    host_stats, host_norm = jax.device_get((device_stats, gradient_norm))
    stats = {}
    for name, (value_sum, count) in host_stats.items():
        stats[name] = (float(value_sum), float(count))
    # The sum over tokens is the batch's loss already: the weights contain the denominator.
    loss_sum, _ = stats['loss']
    stats['loss'] = (loss_sum, 1.0)

    # A norm of infinity or NaN would make the mean of the metric useless, so it gets count 0, and the update counts
    # as skipped (`role_update` did not apply it).
    if np.isfinite(host_norm):
        stats['gradient_norm'] = (float(host_norm), 1.0)
        stats['skipped_updates'] = (0.0, 1.0)
    else:
        stats['gradient_norm'] = (0.0, 0.0)
        stats['skipped_updates'] = (1.0, 1.0)
    return stats
