"""Rules about rollouts that begin before the step before them has ended (`rollout.ahead`)."""

from __future__ import annotations

from ml_collections import ConfigDict

from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import fail


def check_ahead(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses settings that cannot work with rollouts in progress during an update, and losses that ignore age."""
    if not config.rollout.ahead:
        return
    if config.offload:
        problem = 'rollouts are in progress during an update, which frees their cache'
        fail('offload', True, problem, 'set it to false, or rollout.ahead to 0')
    for specification in recipe.roles(config):
        if not specification.is_trained:
            continue
        role = specification.name
        settings = config[role]
        # With old_logp=sampler the ratio would contain the age of the rollouts: the clip range would be spent on it,
        # and losses without a ratio would ignore it. With old_logp=trainer the ratio begins at 1, and the truncated
        # importance weight corrects the age alone.
        if settings.old_logp != 'trainer' or not settings.tis_cap:
            problem = f'rollouts of older weights (rollout.ahead=1) need {role}.old_logp=trainer'
            fix = f'give a cap such as 2.0 and set {role}.old_logp to trainer'
            fail(f'{role}.tis_cap', settings.tis_cap, problem, fix)
