"""The host side of slots and pages on a long workload: nobody waits for ever, nothing is lost, little is idle."""

import asyncio
import math

import numpy as np
import pytest
from counted_device import CountedDevice, CountedRole

from zeroplay_jax.rollout.placement import Placement
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.sampler import SamplerConfig
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.weights import WeightStore

# Pages of 64 in the memory of eight slots of 4,096 + 256 tokens.
SLOTS = 8
SHAPE = dict(context=4096, chunk=256, fill_rows=8, burst=16, put_rows=16, put_tokens=256)
PAGES = SLOTS * (4096 + 256) // 64
SAMPLES = 5


class Conversations(CountedRole):
    """Requests of 5 samples with two to five turns and observations between them: about 1,500 tokens each."""

    def __init__(self, groups, seed=0):
        rng = np.random.default_rng(seed)
        self.prompts = [np.zeros(rng.integers(200, 300), np.int32) for _ in range(groups)]
        self.turns, self.observations = {}, {}
        for group in range(groups):
            for sample in range(SAMPLES):
                turns = 2 + rng.choice(4, p=(0.46, 0.25, 0.163, 0.127))
                lengths = rng.lognormal(math.log(90) - 0.18, 0.6, turns).astype(int) + 4
                self.turns[group, sample] = np.minimum(lengths, 250)
                self.observations[group, sample] = rng.integers(400, 601, turns - 1)


def play(groups, slots, seed=1, shards=1, **fields):
    """(pool, device, concurrent rollouts per round while requests wait) of all requests of `Conversations`."""
    talks = Conversations(groups)
    config = SamplerConfig(slots=slots, **(SHAPE | fields))
    device = CountedDevice(config, lambda rollout: talks.turns[rollout.identity], shards)
    pool = device.pool = SlotPool(device, seed=0)
    weights = WeightStore()
    weights.publish('', {})
    rng = np.random.default_rng(seed)
    concurrent, parked = [], []

    async def run():
        futures = []
        for number, prompt in enumerate(talks.prompts):
            futures += pool.enqueue(Request('', prompt, (number,), talks, SAMPLES, version=0))
        for now in range(10000):
            if all(future.done() for future in futures):
                return [future.result() for future in futures]
            due = [rollout for time, rollout in parked if time <= now]
            parked[:] = [(time, rollout) for time, rollout in parked if time > now]
            replies = []
            for rollout in due:
                lengths = talks.observations[rollout.identity]
                if len(rollout.turns) > len(lengths):
                    pool.finish(rollout, 'answer')
                else:
                    ids = np.zeros(lengths[len(rollout.turns) - 1], np.int32)
                    replies.append((rollout, ids))
            pool.add_observations(replies)
            pool.admit()
            pool.prefill(weights)
            pool.clone_siblings()
            if pool.queue:
                concurrent.append(pool.active)
            if pool.can_decode:
                (chunk,) = pool.decode(weights)
                calls = pool.read(chunk)
                parked.extend((now + rng.integers(1, 4), rollout) for rollout, _ in calls)
            elif pool.active or pool.queue:
                assert parked, 'no rollout proceeds'
        raise AssertionError('the requests are not served')

    trajectories = asyncio.run(run())
    for trajectory in trajectories:
        assert len(trajectory.turns) == len(talks.turns[trajectory.identity])
    for shard in pool.placement.shards:
        allocator = shard.allocator
        assert allocator.available == allocator.count and not any(allocator.references)
    return pool, device, np.mean(concurrent)


@pytest.mark.parametrize('slots,pages', [(16, 100), (2, 64)])
def test_rollouts_that_evict_each_other_all_end(slots, pages):
    pool, _, _ = play(6, slots, page=64, pages=pages, token_budget=16)
    assert pool.placement.stats['evictions'] > 0 or slots == 2


def test_no_rollout_is_evicted_in_vain(monkeypatch):
    reserve = Placement._reserve_turn
    refused = []

    def checked(placement, rollout):
        evictions = placement.stats['evictions']
        is_reserved = reserve(placement, rollout)
        if not is_reserved:
            refused.append(rollout)
            assert placement.stats['evictions'] == evictions
        return is_reserved

    monkeypatch.setattr(Placement, '_reserve_turn', checked)
    pool, _, _ = play(6, 16, page=64, pages=70, token_budget=64)
    assert refused and pool.placement.stats['evictions'] > 0


@pytest.mark.parametrize('pages', [dict(), dict(page=64, pages=8 * 12 * 64, token_budget=768)])
def test_requests_with_more_samples_than_free_slots_of_a_shard_fill_them(pages):
    """Eight shards of 12 slots and requests of 5 samples: a third sample of slots must not stay empty."""
    _, _, concurrent = play(96, 96, shards=8, **pages)
    assert concurrent >= 0.97 * 96
