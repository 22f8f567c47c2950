"""Rules about adapters (`policy.adapters`)."""

from __future__ import annotations

import pathlib
import sys

from ml_collections import ConfigDict

from zeroplay_jax.policy import adapter_config
from zeroplay_jax.policy.adapter_config import holds_other_weights
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.adapters import LINEARS, Adapters
from zeroplay_jax.settings.errors import ConfigError, fail
from zeroplay_jax.settings.paths import BUILT_IN_CHECKPOINT
from zeroplay_jax.types import UserError


def check_adapters(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses settings of adapters without a rank, and folders that do not fit the settings."""
    settings = config.policy.adapters
    trained = [role.name for role in recipe.roles(config) if role.is_trained]
    folders = {role: config[role].adapter for role in trained if config[role].adapter}
    for name, section in config.items():
        if name in trained or not isinstance(section, ConfigDict):
            continue
        if section.get('adapter'):
            problem = 'the run does not train this role'
            fail(f'{name}.adapter', section.adapter, problem, "set it to ''")
    if not settings.rank:
        for role, folder in folders.items():
            problem = 'full fine-tuning has no adapters'
            fail(f'{role}.adapter', folder, problem, 'set policy.adapters.rank to its rank')
        if settings.merge:
            problem = 'full fine-tuning has no adapters'
            fix = 'set it to false, or policy.adapters.rank to a rank'
            fail('policy.adapters.merge', True, problem, fix)
        if settings.quantize != 'none':
            problem = 'full fine-tuning has no frozen base'
            fix = "set it to 'none', or policy.adapters.rank to a rank"
            fail('policy.adapters.quantize', settings.quantize, problem, fix)
        defaults = Adapters()
        for name in ('alpha', 'linears', 'weight_decay'):
            if settings[name] != getattr(defaults, name):
                problem = 'full fine-tuning has no adapters'
                fix = 'set policy.adapters.rank to a rank, or take the flag away'
                fail(f'policy.adapters.{name}', settings[name], problem, fix)
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
    for linear in stored.linears:
        if linear not in LINEARS:
            problem = f'it adapts {linear}'
            fix = f'train an adapter of some of {", ".join(LINEARS)}'
            fail(f'{role}.adapter', folder, problem, fix)
    pairs = (
        ('rank', settings.rank, stored.rank),
        ('alpha', settings.alpha, stored.alpha),
        ('linears', tuple(sorted(settings.linears)), stored.linears),
    )
    for name, value, stored_value in pairs:
        if value != stored_value:
            problem = f'the adapter of {role}.adapter={folder} has {stored_value}'
            fail(f'policy.adapters.{name}', value, problem, f'give {stored_value}')
    _check_base(config, role, stored.base)


def _check_base(config: ConfigDict, role: str, stored_base: pathlib.Path) -> None:
    """Raises ConfigError if the adapter of a role was trained over other weights than those of the run."""
    base = pathlib.Path(config.policy.path or BUILT_IN_CHECKPOINT)
    folder = config[role].adapter
    if not base.is_dir():
        # On the Hub or in a bucket, or refused by another rule.
        return
    if not stored_base.is_dir():
        print(
            f'warning: the adapter of config.{role}.adapter={folder} was trained over {stored_base}, which is not '
            f'here; it is used over {base}',
            file=sys.stderr,
        )
    elif holds_other_weights(stored_base, base):
        problem = f'its adapter was trained over the weights in {stored_base}'
        fail(f'{role}.adapter', folder, problem, 'set policy.path to that folder')
