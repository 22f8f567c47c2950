"""Attention over pages against plain attention of one row at a time; bits that do not depend on neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zeroplay_jax.policy import paged_attention

PAGES, ROWS, PER_ROW = 40, 6, 6


def reference(q, k, v, position, window):
    """Attention of one token [heads, head_dim] to the keys [length, kv_heads, head_dim] of its row, in float64."""
    first = max(position - window + 1, 0) if window else 0
    k, v = (np.asarray(x[first : position + 1], np.float64) for x in (k, v))
    out = []
    for head in range(q.shape[0]):
        kv = head // (q.shape[0] // k.shape[1])
        scores = k[:, kv] @ np.asarray(q[head], np.float64) * q.shape[1] ** -0.5
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ v[:, kv])
    return np.concatenate(out)


class Case:
    """Rows of random length in random pages; everything else in the cache is not a number."""

    def __init__(self, page, heads, kv_heads, dtype, seed=0, head_dim=16):
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, page * PER_ROW + 1, ROWS)
        self.lengths[:2] = 1, page * PER_ROW
        self.keys, self.values = (
            jnp.asarray(rng.normal(size=(ROWS, page * PER_ROW, kv_heads, head_dim)), dtype)
            for _ in range(2)
        )
        self.table = rng.permutation(PAGES)[: ROWS * PER_ROW].reshape(ROWS, PER_ROW)
        cache = jnp.full((PAGES, page, 2 * kv_heads, head_dim), jnp.nan, dtype)
        row = np.repeat(np.arange(ROWS), self.lengths)
        place = np.concatenate([np.arange(n) for n in self.lengths])
        self.cache = paged_attention.write_tokens(
            cache,
            self.keys[row, place],
            self.values[row, place],
            jnp.asarray(self.table[row, place // page]),
            jnp.asarray(place % page),
        )
        self.rng, self.shape, self.dtype = rng, (heads, head_dim), dtype

    def queries(self, count):
        return jnp.asarray(self.rng.normal(size=(count, *self.shape)), self.dtype)

    def attend(self, q, row, position, window):
        function = functools.partial(paged_attention.attend_pages, window=window)
        row, position = (np.asarray(x, np.int32) for x in (row, position))
        return np.asarray(jax.jit(function)(q, self.cache, self.table, row, position), np.float32)


@pytest.mark.parametrize(
    'page,heads,kv_heads,window,dtype',
    [
        (4, 4, 2, 0, 'float32'),
        (16, 6, 2, 5, 'float32'),
        (5, 8, 1, 11, 'float32'),
        (8, 3, 3, 0, 'bfloat16'),
        (16, 8, 2, 20, 'bfloat16'),
    ],
)
def test_attention_over_pages_is_attention_of_each_row(page, heads, kv_heads, window, dtype):
    case = Case(page, heads, kv_heads, dtype)
    # The last tokens of all rows, and a chunk that ends at the last token of one row.
    chunk = min(4, int(case.lengths[3]))
    row = np.array([*range(ROWS), *[3] * chunk, ROWS])
    ends = case.lengths - 1
    position = np.array([*ends, *range(ends[3] - chunk + 1, ends[3] + 1), -1])
    q = case.queries(len(row))
    out = case.attend(q, row, position, window)
    tolerance = 2e-6 if dtype == 'float32' else 2e-2
    for index in range(len(row) - 1):
        r = row[index]
        expected = reference(q[index], case.keys[r], case.values[r], position[index], window)
        np.testing.assert_allclose(out[index], expected, atol=tolerance)
    np.testing.assert_array_equal(out[-1], 0)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('window', [0, 9])
def test_neighbours_and_pages_change_no_bit(window, dtype):
    case = Case(8, 4, 2, dtype)
    row = np.arange(ROWS)
    position = case.lengths - 1
    q = case.queries(ROWS)
    together = case.attend(q, row, position, window)
    for r in range(ROWS):
        alone = np.where(row == r, position, -1)
        np.testing.assert_array_equal(case.attend(q, row, alone, window)[r], together[r])
    # The same rows in other pages, beside other entries.
    numbers = np.random.default_rng(1).permutation(PAGES)
    case.cache = jnp.zeros_like(case.cache).at[numbers].set(case.cache)
    case.table = numbers[case.table]
    np.testing.assert_array_equal(case.attend(q, row, position, window), together)
