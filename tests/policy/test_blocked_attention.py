"""Attention in blocks is dense attention, forward and backward; its memory grows with the length, not its square."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import dense, value_and_gradients

from zeroplay_jax.policy import attention, blocked_attention, sharding

ROWS, LENGTH, DIM = 2, 200, 16
# Segments that end inside of blocks, fill one exactly, and are shorter than one; the last places are empty.
LENGTHS = [50, 14, 64, 3, 49, 20]


def make_rows(heads=4, kv_heads=2, seed=0):
    """Queries, keys, values, segments and the weights of a sum over the outputs."""
    rng = np.random.default_rng(seed)
    draw = lambda count: rng.normal(size=(ROWS, LENGTH, count, DIM)).astype(np.float32)
    segment = np.ones((ROWS, LENGTH), np.int32)
    segment[0] = np.repeat([1, 2, 3, 4, 5, 0], LENGTHS)
    weight = draw(heads).reshape(ROWS, LENGTH, -1)
    return draw(heads), draw(kv_heads), draw(kv_heads), segment, weight


@functools.cache
def by_dense(heads=4, kv_heads=2, window=0):
    return value_and_gradients(functools.partial(dense, window=window), make_rows(heads, kv_heads))


@pytest.mark.parametrize(
    'window,block,heads,kv_heads,mesh',
    [
        # Blocks that divide the length or do not, that are longer than it, and windows shorter and longer than a block.
        (0, 77, 4, 2, None),
        (0, 512, 4, 2, None),
        (1, 64, 4, 2, None),
        (40, 32, 4, 2, None),
        # Any number of query heads per key head.
        (0, 64, 6, 1, None),
        # Every device computes its rows and heads.
        (40, 64, 4, 2, (2, 1, 2)),
    ],
    ids=str,
)
def test_blocked_attention_is_dense_attention(window, block, heads, kv_heads, mesh):
    """Output and gradients of queries, keys and values are those of dense attention."""
    place = None if mesh is None else sharding.make_mesh(*mesh)
    blocked = functools.partial(
        blocked_attention.attend_packed, window=window, block=block, mesh=place
    )
    ours = value_and_gradients(blocked, make_rows(heads, kv_heads))
    for mine, theirs in zip(ours, by_dense(heads, kv_heads, window), strict=True):
        tolerance = 2e-5 * max(1, np.abs(theirs).max())
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


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
