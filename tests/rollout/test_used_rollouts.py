"""Rollouts with `sampler.attention=used`: the tokens of the default, and no bit depends on neighbours."""

import dataclasses

import jax
import numpy as np
import pytest
from request_cases import CONFIG, make_env, requests, run, same

from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.sampler import PutRow, Sampler
from zeroplay_jax.types import UserError

USED = dataclasses.replace(CONFIG, attention='used')


@pytest.fixture(scope='module')
def rollouts(policy):
    return run(policy, requests(make_env(policy[0])), USED)


def test_tokens_are_those_of_attention_to_all_places(policy, rollouts):
    same(run(policy, requests(make_env(policy[0]))), rollouts, 1e-5)


def test_order_and_neighbours_change_nothing_bitwise(policy, rollouts):
    same(rollouts, run(policy, requests(make_env(policy[0])), USED, order=-1))
    alone = run(policy, requests(make_env(policy[0]))[3:4], USED)
    same(rollouts[9:12], alone)


def test_devices_change_no_token(policy, rollouts):
    mesh = sharding.make_mesh(1, 2, 2)
    codec, config, params = policy
    params = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    same(rollouts, run((codec, config, params), requests(make_env(codec)), USED, mesh=mesh), 1e-5)


def test_pages_shorter_than_a_slot_are_refused():
    with pytest.raises(UserError, match='sampler.attention=used: sampler.page=16 is shorter'):
        dataclasses.replace(USED, page=16, token_budget=8).check(1)


def test_chunks_of_a_row_in_one_call_equal_those_of_several_calls(policy):
    """A prompt of three chunks in one prefill call, and in three: equal bit for bit."""
    _, model, params = policy
    prompt = np.random.default_rng(0).integers(0, 8, 2 * CONFIG.chunk + 3).astype(np.int32)
    key = np.array([1, 2], np.uint32)
    config = dataclasses.replace(CONFIG, eos=(), fill_rows=3)
    chunks = []
    for calls in ([[2, 2, 2]], [[2], [2], [2]]):
        sampler = Sampler(model, config, sharding.make_mesh())
        sampler.put([PutRow(2, prompt, 0, limit=60, temperature=1.0, key=key)])
        for slots in calls:
            sampler.extend(params, slots)
        assert sampler.state.cached[2] == len(prompt) - 1
        chunks.append(jax.device_get(sampler.decode(params)))
    assert chunks[0].count[2] == CONFIG.burst
    np.testing.assert_array_equal(chunks[0].tokens[2], chunks[1].tokens[2])
    np.testing.assert_array_equal(chunks[0].logp[2], chunks[1].logp[2])
