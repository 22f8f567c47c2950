"""Sets fields of a config by flags --config.FIELD=VALUE, for commands that take their config from a policy's run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.settings.errors import ConfigError

PREFIX = '--config.'


def set_fields(config: ConfigDict, assignments: Sequence[str]) -> None:
    """Sets fields in place and checks names, types and bounds of all of them.

    Args:
      config: a whole config.
      assignments: flags such as '--config.rollout.max_turns=3'.

    Raises:
      ConfigError: one line; an unknown field, or a value of a wrong type or out of bounds.
    """
    if not assignments:
        return
    for assignment in assignments:
        assign(config, assignment)
    fields.check_asked(config)


def assign(config: ConfigDict, assignment: str) -> None:
    """Sets one field in place; checks its name and type, and no bounds.

    Raises:
      ConfigError: one line; an unknown field, or a value of another type.
    """
    name, equals, text = assignment.removeprefix(PREFIX).partition('=')
    if not equals:
        raise ConfigError(f'{assignment}: has no value; give {PREFIX}{name}=VALUE')
    fields.check_name(name, config)
    *sections, field = name.split('.')
    section = config
    for section_name in sections:
        section = section[section_name]
    section[field] = _value(name, text, section[field])


def _value(name: str, text: str, default: Any) -> Any:
    """Returns the value of a flag with the type of the field's value."""
    if isinstance(default, ConfigDict):
        raise ConfigError(
            f'config.{name}: a section; set one of its fields, such as {next(iter(default))}'
        )
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {'true': True, 'false': False}.get(text.lower(), text)
    return fields.of_type(name, value, default)
