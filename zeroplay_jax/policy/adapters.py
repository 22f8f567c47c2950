"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685) over one frozen base.

An adapted linear layer computes y = x W + (x A) B · alpha / rank. Weights with adapters are the base's tree with three
additions: 'lora_a' [in, adapters · rank] and 'lora_b' [adapters · rank, out] beside every adapted kernel, and the
vector 'adapter_scale' [adapters] at the top. With several adapters, those of different roles, every row of a batch uses
its own or none: x is multiplied with all of them, and what does not belong to the row is set to zero. For a few
adapters that is less work than to gather one per row, which a decode step would read from memory for every row.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int, Int8

from zeroplay_jax.policy import attention
from zeroplay_jax.policy.attention import AnyArray
from zeroplay_jax.types import identity_rng

# Nested dict of arrays, as in policy/decoder.py.
Params = dict[str, Any]

# Names of the additions to the tree of the base.
A, B, SCALE = 'lora_a', 'lora_b', 'adapter_scale'
# Adapter of a row that uses the base alone.
NO_ADAPTER = -1


# Trees


def init(base: Params, linears: Sequence[str], rank: int, seed: int, name: str) -> Params:
    """Returns a fresh adapter {layer: {linear: {A, B}}}, float32 NumPy arrays: A is random, B is zero.

    With B = 0 the adapted model is the base. A is uniform within ±1/√in and depends on seed, name and layer alone, not
    on devices or on the other adapters.

    Args:
      base: arrays or shapes of the base.
      linears: names of the adapted linear layers, some of `settings.schema.ALL_LINEARS`.
      rank: columns of A.
      seed: of the run.
      name: of the adapter.
    """
    adapter: Params = {}
    for layer, modules in base.items():
        if not layer.startswith('layer_'):
            continue
        adapter[layer] = {}
        for linear in linears:
            # Gated delta nets have no queries, keys and values of their own.
            if linear not in modules:
                continue
            fan_in, fan_out = modules[linear]['kernel'].shape
            identity = (zlib.crc32(name.encode()), zlib.crc32(f'{layer}/{linear}'.encode()))
            bound = fan_in**-0.5
            a = identity_rng(seed, *identity).uniform(-bound, bound, (fan_in, rank))
            b = np.zeros((rank, fan_out), np.float32)
            adapter[layer][linear] = {A: a.astype(np.float32), B: b}
    return adapter


def join(base: Params | None, adapters: Params) -> Params:
    """Returns the base with adapters in its tree; `adapters` itself, as whole weights, if the base is None.

    Arrays are shared, not copied. An empty `adapters` gives the base alone.
    """
    if base is None:
        return adapters
    params = dict(base)
    for layer, linears in adapters.items():
        modules = dict(base[layer])
        for linear, adapter in linears.items():
            modules[linear] = modules[linear] | adapter
        params[layer] = modules
    return params


def split(params: Params) -> tuple[Params, Params]:
    """Returns (base, adapters), the arguments of `join`."""
    base = dict(params)
    adapters: Params = {}
    for layer, modules in params.items():
        if not layer.startswith('layer_'):
            continue
        base[layer] = dict(modules)
        for linear, arrays in modules.items():
            # Gated delta nets have parameters that are no module.
            if isinstance(arrays, dict) and A in arrays:
                adapters.setdefault(layer, {})[linear] = {A: arrays[A], B: arrays[B]}
                base[layer][linear] = {name: x for name, x in arrays.items() if name not in (A, B)}
    return base, adapters


def has_frozen_base(params: Params) -> bool:
    """Returns whether weights are a base with or for adapters, so that nothing but the adapters has a gradient."""
    return SCALE in params


def stack(adapters: Sequence[Params]) -> Params:
    """Returns adapters of equal shapes side by side, in order: the adapter number i of a row is `adapters[i]`."""

    def concatenate(path, *leaves):
        return jnp.concatenate(leaves, _rank_axis(path))

    return jax.tree_util.tree_map_with_path(concatenate, *adapters)


def _rank_axis(path) -> int:
    """Returns the axis of the rank of a factor: the last one of A, and the first one of B."""
    return 1 if path[-1].key == A else 0


