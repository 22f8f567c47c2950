"""Rollouts over pages: the same tokens as with one page per slot, whatever the pages, neighbours and evictions."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from request_cases import CONFIG, echo, make_env, make_pool, requests, run, same

from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.sampler import programs
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.types import UserError

# Nats per token between two shapes of the programs: they add up in another order.
TOLERANCE = 1e-5
PAGED = dataclasses.replace(CONFIG, page=16, token_budget=12)


@pytest.fixture(scope='module')
def expected(policy):
    """Rollouts with one page per slot."""
    return run(policy, requests(make_env(policy[0])))


def play(policy, reqs, config, mesh=None, order=1):
    """(rollouts, scheduler) of a run that must give back every page and slot."""
    pool = make_pool(policy, config, mesh)
    scheduler = Scheduler({'policy': pool})
    scheduler.weights.publish('policy', policy[2], 1)
    groups = scheduler.run([scheduler.rollout(r) for r in reqs[::order]])[::order]
    for shard in pool.placement.shards:
        allocator = shard.allocator
        assert shard.is_idle and allocator.available == allocator.count
        assert sorted(allocator.free) == list(range(allocator.count))
        assert not any(allocator.references)
    return [t for group in groups for t in group], scheduler


LONG = pytest.mark.long


@pytest.mark.parametrize(
    'page,budget',
    [
        (16, 12),
        (64, 12),
        (96, 0),
        pytest.param(7, 40, marks=LONG),
        pytest.param(16, 3, marks=LONG),
    ],
)
def test_pages_and_budget_change_no_token(policy, expected, page, budget):
    config = dataclasses.replace(CONFIG, page=page, token_budget=budget)
    rollouts, scheduler = play(policy, requests(make_env(policy[0])), config)
    # A page of a slot or more is one page per slot.
    same(expected, rollouts, TOLERANCE if page < CONFIG.context else 0.0)
    assert not scheduler.stats['evictions']


def test_neighbours_order_and_pages_change_no_bit(policy):
    reqs = requests(make_env(policy[0]))
    rollouts, _ = play(policy, reqs, PAGED)
    same(rollouts, play(policy, reqs, PAGED, order=-1)[0])
    same(rollouts[9:12], play(policy, reqs[3:4], PAGED)[0])

    # Other pages for the same tokens, in another order, all full of what is not a number.
    pool = make_pool(policy, PAGED)
    sampler = pool.sampler
    sampler.state = sampler.programs['empty']()
    spoilt = jax.tree.map(lambda x: jax.numpy.full_like(x, np.nan), sampler.state.cache)
    sampler.state = dataclasses.replace(sampler.state, cache=spoilt)
    shard = pool.placement.shards[0]
    shard.allocator.free = sorted(shard.allocator.free)[11:]
    scheduler = Scheduler({'policy': pool})
    scheduler.weights.publish('policy', policy[2], 1)
    groups = scheduler.run([scheduler.rollout(r) for r in reqs[2:5]])
    same(rollouts[6:15], [t for group in groups for t in group])


def test_tool_latency_changes_no_bit(policy):
    calls = []

    def slow(queries):
        calls.append(len(queries))
        time.sleep(0.02 * (len(calls) % 3))
        return echo(queries)

    rollouts, _ = play(policy, requests(make_env(policy[0])), PAGED)
    same(rollouts, play(policy, requests(make_env(policy[0], slow)), PAGED)[0])


def test_a_page_is_shared_until_its_end_differs(policy):
    """Siblings of a long prompt have its full pages in common."""
    pool = make_pool(policy, dataclasses.replace(PAGED, page=4))
    seen = []
    decode = pool.decode

    def look(*args):
        groups = {}
        for rollout in pool.placement.active():
            groups.setdefault(rollout.identity[:-1], []).append(rollout)
        for siblings in groups.values():
            shared = (len(siblings[0].prefix.tokens) - 1) // 4
            firsts = {tuple(rollout.pages.pages[:shared]) for rollout in siblings}
            rests = [page for rollout in siblings for page in rollout.pages.pages[shared:]]
            assert len(firsts) == 1 and len(set(rests)) == len(rests)
            seen.append((len(siblings), shared))
        return decode(*args)

    pool.decode = look
    scheduler = Scheduler({'policy': pool})
    scheduler.weights.publish('policy', policy[2], 1)
    scheduler.run([scheduler.rollout(r) for r in requests(make_env(policy[0]))])
    assert max(seen)[0] == 3 and max(shared for _, shared in seen) >= 3


def slow_echo(queries):
    time.sleep(0.01)
    return echo(queries)


def test_few_pages_evict_and_prefill_again(policy, expected):
    """Pages for little more than one rollout: every bit is the same."""
    env = make_env(policy[0], slow_echo)
    plenty, before = play(policy, requests(env), dataclasses.replace(PAGED, slots=6))
    rollouts, scheduler = play(policy, requests(env), dataclasses.replace(PAGED, slots=6, pages=8))
    assert scheduler.stats['evictions'] > 0 and scheduler.stats['refilled_tokens'] > 0
    assert not before.stats['evictions']
    # Decoded tokens that a prefill computes again: all tokens pass through one program.
    same(plenty, rollouts)
    same(expected, rollouts, TOLERANCE)


def test_pages_for_one_rollout_suffice(policy, expected):
    config = dataclasses.replace(PAGED, slots=5, pages=6)
    same(expected, play(policy, requests(make_env(policy[0])), config)[0], TOLERANCE)


def test_more_samples_than_slots_or_pages(policy):
    reqs = requests(make_env(policy[0]), count=2, samples=9)
    many, _ = play(policy, reqs, dataclasses.replace(CONFIG, slots=24))
    few = dataclasses.replace(PAGED, slots=3, pages=9)
    same(many, play(policy, reqs, few)[0], TOLERANCE)


@pytest.mark.parametrize('fsdp,model', [(2, 2), pytest.param(4, 1, marks=LONG)])
def test_data_shards_change_no_token(policy, expected, fsdp, model):
    mesh = sharding.make_mesh(1, fsdp, model)
    codec, model_config, params = policy
    params = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    rollouts, _ = play((codec, model_config, params), requests(make_env(codec)), PAGED, mesh)
    same(expected, rollouts, TOLERANCE)


def test_one_compilation_per_program(policy):
    codec, model, _ = policy
    config = dataclasses.replace(PAGED, put_tokens=5)
    compiled = programs(model, dataclasses.replace(config, eos=codec.eos_ids), sharding.make_mesh())
    play(policy, requests(make_env(codec)), config)
    play(policy, requests(make_env(codec), count=11, samples=2, temperature=0.7), config)
    sizes = {name: f._cache_size() for name, f in compiled.items()}
    assert sizes == dict.fromkeys(('empty', 'put', 'decode', 'rewind', 'clone'), 1)


@pytest.mark.parametrize(
    'changes,message',
    [
        (
            dict(page=16, pages=5, token_budget=8),
            'sampler.pages=5: .* fills 6 pages of 16',
        ),
        (dict(pages=9), 'sampler.pages=9: a page is as long as a slot'),
        (dict(token_budget=8), 'sampler.token_budget=8: a page is as long as a slot'),
    ],
)
def test_a_cache_that_cannot_work_is_refused(policy, changes, message):
    with pytest.raises(UserError, match=message) as error:
        make_pool(policy, dataclasses.replace(CONFIG, **changes))
    assert '\n' not in str(error.value)
