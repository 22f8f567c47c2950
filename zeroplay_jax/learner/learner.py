"""How a policy improves: micro-batches in, summed gradients, one optimiser step.

Losses are sums of weighted tokens (objectives/policy_gradient.py), so gradients of micro-batches simply add up: any
number of micro-batches runs through one compiled program, and how the batch was cut cannot change the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zeroplay_jax.learner import optimizer, packing  # noqa: F401 - the latter makes a tree of Batch
from zeroplay_jax.learner.loss import LossConfig, loss
from zeroplay_jax.objectives import distillation
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.types import Batch, UserError

Stats = dict[str, tuple[float, float]]


def _accumulate(model, config, params, gradients, stats, batch, ref_logp, teacher, distill_coef):
    new, more = jax.grad(loss, argnums=2, has_aux=True)(
        model, config, params, batch, ref_logp, teacher, distill_coef
    )
    return jax.tree.map(jnp.add, gradients, new), jax.tree.map(jnp.add, stats, more)


def _apply(tx, params, opt, gradients):
    """One optimiser step; with a gradient that is not finite, everything stays as it was."""
    norm = optax.tree.norm(gradients)
    fine = jnp.isfinite(norm)
    updates, new_opt = tx.update(gradients, opt, params)
    new = (optax.apply_updates(params, updates), new_opt)
    return *jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, (params, opt)), norm


@dataclasses.dataclass(frozen=True)
class _Head:
    """How one role trains: its loss, its compiled programs, and which optimiser state is its own."""

    config: LossConfig
    optimizer: str
    accumulate: Any
    apply: Any
    score: Any
    nothing: Any


def publisher(model: ModelConfig, mesh, params: Params) -> Callable[[Params], Params]:
    """A function from weights as a learner holds them to what a sampler reads: whole in every replica.

    Where the two are the same, nothing is copied, and the next update invalidates both. `params`: arrays or shapes.
    """
    own, whole = (sharding.parameter_shardings(params, mesh, owned) for owned in (True, False))
    gather = jax.jit(functools.partial(transformer.published, model), out_shardings=whole)
    as_is = own == whole and all(x.dtype == model.dtype for x in jax.tree.leaves(params))
    return lambda p: sharding.local_view(p if as_is else gather(p), sharding.local_mesh(mesh))


class Learner:
    """One set of trained weights: the roles that train it, their optimisers, and a teacher where one distils.

    Attributes:
      state: {'params', 'opt': {name: optimiser state}} and, where a role distils, 'teacher'; the checkpointed tree.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh,
        roles: Mapping[str, Any],
        params: Params,
        micro_shape: tuple[int, int],
        *,
        shared_optimizer: bool = False,
        teacher_tokens: int = 0,
        offload: bool = False,
    ):
        """Takes initial `params` (copied, never donated) and `config.<role>` by role; `micro_shape` is (B, L).

        Roles of one learner share its weights; with `shared_optimizer` the optimiser too, the first role's.
        The teacher of a role that distils reads rows of `teacher_tokens`. With `offload` all state lies in host memory
        and comes to the devices piece by piece, each while it is needed. Of `params` that are shapes alone
        (jax.ShapeDtypeStruct) the state is shapes too: enough to `lower`, not to update.
        """
        self.model, self.mesh, self.micro_shape = model, mesh, micro_shape
        self.teacher_tokens = teacher_tokens
        same = lambda tree: tree
        self._near, self._far = (sharding.to_device, sharding.to_host) if offload else (same, same)
        shards = mesh.shape['replica'] * mesh.shape['fsdp']
        if micro_shape[0] % shards:
            raise UserError(
                f'micro.rows={micro_shape[0]} must divide by mesh axes replica × fsdp = {shards}'
            )
        losses = {name: LossConfig.of(role) for name, role in roles.items()}
        distils = any(c.distills for c in losses.values())
        first = next(iter(roles))
        own_optimizer = {name: first if shared_optimizer else name for name in roles}
        transforms = {name: optimizer.make(role) for name, role in roles.items()}
        placed = sharding.parameter_shardings(params, mesh, owned=True)
        self._gather = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
        self._publish = publisher(model, mesh, params)
        self.reference = None
        if any(c.kl_coef for c in losses.values()):
            self.reference = self._far(jax.device_put(params, placed))
        self._own, self._rows, self._everywhere = (
            placed,
            sharding.rows(mesh),
            sharding.replicated(mesh),
        )

        copied = lambda p: jax.tree.map(jnp.copy, p)
        optimizers = {name: transforms[name].init for name in sorted(set(own_optimizer.values()))}
        begin = dict(params=copied, opt=optimizers) | (dict(teacher=copied) if distils else {})
        shape = jax.tree.map(lambda make: jax.eval_shape(make, params), begin)
        opt = {
            name: sharding.state_shardings(tree, params, mesh)
            for name, tree in shape['opt'].items()
        }
        self.shardings = dict(params=placed, opt=opt) | (dict(teacher=placed) if distils else {})
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
            self.state = jax.tree.map(place, shape, self.shardings)
        else:
            part = lambda make, where: self._far(jax.jit(make, out_shardings=where)(params))
            self.state = jax.tree.map(part, begin, self.shardings)
        self._heads = {
            name: self._head(
                losses[name],
                own_optimizer[name],
                transforms[own_optimizer[name]],
                shape['params'],
                opt,
            )
            for name in roles
        }
        rate = max(
            (role.distill_ema_rate for role in roles.values() if role.distill_top_k), default=0.0
        )
        self._ema = jax.jit(
            functools.partial(distillation.ema, rate=rate), donate_argnums=0, out_shardings=placed
        )

    def _head(self, config, name, tx, params, opt) -> _Head:
        own, rows, everywhere = self._own, self._rows, self._everywhere
        score = lambda p, b: transformer.score(
            self.model, p, b.tokens, b.positions, b.segment, config.temperature
        )[0]
        blank = Batch.blank(self.micro_shape, self.teacher_tokens if config.distills else 0)
        teacher = params if config.distills else None
        arguments = (params, blank, blank.old_logp, teacher, jnp.float32(0))
        stats = jax.eval_shape(functools.partial(loss, self.model, config), *arguments)[1]
        nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, stats))
        return _Head(
            config=config,
            optimizer=name,
            accumulate=jax.jit(
                functools.partial(_accumulate, self.model, config),
                donate_argnums=(1, 2),
                in_shardings=(
                    own,
                    own,
                    everywhere,
                    rows,
                    rows,
                    own if config.distills else None,
                    everywhere,
                ),
                out_shardings=(own, everywhere),
            ),
            apply=jax.jit(
                functools.partial(_apply, tx),
                donate_argnums=(0, 1),
                out_shardings=(own, opt[name], everywhere),
            ),
            score=jax.jit(score, in_shardings=(own, rows), out_shardings=rows),
            nothing=jax.jit(nothing, out_shardings=(own, everywhere)),
        )

    @property
    def params(self) -> Params:
        """Current weights, on the devices; the next update invalidates them."""
        return self._near(self.state['params'])

    def restore(self, state: dict[str, Any]) -> None:
        """Takes back what `state` was."""
        self.state = jax.tree.map(
            lambda x, where: self._far(jax.device_put(x, where)), state, self.shardings
        )

    def published(self) -> Params:
        """What a sampler reads: current weights, whole in every replica; the next update may invalidate them."""
        return self._publish(self.params)

    def lower(self, role: str) -> dict[str, jax.stages.Lowered]:
        """The programs of an update, traced but not compiled: 'accumulate' of one micro-batch, and 'apply'."""
        head = self._heads[role]
        batch = Batch.blank(self.micro_shape, self.teacher_tokens if head.config.distills else 0)
        params, (gradients, stats) = self.state['params'], jax.eval_shape(head.nothing)
        gradients = jax.tree.map(
            lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
            gradients,
            params,
        )
        teacher = self.state['teacher'] if head.config.distills else None
        arguments = (params, gradients, stats, batch, batch.old_logp, teacher, jnp.float32(0))
        return dict(
            accumulate=head.accumulate.lower(*arguments),
            apply=head.apply.lower(params, self.state['opt'][head.optimizer], gradients),
        )

    def rescore(self, role: str, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with this learner's own log-probs as `old_logp`; the sampler's move to `sampler_logp`."""
        score, params = self._heads[role].score, self.params
        out = []
        for batch in batches:
            logp = np.asarray(self._gather(score(params, sharding.put(batch, self._rows))))
            out.append(
                dataclasses.replace(
                    batch, old_logp=np.where(batch.mask, logp, 0), sampler_logp=batch.old_logp
                )
            )
        return out

    def update(self, role: str, batches: Sequence[Batch], distill_coef: float = 0.0) -> Stats:
        """One optimiser step from the micro-batches of one batch; returns statistics as (sum, count).

        A batch without a weight skips the step, as does a gradient that is not finite; both are counted in
        `skipped_updates`.
        """
        head = self._heads[role]
        if not any(
            b.weight.any() or (b.teacher is not None and b.teacher.weight.any()) for b in batches
        ):
            return {'skipped_updates': (1.0, 1.0)}
        batches = [sharding.put(batch, self._rows) for batch in batches]
        ref_logp = [batch.old_logp for batch in batches]
        if head.config.kl_coef:  # before anything else is on the devices
            reference = self._near(self.reference)
            ref_logp = [head.score(reference, batch) for batch in batches]
            del reference
        gradients, stats = head.nothing()
        params, coef = self.params, jnp.float32(distill_coef)
        teacher = self._near(self.state['teacher']) if head.config.distills else None
        for batch, ref in zip(batches, ref_logp):
            gradients, stats = head.accumulate(params, gradients, stats, batch, ref, teacher, coef)
        del teacher
        params, opt, norm = head.apply(
            params, self._near(self.state['opt'][head.optimizer]), gradients
        )
        self.state = self.state | dict(
            params=self._far(params), opt=self.state['opt'] | {head.optimizer: self._far(opt)}
        )
        stats, norm = jax.device_get((stats, norm))
        fine = bool(np.isfinite(norm))
        out = {name: (float(s), float(n)) for name, (s, n) in stats.items()}
        out['loss'] = (out['loss'][0], 1.0)
        return out | {
            'gradient_norm': (float(norm) if fine else 0.0, float(fine)),
            'skipped_updates': (float(not fine), 1.0),
        }

    def follow(self) -> None:
        """Moves the teacher towards the student, once per rollout batch (π-Play eq. 10)."""
        if 'teacher' in self.state:
            teacher = self._ema(self._near(self.state['teacher']), self.params)
            self.state = self.state | dict(teacher=self._far(teacher))
