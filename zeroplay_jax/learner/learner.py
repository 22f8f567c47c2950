"""How a policy improves: micro-batches in, summed gradients, one optimiser step.

Losses are sums of weighted tokens (objectives/policy_gradient.py), so gradients of micro-batches simply add up: any
number of micro-batches runs through one compiled program, and how the batch was cut cannot change the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zeroplay_jax.learner import optimizer
from zeroplay_jax.objectives import policy_gradient
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.types import Batch, UserError

Stats = dict[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static part of the loss; fields as in `config.<role>`."""

    loss: str
    clip_low: float
    clip_high: float
    dual_clip: float
    kl_coef: float
    kl_kind: str
    temperature: float

    @classmethod
    def of(cls, role) -> LossConfig:
        """From a role's config."""
        return cls(**{f.name: role[f.name] for f in dataclasses.fields(cls)})


def loss(model: ModelConfig, config: LossConfig, params: Params, batch: Batch, ref_logp):
    """Σ weight · per-token loss of one micro-batch (arrays [B, L]) and its statistics as (sum, count).

    `ref_logp` is float32 [B, L] where the KL term is on, else anything of that shape.
    """
    logp, entropy = transformer.score(model, params, batch.tokens, batch.positions, batch.segment, config.temperature)
    if config.loss == 'token_pg':
        per_token, stats = policy_gradient.token_pg(
            logp,
            batch.old_logp,
            batch.advantage,
            batch.mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
    else:
        per_token, stats = policy_gradient.reinforce(logp, batch.advantage, batch.mask)
        stats |= policy_gradient.agreement(logp, batch.old_logp, batch.mask)
    if config.kl_coef:
        penalty, kl_stats = policy_gradient.kl(logp, ref_logp, batch.mask, config.kl_kind)
        per_token, stats = per_token + config.kl_coef * penalty, stats | kl_stats
    tokens = jnp.sum(batch.mask, dtype=jnp.float32)
    stats['entropy'] = (jnp.sum(jnp.where(batch.mask, jax.lax.stop_gradient(entropy), 0.0)), tokens)
    value = policy_gradient.aggregate(per_token, batch.weight)
    stats['loss'] = (jax.lax.stop_gradient(value), jnp.float32(0))
    return value, stats


def _accumulate(model, config, params, gradients, stats, batch, ref_logp):
    new, more = jax.grad(loss, argnums=2, has_aux=True)(model, config, params, batch, ref_logp)
    return jax.tree.map(jnp.add, gradients, new), jax.tree.map(jnp.add, stats, more)


def _apply(tx, state, gradients):
    """One optimiser step; with a gradient that is not finite, everything stays as it was."""
    norm = optax.tree.norm(gradients)
    fine = jnp.isfinite(norm)
    updates, opt = tx.update(gradients, state['opt'], state['params'])
    new = dict(params=optax.apply_updates(state['params'], updates), opt=opt, step=state['step'] + 1)
    return jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, state), norm


jax.tree_util.register_dataclass(Batch, [f.name for f in dataclasses.fields(Batch)], [])


class Learner:
    """One set of trained weights with its optimiser.

    Attributes:
      state: {'params', 'opt', 'step'}; the checkpointed tree.
    """

    def __init__(self, model: ModelConfig, mesh, role, params: Params, micro_shape: tuple[int, int]):
        """Takes initial `params` (copied, never donated) and `config.<role>`; `micro_shape` is (B, L)."""
        self.model, self.mesh, self.micro_shape = model, mesh, micro_shape
        self.config = LossConfig.of(role)
        shards = mesh.shape['replica'] * mesh.shape['fsdp']
        if micro_shape[0] % shards:
            raise UserError(f'micro.rows={micro_shape[0]} must divide by mesh axes replica × fsdp = {shards}')
        tx = optimizer.make(role)
        own = sharding.parameter_shardings(params, mesh)
        self.reference = params if self.config.kl_coef else None
        begin = lambda p: dict(params=jax.tree.map(jnp.copy, p), opt=tx.init(p), step=jnp.int32(0))
        shape = jax.eval_shape(begin, params)
        placed = dict(
            params=own,
            opt=sharding.state_shardings(shape['opt'], params, mesh),
            step=sharding.replicated(mesh),
        )
        self.shardings = placed
        self.state = jax.jit(begin, out_shardings=placed)(params)
        everywhere, rows = sharding.replicated(mesh), sharding.rows(mesh)
        self._rows = rows
        self._accumulate = jax.jit(
            functools.partial(_accumulate, model, self.config),
            donate_argnums=(1, 2),
            in_shardings=(own, own, everywhere, rows, rows),
            out_shardings=(own, everywhere),
        )
        self._apply = jax.jit(functools.partial(_apply, tx), donate_argnums=0, out_shardings=(placed, everywhere))
        self._score = jax.jit(
            lambda p, b: transformer.score(model, p, b.tokens, b.positions, b.segment, self.config.temperature)[0],
            in_shardings=(own, rows),
            out_shardings=rows,
        )
        blank = Batch(*(jnp.zeros(micro_shape, d) for d in (int, int, int, bool, float, float, float)))
        stats = jax.eval_shape(functools.partial(loss, model, self.config), params, blank, blank.old_logp)[1]
        nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shape['params'], stats))
        self._nothing = jax.jit(nothing, out_shardings=(own, everywhere))

    @property
    def params(self) -> Params:
        """Current weights; the next update invalidates them."""
        return self.state['params']

    def update(self, batches: Sequence[Batch]) -> Stats:
        """One optimiser step from the micro-batches of one batch; returns statistics as (sum, count).

        A batch without a weight skips the step, as does a gradient that is not finite; both are counted in
        `skipped_updates`.
        """
        if not any(b.weight.any() for b in batches):
            return {'skipped_updates': (1.0, 1.0)}
        gradients, stats = self._nothing()
        for batch in batches:
            batch = jax.device_put(batch, self._rows)
            ref = batch.old_logp if self.reference is None else self._score(self.reference, batch)
            gradients, stats = self._accumulate(self.params, gradients, stats, batch, ref)
        self.state, norm = self._apply(self.state, gradients)
        stats, norm = jax.device_get((stats, norm))
        fine = bool(np.isfinite(norm))
        out = {name: (float(s), float(n)) for name, (s, n) in stats.items()}
        out['loss'] = (out['loss'][0], 1.0)
        return out | {
            'gradient_norm': (float(norm) if fine else 0.0, float(fine)),
            'skipped_updates': (float(not fine), 1.0),
        }
