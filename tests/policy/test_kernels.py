"""Splash attention, interpreted on the CPU, is dense attention; and layers in a loop are the layers one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from small_policies import packed

from zeroplay_jax.policy import attention, blocked_attention, sharding, transformer

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 4, 256, 4, 2, 128
CONFIG = transformer.ModelConfig(
    'test',
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    layers=4,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    windows=(100, 0, 100, 0),
    tied=False,
    qkv_bias=True,
    logit_chunk=128,
)


@pytest.fixture(scope='module')
def rows():
    """Queries, keys and values; segments of unequal lengths that cross the kernel's blocks, the last places empty."""
    rng = np.random.default_rng(0)
    draw = lambda heads: rng.normal(size=(ROWS, LENGTH, heads, DIM)).astype(np.float32)
    segment = np.repeat(np.array([[1, 2, 3, 0]], np.int32), [50, 130, 56, 20], 1).repeat(ROWS, 0)
    segment[1] = 1
    weight = draw(HEADS).reshape(ROWS, LENGTH, -1)
    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS), segment, weight


def value_and_gradients(attend, rows):
    q, k, v, segment, weight = rows
    weight = weight * (segment > 0)[..., None]

    def value(q, k, v):
        out = attend(q, k, v, segment)
        return jnp.sum(out * weight), out

    (_, out), gradients = jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))(q, k, v)
    return np.where((segment > 0)[..., None], out, 0), *map(np.asarray, gradients)


def dense(q, k, v, segment, window=0):
    return attention.attend_packed(q, k, v, attention.packed_mask(segment, window))


@pytest.mark.parametrize('window,mesh', [(0, None), (70, (2, 1, 2))], ids=str)
def test_splash_attention_is_dense_attention(rows, window, mesh):
    place = None if mesh is None else sharding.make_mesh(*mesh)
    splash = functools.partial(blocked_attention.attend_splash, window=window, mesh=place)
    expected = value_and_gradients(functools.partial(dense, window=window), rows)
    for ours, theirs in zip(value_and_gradients(splash, rows), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * max(1, np.abs(theirs).max()))


def scores(config, params, mesh=None):
    """(log-probs, gradients) of rows of two segments under a config."""
    tokens, positions, segment = packed(config, ROWS, LENGTH, segments=2)
    config = dataclasses.replace(config, mesh=mesh)

    def value(params):
        logp = transformer.score(config, params, tokens, positions, segment)[0]
        return jnp.sum(jnp.where(positions > 0, logp, 0)), logp

    gradients, logp = jax.jit(jax.grad(value, has_aux=True))(params)
    return np.where(positions > 0, logp, 0), gradients


@pytest.fixture(scope='module')
def plain():
    params = tiny.random_params(CONFIG)
    return params, scores(CONFIG, params)


@pytest.mark.parametrize('kind', ['blocked', pytest.param('splash', marks=pytest.mark.long)])
def test_a_policy_with_kernels_and_looped_layers_scores_alike(plain, kind):
    params, (logp, gradients) = plain
    config = dataclasses.replace(CONFIG, attention=kind, scan=True, remat=True)
    mine, slopes = scores(config, params, sharding.make_mesh(1, 2, 2))
    np.testing.assert_allclose(mine, logp, rtol=0, atol=1e-4)
    assert tiny.gap(slopes, gradients) <= 1e-4


def test_looped_layers_are_compiled_once_per_kind(plain):
    def products(config):
        inputs = (np.zeros((ROWS, LENGTH), np.int32),) * 3
        lowered = jax.jit(functools.partial(transformer.hidden, config)).lower(plain[0], *inputs)
        return lowered.as_text().count('stablehlo.dot_general')

    # Windows 100, 0, 100, 0: a loop of two layers.
    assert products(CONFIG) == 2 * products(dataclasses.replace(CONFIG, scan=True))
    single = dataclasses.replace(CONFIG, windows=())
    assert products(single) == 4 * products(dataclasses.replace(single, scan=True))
