"""Rules about where the metrics of a run go."""

from __future__ import annotations

import importlib.util

from ml_collections import ConfigDict

from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import fail

# TensorBoard is a requirement of this package.
_OPTIONAL = ('wandb', 'mlflow')


def check_writers(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a writer whose package is not installed."""
    names = tuple(config.log.writers)
    for name in names:
        if name in _OPTIONAL and not _is_installed(name):
            fix = f'install it with .venv/bin/pip install {name}, or leave it out'
            fail('log.writers', names, f'the package {name} is not installed', fix)


def _is_installed(name: str) -> bool:
    # wandb leaves a folder of its name in the current one, which Python takes for a package without files.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
