"""The optimiser of a role, from its config."""

from __future__ import annotations

import jax
import optax


def matrices(params):
    """Tree of bool: weight decay is for matrices, not for norms and biases."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def make(role) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW with linear warm-up to a constant rate (fields of `config.<role>`)."""
    rate = role.learning_rate
    if role.warmup_steps:
        rate = optax.linear_schedule(rate / role.warmup_steps, rate, max(role.warmup_steps - 1, 1))
    return optax.chain(
        optax.clip_by_global_norm(role.clip_norm),
        optax.adamw(
            rate, b1=role.beta1, b2=role.beta2, weight_decay=role.weight_decay, mask=matrices
        ),
    )
