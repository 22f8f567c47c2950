"""Ragged paged attention for GPUs: a Pallas kernel (Triton). One block per tile of queries and key/value head.

A tile has consecutive queries of one row, with all query heads that share the key/value head. Its block reads the used
pages of the row in ascending order, with the softmax of policy/paged_attention.py. On CPUs the kernel is interpreted.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from zeroplay_jax.policy.attention import MASKED_SCORE
from zeroplay_jax.policy.paged_attention import LayerPages
from zeroplay_jax.policy.ragged_rows import Rows, StepShape
from zeroplay_jax.types import UserError

# Tokens of a tile of a chunk.
CHUNK_QUERIES = 16
# Least lines of a matrix product on tensor cores.
_LEAST_LINES = 16


def check(kv_heads: int, page: int, dtype) -> None:
    """Raises UserError for a page that the kernel does not take."""
    del kv_heads, dtype
    if page < _LEAST_LINES or page & (page - 1):
        raise UserError(
            f'sampler.page={page}: sampler.attention=ragged takes powers of 2 from {_LEAST_LINES} on a GPU; give 64'
        )


def cache_head_dim(head_dim: int) -> int:
    """Returns the size of a head in the cache."""
    return max(pl.next_power_of_2(head_dim), _LEAST_LINES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of the queries of a step.

    Attributes:
      token: index of every query; the number of tokens where there is none.
      scalars: per tile its row, the position of its first query, and the end of the positions that it sees, which is 0
        in a tile without queries.
      table: pages of every row.
    """

    token: Int[Array, 'tiles queries']
    scalars: Int[Array, '3 tiles']
    table: Int[Array, 'rows pages_per_row']


