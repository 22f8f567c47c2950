"""The compiled programs of one role's update: accumulate gradients of micro-batches, apply them, score tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.learner.loss import LossConfig, loss, wanted_tokens
from zeroplay_jax.learner.means import with_means, with_rollout_means
from zeroplay_jax.learner.weights_view import FrozenBase
from zeroplay_jax.policy import adapters, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params


class Trained:
    """Weights with their optimisers; the base of learners and value networks.

    Attributes:
      state: the checkpointed tree; with `offload` it lies in host memory, and each part is moved to the devices only
        while it is used.
      shardings: tree of shardings with the structure of `state`.
    """

    state: dict[str, Any]
    shardings: dict[str, Any]
    _offload: bool

    def _to_device(self, tree: Any) -> Any:
        """Returns the tree on the devices; with `offload` it is copied from host memory."""
        return sharding.to_device(tree) if self._offload else tree

    def _to_host(self, tree: Any) -> Any:
        """Returns the tree where the state lies: with `offload` in host memory, else unchanged."""
        return sharding.to_host(tree) if self._offload else tree

    def restore(self, state: dict[str, Any]) -> None:
        """Sets `state` to a tree of the same structure, such as a checkpoint's."""

        # A checkpoint may come from a run with another mesh, or with another setting of `offload`.
        def place(x, x_sharding):
            return self._to_host(jax.device_put(x, x_sharding))

        self.state = jax.tree.map(place, state, self.shardings)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the programs of a learner read and write: trees of shapes (jax.ShapeDtypeStruct) and of shardings.

    Attributes:
      model, mesh: static shape of the decoder, and devices.
      params, param_shardings: of the float32 masters, and of gradients.
      weights, weight_shardings: of what `accumulate` and `score` read: the masters or a sampler's view of them
        (Learner, `weights`).
      teacher: shapes of a teacher's weights as `accumulate` reads them; not used without one.
      base: the frozen weights of which all these are adapters; None for whole weights.
    """

    model: ModelConfig
    mesh: jax.sharding.Mesh
    params: Params
    param_shardings: Any
    weights: Params
    weight_shardings: Any
    teacher: Params
    base: FrozenBase | None


class UpdatePrograms:
    """The programs of a role's update, jitted; each is compiled at its first call.

    Args:
      layout: of the learner.
      config: static part of the role's loss.
      optimizer: name of the optimiser state that it updates.
      transform: that optimiser.
      opt_shardings: shardings of its state.
      blank_batch: a micro-batch, of which only the shapes are used.

    Attributes:
      zero_gradients: () → (gradients, statistics), all zeros: the start of an accumulation.
      accumulate: (weights, gradients, statistics, batch, ref_logp, teacher, distill_coef, base) → (gradients,
        statistics) with one micro-batch added. Donates the accumulators.
      apply: (params, optimiser state, gradients) → (params, optimiser state, gradient norm). Donates the first two.
      score: (weights, batch, base) → log-probs float32 [B, L].
      score_reference: the same for the reference of the KL term, whose weights are {} with a base: the base alone.
    """

    def __init__(
        self,
        layout: Layout,
        config: LossConfig,
        optimizer: str,
        transform: optax.GradientTransformation,
        opt_shardings: Any,
        blank_batch: Batch,
    ):
        self.config = config
        self.optimizer = optimizer
        rows = sharding.rows(layout.mesh)
        replicated = sharding.replicated(layout.mesh)
        weights = layout.weight_shardings
        # None is an empty pytree: without a base or a teacher the programs have no argument for it.
        base = None if layout.base is None else layout.base.params
        base_shardings = None if layout.base is None else layout.base.shardings
        teacher = layout.teacher if config.distills else None
        teacher_shardings = weights if config.distills else None
        read_shapes = _shapes((layout.weights, blank_batch, teacher, base))
        stats = _statistic_shapes(layout.model, config, *read_shapes)
        accumulators = (layout.param_shardings, replicated)
        arguments = (weights, *accumulators, rows, rows, teacher_shardings, replicated)
        self.zero_gradients = zeros_program((layout.params, stats), accumulators)
        self.accumulate = _accumulate_program(
            layout.model,
            config,
            (*arguments, base_shardings),
            accumulators,
            (layout.params, *read_shapes),
        )
        self.apply = apply_program(
            transform, layout.params, layout.param_shardings, opt_shardings, replicated
        )
        reference = weights if base is None else {}
        self.score, self.score_reference = (
            _score_program(
                layout.model, config.temperature, read, rows, base_shardings, read_shapes
            )
            for read in (weights, reference)
        )


def _shapes(tree):
    """Returns the tree with the shapes and dtypes of its arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def shared(make):
    """Decorates a function of trees: calls with equal leaves return the same object.

    A program of jit is traced and compiled once where two roles, or two learners of one process, ask for it.
    """

    @functools.lru_cache
    def made(leaves, treedef):
        return make(*jax.tree.unflatten(treedef, leaves))

    @functools.wraps(make)
    def shared_make(*trees):
        leaves, treedef = jax.tree.flatten(trees)
        return made(tuple(leaves), treedef)

    return shared_make


@shared
def _statistic_shapes(model, config, weights, batch, teacher, base):
    """Returns the shapes of the statistics of a loss: their names depend on it, so it is traced once to get them."""
    loss_of = functools.partial(loss, model, config)
    _, stats = jax.eval_shape(
        loss_of, weights, batch, batch.old_logp, teacher, jnp.float32(0), base
    )
    return stats


