"""Two versions of the weights share slots, cache and rounds, and decode calls overlap: no token changes."""

import asyncio
import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
from request_cases import (
    CONFIG,
    check_idle,
    echo,
    flat,
    make_env,
    make_scheduler,
    play,
    requests,
    run,
    same,
    start,
)

from zeroplay_jax.policy import sharding
from zeroplay_jax.types import POLICY

MANY = dataclasses.replace(CONFIG, slots=24)
# So few pages that rollouts are evicted.
FEW_PAGES = dataclasses.replace(CONFIG, page=8, pages=14, token_budget=8)
# Layout → shape of the slots, data shards.
LAYOUTS = {
    'slots': (CONFIG, 1),
    'pages': (dataclasses.replace(CONFIG, page=8, pages=30, token_budget=8), 1),
    'shards': (CONFIG, 2),
}


def changed(params, seed=3):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype), params)


def with_two_versions(policy, config=CONFIG, mesh=None, **options):
    """(scheduler, pool), where version 1 is pinned."""
    scheduler, pool = make_scheduler(policy, config, mesh, versions=3, **options)
    scheduler.weights.pin({'policy': 1})
    scheduler.weights.publish('policy', changed(policy[2]))
    return scheduler, pool


def of_step(reqs, step):
    return [dataclasses.replace(r, identity=(step, r.identity[1])) for r in reqs]


@pytest.mark.parametrize(
    'layout,overlap',
    [('slots', True), ('pages', False), pytest.param('shards', True, marks=pytest.mark.long)],
)
def test_two_versions_in_one_round_have_the_tokens_they_have_alone(policy, layout, overlap):
    """With overlap, a refused call begins its next turn while the chunk of the turn before is unread."""
    codec, model, params = policy
    config, shards = LAYOUTS[layout]
    mesh = sharding.make_mesh(replica=shards)
    params = jax.device_put(params, sharding.replicated(mesh))
    policy = codec, model, params
    env = make_env(codec, max_turns=6)
    old, new = of_step(requests(env, 5), 3), of_step(requests(env, 6), 4)
    scheduler, pool = with_two_versions(policy, config, mesh, overlap=overlap)
    start(scheduler, 'first', old, 1)
    start(scheduler, 'second', new, 2)
    together = []
    pool.on_tokens = lambda identity, ids: together.append(identity[0])
    ours = flat(scheduler.wait('first'))
    # The second run has sampled tokens before the first one has ended.
    assert 4 in together
    theirs = flat(scheduler.wait('second'))
    assert {t.version for t in ours} == {1} and {t.version for t in theirs} == {2}
    same(ours, run(policy, old, config, mesh))
    same(theirs, run((codec, model, changed(params)), new, config, mesh))
    assert not pool.active and pool.placement.shards[0].is_idle
    assert scheduler._runner is None and not scheduler._unread


def test_a_run_in_progress_continues_with_the_next_call(policy):
    def slow(queries):
        time.sleep(0.01)
        return echo(queries)

    reqs = requests(make_env(policy[0], slow), 4)
    old, new = of_step(reqs, 3), of_step(reqs, 4)
    scheduler, pool = with_two_versions(policy, MANY)
    start(scheduler, 'second', new, 1)
    start(scheduler, 'first', old[:1], 1)
    scheduler.wait('first')
    # Weights that play rollouts in progress are kept, and are not replaced.
    scheduler.weights.release({'policy': 1})
    with pytest.raises(RuntimeError, match='published while'):
        scheduler.weights.publish('policy', policy[2], 4)
    scheduler.weights.publish('policy', policy[2])
    assert sorted(scheduler.weights.params) == [('policy', 1), ('policy', 3)]
    same(flat(scheduler.wait('second')), run(policy, new, MANY))


def test_requests_that_an_episode_leaves_behind_end_with_its_run(policy):
    scheduler, pool = with_two_versions(policy, MANY)
    reqs = requests(make_env(policy[0]), 2)
    left = []

    async def leaves():
        request = dataclasses.replace(reqs[0], owner='first')
        left.append(asyncio.ensure_future(scheduler.rollout(request)))
        await asyncio.sleep(0)

    scheduler.start('first', [leaves()])
    start(scheduler, 'second', of_step(reqs, 4), 2)
    scheduler.wait('first')
    assert all(rollout.request.owner == 'second' for rollout in pool.unfinished())
    scheduler.weights.publish('policy', policy[2])
    assert len(flat(scheduler.wait('second'))) == 6
    assert left[0].cancelled()


@pytest.mark.timeout(600)  # a mutant waits for ever
def test_a_late_result_never_reaches_the_rollout_that_took_the_slot(policy):
    """An episode ends while its tools work; the results come when its slots belong to others."""
    called, first_ended, may_return = threading.Event(), threading.Event(), threading.Event()

    def late(queries):
        called.set()
        may_return.wait(30)
        return echo(queries)

    def releases(queries):
        first_ended.wait(30)
        may_return.set()
        time.sleep(0.05)
        return echo(queries)

    scheduler, pool = with_two_versions(policy)
    left, codec = [], policy[0]

    async def leaves(request):
        left.append(asyncio.ensure_future(scheduler.rollout(request)))
        while not called.is_set():
            await asyncio.sleep(0)

    old = [dataclasses.replace(r, owner='first') for r in requests(make_env(codec, late))]
    new = of_step(requests(make_env(codec, releases), 6), 4)
    scheduler.start('first', [leaves(request) for request in old])
    start(scheduler, 'second', new, 2)
    scheduler.wait('first')
    assert called.is_set() and not may_return.is_set()
    first_ended.set()
    theirs = flat(scheduler.wait('second'))
    same(theirs, run((*policy[:2], changed(policy[2])), new))
    assert may_return.is_set() and pool.placement.shards[0].is_idle


# Decode calls that start before the one before is read


@pytest.mark.parametrize('config', [CONFIG, FEW_PAGES], ids=['slots', 'pages'])
def test_rollouts_with_overlap_are_the_same_bit_for_bit(policy, config):
    expected = run(policy, config=config)
    scheduler, pool = make_scheduler(policy, config, overlap=True)
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

    same(expected, play(scheduler, requests(make_env(policy[0], slow))))
    # Most calls started before the one before was read.
    assert np.mean(calls_in_progress) > 0.5
    # Tokens of turns that were over are not counted, apart from those after a stop string within its call.
    sampled = sum((t.source == POLICY).sum() for t in expected)
    calls = sum(len(t.turns) for t in expected)
    assert sampled <= scheduler.stats['generated_tokens'] <= sampled + calls * config.burst
    check_idle(pool)
    if config == FEW_PAGES:
        assert scheduler.stats['evictions']


@pytest.mark.timeout(600)  # a mutant waits for ever
def test_overlap_with_ends_that_the_host_alone_finds(policy, monkeypatch):
    """A chunk that was started before the host saw the end of a turn is not read into the next one."""
    expected = run(policy)
    # A stop string of several tokens has no end token that the device could know.
    monkeypatch.setattr('zeroplay_jax.rollout.slots.end_ids', lambda codec, stops: ())
    same(expected, run(policy, overlap=True))
