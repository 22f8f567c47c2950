"""Attention in blocks and splash attention, interpreted on the CPU, are dense attention; looped layers are the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from small_policies import EVERY_SWITCH, packed

from zeroplay_jax.policy import attention, blocked_attention, sharding, transformer

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 4, 256, 4, 2, 128
CONFIG = dataclasses.replace(
    EVERY_SWITCH, layers=4, head_dim=DIM, windows=(100, 0, 100, 0), logit_chunk=128
)
# Segments that end inside of blocks, fill one exactly, and are shorter than one; the last places are empty.
LENGTHS = [50, 14, 64, 3, 105, 20]


def make_rows(heads=HEADS, kv_heads=KV_HEADS):
    """Queries, keys, values, segments and the weights of a sum over the outputs."""
    rng = np.random.default_rng(0)
    draw = lambda count: rng.normal(size=(ROWS, LENGTH, count, DIM)).astype(np.float32)
    segment = np.ones((ROWS, LENGTH), np.int32)
    segment[0] = np.repeat([1, 2, 3, 4, 5, 0], LENGTHS)
    weight = draw(heads).reshape(ROWS, LENGTH, -1)
    return draw(heads), draw(kv_heads), draw(kv_heads), segment, weight


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


@pytest.mark.parametrize(
    'block,window,heads,kv_heads,mesh',
    [
        # Blocks that divide the length or do not, that are longer than it, and windows shorter and longer than a block.
        (77, 0, 4, 2, (1, 1, 1)),
        (512, 0, 4, 2, (1, 1, 1)),
        (64, 1, 4, 2, (1, 1, 1)),
        (32, 40, 4, 2, (1, 1, 1)),
        # Any number of query heads per key head.
        (64, 0, 6, 1, (1, 1, 1)),
        # Every device computes its rows and heads.
        (64, 40, 4, 2, (2, 1, 2)),
        # Splash attention.
        (None, 0, 4, 2, (1, 1, 1)),
        (None, 70, 4, 2, (2, 1, 2)),
    ],
    ids=str,
)
def test_blocked_and_splash_attention_are_dense_attention(block, window, heads, kv_heads, mesh):
    """Output and gradients of queries, keys and values."""
    options = dict(window=window, mesh=sharding.make_mesh(*mesh) if mesh[0] > 1 else None)
    attend = functools.partial(blocked_attention.attend_splash, **options)
    if block:
        attend = functools.partial(blocked_attention.attend_packed, block=block, **options)
    rows = make_rows(heads, kv_heads)
    expected = value_and_gradients(functools.partial(dense, window=window), rows)
    for ours, theirs in zip(value_and_gradients(attend, rows), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * max(1, np.abs(theirs).max()))


@pytest.mark.parametrize('window', [0, 1, 40])
def test_no_pair_of_blocks_is_visited_for_nothing(window):
    """Results would not show it: on average, a block visits one more than have tokens that it sees."""
    segment = np.repeat([[1, 2, 3, 0], [1, 2, 2, 2]], [40, 60, 40, 20], 1)
    mask = np.asarray(attention.packed_mask(segment, window))
    needed = mask.reshape(2, 10, 16, 10, 16).any((0, 2, 4))
    blocks = jnp.asarray(segment.reshape(2, 10, 16).swapaxes(0, 1))
    first, last = map(np.asarray, blocked_attention._ranges(blocks, window))
    own, other = np.arange(10)[:, None], np.arange(10)
    visited = (first[:, None] <= other) & (other <= own)
    # The backward pass visits the same pairs.
    np.testing.assert_array_equal(visited, (other <= own) & (own <= last))
    assert not (needed & ~visited).any() and visited.sum() <= needed.sum() + 10


def temporaries(attend, length):
    """Bytes of temporaries of the compiled forward and backward pass over one row; nothing is run."""
    shape = lambda heads: jax.ShapeDtypeStruct((1, length, heads, 32), jnp.bfloat16)
    segment = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def value(q, k, v, segment):
        return jnp.sum(attend(q, k, v, segment).astype(jnp.float32))

    program = jax.jit(jax.grad(value, (0, 1, 2))).lower(shape(4), shape(2), shape(2), segment)
    return program.compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_length_and_not_with_its_square():
    blocked = functools.partial(blocked_attention.attend_packed, block=256)
    short, long = temporaries(blocked, 4096), temporaries(blocked, 8192)
    assert long < 2.1 * short
    # Dense attention holds the scores of all pairs in float32.
    assert temporaries(dense, 4096) > 4 * 4096**2 * 4 > 10 * short


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
