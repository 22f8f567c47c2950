"""Files and folders that a config names in a bucket (gs://bucket/path), or in the package, get local paths."""

from __future__ import annotations

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.retrieval import object_cache
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import ConfigError


def fetch_addresses(
    config: ConfigDict, recipe: type[Recipe] | None = None, section_name: str = ''
) -> None:
    """Replaces addresses in a bucket by the paths of their local copies, in place; downloads what is outdated.

    Paths of what comes with the package, such as zeroplay_jax/mini/clean, become those of this installation.

    A rule like the others, so that the rules after it read local files; `recipe` is not used.

    Args:
      config: is changed.
      recipe: not used.
      section_name: only its fields; '': all.

    Raises:
      ConfigError: one line; what could not be fetched.
    """
    for name, value in fields.leaves(config):
        if not isinstance(value, str):
            continue
        *sections, field = name.split('.')
        if section_name and sections[:1] != [section_name]:
            continue
        section = config
        for part in sections:
            section = section[part]
        try:
            section[field] = object_cache.fetch(value)
        except RetrievalError as error:
            raise ConfigError(f'config.{name}: {error}') from None


def fetch_file(path: str) -> str:
    """Returns the path of the local copy of a question set in a bucket; any other text as it is.

    Raises:
      ConfigError: one line; it could not be fetched.
    """
    try:
        return object_cache.fetch(path)
    except RetrievalError as error:
        raise ConfigError(f'--sets: {error}') from None
