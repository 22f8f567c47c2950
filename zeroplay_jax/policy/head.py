"""The output head over packed tokens: logits, log-probabilities, and functions of a chunk of tokens at a time.

The logits of one chunk exist at a time, forward and backward: [batch, length, vocab] is never built. Tokens whose
result nobody reads can be left out. The backward pass is written by hand, because automatic differentiation cannot
reverse a loop whose number of iterations depends on the data.

`sum_tokens` computes a loss that is a sum over the tokens, and its gradient in the same pass: three products with the
head per chunk (Liger Kernel's fused linear cross entropy, arXiv:2410.10989). `map_tokens` returns the results of the
tokens, for a loss that couples them: its gradient needs the logits a second time, which makes four products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from zeroplay_jax.policy import adapters, attention, sharding
from zeroplay_jax.policy.attention import AnyArray
from zeroplay_jax.policy.decoder import ModelConfig, Params, cast_matrices

# Logit of a token that is not drawn. Finite, because the entropy multiplies it by its probability, 0.
_EXCLUDED = -1e30


@dataclasses.dataclass(frozen=True)
class Head:
    """The output head of a policy, and how tokens are sent through it.

    Attributes:
      matrices: tree {parameter name: matrix}; it has a gradient unless it is frozen.
      is_frozen: whether it belongs to a frozen base, of which no gradient is computed.
      chunk: tokens per iteration and device.
      mesh: mesh over whose data axes the rows are split; None: no mesh.
    """

    matrices: Params
    is_frozen: bool
    chunk: int
    mesh: Mesh | None


def head_of(config: ModelConfig, params: Params, dtype: Any) -> Head:
    """Returns the head of a policy, whose hidden states have `dtype`."""
    is_frozen = adapters.has_frozen_base(params)
    matrices = frozen_matrices(config, params, dtype) if is_frozen else _matrices(config, params)
    return Head(matrices, is_frozen, config.logit_chunk, config.mesh)


def frozen_matrices(config: ModelConfig, params: Params, dtype: Any) -> Params:
    """Returns the matrices of a head without gradient, such as a teacher's."""
    # Cast before they are gathered on every device; the loops do the same with those that are trained.
    return cast_matrices(jax.lax.stop_gradient(_matrices(config, params)), dtype)


def _matrices(config: ModelConfig, params: Params) -> Params:
    """Returns the parameters that `logits` reads."""
    # Only these become inputs of the loop over chunks: everything that enters it is gathered on every device.
    name = 'embedding' if config.tied else 'head'
    return {name: params[name]}


def logits(
    config: ModelConfig, matrices: Params, hidden_states: Float[Array, 'tokens hidden_size']
) -> Float[Array, 'tokens vocab']:
    """Returns the float32 logits of the output head; `matrices` may be all weights."""
    # `product` accumulates in float32 also for bfloat16 inputs: rounded logits would change the log-probabilities.
    if config.tied:
        embedding = matrices['embedding'].astype(hidden_states.dtype)
        return attention.product('nd,vd->nv', hidden_states, embedding)
    matrix = matrices['head'].astype(hidden_states.dtype)
    return attention.product('nd,dv->nv', hidden_states, matrix)


def within(
    token_logits: Float[Array, 'tokens vocab'], kept: Int[AnyArray, 'tokens ids'] | None
) -> Float[Array, 'tokens vocab']:
    """Returns logits whose softmax is 0 outside of the sets that tokens are drawn from.

    Args:
      token_logits: of the whole vocabulary.
      kept: ids of every set, -1 beyond its end; a set without any has all ids. None: all sets have.
    """
    if kept is None:
        return token_logits
    tokens, vocabulary = token_logits.shape
    # Negative indices would count from the end; one beyond it is dropped.
    ids = jnp.where(kept < 0, vocabulary, kept)
    is_kept = jnp.zeros(token_logits.shape, bool)
    is_kept = is_kept.at[jnp.arange(tokens)[:, None], ids].set(True, mode='drop')
    return jnp.where(is_kept | (kept[:, :1] < 0), token_logits, _EXCLUDED)


