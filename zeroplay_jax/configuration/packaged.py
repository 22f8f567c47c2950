"""The config files that come with the project, from Python. Imports no JAX."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.settings.paths import CONFIGS


def config(
    name: str = 'drzero', variant: str = '', changes: Mapping[str, Any] | None = None
) -> ConfigDict:
    """Returns the settings of a config file that comes with the project, or the defaults of a recipe.

        config = zp.config('drzero', 'mini', {'solver.batch': 16, 'seed': 1})

    Args:
      name: a file of configs/ without '.py' ('drzero', 'quickstart'), or the import path of a recipe.
      variant: what follows the colon in --config=configs/drzero.py:mini.
      changes: dotted field name → value.

    Raises:
      ConfigError: there is no such config or recipe, or no such field.
    """
    if (CONFIGS / f'{name}.py').is_file():
        module = importlib.import_module(f'zeroplay_jax.configs.{name}')
        # Not every file has variants, and those without take no argument.
        settings = module.get_config(variant) if variant else module.get_config()
    else:
        settings = fields.default_config(name)
    changes = dict(changes or {})
    # ml_collections would raise a KeyError without the field that was probably meant.
    for field in changes:
        fields.check_name(field, settings)
    settings.update_from_flattened_dict(changes)
    return settings