def merged(params: Params) -> Params:
    """Returns whole float32 weights that compute what a base with one adapter does, up to rounding.

    A quantised base is dequantised.
    """
    base, adapters = split(params)
    (scale,) = base.pop(SCALE)
    whole = jax.tree.map(lambda x: x.astype(jnp.float32), dequantized(base))
    for layer, linears in adapters.items():
        for linear, adapter in linears.items():
            # Default precision would round the factors to bfloat16 on TPUs.
            difference = jnp.matmul(adapter[A], adapter[B], precision='highest')
            whole[layer][linear]['kernel'] += scale * difference
    return whole


# The product


def row_scale(
    scale: Float[Array, ' adapters'], adapter: Int[Array, ' batch'] | None, batch: int
) -> Float[Array, 'batch adapters']:
    """Returns by what every adapter's product is multiplied in every row: its scale, or 0 if it is not the row's.

    Args:
      scale: alpha / rank of every adapter.
      adapter: adapter of every row, NO_ADAPTER for none. None: all rows have the only adapter. The rows may be tokens.
      batch: number of rows; not used if `adapter` is given.
    """
    count = scale.shape[0]
    if adapter is None:
        if count != 1:
            raise ValueError(f'{count} adapters and no adapter index per row')
        return jnp.broadcast_to(scale, (batch, 1))
    is_selected = adapter[:, None] == jnp.arange(count)
    return jnp.where(is_selected, scale, 0.0)


def product(
    x: Float[Array, 'tokens in_features'],
    scale_of_row: Float[Array, 'batch adapters'],
    a: Float[Array, 'in_features columns'],
    b: Float[Array, 'columns out_features'],
) -> Float[Array, 'tokens out_features']:
    """Returns what the adapters add to a linear layer, in the dtype of x.

    Args:
      x: inputs; all tokens of a row are consecutive, and rows have equally many.
      scale_of_row: result of `row_scale`.
      a, b: the adapters side by side, columns = adapters · rank.
    """
    tokens = x.shape[0]
    batch, count = scale_of_row.shape
    low = x @ a.astype(x.dtype)
    columns = low.shape[1]
    low = low.reshape(batch, tokens // batch, count, columns // count)
    # The columns of the other adapters become exactly 0, so that they add nothing to any bit of the row's result, as
    # long as their B is finite: an update with a number that is not finite is skipped.
    scale = scale_of_row[:, None, :, None]
    # In float32: bfloat16 would round alpha / rank where the rank is no power of two.
    scaled = (low * scale).astype(x.dtype)
    low = jnp.where(scale == 0, 0, scaled)
    return low.reshape(tokens, columns) @ b.astype(x.dtype)


# The teacher's average


def widened(adapters: Params) -> Params:
    """Returns adapters of twice the rank with the same products."""

    def pad(path, x):
        return jnp.concatenate([x, jnp.zeros_like(x)], _rank_axis(path))

    return jax.tree_util.tree_map_with_path(pad, adapters)


def average_products(teacher: Params, student: Params, rate: float) -> Params:
    """Returns adapters, as wide as the teacher's, whose products are (1 − rate) · teacher + rate · student.

    The average of two products has the sum of their ranks. It is cut to the rank of the teacher by its largest singular
    values, which is the closest matrix of that rank (Eckart and Young 1936). Averaging A and B themselves would not
    average the products (π-Play eq. 10 averages weights).

    Args:
      teacher: {layer: {linear: {A [in, teacher rank], B [teacher rank, out]}}}, float32.
      student: the same with the student's rank.
      rate: weight of the student, 0 to 1.
    """
    average: Params = {layer: {} for layer in student}
    # The linear layers of one name have one shape in all layers, so one decomposition is compiled for all of them.
    for linear in dict.fromkeys(linear for linears in student.values() for linear in linears):
        layers = [layer for layer in student if linear in student[layer]]
        factors = [(teacher[layer][linear], student[layer][linear]) for layer in layers]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *factors)
        result = jax.lax.map(functools.partial(_average_product, rate), stacked)
        for index, layer in enumerate(layers):
            average[layer][linear] = jax.tree.map(lambda x, i=index: x[i], result)
    return average


