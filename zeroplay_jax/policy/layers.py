"""The parts of a decoder layer that have weights: linear layers, norms and the embedding."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy import adapters, quantization
from zeroplay_jax.policy.attention import AnyArray


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def look_up(
    table_shape: jax.ShapeDtypeStruct,
    dtype: str,
    table: Float[AnyArray, 'vocab features'],
    tokens: Int[AnyArray, 'batch length'],
) -> Float[Array, 'batch length features']:
    """Returns the rows of an embedding table at `tokens`, in `dtype`; its gradient adds up in the dtype of the table.

    Args:
      table_shape: shape and dtype of the table.
      dtype: of the result.
      table: embedding of every token id.
      tokens: token ids.
    """
    # The table is cast before the lookup: an update may widen a bfloat16 table (learner/role_update.py), and XLA
    # removes both casts only where they are neighbours. The gradient is not that of this order, which would add up the
    # occurrences of a token in bfloat16.
    return table.astype(dtype)[tokens]


def _look_up_forward(table_shape, dtype, table, tokens):
    return look_up(table_shape, dtype, table, tokens), tokens


def _look_up_backward(table_shape, dtype, tokens, gradient):
    def read_rows(table):
        return table[tokens].astype(dtype)

    (table_gradient,) = jax.linear_transpose(read_rows, table_shape)(gradient)
    return table_gradient, None


look_up.defvjp(_look_up_forward, _look_up_backward)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32.

    Attributes:
      eps: added to the mean square.
      offset: added to the scale.
    """

    eps: float
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, '*batch features']) -> Float[Array, '*batch features']:
        features = x.shape[-1]
        initial_scale = nn.initializers.constant(1 - self.offset)
        scale = self.param('scale', initial_scale, (features,))
        # In bfloat16 the mean of the squares would lose most of its digits.
        y = x.astype(jnp.float32)
        mean_square = jnp.mean(y * y, -1, keepdims=True)
        inverse_rms = jax.lax.rsqrt(mean_square + self.eps)
        y = y * inverse_rms
        factor = scale.astype(jnp.float32)
        if self.offset:
            factor = factor + self.offset
        y = y * factor
        return y.astype(x.dtype)


class Linear(nn.Module):
    """Product with a kernel [in, out] and its adapters, if it has any, in the dtype of the activations.

    The kernel may be quantised (policy/quantization.py).
    """

    features: int
    bias: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, '*batch in_features'],
        row_scale: Float[Array, 'rows adapters'] | None = None,
    ) -> Float[Array, '*batch out_features']:
        """Returns the product; `row_scale` is that of policy/adapters.py, None without adapters."""
        in_features = x.shape[-1]
        kernel_shape = (in_features, self.features)
        kernel = self.param('kernel', nn.initializers.lecun_normal(), kernel_shape)
        # Flattened to two dimensions: with two batch dimensions XLA's CPU backend takes three times as long for the
        # gradient of the kernel.
        flat = x.reshape(-1, in_features)
        if self.has_variable('params', quantization.KERNEL_SCALE):
            kernel_scale = self.get_variable('params', quantization.KERNEL_SCALE)
            y = quantization.multiply(flat, kernel, kernel_scale)
        else:
            y = flat @ kernel.astype(x.dtype)
        if row_scale is not None and self.has_variable('params', adapters.A):
            a = self.get_variable('params', adapters.A)
            b = self.get_variable('params', adapters.B)
            y = y + adapters.product(flat, row_scale, a, b)
        batch_shape = x.shape[:-1]
        y = y.reshape(*batch_shape, self.features)
        if self.bias:
            bias_shape = (self.features,)
            bias = self.param('bias', nn.initializers.zeros, bias_shape)
            y = y + bias.astype(x.dtype)
        return y
