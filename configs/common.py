"""All fields of a run with their defaults. A recipe's config starts from here and changes a few.

Flags override any field: `--config.solver.learning_rate=1e-4`. Fields, bounds and meaning are
defined in zeroplay_jax/settings/schema.py and listed in docs/configuration.md; a field that is not
there is an error.
"""

from ml_collections import ConfigDict

from zeroplay_jax.configuration.fields import add_missing_sections as add_sections
from zeroplay_jax.configuration.fields import default_config

__all__ = ['add_sections', 'get_config']


def get_config(recipe: str = 'drzero') -> ConfigDict:
    """Defaults, with the sections of `recipe`: a built-in name, or the import path of a module."""
    return default_config(recipe)
