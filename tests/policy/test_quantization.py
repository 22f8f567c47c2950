"""int8 kernels: the error of an entry, values and gradients of the dequantised base, and what it does to a policy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from small_policies import adapter_of, equal, packed

from zeroplay_jax.policy import adapters, hf, sharding, transformer
from zeroplay_jax.settings.schema import LINEARS


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