def logp_and_entropy(
    chunk_logits: Float[Array, 'tokens vocab'],
    chunk_tokens: Int[AnyArray, ' tokens'],
    train_entropy: bool,
) -> tuple[Float[Array, ' tokens'], Float[Array, ' tokens']]:
    """Returns the log-probabilities of tokens and the entropies, in nats, of the distributions they are of.

    Args:
      chunk_logits: divided by the temperature.
      chunk_tokens: ids.
      train_entropy: whether the entropy has a gradient.
    """
    log_normaliser = jax.nn.logsumexp(chunk_logits, -1)
    # log p = logit - log Z, without an array of all log-probabilities.
    token_logits = jnp.take_along_axis(chunk_logits, chunk_tokens[:, None], 1)
    logp = token_logits[:, 0] - log_normaliser
    if not train_entropy:
        # The entropy is only a metric: with a gradient, its backward pass would be computed and multiplied by zero.
        chunk_logits, log_normaliser = jax.lax.stop_gradient((chunk_logits, log_normaliser))
    # H = -Σ p log p = log Z - Σ p · logit.
    probs = jnp.exp(chunk_logits - log_normaliser[:, None])
    entropy = log_normaliser - jnp.sum(probs * chunk_logits, -1)
    return logp, entropy


@dataclasses.dataclass(frozen=True)
class _Loop:
    """Static part of the loop.

    Attributes:
      chunk_function: (head, states [tokens, hidden_size], shared, per_token) → what the loop puts together.
      chunk: tokens of an iteration, on every device.
      mesh: mesh of the arrays, or None.
    """

    chunk_function: Callable
    chunk: int
    mesh: Mesh | None


def reduced_scores(
    score: Callable,
    reduce: Callable,
    head: Head,
    states: Float[Array, 'batch length hidden_size'],
    shared: Any,
    predicted: Any,
    labels: Any,
    wanted: Bool[AnyArray, 'batch length'] | None,
    elementwise: bool,
) -> tuple[Float[Array, ''], Any]:
    """Returns (loss, statistics): sums that `reduce` makes of what `score` says about the tokens of packed rows.

    Args:
      score: (matrices of the head, states, shared, predicted) → tree of arrays [tokens], for a chunk of tokens, as of
        `map_tokens`. The state of a token predicts the next one.
      reduce: (scores, labels, shared) → (loss, statistics), scalars, from arrays [B, L], 0 at the first place of a row.
      head, states, shared, wanted: as of `map_tokens`; `wanted` are the predicted tokens.
      predicted: what `score` reads of the predicted tokens, [batch, length − 1, …].
      labels: what `reduce` reads of the tokens: tree of arrays [batch, length].
      elementwise: whether `reduce` is a sum over the tokens: it then gets chunks, [1, tokens], in the pass of `score`.
    """
    states = states[:, :-1]
    wanted = None if wanted is None else wanted[:, 1:]
    if not elementwise:
        scores = map_tokens(score, head, states, shared, predicted, wanted)
        return reduce(at_predicted(scores), labels, shared)

    def of_chunk(matrices, states, shared, tokens):
        predicted, labels = tokens
        scores = score(matrices, states, shared, predicted)
        return reduce(*jax.tree.map(lambda x: x[None], (scores, labels)), shared)

    tokens = (predicted, jax.tree.map(lambda x: x[:, 1:], labels))
    return sum_tokens(of_chunk, head, states, shared, tokens, wanted)


def at_predicted(scores: Any) -> Any:
    """Moves arrays [B, L − 1] from the tokens that predict to the predicted ones: [B, L], 0 at the first of a row."""
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), scores)


def map_tokens(
    function: Callable,
    head: Head,
    states: Float[Array, 'batch length hidden_size'],
    shared: Any,
    per_token: Any,
    wanted: Bool[AnyArray, 'batch length'] | None = None,
) -> Any:
    """Returns the results of a function over the tokens of packed rows, a chunk of tokens at a time.

    On a mesh every device loops over its own rows. The head is gathered once before the loop, in the dtype of the
    states; its gradient is accumulated in float32 and summed over the devices once after the loop.

    Args:
      function: (matrices of the head, states, shared, per_token) → tree of arrays [tokens], for a chunk of tokens.
        Pure, and closed over static values only.
      head: see `head_of`.
      states: hidden states; they have a gradient.
      shared: tree that every token needs, without gradient.
      per_token: tree of arrays [batch, length, …], without gradient.
      wanted: True where the result is needed. It is 0, without gradient, elsewhere. None: everywhere.

    Returns:
      The tree that `function` returns, with arrays [batch, length].
    """
    loop, matrices, shared = _loop_of(function, head, shared)
    return _map(loop, matrices, states, shared, per_token, wanted)


