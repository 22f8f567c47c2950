"""Rollouts whose attention is a kernel, interpreted on a CPU: the tokens of the plain path."""

import dataclasses

import interpretable_kernel
import jax
import pytest
from request_cases import CONFIG, make_env, requests, run, same

from zeroplay_jax.policy import ragged_attention, ragged_tpu, sharding
from zeroplay_jax.types import UserError

# Nats per token between two ways to add up.
TOLERANCE = 1e-5
PAGED = dataclasses.replace(CONFIG, page=16, token_budget=12)
LONG = pytest.mark.long


def play(policy, config, mesh=None, temperature=0.0):
    env = make_env(policy[0])
    return run(policy, requests(env, 5, 2, temperature), config, mesh)


@pytest.fixture(scope='module')
def expected(policy):
    return play(policy, PAGED)


def test_the_gpu_kernel_samples_the_same_tokens(policy, expected):
    same(expected, play(policy, dataclasses.replace(PAGED, attention='ragged')), TOLERANCE)


def test_the_tpu_kernel_samples_the_same_tokens(policy, expected, monkeypatch):
    kernel = interpretable_kernel.load().ragged_paged_attention
    monkeypatch.setattr(ragged_attention, 'platform_of', lambda mesh: 'tpu')
    monkeypatch.setattr(ragged_tpu, '_kernel', lambda: kernel)
    # Another shape than those of other tests, whose programs are kept.
    config = dataclasses.replace(PAGED, attention='ragged', put_tokens=7)
    same(expected, play(policy, config), TOLERANCE)


@pytest.mark.parametrize(
    'fsdp,model', [(2, 2), pytest.param(1, 2, marks=LONG), pytest.param(2, 1, marks=LONG)]
)
def test_kernels_run_on_data_shards_and_heads(policy, expected, fsdp, model):
    mesh = sharding.make_mesh(1, fsdp, model)
    codec, model_config, params = policy
    params = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    config = dataclasses.replace(PAGED, attention='ragged')
    same(expected, play((codec, model_config, params), config, mesh), TOLERANCE)


def test_smaller_steps_sample_the_same_tokens(policy, expected):
    config = dataclasses.replace(PAGED, decode_buckets=(1, 3))
    same(expected, play(policy, config), TOLERANCE)


@pytest.mark.parametrize(
    'changes,message',
    [
        (dict(attention='ragged'), 'sampler.attention=ragged: a page is as long as a slot'),
        (dict(decode_buckets=(2,)), r'sampler.decode_buckets=\(2,\): a page is as long as a slot'),
        (dict(page=16), 'sampler.page=16 needs steps that prefill .* give the tokens of a step'),
        (
            dict(page=16, token_budget=9, decode_buckets=(9,)),
            'a whole step has 9 tokens',
        ),
        (dict(page=16, token_budget=9, decode_buckets=(3, 2)), 'not ascending'),
        (dict(page=24, token_budget=9, attention='ragged'), 'sampler.page=24'),
    ],
)
def test_settings_that_cannot_work_are_refused(policy, changes, message):
    with pytest.raises(UserError, match=message) as error:
        play(policy, dataclasses.replace(CONFIG, **changes))
    assert '\n' not in str(error.value)
