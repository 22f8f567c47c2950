"""The frozen weights under the adapters of all roles (policy/adapters.py), as learners and samplers read them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from zeroplay_jax.learner.weights_view import copy_tree
from zeroplay_jax.objectives import distillation
from zeroplay_jax.policy import adapters, sharding
from zeroplay_jax.policy.transformer import Params


@dataclasses.dataclass(frozen=True)
class FrozenBase:
    """Weights that no update changes, shared by all learners and samplers of a run.

    Attributes:
      params: matrices in the dtype of the activations, whole in every replica, with the scale of the adapters
        (`adapters.with_scale`).
      mesh: mesh of the learners.
      weight_decay: of the adapters, instead of the roles': it decays A and B, which pulls the policy to the base.
    """

    params: Params
    mesh: jax.sharding.Mesh
    weight_decay: float = 0.0

    @classmethod
    def of(
        cls, params: Params, mesh: jax.sharding.Mesh, scale: float, weight_decay: float = 0.0
    ) -> FrozenBase:
        """Returns the base of loaded weights.

        Args:
          params: as in the attributes, without the scale.
          mesh: mesh of the learners.
          scale: alpha / rank of the adapters.
          weight_decay: as in the attributes.
        """
        scales = jax.device_put(np.full(1, scale, np.float32), sharding.replicated(mesh))
        return cls(params | {adapters.SCALE: scales}, mesh, weight_decay)

    @functools.cached_property
    def sampler_params(self) -> Params:
        """The weights of this process's replicas, whole on every data shard."""
        return sharding.sampler_view(self.params, self.mesh)

    @property
    def shardings(self) -> Params:
        """Tree of the shardings of `params`."""
        return sharding.parameter_shardings(self.params, self.mesh)


def initial_teacher(base: FrozenBase | None) -> Callable[[Params], Params]:
    """Returns the function from a learner's initial weights to those of its teacher."""
    if base is not None:
        # An average of products has a higher rank than the adapters: twice theirs is kept of it.
        return adapters.widened
    return copy_tree


def teacher_average(base: FrozenBase | None) -> Callable[..., Params]:
    """Returns the function (teacher, student, rate) → the teacher's next weights (π-Play eq. 10)."""
    if base is not None:
        return adapters.average_products
    return distillation.ema
