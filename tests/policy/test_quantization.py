"""int8 kernels: the error of an entry, values and gradients of the dequantised base, and what it does to a policy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from small_policies import adapter_of, equal, fill_and_decode, packed, sampler_of

from zeroplay_jax.policy import adapters, hf, sharding, transformer
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.sampler import PutRow
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.settings.schema import LINEARS

# The built-in policy before it was degraded.
TRAINED = BUILT_IN_CHECKPOINT.parent / 'clean'


@pytest.fixture(scope='module')
def policy(published):
    model = dataclasses.replace(hf.read_config(published), logit_chunk=16)
    params = hf.load(published, model, quantized=True)
    return model, params | {adapters.SCALE: jnp.full(1, 2.0)}


@pytest.mark.parametrize('magnitude', [1e-30, 1e30])
def test_no_entry_is_off_by_more_than_half_a_step_of_its_channel(magnitude):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(64, 48)) * np.exp(rng.normal(size=48))
    kernel[:, 5] = 0
    kernel = (magnitude * kernel).astype(np.float32)
    values, scale = jax.jit(adapters.quantize)(kernel)
    values, scale = np.asarray(values), np.asarray(scale)
    largest = np.abs(kernel).max(0)
    np.testing.assert_allclose(scale[largest > 0], largest[largest > 0] / 127, rtol=1e-6)
    error = np.abs(kernel - values.astype(np.float64) * scale)
    assert (error <= 0.5 * scale * (1 + 1e-4)).all()
    assert (np.abs(values).max(0)[largest > 0] == 127).all() and not values[:, 5].any()


def test_every_linear_layer_and_nothing_else_is_quantised_the_same_on_every_mesh(published, policy):
    model, base = policy
    whole = hf.load(published, model)
    split = hf.load(published, model, sharding.make_mesh(2, 2, 2), quantized=True)
    equal(split, {name: x for name, x in base.items() if name != adapters.SCALE})
    sharding.parameter_shardings(split, sharding.make_mesh(1, 2, 2))
    for layer, modules in whole.items():
        if not layer.startswith('layer_'):
            equal(modules, base[layer])
            continue
        for name, arrays in modules.items():
            quantized = base[layer][name]
            if name not in LINEARS:
                equal(arrays, quantized)
                continue
            assert quantized['kernel'].dtype == jnp.int8
            error = arrays['kernel'] - adapters.dequantized(quantized)['kernel']
            assert (np.abs(error) <= 0.501 * quantized['kernel_scale']).all()
    assert split['layer_0']['q']['kernel_scale'].sharding.spec == P('model')
    assert split['layer_0']['down']['kernel_scale'].sharding.spec == P('fsdp')


def test_values_and_gradients_of_adapters_are_those_over_the_dequantised_base(policy):
    model, base = policy
    model, rows = dataclasses.replace(model, scan=True, remat=True), packed(model)
    weight = np.linspace(0, 1, rows[0].size).reshape(rows[0].shape)

    def loss(adapter, base):
        params = adapters.join(base, adapter)
        logp, entropy = transformer.score(model, params, *rows)
        return jnp.sum(logp * weight + 0.1 * entropy), logp

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    ours, our_logp = gradient(adapter_of(base), base)
    theirs, their_logp = gradient(adapter_of(base), adapters.dequantized(base))
    np.testing.assert_allclose(our_logp, their_logp, atol=2e-5)
    assert all(np.linalg.norm(x) > 0 for x in jax.tree.leaves(theirs))
    assert tiny.gap(ours, theirs) <= 1e-4


def test_merged_weights_are_those_of_the_quantised_policy(policy):
    model, base = policy
    joined, rows = adapters.join(base, adapter_of(base)), packed(model)
    whole = adapters.merged(joined)
    assert {str(x.dtype) for x in jax.tree.leaves(whole)} == {'float32'}
    score = jax.jit(functools.partial(transformer.score, model))
    np.testing.assert_allclose(score(joined, *rows)[0], score(whole, *rows)[0], atol=1e-4)


QUESTIONS = ('What is the teacher of the founder of Mimi?', 'What is the birthplace of Babin?')


def test_a_trained_policy_hardly_changes_and_sampler_and_trainer_agree():
    """The figures of docs/adapters.md: the built-in policy, bfloat16 activations, its own continuations of prompts."""
    model = dataclasses.replace(hf.read_config(TRAINED), dtype='bfloat16', logit_chunk=64)
    half = hf.load(TRAINED, model, matrix_dtype='bfloat16')
    int8 = hf.load(TRAINED, model, quantized=True)
    codec, template = Codec(TRAINED), prompts.select('mini')['solver']
    starts = [codec.render(prompts.fill(template, question=text)) for text in QUESTIONS]
    goals = np.array([len(start) + 40 for start in starts])
    length = int(goals.max())
    shape = dict(slots=2, context=length + 16, chunk=32, fill_rows=2, burst=8, put_rows=2)
    sampler = sampler_of(model, **shape, put_tokens=length)
    key = np.array([1, 2], np.uint32)
    sampler.put([PutRow(i, starts[i], 0, int(goals[i]), 1.0, key) for i in range(2)])
    sampled, sampled_logp = fill_and_decode(sampler, int8, goals)

    tokens, segment = np.zeros((2, 2, length), np.int32)
    is_sampled = np.zeros(tokens.shape, bool)
    for row, (start, ids) in enumerate(zip(starts, sampled)):
        tokens[row, : goals[row]] = [*start, *ids]
        segment[row, : goals[row]] = 1
        is_sampled[row, len(start) : goals[row]] = True
    packed_rows = tokens, np.tile(np.arange(length, dtype=np.int32), (2, 1)), segment
    # The place before a token has its log-probs.
    places = np.roll(is_sampled, -1, 1)

    @jax.jit
    def log_probs(params):
        states = transformer.hidden(model, params, *packed_rows)
        logits = transformer.logits(model, params, states.reshape(-1, states.shape[-1]))
        return jax.nn.log_softmax(logits).reshape(*tokens.shape, -1)

    p, q = (np.asarray(log_probs(params))[places] for params in (half, int8))
    divergence = float(np.mean(np.sum(np.exp(p) * (p - q), -1)))
    largest_logp = float(np.abs(p - q)[p > -10].max())
    # 4 bits have a divergence of .0035 and 6 bits one of .00018.
    assert 0 <= divergence < 1e-4 and largest_logp < 0.5, (divergence, largest_logp)
    trained_logp = np.take_along_axis(q, tokens[is_sampled][:, None], 1)[:, 0]
    gaps = np.abs(trained_logp - np.concatenate(sampled_logp))
    assert len(gaps) == 80 and gaps.mean() < 0.003 and gaps.max() < 0.06, (gaps.mean(), gaps.max())
