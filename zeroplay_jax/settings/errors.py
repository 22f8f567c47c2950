"""Errors about a config: one line with the field, its value, the problem and the fix."""

from __future__ import annotations

from typing import Any, NoReturn

from zeroplay_jax.types import UserError


class ConfigError(UserError):
    """A config that cannot run."""


def fail(field: str, value: Any, problem: str, fix: str) -> NoReturn:
    """Raises ConfigError for `config.{field}`."""
    # Texts are written without quotes, as on a command line; an empty one would be invisible and keeps them.
    value_text = repr(value)
    if isinstance(value, str) and value:
        value_text = value
    raise ConfigError(f'config.{field}={value_text}: {problem}; {fix}')
