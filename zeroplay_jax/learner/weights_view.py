"""Weights as samplers and updates read them: casts of the trained ones, the frozen base of adapters, fingerprints."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from zeroplay_jax.policy import adapters, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params


@dataclasses.dataclass(frozen=True)
class FrozenBase:
    """The weights under the adapters of all roles (policy/adapters.py), which no update changes.

    Attributes:
      params: matrices in the dtype of the activations, whole in every replica, with the scale of the adapters
        (`adapters.with_scale`).
      mesh: mesh of the learners.
    """

    params: Params
    mesh: jax.sharding.Mesh

    @classmethod
    def of(cls, params: Params, mesh: jax.sharding.Mesh, scale: float) -> FrozenBase:
        """Returns the base of loaded weights.

        Args:
          params: as in the attributes, without the scale.
          mesh: mesh of the learners.
          scale: alpha / rank of the adapters.
        """
        scales = jax.device_put(np.full(1, scale, np.float32), sharding.replicated(mesh))
        return cls(params | {adapters.SCALE: scales}, mesh)

    @functools.cached_property
    def sampler_params(self) -> Params:
        """The weights of this process's replicas, whole on every data shard."""
        return sharding.sampler_view(self.params, self.mesh)

    @property
    def shardings(self) -> Params:
        """Tree of the shardings of `params`."""
        return sharding.parameter_shardings(self.params, self.mesh)


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


def published(model: ModelConfig, mesh: jax.sharding.Mesh, params: Params) -> Params:
    """Returns weights as a sampler reads them, whole on every data shard; the same buffers where nothing changes.

    Args:
      model: static shape of the decoder.
      mesh: mesh of the weights.
      params: weights as of a learner.
    """
    return sharding.sampler_view(WeightsView(model, mesh, params).make(params), mesh)


def copy_tree(tree: Params) -> Params:
    """Returns a tree of copies."""
    return jax.tree.map(jnp.copy, tree)


class WeightsView:
    """What a sampler reads: the weights whole in every replica, matrices in the dtype of the activations.

    Attributes:
      shardings: tree of shardings.
    """

    def __init__(self, model: ModelConfig, mesh: jax.sharding.Mesh, params: Params):
        """Args as of `published`; of `params` shapes suffice."""
        training_shardings = sharding.parameter_shardings(params, mesh, training_layout=True)
        self.shardings = sharding.parameter_shardings(params, mesh, training_layout=False)
        self._publish = functools.partial(transformer.published, model)
        self._convert = jax.jit(self._publish, out_shardings=self.shardings)
        same_dtype = all(x.dtype == model.dtype for x in jax.tree.leaves(params))
        # With one replica and equal dtypes the sampler can read the learner's buffers themselves.
        self._needs_conversion = not same_dtype or training_shardings != self.shardings

    def shapes(self, params: Params) -> Params:
        """Returns the view of a learner's weights as shapes (jax.ShapeDtypeStruct)."""
        return jax.eval_shape(self._publish, params)

    def make(self, params: Params) -> Params:
        """Returns the view of a learner's weights, which are the weights themselves if layout and dtype are equal."""
        return self._convert(params) if self._needs_conversion else params
