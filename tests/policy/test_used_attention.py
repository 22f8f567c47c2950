"""Attention over used places: equal to attention over all places, and no bit depends on what a row does not use."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zeroplay_jax.policy import attention

SLOTS, KV_HEADS, HEADS, HEAD_DIM, PLACES, BURST, CHUNK = 6, 2, 4, 8, 100, 4, 5
# Around the borders of the lengths that can be read: 16, 32, …, 96, 100.
BASE = np.array([0, 1, 16, 17, 50, 97], np.int32)
STEP = 2


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.fixture(scope='module')
def cache():
    return arrays((SLOTS, KV_HEADS, HEAD_DIM, PLACES), (SLOTS, KV_HEADS, PLACES, HEAD_DIM))


def spoilt_beyond_the_read_lengths(cache, used):
    """The cache with NaN in all places that a row with `used` places must not read."""
    lengths = attention.read_lengths(PLACES)
    read = np.array([min(length for length in lengths if length >= n) for n in used])
    unread = np.arange(PLACES)[None] >= read[:, None]
    keys = jnp.where(unread[:, None, None], jnp.nan, cache[0])
    return keys, jnp.where(unread[:, None, :, None], jnp.nan, cache[1])


@pytest.fixture(scope='module')
def token():
    """A query, key and value of every slot, and the keys and values of the burst so far."""
    heads, kv_heads = (SLOTS, 1, HEADS, HEAD_DIM), (SLOTS, 1, KV_HEADS, HEAD_DIM)
    buffer = (SLOTS, KV_HEADS, HEAD_DIM, BURST), (SLOTS, KV_HEADS, BURST, HEAD_DIM)
    q, k, v, *new = arrays(heads, kv_heads, kv_heads, *buffer)
    return q, k, v, tuple(new)


@functools.partial(jax.jit, static_argnums=3)
def step_over_used(token, cache, live, window):
    q, k, v, buffer = token
    rows = attention.decoding_rows(live)
    base = jnp.asarray(BASE)
    return attention.attend_used_step(q, k, v, cache, buffer, base, STEP, rows, window)


@pytest.mark.parametrize('window', [0, 7])
def test_a_step_equals_that_over_all_places_and_reads_its_used_ones_alone(token, cache, window):
    q, k, v, buffer = token
    step = q, k, v, cache, buffer, BASE, jnp.int32(STEP), window
    expected, expected_buffer = attention.attend_step(*step)
    spoilt = spoilt_beyond_the_read_lengths(cache, BASE)
    assert np.isnan(spoilt[0]).mean() > 0.3
    together, buffer = step_over_used(token, spoilt, np.ones(SLOTS, bool), window)
    np.testing.assert_allclose(together, expected, atol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, buffer, expected_buffer)
    # Only rows that decode are computed.
    for slot in range(SLOTS):
        is_live = np.arange(SLOTS) == slot
        alone = np.asarray(step_over_used(token, spoilt, is_live, window)[0])
        np.testing.assert_array_equal(alone[slot], together[slot])
        assert not np.allclose(alone[~is_live], expected[~is_live], atol=1e-2)


@functools.partial(jax.jit, static_argnums=(3, 4))
def chunk_over(chunk, cache, slots, window, reads_used):
    q, k, v, start = chunk
    return attention.attend_chunk(q, k, v, cache, slots, start, window, reads_used)


@pytest.fixture(scope='module')
def chunk():
    """Chunks of four rows; the last two are consecutive chunks of one slot."""
    start = jnp.asarray([0, 44, 11, 11 + CHUNK], jnp.int32)
    heads, kv_heads = (4, CHUNK, HEADS, HEAD_DIM), (4, CHUNK, KV_HEADS, HEAD_DIM)
    return *arrays(heads, kv_heads, kv_heads), start


@pytest.mark.parametrize('window', [0, 7])
def test_a_chunk_equals_that_over_all_places_and_reads_its_used_ones_alone(chunk, cache, window):
    slots = np.array([4, 2, 1, 1], np.int32)
    expected, expected_cache = chunk_over(chunk, cache, slots, window, False)
    used = np.full(SLOTS, PLACES)
    used[slots] = np.asarray(chunk[3]) + CHUNK
    spoilt = spoilt_beyond_the_read_lengths(cache, used)
    out, written = chunk_over(chunk, spoilt, slots, window, True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    written = [np.where(np.isnan(ours), theirs, ours) for ours, theirs in zip(written, cache)]
    jax.tree.map(np.testing.assert_array_equal, written, list(expected_cache))
