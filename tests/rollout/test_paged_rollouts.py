"""Rollouts over pages, and in kernels interpreted on a CPU: the tokens of one page per slot, whatever the pages."""

import dataclasses
import pathlib

import interpretable_kernel
import jax
import numpy as np
import pytest
from refused_calls import check_table
from request_cases import (
    CONFIG,
    check_requests_alone_count,
    late_echo,
    make_env,
    make_pool,
    make_scheduler,
    play,
    requests,
    run,
    same,
)

from zeroplay_jax.policy import ragged_attention, ragged_tpu, sharding
from zeroplay_jax.rollout.sampler import programs
from zeroplay_jax.settings.kinds import refuse

# Nats per token between two shapes of the programs, or two kernels: they add up in another order.
TOLERANCE = 1e-5
PAGED = dataclasses.replace(CONFIG, page=16, token_budget=12)


@pytest.fixture(scope='module')
def expected(policy):
    """Rollouts with one page per slot."""
    return run(policy)


def paged(policy, config, reqs=None, mesh=None, order=1):
    """(rollouts, scheduler) of a run that must give back every page and slot."""
    scheduler, pool = make_scheduler(policy, config, mesh)
    rollouts = play(scheduler, reqs or requests(make_env(policy[0])), order)
    for shard in pool.placement.shards:
        allocator = shard.allocator
        assert shard.is_idle and allocator.available == allocator.count
        assert sorted(allocator.free) == list(range(allocator.count))
        assert not any(allocator.references)
    return rollouts, scheduler


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
    rollouts, scheduler = paged(policy, config)
    # A page of a slot or more is one page per slot.
    same(expected, rollouts, TOLERANCE if page < CONFIG.context else 0.0)
    assert not scheduler.stats['evictions']


def test_order_neighbours_tools_and_pages_change_no_bit(policy):
    reqs = requests(make_env(policy[0]))
    rollouts, _ = paged(policy, PAGED)
    check_requests_alone_count(policy, rollouts, PAGED)

    # Other pages for the same tokens, in another order, all full of what is not a number.
    scheduler, pool = make_scheduler(policy, PAGED)
    sampler = pool.sampler
    sampler.state = sampler.programs['empty']()
    spoilt = jax.tree.map(lambda x: jax.numpy.full_like(x, np.nan), sampler.state.cache)
    sampler.state = dataclasses.replace(sampler.state, cache=spoilt)
    shard = pool.placement.shards[0]
    shard.allocator.free = sorted(shard.allocator.free)[11:]
    same(rollouts[6:15], play(scheduler, reqs[2:5]))


def test_a_page_is_shared_until_its_end_differs(policy):
    """Siblings of a long prompt have its full pages in common."""
    scheduler, pool = make_scheduler(policy, dataclasses.replace(PAGED, page=4))
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
    play(scheduler, requests(make_env(policy[0])))
    assert max(seen)[0] == 3 and max(shared for _, shared in seen) >= 3


def test_few_pages_evict_and_prefill_again(policy, expected):
    """Pages for little more than one rollout: every bit is the same."""
    reqs = requests(make_env(policy[0], late_echo))
    plenty, before = paged(policy, dataclasses.replace(PAGED, slots=6), reqs)
    rollouts, scheduler = paged(policy, dataclasses.replace(PAGED, slots=6, pages=8), reqs)
    assert scheduler.stats['evictions'] > 0 and scheduler.stats['refilled_tokens'] > 0
    assert not before.stats['evictions']
    # Decoded tokens that a prefill computes again: all tokens pass through one program.
    same(plenty, rollouts)
    same(expected, rollouts, TOLERANCE)


def test_pages_for_one_rollout_suffice(policy, expected):
    same(expected, paged(policy, dataclasses.replace(PAGED, slots=5, pages=6))[0], TOLERANCE)


def test_more_samples_than_slots_or_pages(policy):
    reqs = requests(make_env(policy[0]), count=2, samples=9)
    many = run(policy, reqs, dataclasses.replace(CONFIG, slots=24))
    few, _ = paged(policy, dataclasses.replace(PAGED, slots=3, pages=9), reqs)
    same(many, few, TOLERANCE)


@pytest.mark.parametrize('fsdp,model', [(2, 2), pytest.param(4, 1, marks=LONG)])
def test_data_shards_change_no_token(policy, expected, fsdp, model):
    rollouts, _ = paged(policy, PAGED, mesh=sharding.make_mesh(1, fsdp, model))
    same(expected, rollouts, TOLERANCE)


def test_one_compilation_per_program(policy):
    codec, model, _ = policy
    config = dataclasses.replace(PAGED, put_tokens=5)
    compiled = programs(model, dataclasses.replace(config, eos=codec.eos_ids), sharding.make_mesh())
    for reqs in (None, requests(make_env(codec), count=11, samples=2, temperature=0.7)):
        paged(policy, config, reqs)
    sizes = {name: f._cache_size() for name, f in compiled.items()}
    assert sizes == dict.fromkeys(('empty', 'put', 'decode', 'rewind', 'clone'), 1)


def greedy(policy, config, mesh=None):
    return run(policy, requests(make_env(policy[0]), 5, 2, 0.0), config, mesh)


@pytest.fixture(scope='module')
def expected_greedy(policy):
    return greedy(policy, PAGED)


RAGGED = dataclasses.replace(PAGED, attention='ragged')


@pytest.mark.parametrize('changes', [{'attention': 'ragged'}, {'decode_buckets': (1, 3)}], ids=str)
def test_a_kernel_or_smaller_steps_sample_the_same_tokens(policy, expected_greedy, changes):
    """The kernel for GPUs, or steps with fewer tokens."""
    config = dataclasses.replace(PAGED, **changes)
    same(expected_greedy, greedy(policy, config), TOLERANCE)


def test_the_tpu_kernel_samples_the_same_tokens(policy, expected_greedy, monkeypatch):
    kernel = interpretable_kernel.load().ragged_paged_attention
    monkeypatch.setattr(ragged_attention, 'platform_of', lambda mesh: 'tpu')
    monkeypatch.setattr(ragged_tpu, '_kernel', lambda: kernel)
    # Another shape than those of other tests, whose programs are kept.
    config = dataclasses.replace(RAGGED, put_tokens=7)
    same(expected_greedy, greedy(policy, config), TOLERANCE)


@pytest.mark.parametrize(
    'fsdp,model', [(2, 2), pytest.param(1, 2, marks=LONG), pytest.param(2, 1, marks=LONG)]
)
def test_kernels_run_on_data_shards_and_heads(policy, expected_greedy, fsdp, model):
    mesh = sharding.make_mesh(1, fsdp, model)
    same(expected_greedy, greedy(policy, RAGGED, mesh), TOLERANCE)


def test_settings_that_cannot_work_are_refused(policy, tmp_path):
    def pool(**changes):
        config = dataclasses.replace(CONFIG, **changes)
        # As rules of configs do, before there are devices.
        refuse({'sampler': dataclasses.asdict(config)}, config.conflicts(1))
        return make_pool(policy, config)

    names = {'pool': pool}
    table = pathlib.Path(__file__).with_name('wrong_samplers.txt')
    check_table(table, names, tmp_path)
