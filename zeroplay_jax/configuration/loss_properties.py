"""Properties of losses that a config is checked against."""

from __future__ import annotations

from zeroplay_jax.settings.errors import ConfigError

# Properties of the built-in losses, as objectives/losses.py states them: a check imports no JAX.
LOSSES_WITHOUT_RATIO = ('reinforce',)
LOSSES_PER_SEQUENCE = ('sequence_pg', 'geometric_pg')


def uses_ratio(loss: str) -> bool:
    """Returns whether a loss has an importance ratio."""
    if ':' in loss:
        return imported_loss(loss).uses_ratio
    return loss not in LOSSES_WITHOUT_RATIO


def is_per_token(loss: str) -> bool:
    """Returns whether the ratio of a loss belongs to a token and not to a sequence."""
    if ':' in loss:
        return imported_loss(loss).per_token
    return loss not in LOSSES_PER_SEQUENCE


def imported_loss(name: str):
    """Returns a loss of another package. Imports JAX, which built-in losses do not need here."""
    from zeroplay_jax.objectives import losses

    try:
        return losses.resolve_loss(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
