"""Helpers of the losses: shape checks, masks that stop NaN, sums over the rollouts of a packed row.

Letters: B packed rows, T positions of a row. Several rollouts share a row; `segment` tells them apart.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from zeroplay_jax.objectives.types import AnyArray, DevicePerToken, Segments

# exp(20) is 5e8: far beyond any useful ratio, and still finite when multiplied by an advantage.
_LOG_RATIO_LIMIT = 20.0


def check_shapes(name: str, *arrays: Shaped[AnyArray, '*_']) -> None:
    """Checks that all arrays have one shape [B, T].

    Args:
      name: the calling function, for the error text.
      *arrays: the mask first.

    Raises:
      ValueError: an array is not two-dimensional, or shapes differ.
    """
    shapes = [jnp.shape(x) for x in arrays]
    two_dimensional = len(shapes[0]) == 2
    all_equal = len(set(shapes)) == 1
    if not (two_dimensional and all_equal):
        raise ValueError(
            f'{name}: every array must be [B, T] of one shape, got {shapes} (mask first)'
        )


def masked(
    name: str, mask: Shaped[AnyArray, '*_'], *arrays: Shaped[AnyArray, '*_']
) -> tuple[Shaped[Array, '*_'], ...]:
    """Returns the mask as bool and the arrays as float32, set to 0 where masked.

    Args:
      name: the calling function, for the error text.
      mask: [B, T], True on tokens to learn from.
      *arrays: [B, T], any dtype.

    Returns:
      (mask, *arrays), each [B, T].

    Raises:
      ValueError: shapes differ.
    """
    check_shapes(name, mask, *arrays)
    mask = jnp.asarray(mask).astype(bool)
    # Inputs are set to 0 before any arithmetic. Masking the result alone is not enough: in the backward pass the zero
    # cotangent of a masked position is multiplied by the derivative there, and 0 · NaN is NaN.
    zeroed = []
    for array in arrays:
        values = jnp.asarray(array).astype(jnp.float32)
        zeroed.append(jnp.where(mask, values, 0.0))
    return mask, *zeroed


def log_ratio(
    logp: Float[AnyArray, '*shape'], old_logp: Float[AnyArray, '*shape']
) -> Float[Array, '*shape']:
    """Returns logp − old_logp, clipped to ±20."""
    return jnp.clip(logp - old_logp, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def total(
    values: Shaped[AnyArray, '*shape'], mask: Bool[AnyArray, '*shape']
) -> tuple[Float[Array, ''], Float[Array, '']]:
    """Returns a statistic: the (sum, count) of `values` over the unmasked positions, without gradient."""
    values = jax.lax.stop_gradient(values)
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32)


def segment_sum(
    values: Shaped[AnyArray, 'batch length'], segment: Segments
) -> Float[Array, 'batch segments']:
    """Sums values within each segment of each row.

    Args:
      values: [B, T], float or bool.
      segment: int [B, T], 0 to T.

    Returns:
      float32 [B, T + 1]; entry s of a row is the sum over its segment s.
    """
    # A row of T positions holds at most T rollouts, and 0 marks empty positions: T + 1 sums, a static shape.
    num_segments = values.shape[1] + 1

    def sum_row(row_values, row_segment):
        return jax.ops.segment_sum(row_values, row_segment, num_segments=num_segments)

    return jax.vmap(sum_row)(values.astype(jnp.float32), segment)


def spread(sums: Float[Array, 'batch segments'], segment: Segments) -> DevicePerToken:
    """Returns for every position the entry of its segment in `sums` [B, T + 1]; the inverse of `segment_sum`."""
    return jnp.take_along_axis(sums, segment, axis=1)
