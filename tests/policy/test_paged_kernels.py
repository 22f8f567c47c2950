"""Kernels of paged attention, interpreted on a CPU, against the plain path, which rollouts compare with slots."""

import interpretable_kernel
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zeroplay_jax.policy import paged_attention, ragged_attention, ragged_gpu, ragged_tpu, sharding
from zeroplay_jax.policy.paged_attention import StepShape


def long(*values):
    """A row of the tests that take minutes."""
    return pytest.param(*values, marks=pytest.mark.long)


# Largest difference to the plain path. bfloat16: the weights of the values are rounded to it in the plain path and on
# GPUs and not on TPUs; results, of a size of about 1, have 8 bits.
TOLERANCE = {'float32': 2e-6, 'bfloat16': 2e-2}
SLOTS = 8


@pytest.fixture(scope='module')
def tpu_kernel():
    return interpretable_kernel.load().ragged_paged_attention


@pytest.fixture
def on(request, monkeypatch, tpu_kernel):
    """Computes as on the platform that the test asks for."""
    if request.param == 'tpu':
        monkeypatch.setattr(ragged_attention, 'platform_of', lambda mesh: 'tpu')
        monkeypatch.setattr(ragged_tpu, '_kernel', lambda: tpu_kernel)
        # Two pages a time, so that rows have several blocks; and two blocks of queries per chunk.
        monkeypatch.setattr(ragged_tpu, 'BLOCK', 32)
        monkeypatch.setattr(ragged_tpu, 'CHUNK_QUERIES', 8)
    return request.param


BOTH = pytest.mark.parametrize('on', ['tpu', 'gpu'], indirect=True)