def make_plan(rows: Rows, tokens: int, shape: StepShape) -> tuple[Tiles | None, Tiles | None]:
    """Returns the tiles of rows with one token, and those of chunks."""
    singles = chunks = None
    number = jnp.arange(rows.length.shape[0])
    is_single = number < rows.singles
    if shape.most_singles:
        singles = _tiles(rows, is_single, shape.most_singles, 1, tokens)
    if shape.has_chunks:
        # Every row has less than one tile beyond those that its tokens fill.
        most = min(tokens, rows.length.shape[0] + tokens // CHUNK_QUERIES)
        is_chunk = ~is_single & (number < rows.count)
        chunks = _tiles(rows, is_chunk, most, CHUNK_QUERIES, tokens)
    return singles, chunks


def _tiles(
    rows: Rows, is_wanted: Bool[Array, ' rows'], most: int, queries: int, tokens: int
) -> Tiles:
    """Returns the tiles of some rows.

    Args:
      rows: of the step.
      is_wanted: rows that get tiles.
      most: number of tiles, at least as many as these rows need.
      queries: of a tile.
      tokens: of the step.
    """
    row_tokens = rows.start[1:] - rows.start[:-1]
    row_tiles = jnp.where(is_wanted, -(-row_tokens // queries), 0)
    end = jnp.cumsum(row_tiles)
    number = jnp.arange(most)
    row = jnp.searchsorted(end, number, side='right', method='compare_all')
    is_used = row < row_tiles.shape[0]
    row = jnp.minimum(row, row_tiles.shape[0] - 1)
    first = (number - (end - row_tiles)[row]) * queries
    position = rows.length[row] - row_tokens[row] + first
    query = first[:, None] + jnp.arange(queries)[None]
    has_query = is_used[:, None] & (query < row_tokens[row][:, None])
    token = jnp.where(has_query, rows.start[row][:, None] + query, tokens)
    end_position = jnp.minimum(rows.length[row], position + queries)
    end_position = jnp.where(is_used, end_position, 0)
    scalars = jnp.stack([row, position, end_position]).astype(jnp.int32)
    return Tiles(token, scalars, rows.table)


def attend(
    q: Float[Array, 'tokens heads head_dim'],
    cache: LayerPages,
    plan: tuple[Tiles | None, Tiles | None],
    shape: StepShape,
    window: int,
    scale: float,
    interpret: bool,
) -> tuple[Array | None, Array | None]:
    """Returns the attention of the first `most_singles` tokens as rows of one, and that of all tokens as chunks.

    Args:
      q: queries; heads as wide as those of the cache.
      cache: keys and values, those of the tokens themselves included.
      plan: from `make_plan`.
      shape: of the step.
      window: number of positions that a token attends to, its own included; 0: no limit.
      scale: factor of the scores.
      interpret: whether the kernel is interpreted.
    """
    singles, chunks = plan
    queries = q * scale
    single_out = chunk_out = None
    if singles is not None:
        single_out = _attend_tiles(queries, cache, singles, window, interpret)
        single_out = single_out[: shape.most_singles]
    if chunks is not None:
        chunk_out = _attend_tiles(queries, cache, chunks, window, interpret)
    return single_out, chunk_out


def _attend_tiles(q, cache: LayerPages, tiles: Tiles, window: int, interpret: bool):
    """Returns the attention of the queries in tiles, 0 for all others."""
    heads, head_dim = q.shape[1:]
    kv_heads = cache.shape[2] // 2
    groups = heads // kv_heads
    count, queries = tiles.token.shape
    # Gathered, because sizes in a Triton kernel are powers of 2 and groups are not.
    tile_q = q.at[tiles.token].get(mode='clip')
    tile_q = tile_q.reshape(count, queries, kv_heads, groups, head_dim)
    tile_q = tile_q.transpose(2, 0, 1, 3, 4).reshape(kv_heads, count, queries * groups, head_dim)
    tile_lines = max(pl.next_power_of_2(queries * groups), _LEAST_LINES)
    padding = tile_lines - queries * groups
    tile_q = jnp.pad(tile_q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    out = _call(
        tile_q,
        cache,
        tiles.table,
        tiles.scalars,
        window=window,
        groups=groups,
        interpret=interpret,
    )
    out = out[:, :, : queries * groups].reshape(kv_heads, count, queries, groups, head_dim)
    out = out.transpose(1, 2, 0, 3, 4).reshape(count * queries, heads, head_dim)
    return jnp.zeros_like(q).at[tiles.token.reshape(-1)].set(out, mode='drop')


@functools.partial(jax.jit, static_argnames=('window', 'groups', 'interpret'))
def _call(tile_q, cache: LayerPages, table, scalars, window: int, groups: int, interpret: bool):
    """Returns the attention of tiles [kv_heads, tiles, tile_lines, head_dim] of queries."""
    kv_heads, tiles, tile_lines, head_dim = tile_q.shape
    tile_spec = pl.BlockSpec(
        (None, None, tile_lines, head_dim), lambda head, tile: (head, tile, 0, 0)
    )

    def whole(array) -> pl.BlockSpec:
        zeros = (0,) * array.ndim
        return pl.BlockSpec(array.shape, lambda head, tile: zeros)

    return pl.pallas_call(
        functools.partial(_kernel, window=window, groups=groups),
        grid=(kv_heads, tiles),
        in_specs=[tile_spec, whole(cache), whole(table), whole(scalars)],
        out_specs=tile_spec,
        out_shape=jax.ShapeDtypeStruct(tile_q.shape, tile_q.dtype),
        # Two stages of float32 pages of 128 exceed the shared memory of a block.
        compiler_params=triton.CompilerParams(
            num_warps=8 if tile_lines >= 128 else 4,
            num_stages=2 if cache.dtype.itemsize == 2 else 1,
        ),
        interpret=interpret,
        name='ragged_paged_attention',
    )(tile_q, cache, table, scalars)


def _kernel(q_ref, cache_ref, table_ref, scalars_ref, out_ref, *, window: int, groups: int):
    """Writes the attention of one tile and key/value head.

    Args:
      q_ref: scaled queries [tile_lines, head_dim]; line r is query r // groups; the last lines are padding.
      cache_ref: [pages, page_tokens, two_kv_heads, head_dim], keys and values of a head next to each other.
      table_ref, scalars_ref: `Tiles.table` and `Tiles.scalars`.
      groups: query heads per key/value head.
      window: as in `attend`.
    """
    head, tile = pl.program_id(0), pl.program_id(1)
    row = scalars_ref[0, tile]
    first_position = scalars_ref[1, tile]
    end_position = scalars_ref[2, tile]
    page_tokens = cache_ref.shape[1]
    q = q_ref[...]
    tile_lines, head_dim = q.shape
    query = jax.lax.broadcasted_iota(jnp.int32, (tile_lines, page_tokens), 0) // groups
    query_position = first_position + query

    def attend_page(number, sums):
        maximum, total, weighted = sums
        page_id = table_ref[row, number]
        keys = cache_ref[page_id, :, 2 * head, :]
        values = cache_ref[page_id, :, 2 * head + 1, :]
        # Entries that were never written may hold NaN. Values are masked before the product, because 0 · NaN is NaN;
        # scores after it.
        entry = jax.lax.broadcasted_iota(jnp.int32, (page_tokens, 1), 0)
        is_written = number * page_tokens + entry < end_position
        values = jnp.where(is_written, values, jnp.zeros_like(values))
        scores = triton.dot(q, keys, trans_b=True, precision=_precision(q.dtype))
        index = jax.lax.broadcasted_iota(jnp.int32, (tile_lines, page_tokens), 1)
        key_position = number * page_tokens + index
        seen = key_position <= query_position
        if window:
            seen &= key_position > query_position - window
        scores = jnp.where(seen, scores, MASKED_SCORE)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, 1))
        # A query that sees nothing in this page keeps its sums.
        weights = jnp.where(seen, jnp.exp(scores - new_maximum[:, None]), 0.0)
        scale = jnp.exp(maximum - new_maximum)
        page_weighted = triton.dot(
            weights.astype(values.dtype), values, precision=_precision(q.dtype)
        )
        return (
            new_maximum,
            scale * total + jnp.sum(weights, 1),
            scale[:, None] * weighted + page_weighted,
        )

    sums = (
        jnp.full((tile_lines,), MASKED_SCORE, jnp.float32),
        jnp.zeros((tile_lines,), jnp.float32),
        jnp.zeros((tile_lines, head_dim), jnp.float32),
    )
    first_page = jnp.maximum(first_position - window + 1, 0) // page_tokens if window else 0
    _, total, weighted = jax.lax.fori_loop(
        first_page, pl.cdiv(end_position, page_tokens), attend_page, sums
    )
    # A tile without queries has summed nothing.
    total = jnp.where(total == 0, 1.0, total)
    out_ref[...] = (weighted / total[:, None]).astype(out_ref.dtype)


def _precision(dtype) -> jax.lax.Precision | None:
    """Returns the precision of products: float32 is not rounded to TensorFloat-32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
