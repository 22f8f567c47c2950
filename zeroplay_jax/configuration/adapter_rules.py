"""Rules about adapters (`policy.adapters`)."""

from __future__ import annotations

from ml_collections import ConfigDict

from zeroplay_jax.policy import adapter_config
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import ConfigError, fail
from zeroplay_jax.types import UserError


def check_adapters(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses settings of adapters without a rank, and folders that do not fit the settings."""
    settings = config.policy.adapters
    trained = [role.name for role in recipe.roles(config) if role.is_trained]
    folders = {role: config[role].adapter for role in trained if config[role].adapter}
    if not settings.rank:
        for role, folder in folders.items():
            problem = 'full fine-tuning has no adapters'
            fail(f'{role}.adapter', folder, problem, 'set policy.adapters.rank to its rank')
        if settings.merge:
            problem = 'full fine-tuning has no adapters'
            fail('policy.adapters.merge', True, problem, 'set it to false')
        if settings.quantize != 'none':
            problem = 'full fine-tuning has no frozen base'
            fix = "set it to 'none', or policy.adapters.rank to a rank"
            fail('policy.adapters.quantize', settings.quantize, problem, fix)
        return
    if config.weights == 'shared' and len({config[role].adapter for role in trained}) > 1:
        role = next(iter(folders))
        problem = 'the roles share their weights (weights=shared)'
        fail(f'{role}.adapter', folders[role], problem, 'give all of them the same folder')
    for role, folder in folders.items():
        _check_folder(config, role, folder)


def _check_folder(config: ConfigDict, role: str, folder: str) -> None:
    """Raises ConfigError unless the adapter in a folder has the rank, alpha and layers of the config."""
    settings = config.policy.adapters
    try:
        stored = adapter_config.read(folder)
    except UserError as error:
        raise ConfigError(f'config.{role}.adapter: {error}') from None
    pairs = (
        ('rank', settings.rank, stored.rank),
        ('alpha', settings.alpha, stored.alpha),
        ('linears', tuple(sorted(settings.linears)), stored.linears),
    )
    for name, value, stored_value in pairs:
        if value != stored_value:
            problem = f'the adapter of {role}.adapter={folder} has {stored_value}'
            fail(f'policy.adapters.{name}', value, problem, f'give {stored_value}')