@shared
def zeros_program(shapes, shardings):
    """Returns the program () → zeros of these shapes, which creates them on the devices."""

    def make_zeros():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return jax.jit(make_zeros, out_shardings=shardings)


@shared
def apply_program(transform, shapes, param_shardings, opt_shardings, replicated):
    """Returns the program of `apply_gradients`, which donates parameters and optimiser state; one for every shape."""
    return jax.jit(
        functools.partial(apply_gradients, transform),
        donate_argnums=(0, 1),
        out_shardings=(param_shardings, opt_shardings, replicated),
    )


@shared
def _accumulate_program(model, config, in_shardings, out_shardings, shapes):
    """Returns the program `accumulate`; one for every shape, so that each is compiled once."""
    return jax.jit(
        functools.partial(_accumulate, model, config),
        # Accumulators are updated in place; parameters stay for the next micro-batch.
        donate_argnums=(1, 2),
        in_shardings=in_shardings,
        out_shardings=out_shardings,
    )


@shared
def _score_program(model, temperature, read_shardings, rows, base_shardings, shapes):
    """Returns the program `score`; one for every shape."""
    return jax.jit(
        functools.partial(score, model, temperature),
        in_shardings=(read_shardings, rows, base_shardings),
        out_shardings=rows,
    )


def score(model, temperature, weights, batch, base=None):
    """Returns the log-probs of the tokens that the loss reads, float32 [B, L]; without `base` of whole weights."""
    logp, _ = transformer.score(
        model,
        adapters.join(base, weights),
        batch.tokens,
        batch.positions,
        batch.segment,
        temperature,
        wanted=wanted_tokens(model, batch),
        record=batch.experts,
        kept=batch.kept,
    )
    return logp


def _accumulate(
    model, config, weights, gradients, stats, batch, ref_logp, teacher, distill_coef, base=None
):
    """Returns the accumulated gradients and statistics with those of one micro-batch added."""

    # The gradient has the dtype of what it is taken by. Weights that are bfloat16 already are therefore widened to
    # that of the accumulators, and every use casts them back: XLA removes both casts, and the gradient is that of the
    # masters, bit for bit.
    def widen(weight, gradient):
        return weight.astype(gradient.dtype)

    return add_gradients(
        functools.partial(loss, model, config),
        jax.tree.map(widen, weights, gradients),
        gradients,
        stats,
        batch,
        ref_logp,
        teacher,
        distill_coef,
        base,
    )


def add_gradients(loss_of, params, gradients, stats, *arguments):
    """Returns accumulated gradients and statistics with those of `loss_of(params, *arguments)` added."""
    # Losses are sums of weighted tokens with a global denominator, so gradients add up without rescaling.
    added_gradients, added_stats = jax.grad(loss_of, has_aux=True)(params, *arguments)
    gradients = jax.tree.map(jnp.add, gradients, added_gradients)
    return gradients, jax.tree.map(jnp.add, stats, added_stats)


def apply_gradients(transform, params, opt_state, gradients):
    """Takes one optimiser step; returns (params, opt_state, gradient norm), unchanged if the norm is not finite."""
    gradient_norm = optax.tree.norm(gradients)
    # If any entry of the gradient is not finite, the norm is not finite either.
    is_finite = jnp.isfinite(gradient_norm)
    updates, new_opt_state = transform.update(gradients, opt_state, params)
    new_params = optax.apply_updates(params, updates)

    # A gradient that is not finite leaves weights and moments as they were. The selection is part of the program,
    # because the old buffers are donated and the host could not restore them.
    def select(new, old):
        return jnp.where(is_finite, new, old)

    params, opt_state = jax.tree.map(select, (new_params, new_opt_state), (params, opt_state))
    return params, opt_state, gradient_norm


def step_loss(
    model: ModelConfig, role: Any, params: Params, reference: Params, batches: Sequence[Batch]
) -> tuple[Float[Array, ''], dict[str, Any]]:
    """Returns the loss that an optimiser step minimises, without a learner and without distillation.

    Args:
      role: `config.<role>`.
      params: weights to evaluate; the loss can be differentiated with respect to them.
      reference: weights that a KL term compares them with.
      batches: the micro-batches of the step.

    Returns:
      The loss, float32 scalar; statistics as name → (sum, count), with the loss among them.
    """
    config = LossConfig.of(role)
    policy_loss = config.policy_loss
    score_one = functools.partial(_score, model, config.temperature)

    def score_all():
        return [score_one(params, batch.for_devices(config.kept)) for batch in batches]

    batches = with_rollout_means(policy_loss, batches, score_all, config.clips)
    batches = [batch.for_devices(config.kept) for batch in batches]
    total_loss, stats = jnp.float32(0), {}
    for batch in with_means(policy_loss, batches, score_one, params):
        # Without a KL term the values are not used; any array of the shape will do.
        ref_logp: Any = batch.old_logp
        if config.kl_coef:
            ref_logp = score_one(reference, dataclasses.replace(batch, experts=None))
        batch_loss, batch_stats = _loss(
            model, config, params, batch, ref_logp, None, jnp.float32(0)
        )
        # The token weights contain the denominator of the whole step: the sum over micro-batches is the mean.
        total_loss += batch_loss
        stats = jax.tree.map(jnp.add, stats, batch_stats) if stats else batch_stats
    return total_loss, stats | {'loss': (total_loss, 1.0)}


# Model, config and temperature are static: they select the compiled program.
_loss = jax.jit(loss, static_argnums=(0, 1))
_score = jax.jit(score, static_argnums=(0, 1))
