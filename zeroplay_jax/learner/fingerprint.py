"""Computes figures of whole weights: a fingerprint that shows whether they changed, and whether they are finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.transformer import Params


def weights_fingerprint(params: Params, mesh: jax.sharding.Mesh) -> list[int]:
    """Returns the sum of the bit patterns of each array, modulo 2**32: equal weights give equal lists.

    Integer sums do not depend on the order of summation, and therefore not on the layout of the weights.

    Args:
      params: weights on the devices of `mesh`, in float32.
      mesh: mesh of the learner.
    """
    sums = jax.jit(_bit_sums, out_shardings=sharding.replicated(mesh))(params)
    return np.asarray(sums).tolist()


def _bit_sums(params: Params) -> jax.Array:
    sums = []
    for array in jax.tree.leaves(params):
        bits = jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
        sums.append(jnp.sum(bits, dtype=jnp.uint32))
    return jnp.stack(sums)


def weights_are_finite(params: Params) -> bool:
    """Returns whether all numbers of the weights are finite; reads them once, where they are."""
    return bool(_all_finite(params))


@jax.jit
def _all_finite(params: Params) -> jax.Array:
    finite = [jnp.isfinite(array).all() for array in jax.tree.leaves(params)]
    return jnp.stack(finite).all()
