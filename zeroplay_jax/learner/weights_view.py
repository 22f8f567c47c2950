"""Weights as samplers read them, and as updates do with `micro.weights=published`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params


def publisher(
    model: ModelConfig, mesh: jax.sharding.Mesh, params: Params
) -> Callable[[Params], Params]:
    """Returns a function from a learner's weights to those that a sampler reads: whole on every data shard.

    If layout and dtype are the same, the function returns the learner's own buffers, which the next update
    invalidates.

    Args:
      model: static shape of the decoder.
      mesh: the learner's mesh.
      params: tree of arrays or of jax.ShapeDtypeStruct.
    """
    view = WeightsView(model, mesh, params)

    def publish(params: Params) -> Params:
        return sharding.sampler_view(view.make(params), mesh)

    return publish


def copy_tree(tree: Params) -> Params:
    """Returns a tree of copies."""
    return jax.tree.map(jnp.copy, tree)


class WeightsView:
    """The weights in the dtype of the activations and whole in every replica: what a sampler reads.

    Attributes:
      shardings: tree of shardings.
    """

    def __init__(self, model: ModelConfig, mesh: jax.sharding.Mesh, params: Params):
        """Args as of `publisher`."""
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
