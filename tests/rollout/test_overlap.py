"""Decode calls that start before the one before is read change the time of rollouts and nothing else."""

import asyncio
import dataclasses
import time

import jax
import numpy as np
import pytest
from request_cases import CONFIG, echo, make_env, make_pool, requests, run, same, start

from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.weights import WeightStore
from zeroplay_jax.types import POLICY

# So few pages that rollouts are evicted.
PAGES = dataclasses.replace(CONFIG, page=8, pages=14, token_budget=8)
LAYOUTS = {'slots': CONFIG, 'pages': PAGES}


def overlapped(policy, config, versions=1):
    pool = make_pool(policy, config)
    scheduler = Scheduler({'policy': pool}, WeightStore({'policy': versions}), overlap=True)
    scheduler.weights.publish('policy', policy[2], 1)
    return scheduler, pool


def flat(groups):
    return [trajectory for group in groups for trajectory in group]


@pytest.mark.parametrize('layout', LAYOUTS)
def test_rollouts_are_the_same_bit_for_bit(policy, layout):
    config = LAYOUTS[layout]
    expected = run(policy, requests(make_env(policy[0])), config)
    scheduler, pool = overlapped(policy, config)
    calls_in_progress = []
    decode = pool.decode

    def counted(weights, has_unread):
        calls_in_progress.append(has_unread)
        return decode(weights, has_unread)

    pool.decode = counted
    delays = iter(np.random.default_rng(0).integers(0, 3, 1000))

    def slow(queries):
        time.sleep(0.01 * next(delays))
        return echo(queries)

    reqs = requests(make_env(policy[0], slow))
    same(expected, flat(scheduler.run([scheduler.rollout(r) for r in reqs])))
    # Most calls started before the one before was read.
    assert np.mean(calls_in_progress) > 0.5
    # Tokens of turns that were over are not counted, apart from those after a stop string within its call.
    sampled = sum((t.source == POLICY).sum() for t in expected)
    calls = sum(len(t.turns) for t in expected)
    assert sampled <= scheduler.stats['generated_tokens'] <= sampled + calls * config.burst
    for shard in pool.placement.shards:
        assert shard.is_idle and shard.allocator.available == shard.allocator.count
    if layout == 'pages':
        assert scheduler.stats['evictions']


def test_versions_and_refused_calls_in_overlapping_calls(policy):
    """A refused call begins its next turn while the chunk of the turn before is unread."""
    codec, model, params = policy
    newer = jax.tree.map(lambda x: x * 1.1, params)
    # Programs of its own: another test counts the compilations of CONFIG.
    config = dataclasses.replace(CONFIG, slots=5)
    scheduler, pool = overlapped(policy, config, versions=2)
    scheduler.weights.pin({'policy': 1})
    scheduler.weights.publish('policy', newer)
    env = make_env(codec, max_turns=6)
    earlier, later = requests(env, 5), requests(env, 6)
    later = [dataclasses.replace(r, identity=(4, r.identity[1])) for r in later]
    start(scheduler, 'first', earlier, 1)
    start(scheduler, 'second', later, 2)
    same(flat(scheduler.wait('first')), run(policy, earlier, config))
    same(flat(scheduler.wait('second')), run((codec, model, newer), later, config))
    assert not scheduler._unread and not pool.active


def test_rollouts_after_an_error_are_not_given_old_tokens(policy):
    scheduler, pool = overlapped(policy, CONFIG)
    reqs = requests(make_env(policy[0]))
    expected = run(policy, reqs)

    async def failing():
        for _ in range(60):
            await asyncio.sleep(0)
        raise ValueError('an episode fails')

    with pytest.raises(ValueError, match='an episode fails'):
        scheduler.run([failing(), *(scheduler.rollout(r) for r in reqs)])
    same(expected, flat(scheduler.run([scheduler.rollout(r) for r in reqs])))
