"""Rules about value networks (`<role>.baseline=value`, section `value_network`)."""

from __future__ import annotations

from ml_collections import ConfigDict

from zeroplay_jax.configuration.loss_properties import is_per_token
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import fail
from zeroplay_jax.settings.schema import ValueNetwork


def check_value_networks(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses settings that do not go with a value network, and a section `value_network` that nothing reads."""
    trained = [role.name for role in recipe.roles(config) if role.is_trained]
    roles = [role for role in trained if config[role].baseline == 'value']
    for role in roles:
        settings = config[role]
        if settings.scale == 'std':
            problem = 'a value network compares tokens, not the rollouts of a group'
            fail(f'{role}.scale', 'std', problem, 'give batch, as PPO in verl, or none')
        if not is_per_token(settings.loss):
            problem = (
                'a ratio per rollout has one advantage, and a value network gives one per token'
            )
            fail(f'{role}.loss', settings.loss, problem, 'take token_pg')
        if config.policy.adapters.rank:
            problem = 'a value network has whole weights, and the run trains adapters'
            fail(f'{role}.baseline', 'value', problem, 'take mean, or policy.adapters.rank=0')
    settings = config.value_network
    if roles and config.rollout.drop_thinking and settings.discount * settings.gae_lambda < 1:
        name = 'discount' if settings.discount < 1 else 'gae_lambda'
        problem = 'with rollout.drop_thinking every context of a rollout ends with its reward'
        fix = 'give 1, or rollout.drop_thinking=false'
        fail(f'value_network.{name}', settings[name], problem, fix)
    if roles:
        return
    for name, default in ValueNetwork().model_dump().items():
        if config.value_network[name] != default:
            problem = 'no trained role has a value network'
            fail(
                f'value_network.{name}',
                config.value_network[name],
                problem,
                'set baseline=value of one',
            )
