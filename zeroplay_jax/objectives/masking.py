"""What the losses share: shape checks, masks that stop NaN, sums over the rollouts of a packed row.

Letters: B packed rows, T places of a row. Several rollouts share a row, told apart by `segment`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Stats = dict[str, tuple[jax.Array, jax.Array]]

# exp(20) is 5e8: far beyond any useful ratio, and finite when multiplied by an advantage.
_LOG_RATIO_LIMIT = 20.0


def check_shapes(name: str, *arrays: jax.Array) -> None:
    """Raises ValueError unless all arrays (the mask first) are [B, T] of one shape."""
    shapes = [jnp.shape(x) for x in arrays]
    if len(shapes[0]) != 2 or len(set(shapes)) != 1:
        raise ValueError(
            f'{name}: every array must be [B, T] of one shape, got {shapes} (mask first)'
        )


def masked(name: str, mask: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The mask as bool and the arrays as float32, all [B, T], with 0 where masked.

    Zeroed before any arithmetic, not after: NaN times a zero cotangent is NaN again.
    """
    check_shapes(name, mask, *arrays)
    mask = jnp.asarray(mask).astype(bool)
    return mask, *(jnp.where(mask, jnp.asarray(x).astype(jnp.float32), 0.0) for x in arrays)


def log_ratio(logp: jax.Array, old_logp: jax.Array) -> jax.Array:
    """logp − old_logp, held within ±20."""
    return jnp.clip(logp - old_logp, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def total(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A statistic: (sum, count) over the unmasked places, float32 scalars without gradient."""
    values = jax.lax.stop_gradient(values)
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32)


def segment_sum(values: jax.Array, segment: jax.Array) -> jax.Array:
    """Sums of values [B, T] by segment [B, T]: float32 [B, T + 1], the sum of segment s of a row at s."""
    count = values.shape[1] + 1
    add = lambda row, owner: jax.ops.segment_sum(row, owner, num_segments=count)
    return jax.vmap(add)(values.astype(jnp.float32), segment)


def spread(sums: jax.Array, segment: jax.Array) -> jax.Array:
    """Gives every place [B, T] the number of its segment, from [B, T + 1]."""
    return jnp.take_along_axis(sums, segment, axis=1)
