"""The learner: sums the gradients of micro-batches and takes one optimiser step.

Losses are sums of weighted tokens (objectives/policy_gradient.py), so gradients of micro-batches add up. Any number of
micro-batches runs through one compiled program, and the division of a batch into micro-batches does not change the
result.
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

from zeroplay_jax.learner import optimizer
from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.learner.loss import LossConfig
from zeroplay_jax.learner.means import with_blank_means, with_means, with_rollout_means
from zeroplay_jax.learner.role_update import Layout, Trained, UpdatePrograms
from zeroplay_jax.learner.weights_view import FrozenBase, WeightsView, copy_tree
from zeroplay_jax.objectives import distillation
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.policy import adapters, experts, sharding
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.types import UserError


def any_weight(batches: Sequence[Batch]) -> bool:
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


def host_statistics(device_stats: Any, gradient_norm: jax.Array) -> Stats:
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


class Learner(Trained):
    """One set of trained weights, the optimisers of the roles that train it, and a teacher where a role distils.

    With a base, the trained weights and those of the teacher are adapters; the base is the reference of the KL term.

    The same weights have three forms:
      masters: `params`, float32, split over all devices; the optimiser changes them, a checkpoint holds them.
      view: `view`, matrices in the dtype of the activations, whole in every replica (`WeightsView`).
      a sampler's: `sampler_weights`, the view whole on every data shard, within the base if there is one.
    A micro-batch reads masters or view (`update_weights`).

    Attributes:
      state: {'params', 'opt': {name: optimiser state}} and, where a role distils, 'teacher'; the checkpointed tree.
      shardings: tree of shardings with the structure of `state`.
      reference: the initial weights where a role has a KL term and there is no base, else None.
      initial_teacher: function from weights to those of a teacher that begins with them.
      base: the frozen weights of which the trained ones are adapters, or None.
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
        base: FrozenBase | None = None,
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
          base: frozen weights of which `params` is an adapter; None: `params` are whole weights.

        Raises:
          UserError: a role names a loss that does not exist.
        """
        self.model = model
        self.mesh = mesh
        self.micro_shape = micro_shape
        self.teacher_tokens = teacher_tokens
        self._offload = offload
        self._row_sharding = sharding.rows(mesh)
        self._view = WeightsView(model, mesh, params)
        self._reads_view = weights == 'published'
        # (weights, their view) where updates read the view and it is on the devices anyway, for a sampler.
        self._published: tuple[Params, Params] | None = None
        self.base = base
        self._base_params = None if base is None else base.params
        # An average of products has a higher rank than the adapters: twice theirs is kept of it.
        self.initial_teacher = copy_tree if base is None else adapters.widened
        teacher_average = distillation.ema if base is None else adapters.average_products

        loss_configs = {name: _loss_config(name, role) for name, role in roles.items()}
        has_teacher = any(config.distills for config in loss_configs.values())
        has_reference = any(config.kl_coef for config in loss_configs.values())
        names, transforms = optimizer.make_all(roles, shared_optimizer, base is not None)

        # Parameters, moments, gradients and teacher are split over replicas too (ZeRO); samplers get whole weights.
        self.shardings = self._state_shardings(params, transforms, has_teacher)
        self.state = self._initial_state(params, transforms)
        # The reference of the KL term never changes and is not checkpointed: a continued run builds it from the same
        # initial weights.
        self.reference = None
        if has_reference and base is None:
            self.reference = self._to_host(jax.device_put(params, self.shardings['params']))

        layout = self._layout(params)
        self._role_updates = {}
        for name, optimizer_name in names.items():
            self._role_updates[name] = UpdatePrograms(
                layout,
                loss_configs[name],
                optimizer_name,
                transforms[optimizer_name],
                self.shardings['opt'][optimizer_name],
                self._blank_batch(loss_configs[name]),
            )

        self._ema = jax.jit(
            functools.partial(teacher_average, rate=_ema_rate(roles)),
            donate_argnums=0,
            out_shardings=self.shardings.get('teacher'),
        )

    def _state_shardings(
        self, params: Params, transforms: Mapping[str, Any], has_teacher: bool
    ) -> dict[str, Any]:
        """Returns the tree of shardings of the state."""
        shardings = {
            'params': sharding.parameter_shardings(params, self.mesh, training_layout=True),
            'opt': {},
        }
        for name, transform in transforms.items():
            shapes = jax.eval_shape(transform.init, params)
            shardings['opt'][name] = sharding.state_shardings(shapes, params, self.mesh)
        if has_teacher:
            teacher = jax.eval_shape(self.initial_teacher, params)
            shardings['teacher'] = sharding.parameter_shardings(
                teacher, self.mesh, training_layout=True
            )
        return shardings

    def _initial_state(self, params: Params, transforms: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state before the first step, with the structure of `shardings`."""
        opt_states = {}
        for name, transform in transforms.items():
            opt_states[name] = self._initialize(transform.init, params, self.shardings['opt'][name])
        initial_params = self._initialize(copy_tree, params, self.shardings['params'])
        state = {'params': initial_params, 'opt': opt_states}
        if 'teacher' in self.shardings:
            state['teacher'] = self._initialize(
                self.initial_teacher, params, self.shardings['teacher']
            )
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

    def _layout(self, params: Params) -> Layout:
        """Returns what the programs of updates read and write; shapes suffice, whether `params` are arrays or not."""
        shapes = jax.eval_shape(copy_tree, params)
        weights, weight_shardings = self._update_layout(shapes)
        teacher, _ = self._update_layout(jax.eval_shape(self.initial_teacher, shapes))
        return Layout(
            self.model,
            self.mesh,
            shapes,
            self.shardings['params'],
            weights,
            weight_shardings,
            teacher,
            self.base,
        )

    def _blank_batch(self, config: LossConfig) -> Batch:
        """Returns a micro-batch of zeros, of which only the shapes are used."""
        teacher_tokens = 0
        if config.distills:
            teacher_tokens = self.teacher_tokens
        choices = experts.blank_choices(self.model.experts, self.model.layers)
        batch = Batch.blank(self.micro_shape, teacher_tokens, choices).for_devices(config.kept)
        return with_blank_means(config.policy_loss, batch)

    @property
    def params(self) -> Params:
        """Current weights, on the devices; without `offload` the next update invalidates them."""
        return self._to_device(self.state['params'])

    def _update_layout(self, params: Params) -> tuple[Any, Any]:
        """Returns shapes and shardings of what `_for_update` returns; of `params` only the shapes are used."""
        if self._reads_view:
            return self._view.shapes(params), self._view.shardings
        return params, self.shardings['params']

    def _for_update(self, params: Params) -> Params:
        """Returns weights on the devices as the programs of an update read them."""
        return self._view.make(params) if self._reads_view else params

    def update_weights(self) -> Params:
        """Returns the current weights as the programs of an update read them."""
        if self._published is not None:
            params, view = self._published
            # Not if `state` was replaced since.
            if params is self.state['params']:
                return view
        return self._for_update(self.params)

    def view(self, is_kept: bool = False) -> Params:
        """Returns current weights as `WeightsView`; the next update may invalidate them, unless they are to be kept."""
        params = self.params
        view = self._view.make(params)
        if is_kept and view is params:
            # These are the buffers that an update donates.
            view = copy_tree(params)
        if self._reads_view and not self._offload:
            # The next update reads the same arrays. With `offload` the sampler's are freed during an update.
            self._published = (self.state['params'], view)
        return view

    def place_view(self, view: Params) -> Params:
        """Returns a `view` of a checkpoint on the devices."""
        return jax.tree.map(jax.device_put, view, self._view.shardings)

    def sampler_weights(self, view: Params) -> Params:
        """Returns the weights of a `view` for a sampler, whole on every data shard, within the base if there is one."""
        weights = sharding.sampler_view(view, self.mesh)
        return weights if self.base is None else adapters.join(self.base.sampler_params, weights)

    def lower(self, role: str) -> dict[str, jax.stages.Lowered]:
        """Returns the programs of an update, traced but not compiled: 'accumulate' (one micro-batch) and 'apply'."""
        role_update = self._role_updates[role]
        batch = self._blank_batch(role_update.config)
        params = self.state['params']
        opt_state = self.state['opt'][role_update.optimizer]
        weights = jax.tree.map(_with_sharding, *self._update_layout(params))
        teacher = None
        if role_update.config.distills:
            teacher_layout = self._update_layout(self.state['teacher'])
            teacher = jax.tree.map(_with_sharding, *teacher_layout)
        coefficient = jax.ShapeDtypeStruct((), jnp.float32)

        # eval_shape drops shardings; gradients have those of the parameters.
        gradient_shapes, stats = jax.eval_shape(role_update.zero_gradients)
        gradients = jax.tree.map(
            lambda x, param: _with_sharding(x, param.sharding), gradient_shapes, params
        )
        accumulate = role_update.accumulate.lower(
            weights,
            gradients,
            stats,
            batch,
            batch.old_logp,
            teacher,
            coefficient,
            self._base_params,
        )
        apply = role_update.apply.lower(params, opt_state, gradients)
        return {'accumulate': accumulate, 'apply': apply}

    def recompute_old_logp(self, role: str, batches: Sequence[Batch]) -> list[Batch]:
        """Returns the batches with this learner's log-probs as `old_logp`; the sampler's move to `sampler_logp`."""
        rescored = []
        for batch, logp in zip(batches, self._scores(role, batches), strict=True):
            # 0 at unmasked positions, as the sampler reports them; the scorer has values for prompts as well.
            trainer_logp = np.where(batch.mask, logp, 0)
            rescored.append(
                dataclasses.replace(batch, old_logp=trainer_logp, sampler_logp=batch.old_logp)
            )
        return rescored

    def _scores(self, role: str, batches: Sequence[Batch]) -> list[np.ndarray]:
        """Returns this learner's log-probs of the tokens of the batches, float32 [B, L]."""
        role_update = self._role_updates[role]
        weights = self.update_weights()
        # All are dispatched before the first is read: a read waits for the device.
        scores = []
        for batch in batches:
            rows = self._on_devices(role_update.config, batch)
            scores.append(role_update.score(weights, rows, self._base_params))
        return sharding.local_rows(scores)

    def _on_devices(self, config: LossConfig, batch: Batch) -> Batch:
        """Returns a micro-batch of this process on the devices."""
        return sharding.put_rows(batch.for_devices(config.kept), self._row_sharding)

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
        if not any_weight(batches):
            return {'skipped_updates': (1.0, 1.0)}
        loss_config = role_update.config
        score_all = functools.partial(self._scores, role, batches)
        batches = with_rollout_means(loss_config.policy_loss, batches, score_all, loss_config.clips)
        # One at a time: with the ids that tokens were drawn from they are large.
        on_devices = functools.partial(self._on_devices, loss_config)

        # The reference is used first and released before parameters and gradients are on the devices: with `offload`
        # they need not fit at the same time.
        ref_logps = []
        if loss_config.kl_coef:
            reference = {}
            if self.base is None:
                reference = self._for_update(self._to_device(self.reference))
            score = role_update.score_reference
            # Its routers choose for themselves.
            for batch in batches:
                rows = on_devices(dataclasses.replace(batch, experts=None))
                ref_logps.append(score(reference, rows, self._base_params))
            del reference

        gradients, device_stats = role_update.zero_gradients()
        weights = self.update_weights()
        placed = with_means(
            loss_config.policy_loss,
            map(on_devices, batches),
            role_update.score,
            weights,
            self._base_params,
        )
        teacher = None
        if loss_config.distills:
            teacher = self._for_update(self._to_device(self.state['teacher']))
        # An array: a Python float would be a constant of the program, and each new value would compile it again.
        coefficient = jnp.float32(distill_coef)
        for number, rows in enumerate(placed):
            # Without a KL term the values are not used, and any array of the shape will do.
            ref_logp = ref_logps[number] if ref_logps else rows.old_logp
            gradients, device_stats = role_update.accumulate(
                weights,
                gradients,
                device_stats,
                rows,
                ref_logp,
                teacher,
                coefficient,
                self._base_params,
            )
        # Teacher and view are freed before the optimiser's moments are allocated.
        del teacher
        params = None if self._reads_view else weights
        del weights
        gradient_norm = self._apply_gradients(role, gradients, params)
        return host_statistics(device_stats, gradient_norm)

    def _apply_gradients(
        self, role: str, gradients: Params, params: Params | None
    ) -> Float[Array, '']:
        """Takes one optimiser step with these gradients and returns their norm; replaces `state`.

        Values of `state` are unchanged if the norm is not finite.

        Args:
          role: role whose optimiser is used.
          gradients: tree of the trained weights.
          params: the current weights, if they are on the devices; they are donated.
        """
        self._published = None
        role_update = self._role_updates[role]
        if params is None:
            params = self.params
        opt_state = self._to_device(self.state['opt'][role_update.optimizer])
        params, opt_state, gradient_norm = role_update.apply(params, opt_state, gradients)
        # New dicts: a caller that holds the previous `state` does not see it change.
        opt_states = self.state['opt'] | {role_update.optimizer: self._to_host(opt_state)}
        self.state = self.state | {'params': self._to_host(params), 'opt': opt_states}
        return gradient_norm

    def update_ema_teacher(self) -> None:
        """Moves the teacher towards the student (π-Play eq. 10); call it once per rollout batch.

        Does nothing without a teacher.
        """
        if 'teacher' not in self.state:
            return
        teacher = self._ema(self._to_device(self.state['teacher']), self.params)
        self.state = self.state | {'teacher': self._to_host(teacher)}


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


def _with_sharding(x: Any, x_sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x_sharding)
