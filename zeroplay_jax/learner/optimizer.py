"""The optimisers of the roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax


def matrices(params: Any) -> Any:
    """Returns a tree of bool, True for matrices: weight decay does not apply to norm scales and biases."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def make(role: Any, of_adapters: bool = False) -> optax.GradientTransformation:
    """Returns global-norm clipping followed by AdamW with linear warm-up to a constant rate.

    Args:
      role: `config.<role>`.
      of_adapters: whether it trains adapters, which do not decay: smaller A and B pull the policy to the base.
    """
    learning_rate = role.learning_rate
    if role.warmup_steps:
        # The first of n warm-up steps has rate/n, not 0, and step n has the full rate.
        first_rate = learning_rate / role.warmup_steps
        num_transitions = max(role.warmup_steps - 1, 1)
        learning_rate = optax.linear_schedule(first_rate, learning_rate, num_transitions)
    adamw = optax.adamw(
        learning_rate,
        b1=0.9,
        b2=0.999,
        weight_decay=0.0 if of_adapters else role.weight_decay,
        mask=matrices,
    )
    # Clipping comes before AdamW, so that one large gradient does not enter its moments.
    return optax.chain(optax.clip_by_global_norm(role.clip_norm), adamw)


def make_all(
    roles: Mapping[str, Any], shared: bool, of_adapters: bool
) -> tuple[dict[str, str], dict[str, optax.GradientTransformation]]:
    """Returns role → name of its optimiser, that of the role whose config it is built from; and name → optimiser."""
    first_role = next(iter(roles))
    names = {role: first_role if shared else role for role in roles}
    return names, {name: make(roles[name], of_adapters) for name in sorted(set(names.values()))}
