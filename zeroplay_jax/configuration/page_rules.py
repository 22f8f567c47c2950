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
        without_pages = dict(
            pages=(0,), token_budget=(0,), decode_buckets=((),), attention=('xla', 'used')
        )
        for name, values in without_pages.items():
            if sampler[name] not in values:
                problem = 'a page is as long as a slot'
                fail(f'sampler.{name}', sampler[name], problem, 'set sampler.page, such as 64')
        return
    if sampler.attention == 'used':
        problem = f'sampler.page={sampler.page} is shorter than a slot'
        fix = 'set xla, which reads used pages only, or sampler.page=0'
        fail('sampler.attention', 'used', problem, fix)
    if not sampler.token_budget:
        problem = f'sampler.page={sampler.page} needs steps that prefill and decode'
        fix = f'give the tokens of a step, such as {2 * sampler.slots}, or set sampler.page=0'
        fail('sampler.token_budget', 0, problem, fix)
    # An axis of -1 is resolved later; the sampler checks it then.
    shards = max(math.prod(config.mesh[axis] for axis in sampler_axes(config)), 1)
    _check_buckets(config, shards)
    pages_per_rollout = math.ceil(context / sampler.page)
    needed = pages_per_rollout * shards
    if 0 < sampler.pages < needed:
        problem = f'a rollout of {context} tokens (sampler.context) fills {pages_per_rollout} pages of {sampler.page}'
        fail('sampler.pages', sampler.pages, problem, f'give {needed} or more')


def _check_buckets(config: ConfigDict, shards: int) -> None:
    """Refuses sizes of decode steps that do not ascend, or that no step is smaller than."""
    sampler = config.sampler
    buckets = tuple(sampler.decode_buckets)
    whole_step = sampler.token_budget
    if any(bucket >= whole_step for bucket in buckets):
        problem = f'a whole step has {whole_step} tokens (sampler.token_budget)'
        fail('sampler.decode_buckets', buckets, problem, f'give numbers below {whole_step}')
    if list(buckets) != sorted(set(buckets)):
        fail('sampler.decode_buckets', buckets, 'not ascending', 'give each once, smallest first')
    if any(bucket % shards for bucket in buckets):
        problem = f'cannot be split evenly over {shards} data shards'
        fail('sampler.decode_buckets', buckets, problem, f'give multiples of {shards}')