class Case:
    """Tokens of a step and pages that are not a number wherever nothing was written.

    Args:
      rows: slot → (positions before this step, tokens of this step), in the order of the step.
    """

    def __init__(self, rows, page, heads, kv_heads, head_dim, dtype, tokens=40, cached_dim=None):
        rng = np.random.default_rng(0)
        per_row = max(-(-(before + fed) // page) for before, fed in rows.values()) + 1
        pages = rng.permutation(SLOTS * per_row + 3)
        self.table = pages[: SLOTS * per_row].reshape(SLOTS, per_row).astype(np.int32)
        cache_shape = len(pages), page, 2 * kv_heads, cached_dim or head_dim
        self.cache = jnp.full(cache_shape, jnp.nan, dtype)
        self.row = np.full(tokens, SLOTS, np.int32)
        self.position = np.full(tokens, -1, np.int32)
        index = 0
        for slot, (before, fed) in rows.items():
            place = np.arange(before + fed)
            k, v = jnp.asarray(rng.normal(size=(2, len(place), kv_heads, head_dim)), dtype)
            places = jnp.asarray(self.table[slot, place // page]), jnp.asarray(place % page)
            self.cache = paged_attention.write_tokens(self.cache, k, v, *places)
            self.row[index : index + fed] = slot
            self.position[index : index + fed] = place[before:]
            index += fed
        self.q = jnp.asarray(rng.normal(size=(tokens, heads, head_dim)), dtype)

    def plain(self, window=0):
        cache = self.cache[..., : self.q.shape[-1]]
        return self._attended(paged_attention.make_attend, cache, window)

    def kernel(self, shape, window=0):
        def make(*places):
            return ragged_attention.make_attend(sharding.make_mesh(), *places, shape)

        return self._attended(make, self.cache, window)

    def _attended(self, make, cache, window):
        def attend(q, cache, *places):
            return make(*places)(q, cache, window)

        out = jax.jit(attend)(self.q, cache, self.table, self.row, self.position)
        return np.asarray(out, np.float32)

    def same(self, shape, dtype, window=0):
        expected, out = self.plain(window), self.kernel(shape, window)
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(out, expected, atol=TOLERANCE[dtype])
        np.testing.assert_array_equal(out[self.row == SLOTS], 0)


# Rows of one token: the first position, ends of pages and blocks, and between them; slots in between are idle.
SINGLES = {0: (0, 1), 1: (15, 1), 3: (16, 1), 4: (31, 1), 5: (70, 1), 7: (127, 1)}
# Chunks: a new row, one across pages, one whose last block of queries is full, one with one token.
CHUNKS = {1: (0, 5), 2: (13, 9), 5: (40, 8), 6: (63, 1)}
MIXED = {0: (15, 1), 4: (37, 1), 7: (0, 1), 1: (0, 11), 3: (20, 9)}
STEPS = {
    'singles': (SINGLES, StepShape(8, False)),
    'chunks': (CHUNKS, StepShape(0, True)),
    'mixed': (MIXED, StepShape(8, True)),
    'no-singles': (CHUNKS, StepShape(8, True)),
    'no-chunks': (SINGLES, StepShape(8, True)),
    'idle': ({0: (3, 0)}, StepShape(8, True)),
}


@BOTH
@pytest.mark.parametrize(
    'step,window',
    [
        ('mixed', 20),
        ('singles', 0),
        ('idle', 0),
        long('chunks', 20),
        long('no-singles', 0),
        long('no-chunks', 0),
    ],
)
def test_kernels_equal_the_plain_path(on, step, window):
    rows, shape = STEPS[step]
    tokens = 8 if step == 'singles' else 40
    Case(rows, 16, 4, 2, 128, 'float32', tokens).same(shape, 'float32', window)


# (query heads, key/value heads, size of a head): Qwen2.5 0.5B and 7B, as many key/value heads as heads, Gemma 3 1B.
HEADS = {
    '0.5B': (14, 2, 64),
    '7B': (28, 4, 128),
    'mha': (8, 8, 128),
    'gemma': (4, 1, 256),
}


@BOTH
@pytest.mark.parametrize(
    'model,page,dtype',
    [
        ('0.5B', 16, 'bfloat16'),
        ('7B', 128, 'bfloat16'),
        long('gemma', 16, 'bfloat16'),
        long('mha', 32, 'float32'),
    ],
)
def test_heads_pages_and_dtypes(on, model, page, dtype):
    heads, kv_heads, head_dim = HEADS[model]
    # On TPUs smaller heads are padded.
    cached_dim = ragged_attention.cache_head_dim(head_dim, sharding.make_mesh())
    case = Case(MIXED, page, heads, kv_heads, head_dim, dtype, cached_dim=cached_dim)
    case.same(StepShape(8, True), dtype)


@pytest.mark.parametrize('on', ['plain', 'tpu', 'gpu'], indirect=True)
def test_neighbours_and_pages_change_no_bit(on):
    """A row alone, the same shape of the step: same bits beside other rows and in other pages."""

    def compute(case):
        return case.plain(window=9) if on == 'plain' else case.kernel(StepShape(8, True))

    together = Case(MIXED, 16, 4, 2, 128, 'bfloat16')
    out = compute(together)
    for slot in (4, 3):
        mine = together.row == slot
        count = mine.sum()
        alone = Case(MIXED, 16, 4, 2, 128, 'bfloat16')
        alone.row[:], alone.position[:] = SLOTS, -1
        alone.row[:count], alone.position[:count] = slot, together.position[mine]
        alone.q = alone.q.at[:count].set(together.q[np.flatnonzero(mine)])
        np.testing.assert_array_equal(compute(alone)[:count], out[mine])
    moved = np.random.default_rng(1).permutation(len(together.cache))
    together.cache = jnp.zeros_like(together.cache).at[moved].set(together.cache)
    together.table = moved[together.table].astype(np.int32)
    np.testing.assert_array_equal(compute(together), out)


@pytest.mark.parametrize('model', ['0.5B', 'gemma'])
def test_the_gpu_kernel_is_lowered_for_gpus(model):
    """From shapes, without a GPU: to Triton's language, not further."""
    heads, kv_heads, head_dim = HEADS[model]
    shape = StepShape(64, True)

    def attend(q, cache, table, row, position):
        rows = paged_attention.rows_of_tokens(table, row, position, shape)
        plan = ragged_gpu.make_plan(rows, q.shape[0], shape)
        return ragged_gpu.attend(q, cache, plan, shape, 100, head_dim**-0.5, interpret=False)

    q = jax.ShapeDtypeStruct((256, heads, head_dim), 'bfloat16')
    cache = jax.ShapeDtypeStruct((99, 64, 2 * kv_heads, head_dim), 'bfloat16')
    ints = [jax.ShapeDtypeStruct(size, 'int32') for size in ((64, 9), (256,), (256,))]
    lowered = jax.jit(attend).trace(q, cache, *ints).lower(lowering_platforms=('cuda',))
    assert lowered.as_text().count('__gpu$xla.gpu.triton') == 2