def sum_tokens(
    function: Callable,
    head: Head,
    states: Float[Array, 'batch length hidden_size'],
    shared: Any,
    per_token: Any,
    wanted: Bool[AnyArray, 'batch length'] | None = None,
) -> tuple[Float[Array, ''], Any]:
    """Returns the sum of a loss, and of statistics, over the tokens of packed rows.

    Args: those of `map_tokens`, and here
      function: (matrices of the head, states, shared, per_token) → (loss, statistics), float32 scalars: sums over a
        chunk of tokens. Zeros stand for tokens that fill the last chunk up; they must add nothing.

    Returns:
      (loss, statistics). The loss has a gradient, which is computed with it; the statistics have none.
    """
    loop, matrices, shared = _loop_of(function, head, shared)
    loss, statistics = _sum(loop, matrices, states, shared, per_token, wanted)
    return loss, jax.lax.stop_gradient(statistics)


def _loop_of(function: Callable, head: Head, shared: Any) -> tuple[_Loop, Params, Any]:
    """Returns (loop, matrices that have a gradient, arrays without gradient that every token needs)."""
    if not head.is_frozen:
        return _Loop(function, head.chunk, head.mesh), _widened(head.matrices), shared

    # Among the arrays without gradient: no product is computed for a gradient that nobody reads.
    def with_frozen_head(_, states, matrices_and_shared, per_token):
        matrices, other_shared = matrices_and_shared
        return function(matrices, states, other_shared, per_token)

    return _Loop(with_frozen_head, head.chunk, head.mesh), {}, (head.matrices, shared)


def _widened(head):
    """Returns matrices of at least float32.

    They are cast to the dtype of the states before they are gathered. The gradient that leaves the loop is float32 all
    the same, because that cast is inside of `_map` and `_sum`. XLA removes the pair of casts.
    """
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), head)


