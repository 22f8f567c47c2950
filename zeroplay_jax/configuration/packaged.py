"""The config files that come with the project, from Python. Imports no JAX."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.settings.errors import ConfigError, fail
from zeroplay_jax.settings.paths import CONFIGS


def config(
    name: str = 'drzero', variant: str = '', changes: Mapping[str, Any] | None = None
) -> ConfigDict:
    """Returns the settings of a config file that comes with the project, or the defaults of a recipe.

        config = zp.config('drzero', 'mini', {'solver.batch': 16, 'seed': 1})

    Args:
      name: a file of configs/ without '.py' ('drzero', 'quickstart'), or the import path of a recipe.
      variant: what follows the colon in --config=configs/drzero.py:mini.
      changes: dotted field name → value, or section → dict of the fields of it that change.

    Raises:
      ConfigError: there is no such config, recipe, variant or field, or a value of another type.
    """
    if (CONFIGS / f'{name}.py').is_file():
        module = importlib.import_module(f'zeroplay_jax.configs.{name}')
        settings = _of_variant(name, module.get_config, variant)
    elif variant:
        fix = 'leave it out, or name a file of configs/'
        raise ConfigError(
            f'config: {name!r} is not a file of configs/, so it has no variant {variant!r}; {fix}'
        )
    else:
        settings = _defaults_of_recipe(name)
    if changes is not None and not isinstance(changes, Mapping):
        fix = "give a dict, such as {'solver.batch': 16}"
        raise ConfigError(f'config: changes is a {type(changes).__name__}; {fix}')
    for name in changes or {}:
        # An empty dict has no fields, by which a misspelt section would be noticed.
        fields.check_name(str(name), settings)
    defaults = dict(fields.leaves(settings))
    for field, value in fields.leaves(changes or {}):
        # Checked here, because ml_collections would raise a KeyError without a suggestion.
        fields.check_name(field, settings)
        if field not in defaults:
            fix = f"name one of its fields, such as '{field}.NAME'"
            fail(field, value, 'a section and not a field', fix)
        checked_value = fields.of_type(field, value, defaults[field])
        settings.update_from_flattened_dict({field: checked_value})
    return settings


def _defaults_of_recipe(name: str) -> ConfigDict:
    """Returns the defaults of a recipe; ConfigError, which names the argument, if there is none of this name."""
    try:
        return fields.default_config(name)
    except ConfigError as error:
        reason = str(error).removeprefix(f'config.recipe={name}: ')
        raise ConfigError(f'config: name={name!r}: {reason}') from error


def _of_variant(name: str, get_config: Callable[..., ConfigDict], variant: str) -> ConfigDict:
    """Returns the config of a variant ('' for none) of the file `name`; ConfigError if the file does not have it."""
    # `get_config` of a file without variants takes no argument.
    if not variant:
        return get_config()
    if not inspect.signature(get_config).parameters:
        raise ConfigError(
            f'config: {name} has no variants, so not {variant!r} either; leave it out'
        )
    try:
        return get_config(variant)
    except ValueError as error:
        raise ConfigError(f'config: {name}: {error}') from None
