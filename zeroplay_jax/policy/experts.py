"""Mixtures of experts: a router sends every token to a few of many feed-forward networks.

Shazeer et al. 2017, arXiv:1701.06538; as in Qwen3-MoE, arXiv:2505.09388. No token is dropped, and nothing is padded
for an expert: the choices of all tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies every group with the
kernel of its expert. The result of a token does not depend on which others are computed with it.

**Router replay.** A router that is computed twice may choose other experts the second time, because programs round
differently, and the log-prob of the token then jumps. The sampler therefore records the experts of every token that it
computes, those of prompts and observations too, beside keys and values; they travel with the rollout, and the update
uses them again, with the router's present probabilities of these experts (R3; arXiv:2510.11370). A record has the
experts of all layers of a token side by side: [layers · per_token], NOT_RECORDED where the router shall choose. Beside
gated delta nets (policy/delta.py) the tokens of a turn are computed again for the next one, and the record is of then.

Axis names: those of policy/attention.py; choices: layers · per_token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy import attention, sharding

# Expert of a choice that the router makes anew.
NOT_RECORDED = -1
# Name of the module in a layer, and its variables: what it is given to use, and what it has used.
MODULE, _REPLAYED, _CHOSEN = 'moe', 'replayed', 'chosen'
_NAME = 'experts'
# Rows of a block of `_kernel_gradient`.
_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class Experts:
    """Static shape of the mixture of every layer.

    Attributes:
      count: experts of a layer.
      per_token: experts that compute a token.
      size: width of an expert.
      normalized: whether the weights of a token's experts sum to 1.
      shared: whether a further expert, of the width `ModelConfig.intermediate_size`, computes every token; a gate of
        its own weighs it (Qwen3.5).
    """

    count: int
    per_token: int
    size: int
    normalized: bool
    shared: bool = False

    @property
    def dtype(self) -> str:
        """Dtype of a record."""
        return 'int8' if self.count <= 128 else 'int16'


class Mixture(nn.Module):
    """The feed-forward part of a layer: the weighted sum of the experts that the router chooses.

    Attributes:
      shape: of the mixture.
      activation: of the gate.
      mesh: mesh of the arrays; None: a single device.
      is_cached: whether the call is one of a sampler's, on the rows of a data shard.
    """

    shape: Experts
    activation: Callable
    mesh: Mesh | None
    is_cached: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, 'batch length hidden_size']
    ) -> Float[Array, 'batch length hidden_size']:
        """Returns the sums; reads what is replayed, and stores what was chosen if the caller wants it."""
        hidden_size = x.shape[-1]
        count, size = self.shape.count, self.shape.size
        stacked = nn.initializers.lecun_normal(batch_axis=0)
        weights = {
            'router': self.param('router', nn.initializers.lecun_normal(), (hidden_size, count)),
            'gate': self.param('gate', stacked, (count, hidden_size, size)),
            'up': self.param('up', stacked, (count, hidden_size, size)),
            'down': self.param('down', stacked, (count, size, hidden_size)),
        }
        for name in ('gate_scale', 'up_scale', 'down_scale'):
            # Of quantised kernels (policy/adapters.py).
            if self.has_variable('params', name):
                weights[name] = self.get_variable('params', name)
        # Cast before they are gathered on every device; numbers of quantised kernels stay as they are.
        for name, kernel in weights.items():
            if jnp.issubdtype(kernel.dtype, jnp.floating) and not name.endswith('_scale'):
                weights[name] = kernel.astype(x.dtype)
        replayed = None
        if self.has_variable(_REPLAYED, _NAME):
            replayed = self.get_variable(_REPLAYED, _NAME)
        mix = functools.partial(_mix, self.shape, self.activation)
        # The dummy tokens of `init` cannot be split.
        mesh = None if self.is_initializing() else self.mesh
        on_devices = _on_devices(mix, mesh, self.is_cached, weights)
        out, chosen = on_devices(x, replayed, weights)
        self.sow(_CHOSEN, _NAME, chosen)
        return out


def _on_devices(mix: Callable, mesh: Mesh | None, is_cached: bool, weights: dict) -> Callable:
    """Returns `mix` on every device with its own rows and experts; of the weights only the names are used."""
    if mesh is None or mesh.size == 1:
        return mix
    specs = dict.fromkeys(weights, P('model')) | {'router': P()}
    if is_cached:
        return sharding.per_model_shard(mix, mesh, (P(), P(), specs), P())
    rows = P(sharding.ROW_AXES)
    return jax.shard_map(
        mix, mesh=mesh, in_specs=(rows, rows, specs), out_specs=(rows, rows), check_vma=False
    )


def _mix(shape: Experts, activation: Callable, x, replayed, weights):
    """Returns (sums, experts) of tokens on a device, which may have a part of the experts.

    Args:
      shape: of the mixture.
      activation: of the gate.
      x: [batch, length, hidden_size].
      replayed: experts to use, [batch, length, per_token]; None: the router chooses.
      weights: name → array; gate, up and down of the device's experts, in order.
    """
    flat = x.reshape(-1, x.shape[-1])
    expert, share = _route(shape, flat, weights['router'], replayed)
    tokens, per_token = expert.shape
    chosen = expert.astype(shape.dtype).reshape(*x.shape[:2], per_token)
    local_count = weights['gate'].shape[0]
    is_split = local_count < shape.count
    number = expert.reshape(-1)
    if is_split:
        number = number - local_count * jax.lax.axis_index('model')
    is_local = (number >= 0) & (number < local_count)
    if is_split:
        # Choices of other devices come last, in no group.
        number = jnp.where(is_local, number, local_count)
    order = jnp.argsort(number, stable=True)
    group_sizes = jnp.zeros(local_count, jnp.int32).at[number].add(1, mode='drop')
    choices = jnp.repeat(flat, per_token, 0)
    if is_split:
        # Before and after: what a product of no group holds, or its gradient, is not defined.
        choices = jnp.where(is_local[:, None], choices, 0)
    # Permutations, whose gradients need no sums.
    rows = choices.at[order].get(unique_indices=True, mode='promise_in_bounds')

    def multiply(rows, name):
        kernel = weights[name]
        if f'{name}_scale' not in weights:
            return _product(rows, kernel, group_sizes)
        # Scaled in float32, before the only rounding to the dtype of the rows.
        product = jax.lax.ragged_dot(
            rows, kernel.astype(rows.dtype), group_sizes, preferred_element_type=jnp.float32
        )
        scale = weights[f'{name}_scale'].at[number[order]].get(mode='clip')
        return (product * scale).astype(rows.dtype)

    hidden = activation(multiply(rows, 'gate')) * multiply(rows, 'up')
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]), unique_indices=True)
    out = multiply(hidden, 'down')
    out = out.at[place].get(unique_indices=True, mode='promise_in_bounds')
    if is_split:
        out = jnp.where(is_local[:, None], out, 0)
    out = out.reshape(tokens, per_token, -1).astype(jnp.float32)
    total = jnp.sum(out * share[..., None], 1).astype(x.dtype)
    if is_split:
        total = jax.lax.psum(total, 'model')
    return total.reshape(x.shape), chosen


@jax.custom_vjp
def _product(
    rows: Float[Array, 'rows in_features'],
    kernel: Float[Array, 'experts in_features out_features'],
    group_sizes: Int[Array, ' experts'],
) -> Float[Array, 'rows out_features']:
    """Returns the products of consecutive groups of rows with the kernels; undefined for rows behind the groups."""
    return jax.lax.ragged_dot(rows, kernel, group_sizes)


def _product_forward(rows, kernel, group_sizes):
    return _product(rows, kernel, group_sizes), (rows, kernel, group_sizes)


def _product_backward(saved, gradient):
    rows, kernel, group_sizes = saved
    row_gradient = jax.lax.ragged_dot(gradient, kernel.swapaxes(1, 2), group_sizes)
    kernel_gradient = _kernel_gradient(rows, gradient, group_sizes)
    return row_gradient, kernel_gradient.astype(kernel.dtype), None


_product.defvjp(_product_forward, _product_backward)


def _kernel_gradient(
    rows, gradient, group_sizes
) -> Float[Array, 'experts in_features out_features']:
    """Returns the gradient of the kernels, float32, a block of rows of one expert at a time.

    The one of `ragged_dot` would multiply all rows for every expert.
    """
    block = min(_BLOCK, rows.shape[0])
    end = jnp.cumsum(group_sizes)
    block_end = jnp.cumsum(-(-group_sizes // block))

    def add_block(number, total):
        expert = jnp.searchsorted(block_end, number, side='right')
        # The blocks of a group end with it; its first one may be shorter.
        stop = end[expert] - (block_end[expert] - number - 1) * block
        start = jnp.maximum(stop - block, 0)
        index = start + jnp.arange(block)
        first = jnp.maximum(stop - block, end[expert] - group_sizes[expert])
        is_inside = ((index >= first) & (index < stop))[:, None]

        def read(x):
            return jnp.where(is_inside, jax.lax.dynamic_slice_in_dim(x, start, block), 0)

        product = attention.product('ti,to->io', read(rows), read(gradient))
        return total.at[expert].add(product)

    shape = (group_sizes.shape[0], rows.shape[1], gradient.shape[1])
    return jax.lax.fori_loop(0, block_end[-1], add_block, jnp.zeros(shape, jnp.float32))


def _route(shape: Experts, flat, router, replayed):
    """Returns the experts of every token, int32 [tokens, per_token], and their weights, float32."""
    logits = attention.product('th,he->te', flat, router)
    probs = jax.nn.softmax(logits)
    _, expert = jax.lax.top_k(jax.lax.stop_gradient(probs), shape.per_token)
    if replayed is not None:
        replayed = replayed.reshape(expert.shape).astype(expert.dtype)
        expert = jnp.where(replayed == NOT_RECORDED, expert, replayed)
    share = jnp.take_along_axis(probs, expert, 1)
    if shape.normalized:
        share = share / jnp.sum(share, 1, keepdims=True)
    return expert, share


def on_mesh(model: Any, mesh: Mesh) -> Any:
    """Returns the ModelConfig of programs of a sampler, which split experts over their own mesh."""
    return dataclasses.replace(model, mesh=mesh) if model.experts else model


def replay(
    shape: Experts | None, record: Int[Array, 'batch length choices'] | None
) -> dict[str, Any]:
    """Returns the variables with which a decoder uses recorded experts; {} if there are none."""
    if shape is None or record is None:
        return {}
    layers = record.shape[-1] // shape.per_token
    by_layer = record.reshape(*record.shape[:2], layers, shape.per_token)
    return {_REPLAYED: {f'layer_{i}': {MODULE: {_NAME: by_layer[:, :, i]}} for i in range(layers)}}


def recorded(decoder: nn.Module, variables: dict, *arguments: Any) -> tuple[Any, Array]:
    """Returns (result, record [batch, length, choices]) of a decoder that is applied to arguments."""
    result, stored = decoder.apply(variables, *arguments, mutable=[_CHOSEN])
    layers = stored[_CHOSEN]
    # Flax stores one value per call of a module.
    values = [layers[f'layer_{i}'][MODULE][_NAME][0] for i in range(len(layers))]
    return result, jnp.concatenate(values, -1)


def blank_choices(shape: Experts | None, layers: int) -> np.ndarray | None:
    """Returns the record, [choices], of a token whose experts the routers shall choose; None for a dense model."""
    if shape is None:
        return None
    return np.full(layers * shape.per_token, NOT_RECORDED, shape.dtype)


def empty_record(shape: Experts | None, layers: int, rows: int, tokens: int) -> tuple[Array, ...]:
    """Returns what follows the layers in a cache: the record of its tokens, or nothing for a dense model."""
    if shape is None:
        return ()
    return (jnp.zeros((rows, tokens, layers * shape.per_token), shape.dtype),)