def _narrowed(head, states):
    return jax.tree.map(lambda matrix: matrix.astype(states.dtype), head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map(loop: _Loop, head, states, shared, per_token, wanted):
    results, _ = _map_forward(loop, head, states, shared, per_token, wanted)
    return results


def _map_forward(loop: _Loop, head, states, shared, per_token, wanted):
    """Returns the results and what the backward pass needs."""
    whole = (_narrowed(head, states), shared)
    rows = (states, per_token, wanted)
    run = _on_shards(loop, functools.partial(_local_results, loop), P(sharding.ROW_AXES))
    return run(whole, rows), (whole, rows)


def _map_backward(loop: _Loop, saved, cotangents):
    """Returns the gradients of `_map` by its arguments; None where there is none."""
    whole, (states, per_token, wanted) = saved

    # Once the cotangents are known, the gradient is that of a sum over tokens. The logits are computed again.
    def weighted_sum(head, states, shared, inputs_and_cotangents):
        inputs, chunk_cotangents = inputs_and_cotangents
        results = loop.chunk_function(head, states, shared, inputs)
        # Not `vdot`, which TPUs may compute in bfloat16.
        products = jax.tree.map(
            lambda cotangent, x: jnp.sum(cotangent * x), chunk_cotangents, results
        )
        return sum(jax.tree.leaves(products)), ()

    sum_loop = dataclasses.replace(loop, chunk_function=weighted_sum)
    _, gradients = _sums_and_gradients(sum_loop, whole, (states, (per_token, cotangents), wanted))
    return *gradients, None, None, None


_map.defvjp(_map_forward, _map_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(loop: _Loop, head, states, shared, per_token, wanted):
    """Returns (loss, statistics) without computing a gradient."""
    whole = (_narrowed(head, states), shared)
    run = _on_shards(loop, functools.partial(_local_sums, loop), P())
    return run(whole, (states, per_token, wanted))


def _sum_forward(loop: _Loop, head, states, shared, per_token, wanted):
    """Returns (loss, statistics), and the gradients of the loss."""
    whole = (_narrowed(head, states), shared)
    return _sums_and_gradients(loop, whole, (states, per_token, wanted))


def _sum_backward(loop: _Loop, gradients, cotangents):
    """Returns the gradients of `_sum` by its arguments; None where there is none."""
    loss_cotangent, _ = cotangents
    scaled = jax.tree.map(lambda x: (x * loss_cotangent).astype(x.dtype), gradients)
    return *scaled, None, None, None


_sum.defvjp(_sum_forward, _sum_backward)


def _sums_and_gradients(loop: _Loop, whole, rows):
    """Returns (loss, statistics) and the gradients of the loss, (by the head, by the states)."""
    # The head's gradient is a sum over the devices. `psum_scatter` would have XLA gather it over the 'model' axis
    # first; of a plain sum it keeps the part that a device owns.
    out_specs = (P(), (P(), P(sharding.ROW_AXES)))
    run = _on_shards(loop, functools.partial(_local_sums_and_gradients, loop), out_specs)
    return run(whole, rows)


# One device's rows


class _Chunks:
    """The tokens of a device's rows as chunks of one size.

    Attributes:
      count: tokens.
      padded: tokens of all chunks together.
      iterations: of the loop over chunks; an array where it depends on the data.
    """

    def __init__(self, loop: _Loop, states, wanted):
        """Cuts rows into chunks.

        Args:
          loop: chunk size and mesh.
          states: [rows, length, hidden_size] of this device.
          wanted: bool [rows, length], or None for all tokens.
        """
        self._shape = states.shape[:2]
        self.count = states.shape[0] * states.shape[1]
        self._chunk = min(loop.chunk, self.count)
        self.iterations = -(-self.count // self._chunk)  # ceiling
        self.padded = self.iterations * self._chunk
        self._order = None
        if wanted is None:
            return
        # Wanted tokens in ascending order, then distinct numbers beyond the last token, because `put` promises unique
        # indices. `take` reads 0 for these numbers; what `put` writes there is dropped, or cut off by `folded`.
        num_wanted = jnp.sum(wanted, dtype=jnp.int32)
        index = jnp.arange(self.padded, dtype=jnp.int32)
        (order,) = jnp.nonzero(jnp.ravel(wanted), size=self.padded, fill_value=0)
        self._order = jnp.where(index < num_wanted, order.astype(jnp.int32), self.count + index)
        iterations = -(-num_wanted // self._chunk)
        # Devices that share rows communicate inside of the loop ('model' axis), so all devices make the same number
        # of iterations: that of the device with the most tokens.
        self.iterations = _maximum_over_shards(iterations, loop.mesh)

    def flat(self, x):
        """Returns [tokens, …] for an array [rows, length, …], padded to whole chunks if all tokens are wanted."""
        flat = x.reshape(self.count, *x.shape[2:])
        if self._order is not None:
            return flat
        padding = [(0, 0)] * flat.ndim
        padding[0] = (0, self.padded - self.count)
        return jnp.pad(flat, padding)

    def folded(self, x):
        """Returns [rows, length, …] for an array of `flat`."""
        return x[: self.count].reshape(*self._shape, *x.shape[1:])

    def take(self, tree, chunk):
        """Returns the tokens of a chunk of flat arrays."""

        def take_array(x):
            if self._order is None:
                return jax.lax.dynamic_slice_in_dim(x, chunk * self._chunk, self._chunk)
            return jnp.take(x, self._indices(chunk), 0, mode='fill', fill_value=0)

        return jax.tree.map(take_array, tree)

    def put(self, x, chunk, values):
        """Returns a flat array with the values of a chunk written to it."""
        if self._order is None:
            return jax.lax.dynamic_update_slice_in_dim(x, values, chunk * self._chunk, 0)
        return x.at[self._indices(chunk)].set(values, mode='drop', unique_indices=True)

    def _indices(self, chunk):
        return jax.lax.dynamic_slice_in_dim(self._order, chunk * self._chunk, self._chunk)


def _chunks_and_function(loop: _Loop, whole, rows):
    """Returns the chunks of one device's rows, and the function number of a chunk → result of `loop.chunk_function`."""
    matrices, shared = whole
    states, per_token, wanted = rows
    chunks = _Chunks(loop, states, wanted)
    inputs = jax.tree.map(chunks.flat, (states, per_token))

    def apply(chunk):
        chunk_states, chunk_per_token = chunks.take(inputs, chunk)
        return loop.chunk_function(matrices, chunk_states, shared, chunk_per_token)

    return chunks, apply


def _local_results(loop: _Loop, whole, rows):
    """Returns the results [rows, length] of one device."""
    chunks, apply = _chunks_and_function(loop, whole, rows)

    def iteration(chunk, results):
        return jax.tree.map(lambda x, y: chunks.put(x, chunk, y), results, apply(chunk))

    result_shapes = jax.eval_shape(apply, 0)
    results = _zeros(result_shapes, chunks.padded)
    results = jax.lax.fori_loop(0, chunks.iterations, iteration, results)
    return jax.tree.map(chunks.folded, results)


def _local_sums(loop: _Loop, whole, rows):
    """Returns (loss, statistics), summed over all devices."""
    chunks, apply = _chunks_and_function(loop, whole, rows)

    def iteration(chunk, sums):
        return jax.tree.map(jnp.add, sums, apply(chunk))

    sums = _zeros(jax.eval_shape(apply, 0), None)
    sums = jax.lax.fori_loop(0, chunks.iterations, iteration, sums)
    return _sum_over_shards(sums, loop.mesh)


def _local_sums_and_gradients(loop: _Loop, whole, rows):
    """Returns (loss, statistics) and (head gradient, states gradient).

    Sums and head gradient, which is float32, are summed over all devices; the states gradient is of this device's rows
    and in their dtype.
    """
    head, _ = whole
    states, _, _ = rows
    gradients = jax.value_and_grad(loop.chunk_function, (0, 1), has_aux=True)
    gradient_loop = dataclasses.replace(loop, chunk_function=gradients)
    chunks, apply = _chunks_and_function(gradient_loop, whole, rows)

    def iteration(step, totals):
        sums, head_gradient, states_gradient = totals
        # From the last chunk to the first, so that the float32 sum is rounded as in automatic differentiation of
        # the loop.
        chunk = chunks.iterations - 1 - step
        chunk_sums, (chunk_head_gradient, chunk_states_gradient) = apply(chunk)
        sums = jax.tree.map(jnp.add, sums, chunk_sums)
        # A product of bfloat16 matrices is rounded to bfloat16; the sum over the chunks is not.
        head_gradient = jax.tree.map(
            lambda total, x: total + x.astype(total.dtype), head_gradient, chunk_head_gradient
        )
        return sums, head_gradient, chunks.put(states_gradient, chunk, chunk_states_gradient)

    sum_shapes, _ = jax.eval_shape(apply, 0)
    wide_shapes = jax.eval_shape(_widened, head)
    state_shape = jax.ShapeDtypeStruct(states.shape[1:], states.dtype)
    totals = (
        _zeros(sum_shapes, None),
        _zeros(wide_shapes, None),
        _zeros(state_shape, chunks.padded),
    )
    sums, head_gradient, states_gradient = jax.lax.fori_loop(
        0, chunks.iterations, iteration, totals
    )
    sums, head_gradient = _sum_over_shards((sums, head_gradient), loop.mesh)
    return sums, (head_gradient, chunks.folded(states_gradient))


def _zeros(shapes, tokens: int | None):
    """Returns zeros of these shapes, with a first axis of `tokens` instead of their own unless that is None."""

    def make(x):
        shape = x.shape if tokens is None else (tokens, *x.shape[1:])
        return jnp.zeros(shape, x.dtype)

    return jax.tree.map(make, shapes)


# Devices


def _on_shards(loop: _Loop, local: Callable, out_specs) -> Callable:
    """Returns the function (whole, rows) that runs `local` on every data shard with its own rows.

    `whole` is a tree that every shard receives whole, `rows` a tree of arrays [batch, …].
    """
    return sharding.on_data_shards(local, loop.mesh, (P(), P(sharding.ROW_AXES)), out_specs)


def _maximum_over_shards(x, mesh: Mesh | None):
    return jax.lax.pmax(x, sharding.ROW_AXES) if sharding.is_split(mesh) else x


def _sum_over_shards(tree, mesh: Mesh | None):
    return jax.lax.psum(tree, sharding.ROW_AXES) if sharding.is_split(mesh) else tree