def _average_product(rate: float, factors: tuple[Params, Params]) -> Params:
    """Returns the factors of the average of two products, of the teacher's rank."""
    teacher, student = factors
    rank = teacher[A].shape[1]
    left = jnp.concatenate([teacher[A], student[A]], 1)
    right = jnp.concatenate([(1 - rate) * teacher[B], rate * student[B]], 0)
    # left · right = Q_l (R_l R_rᵀ) Q_rᵀ: the singular values of a small matrix instead of one of the kernel's size.
    with jax.default_matmul_precision('highest'):
        left_basis, left_core = jnp.linalg.qr(left)
        right_basis, right_core = jnp.linalg.qr(right.T)
        core = left_core @ right_core.T
        u, singular_values, v_transposed = jnp.linalg.svd(core, full_matrices=False)
        root = jnp.sqrt(singular_values[:rank])
        a = left_basis @ (u[:, :rank] * root)
        b = (root[:, None] * v_transposed[:rank]) @ right_basis.T
    # A kernel that is narrower than the teacher's rank has fewer singular values.
    missing = rank - root.shape[0]
    return {A: jnp.pad(a, ((0, 0), (0, missing))), B: jnp.pad(b, ((0, missing), (0, 0)))}


# Kernels of frozen linear layers and of experts as int8 with a float32 scale per output channel.
#
# A kernel W [in, out] becomes integers Q within ±127 and scales s [out] with W ≈ Q · s: s is the largest magnitude of a
# channel over 127, so that no entry is off by more than s / 2. The product is computed as (x Q) · s. That equals
# x (Q · s), because a scale belongs to a whole column, and rounds less: Q is exact in bfloat16, where Q · s would not
# be, and no dequantised kernel is stored.
#
# Weights with such layers have 'kernel_scale' beside an int8 'kernel', or 'gate_scale' beside 'gate' of experts. Only
# a frozen base under adapters is quantised: gradients reach the inputs of a layer and not its kernel.


# Name of the scales beside their kernel.
KERNEL_SCALE = 'kernel_scale'
_SCALE = '_scale'
# Largest integer. −128 is not used, so that the range is symmetric.
_LARGEST = 127
_LINEAR_KERNEL = re.compile(r'layer_\d+/(\w+/kernel|moe/(gate|up|down))')


def is_quantized(path: str) -> bool:
    """Returns whether the parameter at a path, such as 'layer_0/q/kernel', is one that is quantised."""
    return _LINEAR_KERNEL.fullmatch(path) is not None


def scale_path(path: str) -> str:
    """Returns the path of the scales of the kernel at `path`."""
    return path + _SCALE


def quantize(
    kernel: Float[AnyArray, '*experts in_features out_features'],
) -> tuple[Int8[Array, '*experts in_features out_features'], Float[Array, '*experts out_features']]:
    """Returns (integers, scales) of a kernel, or of those of experts. A channel of zeros has scale 1."""
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), -2)
    scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
    values = jnp.round(kernel / scale[..., None, :])
    # The division may round up to a little more than the largest integer.
    values = jnp.clip(values, -_LARGEST, _LARGEST)
    return values.astype(jnp.int8), scale


@functools.lru_cache
def quantize_program(kernel: Sharding, scale: Sharding):
    """Returns `quantize`, jitted, for results with these shardings."""
    return jax.jit(quantize, out_shardings=(kernel, scale))


def multiply(
    x: Float[Array, 'tokens in_features'],
    kernel: Int8[AnyArray, 'in_features out_features'],
    scale: Float[AnyArray, ' out_features'],
) -> Float[Array, 'tokens out_features']:
    """Returns the product of x and a quantised kernel, in the dtype of x."""
    # Scaled in float32, before the only rounding to the dtype of x.
    y = attention.product('ti,io->to', x, kernel.astype(x.dtype)) * scale
    return y.astype(x.dtype)


def dequantized(params: Params) -> Params:
    """Returns weights with float32 kernels in place of quantised ones; other arrays are shared."""
    result = {}
    for name, value in params.items():
        if isinstance(value, dict):
            value = dequantized(value)
        result[name] = value
    for name in [name for name in result if f'{name}{_SCALE}' in result]:
        scale = result.pop(f'{name}{_SCALE}')
        result[name] = result[name].astype(jnp.float32) * scale[..., None, :]
    return result
