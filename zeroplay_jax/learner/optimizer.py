"""The optimisers of the roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.transformer import Params


def matrices(params: Any) -> Any:
    """Returns a tree of bool, True for matrices: weight decay does not apply to norm scales and biases."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def make(role: Any, weight_decay: float | None = None) -> optax.GradientTransformation:
    """Returns global-norm clipping followed by AdamW with linear warm-up to a constant rate.

    Args:
      role: `config.<role>`.
      weight_decay: of AdamW; None: the role's.
    """
    learning_rate = role.learning_rate
    if weight_decay is None:
        weight_decay = role.weight_decay
    if role.warmup_steps:
        # The first of n warm-up steps has rate/n, not 0, and step n has the full rate.
        first_rate = learning_rate / role.warmup_steps
        num_transitions = max(role.warmup_steps - 1, 1)
        learning_rate = optax.linear_schedule(first_rate, learning_rate, num_transitions)
    adamw = optax.adamw(
        learning_rate,
        b1=0.9,
        b2=0.999,
        weight_decay=weight_decay,
        mask=matrices,
    )
    # Clipping comes before AdamW, so that one large gradient does not enter its moments.
    return optax.chain(optax.clip_by_global_norm(role.clip_norm), adamw)


def names_of_roles(roles: Mapping[str, Any], shared: bool) -> dict[str, str]:
    """Returns role → name of its optimiser, which is the name of the role whose config it is built from."""
    if not shared:
        return {name: name for name in roles}
    first_role = next(iter(roles))
    return dict.fromkeys(roles, first_role)


def make_all(
    roles: Mapping[str, Any], names: Mapping[str, str], weight_decay: float | None
) -> dict[str, optax.GradientTransformation]:
    """Returns name → optimiser: roles that share one use the config of the first role.

    Args:
      roles: role name to `config.<role>`.
      names: result of `names_of_roles`.
      weight_decay: as of `make`.
    """
    transforms = {}
    for name in sorted(set(names.values())):
        transforms[name] = make(roles[name], weight_decay)
    return transforms


def state_shardings(
    transforms: Mapping[str, Any], params: Params, mesh: jax.sharding.Mesh
) -> dict[str, Any]:
    """Returns name → tree of shardings of that optimiser's state."""
    shardings = {}
    for name, transform in transforms.items():
        shapes = jax.eval_shape(transform.init, params)
        shardings[name] = sharding.state_shardings(shapes, params, mesh)
    return shardings
