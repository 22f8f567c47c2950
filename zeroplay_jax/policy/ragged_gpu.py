"""Ragged paged attention for GPUs: a Pallas kernel (Triton). One block per tile of queries and key/value head.

A tile has consecutive queries of one row, with all query heads that share the key/value head. Its block reads the used
pages of the row in ascending order, with the softmax of policy/attention.py. On CPUs the kernel is interpreted.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from zeroplay_jax.policy.attention import MASKED_SCORE, Sums
from zeroplay_jax.policy.paged_attention import LayerPages, Rows, StepShape
from zeroplay_jax.types import UserError

# Tokens of a tile of a chunk.
CHUNK_QUERIES = 16
# Least lines of a matrix product on tensor cores.
_LEAST_LINES = 16


def check(kv_heads: int, page: int, dtype) -> None:
    """Raises UserError for a page that the kernel does not take."""
    del kv_heads, dtype
    is_power_of_2 = page & (page - 1) == 0
    if page < _LEAST_LINES or not is_power_of_2:
        raise UserError(
            f'sampler.page={page}: sampler.attention=ragged takes powers of 2 from {_LEAST_LINES} on a GPU; give 64'
        )


def cache_head_dim(head_dim: int) -> int:
    """Returns the size of a head in the cache."""
    padded_dim = pl.next_power_of_2(head_dim)
    return max(padded_dim, _LEAST_LINES)


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
    most_rows = rows.length.shape[0]
    number = jnp.arange(most_rows)
    is_single = number < rows.singles
    if shape.most_singles:
        singles = _tiles(rows, is_single, shape.most_singles, 1, tokens)
    if shape.has_chunks:
        # Every row has less than one tile beyond those that its tokens fill.
        most_tiles = most_rows + tokens // CHUNK_QUERIES
        most_tiles = min(tokens, most_tiles)
        is_valid = number < rows.count
        is_chunk = is_valid & ~is_single
        chunks = _tiles(rows, is_chunk, most_tiles, CHUNK_QUERIES, tokens)
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
    most_rows = rows.length.shape[0]
    row_start = rows.start[:-1]
    row_tokens = rows.start[1:] - row_start
    filled_tiles = pl.cdiv(row_tokens, queries)
    row_tiles = jnp.where(is_wanted, filled_tiles, 0)
    tiles_end = jnp.cumsum(row_tiles)
    tiles_start = tiles_end - row_tiles
    number = jnp.arange(most)
    # A tile is of the first row whose tiles end behind it.
    row = jnp.searchsorted(tiles_end, number, side='right', method='compare_all')
    is_used = row < most_rows
    row = jnp.minimum(row, most_rows - 1)
    # Number of the tile's first query among the tokens of its row.
    first = (number - tiles_start[row]) * queries
    # The tokens of a row are its last positions.
    row_length = rows.length[row]
    tile_tokens = row_tokens[row]
    position = row_length - tile_tokens + first
    end_position = jnp.minimum(row_length, position + queries)
    end_position = jnp.where(is_used, end_position, 0)
    query = first[:, None] + jnp.arange(queries)
    in_row = query < tile_tokens[:, None]
    has_query = is_used[:, None] & in_row
    token = row_start[row][:, None] + query
    token = jnp.where(has_query, token, tokens)
    scalars = jnp.stack([row, position, end_position])
    return Tiles(token, scalars.astype(jnp.int32), rows.table)


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
    # Every key/value head has tiles of its own.
    tile_q = jnp.moveaxis(tile_q, 2, 0)
    lines = queries * groups
    tile_q = tile_q.reshape(kv_heads, count, lines, head_dim)
    tile_lines = max(pl.next_power_of_2(lines), _LEAST_LINES)
    padding = tile_lines - lines
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
    out = out[:, :, :lines]
    out = out.reshape(kv_heads, count, queries, groups, head_dim)
    out = jnp.moveaxis(out, 0, 2)
    out = out.reshape(count, queries, heads, head_dim)
    # Places without a query have the number of tokens as index and are dropped.
    attention = jnp.zeros_like(q)
    return attention.at[tiles.token].set(out, mode='drop')


@functools.partial(jax.jit, static_argnames=('window', 'groups', 'interpret'))
def _call(tile_q, cache: LayerPages, table, scalars, window: int, groups: int, interpret: bool):
    """Returns the attention of tiles [kv_heads, tiles, tile_lines, head_dim] of queries."""
    kv_heads, tiles, tile_lines, head_dim = tile_q.shape
    tile_shape = (None, None, tile_lines, head_dim)
    tile_spec = pl.BlockSpec(tile_shape, lambda head, tile: (head, tile, 0, 0))
    call = pl.pallas_call(
        functools.partial(_kernel, window=window, groups=groups),
        grid=(kv_heads, tiles),
        in_specs=[tile_spec, _whole(cache), _whole(table), _whole(scalars)],
        out_specs=tile_spec,
        out_shape=jax.ShapeDtypeStruct(tile_q.shape, tile_q.dtype),
        compiler_params=_compiler_params(tile_lines, cache.dtype),
        interpret=interpret,
        name='ragged_paged_attention',
    )
    return call(tile_q, cache, table, scalars)


def _whole(array) -> pl.BlockSpec:
    """Returns the specification of an array that every block of the grid sees whole."""
    zeros = (0,) * array.ndim
    return pl.BlockSpec(array.shape, lambda head, tile: zeros)


def _compiler_params(tile_lines: int, dtype) -> triton.CompilerParams:
    """Returns how many warps compute a tile, and how many pages are in shared memory at a time."""
    warps = 4
    if tile_lines >= 128:
        warps = 8
    # Two stages of float32 pages of 128 exceed the shared memory of a block.
    stages = 1
    if dtype.itemsize == 2:
        stages = 2
    return triton.CompilerParams(num_warps=warps, num_stages=stages)


def _kernel(q_ref, cache_ref, table_ref, scalars_ref, out_ref, *, window: int, groups: int):
    """Writes the attention of one tile and key/value head.

    Args:
      q_ref: scaled queries [tile_lines, head_dim]; line r is query r // groups; the last lines are padding.
      cache_ref: [pages, page_tokens, two_kv_heads, head_dim], keys and values of a head next to each other.
      table_ref, scalars_ref: `Tiles.table` and `Tiles.scalars`.
      groups: query heads per key/value head.
      window: as in `attend`.
    """
    head = pl.program_id(0)
    tile = pl.program_id(1)
    row = scalars_ref[0, tile]
    first_position = scalars_ref[1, tile]
    end_position = scalars_ref[2, tile]
    page_tokens = cache_ref.shape[1]
    q = q_ref[...]
    tile_lines = q.shape[0]
    shape = (tile_lines, page_tokens)
    line = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    query_position = first_position + line // groups

    def attend_page(number, sums: Sums) -> Sums:
        page_id = table_ref[row, number]
        keys = cache_ref[page_id, :, 2 * head, :]
        values = cache_ref[page_id, :, 2 * head + 1, :]
        page_start = number * page_tokens
        # Entries that were never written may hold NaN. Values are masked before the product, because 0 · NaN is NaN;
        # scores after it.
        entry = jax.lax.broadcasted_iota(jnp.int32, (page_tokens, 1), 0)
        is_written = page_start + entry < end_position
        values = jnp.where(is_written, values, jnp.zeros_like(values))
        index = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        key_position = page_start + index
        seen = key_position <= query_position
        if window:
            in_window = key_position > query_position - window
            seen &= in_window
        return _add_page(sums, q, keys, values, seen)

    first_page = 0
    if window:
        first_seen = jnp.maximum(first_position - window + 1, 0)
        first_page = first_seen // page_tokens
    end_page = pl.cdiv(end_position, page_tokens)
    sums = Sums.of_no_keys(q.shape)
    sums = jax.lax.fori_loop(first_page, end_page, attend_page, sums)
    out_ref[...] = sums.attention().astype(out_ref.dtype)


def _add_page(sums: Sums, q, keys, values, seen) -> Sums:
    """Returns the sums of a tile after one page more.

    Args:
      sums: those of the pages before it.
      q: queries [tile_lines, head_dim].
      keys, values: of the page [page_tokens, head_dim].
      seen: whether a query attends to an entry [tile_lines, page_tokens].
    """
    precision = _precision(q.dtype)
    scores = triton.dot(q, keys, trans_b=True, precision=precision)
    scores = jnp.where(seen, scores, MASKED_SCORE)
    page_maximum = jnp.max(scores, 1)
    maximum = jnp.maximum(sums.maximum, page_maximum)
    weights = jnp.exp(scores - maximum[:, None])
    # A query that sees nothing in this page keeps its sums.
    weights = jnp.where(seen, weights, 0.0)
    rounded_weights = weights.astype(values.dtype)
    weighted = triton.dot(rounded_weights, values, precision=precision)
    return sums.add(maximum, weights, weighted)


def _precision(dtype) -> jax.lax.Precision | None:
    """Returns the precision of products: float32 is not rounded to TensorFloat-32."""
    if dtype == jnp.float32:
        return jax.lax.Precision.HIGHEST
    return None
