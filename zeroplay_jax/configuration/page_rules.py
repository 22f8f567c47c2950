"""Rules about the slots and pages of the sampler's cache."""

from __future__ import annotations

import math

from ml_collections import ConfigDict

from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import fail


def sampler_axes(config: ConfigDict) -> tuple[str, ...]:
    """Returns the mesh axes over which a process splits its slots and pages."""
    # Each of several processes samples on its own replicas; `Sampler` checks their number.
    return ('replica', 'fsdp') if config.distributed.mode == 'off' else ('fsdp',)


def check_pages(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses pages that do not fit a slot, a cache that is too small for one rollout, and settings that need pages."""
    sampler = config.sampler
    context = sampler.context
    if sampler.page > context:
        fix = f'give at most {context} (sampler.context)'
        fail('sampler.page', sampler.page, 'longer than a slot', fix)
    if not 0 < sampler.page < context:
        for name in ('pages', 'token_budget'):
            if sampler[name]:
                problem = 'a page is as long as a slot'
                fail(f'sampler.{name}', sampler[name], problem, 'set sampler.page, such as 64')
        return
    pages_per_rollout = math.ceil(context / sampler.page)
    # An axis of -1 is resolved later; the sampler checks it then.
    shards = max(math.prod(config.mesh[axis] for axis in sampler_axes(config)), 1)
    needed = pages_per_rollout * shards
    if 0 < sampler.pages < needed:
        problem = f'a rollout of {context} tokens (sampler.context) fills {pages_per_rollout} pages of {sampler.page}'
        fail('sampler.pages', sampler.pages, problem, f'give {needed} or more')
