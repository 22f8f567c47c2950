"""The optimisers of the roles."""

from __future__ import annotations

import functools
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
    weight_decay = 0.0 if of_adapters else role.weight_decay
    return _make(role.learning_rate, role.warmup_steps, role.clip_norm, weight_decay)


@functools.lru_cache
def _make(
    learning_rate: float, warmup_steps: int, clip_norm: float, weight_decay: float
) -> optax.GradientTransformation:
    """Returns the same object for equal settings: roles with these share the program of an optimiser step."""
    rate: optax.ScalarOrSchedule = learning_rate
    if warmup_steps:
        # The first of n warm-up steps has rate/n, not 0, and step n has the full rate.
        first_rate = learning_rate / warmup_steps
        rate = optax.linear_schedule(first_rate, learning_rate, max(warmup_steps - 1, 1))
    adamw = optax.adamw(rate, b1=0.9, b2=0.999, weight_decay=weight_decay, mask=matrices)
    # Clipping comes before AdamW, so that one large gradient does not enter its moments.
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw)


def make_all(
    roles: Mapping[str, Any], shared: bool, of_adapters: bool
) -> tuple[dict[str, str], dict[str, optax.GradientTransformation]]:
    """Returns role → name of its optimiser, that of the role whose config it is built from; and name → optimiser."""
    first_role = next(iter(roles))
    names = {role: first_role if shared else role for role in roles}
    return names, {name: make(roles[name], of_adapters) for name in sorted(set(names.values()))}
