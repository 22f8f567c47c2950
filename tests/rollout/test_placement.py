"""Which rollouts get slots and pages: requests fill the slots of their shards, none is evicted in vain."""

import dataclasses

import numpy as np
import pytest
from request_cases import CONFIG, make_env, requests

from zeroplay_jax.rollout.placement import Placement
from zeroplay_jax.rollout.requests import Prefix, Rollout


def make_placement(shards=1, **fields):
    config = dataclasses.replace(CONFIG, **fields)
    table = np.zeros((config.slots, config.pages_per_slot), int) if config.is_paged else None
    return Placement(config, shards, table, np.zeros(config.slots, int))


def start(placement, request):
    """Gives slots to the samples of a request, as many as there are; returns whether some shard takes it."""
    prefix = Prefix(request)
    shard = placement.shard_for(prefix, set())
    if shard is None:
        return False
    prefix.shard = shard.number
    prefix.waiting.extend(Rollout(prefix, sample, None) for sample in range(request.samples))
    placement.open_prefixes.append(prefix)
    placement.start(prefix)
    prefix.is_cached = True
    while prefix.waiting and placement.fork(prefix):
        pass
    return True


@pytest.mark.parametrize('pages', [{}, dict(page=16, token_budget=96)])
def test_requests_with_more_samples_than_free_slots_of_a_shard_fill_them(codec, pages):
    """Eight shards of 12 slots and requests of 5 samples: a third sample of slots must not stay empty."""
    placement = make_placement(8, slots=96, **pages)
    taken = [start(placement, request) for request in requests(make_env(codec), 30, 5)]
    assert sum(1 for _ in placement.active()) == 96 and not all(taken)


def test_no_rollout_is_evicted_in_vain(codec):
    """The next turn of the second rollout needs more pages than the youngest one has, until the oldest has ended."""
    placement = make_placement(slots=3, page=16, pages=7, token_budget=3)
    for request in requests(make_env(codec), 3, 1):
        start(placement, dataclasses.replace(request, prompt=request.prompt[:4]))
    placement.close_served()
    oldest, second, youngest = placement.active()
    placement.release_turn(second)
    placement.release_turn(youngest)
    second.tokens += [0] * 80
    second.expect_turn()
    assert not placement.begin_turn(second)
    assert youngest.pages.pages and not placement.stats['evictions']
    placement.close(oldest)
    assert placement.begin_turn(second)
