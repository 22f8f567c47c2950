"""Kernels of frozen linear layers as int8 with a float32 scale per output channel.

A kernel W [in, out] becomes integers Q within ±127 and scales s [out] with W ≈ Q · s: s is the largest magnitude of a
channel over 127, so that no entry is off by more than s / 2. The product is computed as (x Q) · s. That equals
x (Q · s), because a scale belongs to a whole column, and rounds less: Q is exact in bfloat16, where Q · s would not be,
and no dequantised kernel is stored.

Weights with such layers have 'kernel_scale' beside an int8 'kernel'. Only a frozen base under adapters is quantised:
gradients reach the inputs of a layer and not its kernel.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int8

from zeroplay_jax.policy.attention import AnyArray, product

# Nested dict of arrays, as in policy/decoder.py.
Params = dict[str, Any]

# Name of the scales beside their kernel.
KERNEL_SCALE = 'kernel_scale'
# Largest integer. −128 is not used, so that the range is symmetric.
_LARGEST = 127
_LINEAR_KERNEL = re.compile(r'layer_\d+/\w+/kernel')


def is_quantized(path: str) -> bool:
    """Returns whether the parameter at a path, such as 'layer_0/q/kernel', is one that is quantised."""
    return _LINEAR_KERNEL.fullmatch(path) is not None


def scale_path(path: str) -> str:
    """Returns the path of the scales of the kernel at `path`."""
    return path.removesuffix('kernel') + KERNEL_SCALE


def quantize(
    kernel: Float[AnyArray, 'in_features out_features'],
) -> tuple[Int8[Array, 'in_features out_features'], Float[Array, ' out_features']]:
    """Returns (integers, scales) of a kernel. A channel of zeros has scale 1."""
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), 0)
    scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
    values = jnp.round(kernel / scale)
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
    y = product('ti,io->to', x, kernel.astype(x.dtype)) * scale
    return y.astype(x.dtype)


def dequantized(params: Params) -> Params:
    """Returns weights with float32 kernels in place of quantised ones; other arrays are shared."""
    result = {}
    for name, value in params.items():
        if isinstance(value, dict):
            value = dequantized(value)
        result[name] = value
    if KERNEL_SCALE in result:
        scale = result.pop(KERNEL_SCALE)
        result['kernel'] = result['kernel'].astype(jnp.float32) * scale
    return result
