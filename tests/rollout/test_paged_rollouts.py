"""Rollouts over pages: the same tokens as with one page per slot, whatever the pages, neighbours and evictions."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from request_cases import CONFIG, echo, make_env, make_pool, requests, run, same

from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slot_programs import programs
from zeroplay_jax.types import UserError

# Nats per token between two shapes of the programs: they add up in another order.
TOLERANCE = 1e-5
PAGED = dataclasses.replace(CONFIG, page=16)
MIXED = dataclasses.replace(PAGED, token_budget=12)


@pytest.fixture(scope='module')
def expected(policy):
    """Rollouts with one page per slot."""
    return run(policy, requests(make_env(policy[0])))


def play(policy, reqs, config, mesh=None, order=1):
    """(rollouts, scheduler) of a run that must give back every page and slot."""
    pool = make_pool(policy, config, mesh)
    scheduler = Scheduler({'policy': pool})
    scheduler.publish_weights('policy', policy[2], 1)
    groups = scheduler.run([scheduler.rollout(r) for r in reqs[::order]])[::order]
    for shard in pool.placement.shards:
        allocator = shard.allocator
        assert shard.is_idle and allocator.available == allocator.count
        assert sorted(allocator.free) == list(range(allocator.count))
        assert not any(allocator.references)
    return [t for group in groups for t in group], scheduler


LONG = pytest.mark.long


@pytest.mark.parametrize(
    'page', [16, 64, 96, pytest.param(7, marks=LONG), pytest.param(200, marks=LONG)]
)
def test_the_page_size_changes_no_token(policy, expected, page):
    rollouts, scheduler = play(
        policy, requests(make_env(policy[0])), dataclasses.replace(CONFIG, page=page)
    )
    # A page of a slot or more is one page per slot.
    same(expected, rollouts, TOLERANCE if page < CONFIG.context else 0.0)
    assert not scheduler.stats['evictions']


@pytest.mark.parametrize('budget', [12, pytest.param(3, marks=LONG), pytest.param(40, marks=LONG)])
def test_mixed_steps_sample_the_same_tokens(policy, expected, budget):
    config = dataclasses.replace(PAGED, token_budget=budget)
    rollouts, _ = play(policy, requests(make_env(policy[0])), config)
    same(expected, rollouts, TOLERANCE)


@pytest.mark.parametrize('config', [PAGED, MIXED], ids=['paged', 'mixed'])
def test_neighbours_order_and_pages_change_no_bit(policy, config):
    reqs = requests(make_env(policy[0]))
    rollouts, _ = play(policy, reqs, config)
    same(rollouts, play(policy, reqs, config, order=-1)[0])
    same(rollouts[9:12], play(policy, reqs[3:4], config)[0])

    # Other pages for the same tokens, in another order, all full of what is not a number.
    pool = make_pool(policy, config)
    sampler = pool.sampler
    sampler.state = sampler.programs['empty']()
    spoilt = jax.tree.map(lambda x: jax.numpy.full_like(x, np.nan), sampler.state.cache)
    sampler.state = dataclasses.replace(sampler.state, cache=spoilt)
    shard = pool.placement.shards[0]
    shard.allocator.free = sorted(shard.allocator.free)[11:]
    scheduler = Scheduler({'policy': pool})
    scheduler.publish_weights('policy', policy[2], 1)
    groups = scheduler.run([scheduler.rollout(r) for r in reqs[2:5]])
    same(rollouts[6:15], [t for group in groups for t in group])


@pytest.mark.parametrize('config', [PAGED, MIXED], ids=['paged', 'mixed'])
def test_tool_latency_changes_no_bit(policy, config):
    calls = []

    def slow(queries):
        calls.append(len(queries))
        time.sleep(0.02 * (len(calls) % 3))
        return echo(queries)

    rollouts, _ = play(policy, requests(make_env(policy[0])), config)
    same(rollouts, play(policy, requests(make_env(policy[0], slow)), config)[0])


def test_a_page_is_shared_until_its_end_differs(policy):
    """Siblings of a long prompt have its full pages in common."""
    pool = make_pool(policy, dataclasses.replace(CONFIG, page=4))
    seen = []
    decode = pool.decode

    def look(**options):
        groups = {}
        for rollout in pool.placement.active():
            groups.setdefault(rollout.identity[:-1], []).append(rollout)
        for siblings in groups.values():
            shared = (len(siblings[0].group.request.prompt) - 1) // 4
            firsts = {tuple(rollout.pages.pages[:shared]) for rollout in siblings}
            rests = [page for rollout in siblings for page in rollout.pages.pages[shared:]]
            assert len(firsts) == 1 and len(set(rests)) == len(rests)
            seen.append((len(siblings), shared))
        return decode(**options)

    pool.decode = look
    scheduler = Scheduler({'policy': pool})
    scheduler.publish_weights('policy', policy[2], 1)
    scheduler.run([scheduler.rollout(r) for r in requests(make_env(policy[0]))])
    assert max(seen)[0] == 3 and max(shared for _, shared in seen) >= 3


def slow_echo(queries):
    time.sleep(0.01)
    return echo(queries)


def test_few_pages_evict_and_prefill_again(policy, expected):
    """Pages for little more than one rollout: the tokens are the same, and in mixed steps so is every bit."""
    env = make_env(policy[0], slow_echo)
    few = dict(slots=6, pages=8)
    rollouts, scheduler = play(policy, requests(env), dataclasses.replace(PAGED, **few))
    same(expected, rollouts, TOLERANCE)
    assert scheduler.stats['evictions'] > 0 and scheduler.stats['refilled_tokens'] > 0
    # Decoded tokens that a prefill computes again: all tokens pass through one program.
    plenty, before = play(policy, requests(env), dataclasses.replace(MIXED, slots=6))
    rollouts, scheduler = play(policy, requests(env), dataclasses.replace(MIXED, **few))
    assert scheduler.stats['evictions'] > 0 and not before.stats['evictions']
    same(plenty, rollouts)


def test_pages_for_one_rollout_suffice(policy, expected):
    config = dataclasses.replace(PAGED, slots=5, pages=6)
    same(expected, play(policy, requests(make_env(policy[0])), config)[0], TOLERANCE)


def test_more_samples_than_slots_or_pages(policy):
    reqs = requests(make_env(policy[0]), count=2, samples=9)
    many, _ = play(policy, reqs, dataclasses.replace(CONFIG, slots=24))
    for config in (PAGED, MIXED):
        few = dataclasses.replace(config, slots=3, pages=9)
        same(many, play(policy, reqs, few)[0], TOLERANCE)


@pytest.mark.parametrize(
    'config,fsdp,model',
    [
        pytest.param(PAGED, 4, 1, id='paged'),
        pytest.param(MIXED, 2, 2, id='mixed'),
        pytest.param(PAGED, 2, 2, marks=LONG, id='paged-heads'),
        pytest.param(MIXED, 4, 1, marks=LONG, id='mixed-shards'),
    ],
)
def test_data_shards_change_no_token(policy, expected, config, fsdp, model):
    mesh = sharding.make_mesh(1, fsdp, model)
    codec, model_config, params = policy
    params = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    rollouts, _ = play((codec, model_config, params), requests(make_env(codec)), config, mesh)
    same(expected, rollouts, TOLERANCE)


@pytest.mark.parametrize('config', [PAGED, MIXED], ids=['paged', 'mixed'])
def test_one_compilation_per_program(policy, config):
    codec, model, _ = policy
    compiled = programs(model, dataclasses.replace(config, eos=codec.eos_ids), sharding.make_mesh())
    play(policy, requests(make_env(codec)), config)
    play(policy, requests(make_env(codec), count=11, samples=2, temperature=0.7), config)
    sizes = {name: f._cache_size() for name, f in compiled.items()}
    assert sizes == dict.fromkeys(compiled, 1) | {'extend': int(not config.token_budget)}


@pytest.mark.parametrize(
    'changes,message',
    [
        (dict(page=16, pages=5), 'sampler.pages=5 over 1 data shards: .* needs 6 pages of 16'),
        (dict(pages=9), 'sampler.pages=9: a page is as long as a slot'),
        (dict(token_budget=8), 'sampler.token_budget=8 needs pages'),
    ],
)
def test_a_cache_that_cannot_work_is_refused(policy, changes, message):
    with pytest.raises(UserError, match=message) as error:
        make_pool(policy, dataclasses.replace(CONFIG, **changes))
    assert '\n' not in str(error.value)
