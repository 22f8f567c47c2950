"""Reads the config.json that a run leaves in its folder."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.settings.errors import ConfigError
from zeroplay_jax.settings.paths import built_in_path
from zeroplay_jax.settings.renamed import REMOVED_FIELDS, with_new_names

# Sections that distinguish a run's config.json from other files of that name.
_REQUIRED = {'recipe', 'rollout', 'tools', 'retrieval'}


def read_stored_config(path: pathlib.Path) -> ConfigDict | None:
    """Returns the config in the config.json of a run; None if there is no such file or it is not that of a run.

    Fields that are missing in the file get their defaults. Built-in checkpoints have their paths in this clone; names
    on the Hub and addresses in a bucket stay as they are.

    Raises:
      ConfigError: one line; a field that this version does not have, with its new name if it was
        renamed, or a value of another type.
    """
    try:
        stored = with_new_names(json_text.read_object(path, float))
    except (OSError, ValueError):
        return None
    if not stored.keys() >= _REQUIRED:
        return None
    # The values are written into the defaults, so that fields added since then have a value.
    try:
        config = fields.default_config(stored['recipe'])
        for name, value in _leaves(stored):
            # What is gone concerned training, and the policy of such a run can still be asked and exported.
            if name in REMOVED_FIELDS:
                continue
            fields.check_name(name, config)
            _set(config, name, value)
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{path}: not a config of this version: {error}; correct it, or copy the policy elsewhere'
        ) from None
    return config


def _leaves(stored: Mapping[str, Any], prefix: str = '') -> list[tuple[str, Any]]:
    """Returns all values with their dotted names."""
    leaves: list[tuple[str, Any]] = []
    for name, value in stored.items():
        if isinstance(value, dict):
            leaves += _leaves(value, f'{prefix}{name}.')
        else:
            leaves.append((f'{prefix}{name}', value))
    return leaves


def _set(config: ConfigDict, name: str, value: Any) -> None:
    """Sets the field with a dotted name."""
    *sections, field = name.split('.')
    section = config
    for section_name in sections:
        section = section[section_name]
    # Built-in checkpoints are stored by name.
    if isinstance(value, str):
        value = built_in_path(value)
    # Lists of a config are tuples, which JSON does not have.
    if isinstance(value, list):
        value = tuple(value)
    section[field] = value
