"""Pages that rollouts share and lose, and attention over them in kernels interpreted on a CPU: the same tokens."""

import dataclasses
import pathlib
import types

import interpretable_kernel
import jax
import numpy as np
import pytest
from refused_calls import check_table
from request_cases import (
    CONFIG,
    PAGED,
    TOLERANCE,
    check_idle,
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
from zeroplay_jax.rollout import token_steps
from zeroplay_jax.settings.kinds import refuse


def test_what_pages_held_before_changes_no_bit(policy):
    """Other pages for the same tokens, in another order, all full of what is not a number."""
    reqs = requests(make_env(policy[0]))[2:5]
    scheduler, pool = make_scheduler(policy, PAGED)
    sampler = pool.sampler
    sampler.state = sampler.programs['empty']()
    spoilt = jax.tree.map(lambda x: jax.numpy.full_like(x, np.nan), sampler.state.cache)
    sampler.state = dataclasses.replace(sampler.state, cache=spoilt)
    shard = pool.placement.shards[0]
    shard.allocator.free = sorted(shard.allocator.free)[11:]
    same(run(policy, reqs, PAGED), play(scheduler, reqs))


def test_few_pages_evict_and_prefill_again(policy):
    """Pages for little more than one rollout: every bit is the same."""
    reqs = requests(make_env(policy[0], late_echo))
    plenty, _ = make_scheduler(policy, dataclasses.replace(PAGED, slots=6))
    few, pool = make_scheduler(policy, dataclasses.replace(PAGED, slots=6, pages=8))
    # Decoded tokens that a prefill computes again: all tokens pass through one program.
    same(play(plenty, reqs), play(few, reqs))
    assert few.stats['evictions'] > 0 and few.stats['refilled_tokens'] > 0
    assert not plenty.stats['evictions']
    check_idle(pool)


def test_a_step_feeds_the_oldest_turns_first_and_leaves_a_quarter_to_prompts():
    config = dataclasses.replace(PAGED, slots=8, token_budget=8)
    length, age = np.full(8, 20), np.arange(8)[::-1]
    # Two prompts, and six slots that decode.
    cached = np.array([10, 10, *[19] * 6])
    state = types.SimpleNamespace(length=length, cached=cached, limit=length + 9, status=length)
    fed = token_steps.tokens_of_budget(config, state, age)
    assert fed.single.tolist() == [False] * 2 + [True] * 6
    assert fed.chunk.tolist() == [0, 2, *[0] * 6]


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


def test_kernels_run_on_data_shards_and_heads(policy, expected_greedy):
    mesh = sharding.make_mesh(1, 2, 2)
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
