"""Mixtures of experts: no influence of other tokens, replay, devices, int8."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file
from small_policies import equal, packed

from zeroplay_jax.policy import (
    adapters,
    experts,
    hf,
    sharding,
    transformer,
)


@pytest.fixture(scope='module', params=['qwen3_moe', 'qwen35_moe'])
def case(request, tmp_path_factory):
    """(PyTorch model, folder, ModelConfig, parameters)."""
    model = tiny.make_torch_model(request.param)
    folder = tmp_path_factory.mktemp('experts') / 'policy'
    model.save_pretrained(str(folder))
    config = hf.read_config(folder)
    return model, folder, config, hf.load(folder, config)


def tolerance(config):
    """A gated delta net normalises what it reads, however small."""
    return 2e-4 if config.delta else 1e-5


def loss(config, weight, params, *rows, record=None):
    """A sum over the hidden states, which has a gradient everywhere."""
    states = transformer.hidden(config, params, *rows, record)
    return jnp.sum(states * weight)


def weight_of(config, tokens):
    return np.random.default_rng(1).normal(size=(*tokens.shape, config.hidden_size)).astype('f')


@functools.partial(jax.jit, static_argnums=0)
def chosen(config, params, rows):
    """The record of the routers' own choices."""
    tokens, positions, segment = rows
    attend = transformer._packed_attend(config, segment)
    decoder = transformer.Decoder(config)
    _, record = experts.recorded(decoder, {'params': params}, tokens, positions, attend)
    return record


def test_replayed_choices_count_and_their_weights_are_computed_anew(case):
    _, _, config, params = case
    rows = packed(config, 2, 16)
    record = chosen(config, params, rows)
    config = dataclasses.replace(config, scan=True, remat=True)
    assert record.shape == (2, 16, 2 * config.layers) and record.dtype == jnp.int8
    weight = weight_of(config, rows[0])
    both = jax.jit(jax.value_and_grad(loss, 2), static_argnums=0)
    free = both(config, weight, params, *rows)
    replayed = both(config, weight, params, *rows, record=record)
    np.testing.assert_allclose(replayed[0], free[0], rtol=1e-6)
    assert tiny.gap(replayed[1], free[1]) <= 1e-6
    # Where nothing is recorded the routers choose.
    partly = jnp.where(jnp.arange(16)[:, None] % 2, record, jnp.int8(experts.NOT_RECORDED))
    np.testing.assert_allclose(
        both(config, weight, params, *rows, record=partly)[0], free[0], rtol=1e-6
    )
    # Others have values and gradients of their own.
    other = (record + 1) % config.experts.count
    value, gradient = both(config, weight, params, *rows, record=other)
    assert abs(value - free[0]) > 1 and tiny.gap(gradient, free[1]) > 0.1


def test_devices_share_the_experts(case):
    _, folder, config, params = case
    rows = packed(config, 4, 16)
    weight = weight_of(config, rows[0])
    both = jax.jit(jax.value_and_grad(loss, 2), static_argnums=0)
    record = chosen(config, params, rows)
    expected = both(config, weight, params, *rows, record=record)
    mesh = sharding.make_mesh(2, 1, 2)
    split = hf.load(folder, config, mesh)
    kernel = split['layer_0']['moe']['gate']
    assert kernel.addressable_shards[0].data.shape[0] == config.experts.count // 2
    if config.experts.shared:
        (kernel,) = split['layer_0']['shared_up'].values()
        assert kernel.addressable_shards[0].data.shape[1] == config.intermediate_size // 2
    on_mesh = dataclasses.replace(config, mesh=mesh, scan=True, remat=True)
    arrays = jax.device_put((weight, rows, record), sharding.rows(mesh))
    value, gradient = both(on_mesh, arrays[0], split, *arrays[1], record=arrays[2])
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    assert tiny.gap(jax.device_get(gradient), expected[1]) <= tolerance(config)


def test_int8_experts_compute_what_the_dequantised_ones_do(case):
    _, folder, config, params = case
    quantized = hf.load(folder, config, quantized=True)
    mixture = quantized['layer_0']['moe']
    assert mixture['gate'].dtype == jnp.int8 and mixture['router'].dtype == jnp.float32
    whole = adapters.dequantized(quantized)
    assert tiny.gap(whole['layer_0']['moe'], params['layer_0']['moe']) < 0.01
    mesh = sharding.make_mesh(1, 2, 2)
    split = hf.load(folder, config, mesh, quantized=True)
    np.testing.assert_array_equal(
        split['layer_1']['moe']['down'], quantized['layer_1']['moe']['down']
    )
    rows = packed(config, 4, 16)
    record = chosen(config, whole, rows)
    hidden = jax.jit(transformer.hidden, static_argnums=0)
    expected = hidden(config, whole, *rows, record)
    atol = 2 * tolerance(config)
    np.testing.assert_allclose(hidden(config, quantized, *rows, record), expected, atol=atol)
    config = dataclasses.replace(config, mesh=mesh)
    arrays = jax.device_put((*rows, record), sharding.rows(mesh))
    np.testing.assert_allclose(hidden(config, split, *arrays), expected, atol=atol)


def test_experts_in_one_tensor_are_read(case, tmp_path):
    model, _, config, params = case
    model.save_pretrained(tmp_path, save_original_format=False)
    assert 'model.layers.0.mlp.experts.gate_up_proj' in load_file(tmp_path / 'model.safetensors')
    equal(hf.load(tmp_path, config), params)
    # On a device there are some experts and columns only.
    split = hf.load(tmp_path, config, sharding.make_mesh(1, 2, 2))
    equal(jax.device_get(split), params)
