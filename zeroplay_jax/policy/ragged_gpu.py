"""Ragged paged attention for GPUs: a Pallas kernel (Triton). One block per tile of queries and key/value head.

A tile has consecutive queries of one row, with all query heads that share the key/value head. Its block reads the used
pages of the row in ascending order, with the softmax of policy/paged_attention.py. On CPUs the kernel is interpreted.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy.attention import MASKED_SCORE
from zeroplay_jax.policy.paged_attention import LayerPages
from zeroplay_jax.policy.ragged_rows import Rows
from zeroplay_jax.types import UserError

# Tokens of a tile of a chunk.
CHUNK_QUERIES = 16
# Least rows of a matrix product on tensor cores.
_LEAST_ROWS = 16


def check(page: int) -> None:
    """Raises UserError for a page that the kernel does not take."""
    if page < _LEAST_ROWS or page & (page - 1):
        raise UserError(
            f'sampler.page={page}: sampler.attention=ragged takes powers of 2 from {_LEAST_ROWS} on a GPU; give 64'
        )


def cache_head_dim(head_dim: int) -> int:
    """Returns the size of a head in the cache."""
    return max(pl.next_power_of_2(head_dim), _LEAST_ROWS)


def attend(
    q: Float[Array, 'tokens heads head_dim'],
    cache: LayerPages,
    rows: Rows,
    window: int,
    scale: float,
    is_single: bool,
    interpret: bool = False,
) -> Float[Array, 'tokens heads head_dim']:
    """Returns the attention of the tokens of rows; undefined for tokens of no row.

    Args:
      q: queries, those of the first row first; heads as wide as those of the cache.
      cache: keys and values, those of the tokens themselves included.
      rows: rows of the tokens.
      window: number of positions that a token attends to, its own included; 0: no limit.
      scale: factor of the scores.
      is_single: whether every row has one token.
      interpret: whether the kernel is interpreted.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = cache.shape[2] // 2
    groups = heads // kv_heads
    queries = 1 if is_single else CHUNK_QUERIES
    tile_row, tile_first = _tiles(rows, tokens, queries)
    # Queries are gathered by tiles of a static shape, because sizes in a Triton kernel are powers of 2 and groups are
    # not: [kv_heads, tiles, query and group, head_dim].
    token = rows.start[tile_row] + tile_first
    token = token[:, None] + jnp.arange(queries)[None]
    tile_q = q.at[token].get(mode='clip') * scale
    tiles = tile_q.shape[0]
    tile_q = tile_q.reshape(tiles, queries, kv_heads, groups, head_dim)
    tile_q = tile_q.transpose(2, 0, 1, 3, 4).reshape(kv_heads, tiles, queries * groups, head_dim)
    tile_rows = max(pl.next_power_of_2(queries * groups), _LEAST_ROWS)
    padding = tile_rows - queries * groups
    tile_q = jnp.pad(tile_q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    # Position of the first query of every tile; -1 marks a tile without queries.
    last = rows.length[tile_row]
    row_tokens = rows.start[tile_row + 1] - rows.start[tile_row]
    is_used = (tile_row < rows.count) & (tile_first < row_tokens)
    position = jnp.where(is_used, last - row_tokens + tile_first, -1)
    end = jnp.where(is_used, jnp.minimum(last, position + queries), 0)
    scalars = jnp.stack([tile_row, position, end]).astype(jnp.int32)
    out = _call(
        tile_q, cache, rows.table, scalars, window=window, groups=groups, interpret=interpret
    )
    out = out[:, :, : queries * groups].reshape(kv_heads, tiles, queries, groups, head_dim)
    out = out.transpose(1, 2, 0, 3, 4).reshape(tiles * queries, heads, head_dim)
    # Tokens of no tile read the last entry of `scattered` or zeros; nobody reads them.
    target = jnp.where(
        is_used[:, None] & (token < rows.start[tile_row + 1][:, None]), token, tokens
    )
    return jnp.zeros_like(q).at[target.reshape(-1)].set(out, mode='drop')


def _tiles(
    rows: Rows, tokens: int, queries: int
) -> tuple[Int[Array, ' tiles'], Int[Array, ' tiles']]:
    """Returns the row of every tile and the number of its first query within the row; rows beyond the last are idle."""
    most_rows = rows.length.shape[0]
    row_tokens = rows.start[1:] - rows.start[:-1]
    is_valid = jnp.arange(most_rows) < rows.count
    row_tiles = jnp.where(is_valid, -(-row_tokens // queries), 0)
    end = jnp.cumsum(row_tiles)
    # Every row has less than one tile beyond those that its tokens fill.
    tiles = min(tokens, most_rows + tokens // queries)
    number = jnp.arange(tiles)
    row = jnp.searchsorted(end, number, side='right', method='compare_all')
    row = jnp.minimum(row, most_rows - 1)
    first = (number - (end - row_tiles)[row]) * queries
    return row.astype(jnp.int32), first.astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=('window', 'groups', 'interpret'))
def _call(tile_q, cache: LayerPages, table, scalars, window: int, groups: int, interpret: bool):
    """Returns the attention of tiles [kv_heads, tiles, tile_rows, head_dim] of queries."""
    kv_heads, tiles, tile_rows, head_dim = tile_q.shape
    tile_spec = pl.BlockSpec(
        (None, None, tile_rows, head_dim), lambda head, tile: (head, tile, 0, 0)
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
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name='ragged_paged_attention',
    )(tile_q, cache, table, scalars)


def _kernel(q_ref, cache_ref, table_ref, scalars_ref, out_ref, *, window: int, groups: int):
    """Attention of one tile: see `attend`."""
    head, tile = pl.program_id(0), pl.program_id(1)
    row = scalars_ref[0, tile]
    first_position = scalars_ref[1, tile]
    end = scalars_ref[2, tile]
    page = cache_ref.shape[1]
    q = q_ref[...]
    tile_rows, head_dim = q.shape
    query = jax.lax.broadcasted_iota(jnp.int32, (tile_rows, page), 0) // groups
    position = first_position + query
    index = jax.lax.broadcasted_iota(jnp.int32, (tile_rows, page), 1)

    def attend_page(number, sums):
        maximum, total, weighted = sums
        page_id = table_ref[row, number]
        keys = cache_ref[page_id, :, 2 * head, :]
        values = cache_ref[page_id, :, 2 * head + 1, :]
        # Entries that were never written may hold NaN.
        is_written = number * page + jax.lax.broadcasted_iota(jnp.int32, (page, 1), 0) < end
        values = jnp.where(is_written, values, jnp.zeros_like(values))
        scores = triton.dot(q, keys, trans_b=True, precision=_precision(q.dtype))
        place = number * page + index
        seen = place <= position
        if window:
            seen &= place > position - window
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
        jnp.full((tile_rows,), MASKED_SCORE, jnp.float32),
        jnp.zeros((tile_rows,), jnp.float32),
        jnp.zeros((tile_rows, head_dim), jnp.float32),
    )
    first_page = jnp.maximum(first_position - window + 1, 0) // page if window else 0
    _, total, weighted = jax.lax.fori_loop(first_page, pl.cdiv(end, page), attend_page, sums)
    total = jnp.where(total == 0, 1.0, total)
    out_ref[...] = (weighted / total[:, None]).astype(out_ref.dtype)


def _precision(dtype) -> jax.lax.Precision | None:
    """Returns the precision of products: float32 is not rounded to TensorFloat-32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
