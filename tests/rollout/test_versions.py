"""Rollouts of two versions of the weights share slots, cache and rounds; each has the tokens that it has alone."""

import asyncio
import dataclasses
import time

import jax
import numpy as np
import pytest
from request_cases import CONFIG, echo, make_env, make_pool, requests, run, same, start

from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.weights import WeightStore

MANY = dataclasses.replace(CONFIG, slots=24)
# Layout → shape of the slots, data shards.
LAYOUTS = {
    'slots': (CONFIG, 1),
    'pages': (dataclasses.replace(CONFIG, page=8, pages=30, token_budget=8), 1),
    'shards': (CONFIG, 2),
}


def changed(params, seed=3):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype), params)


def make_scheduler(policy, config=CONFIG, mesh=None):
    pool = make_pool(policy, config, mesh)
    scheduler = Scheduler({'policy': pool}, WeightStore({'policy': 3}))
    scheduler.weights.publish('policy', policy[2], 1)
    scheduler.weights.pin({'policy': 1})
    scheduler.weights.publish('policy', changed(policy[2]))
    return scheduler, pool


def flat(groups):
    return [trajectory for group in groups for trajectory in group]


def of_step(reqs, step):
    return [dataclasses.replace(r, identity=(step, r.identity[1])) for r in reqs]


LONG = pytest.mark.long


@pytest.mark.parametrize('layout', ['slots', 'pages', pytest.param('shards', marks=LONG)])
def test_two_versions_in_one_round_have_the_tokens_they_have_alone(policy, layout):
    codec, model, params = policy
    config, shards = LAYOUTS[layout]
    mesh = sharding.make_mesh(replica=shards)
    params = jax.device_put(params, sharding.replicated(mesh))
    policy = codec, model, params
    old, new = of_step(requests(make_env(codec), 5), 3), of_step(requests(make_env(codec), 6), 4)
    scheduler, pool = make_scheduler(policy, config, mesh)
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
    assert not pool.active and pool.placement.shards[0].is_idle and scheduler._runner is None


def test_a_run_in_progress_continues_with_the_next_call(policy):
    def slow(queries):
        time.sleep(0.01)
        return echo(queries)

    reqs = requests(make_env(policy[0], slow), 4)
    old, new = of_step(reqs, 3), of_step(reqs, 4)
    scheduler, pool = make_scheduler(policy, MANY)
    start(scheduler, 'second', new, 1)
    start(scheduler, 'first', old[:1], 1)
    scheduler.wait('first')
    # Weights that play rollouts in progress are kept, and are not replaced.
    scheduler.weights.release({'policy': 1})
    with pytest.raises(RuntimeError, match='published while'):
        scheduler.weights.publish('policy', policy[2], 4)
    scheduler.weights.publish('policy', policy[2])
    assert sorted(scheduler.weights.params) == [('policy', 1), ('policy', 3)]
    ended = []
    same(flat(scheduler.wait('second', lambda: ended.append(1))), run(policy, new, MANY))
    assert len(ended) == len(new)
    scheduler.weights.publish('policy', policy[2])
    assert sorted(scheduler.weights.params) == [('policy', 4)]


def test_an_error_of_any_run_frees_all_slots(policy):
    scheduler, pool = make_scheduler(policy, MANY)
    reqs = requests(make_env(policy[0]))

    async def bad():
        await scheduler.rollout(of_step(reqs, 4)[0])
        raise KeyError('lost')

    start(scheduler, 'first', of_step(reqs, 3), 1)
    scheduler.start('second', [bad()])
    with pytest.raises(KeyError, match='lost'):
        scheduler.wait('first')
        scheduler.wait('second')
    assert not pool.unfinished() and pool.placement.shards[0].is_idle and scheduler._runner is None
    same(
        flat(scheduler.run([scheduler.rollout(r) for r in reqs])),
        run((*policy[:2], changed(policy[2])), reqs, MANY),
    )


def test_requests_that_an_episode_leaves_behind_end_with_its_run(policy):
    scheduler, pool = make_scheduler(policy, MANY)
    reqs = requests(make_env(policy[0]), 2)
    left = []

    async def leaves():
        request = dataclasses.replace(reqs[0], run='first')
        left.append(asyncio.ensure_future(scheduler.rollout(request)))
        await asyncio.sleep(0)

    scheduler.start('first', [leaves()])
    start(scheduler, 'second', of_step(reqs, 4), 2)
    scheduler.wait('first')
    assert all(rollout.request.run == 'second' for rollout in pool.unfinished())
    scheduler.weights.publish('policy', policy[2])
    assert len(flat(scheduler.wait('second'))) == 6
    assert left[0].cancelled()
