"""Ragged paged attention on TPUs: the Pallas kernel that JAX ships, and what it does not take.

The kernel takes no row without positions and no step without rows: it begins to read the first row before it knows how
many there are, and a read that nobody awaits is overtaken by the next one. It reads whole blocks of positions, also
those before a sliding window.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy.paged_attention import LayerPages, Rows, StepShape
from zeroplay_jax.types import UserError

# Width of a TPU register tile. Heads are padded to a multiple, because the kernel reads whole tiles.
LANES = 128
# Positions that are read at a time.
BLOCK = 512
# Queries of a block, where every row has one, and of chunks, whose queries share a read. With several rows in a block
# there are fewer blocks, each of which costs time, and more products whose results are not used.
SINGLE_QUERIES = 2
CHUNK_QUERIES = 32
# Key/value heads of a chip whose keys and values fill tiles, by size of an element in bytes; besides these the
# multiples of the last number.
_KV_HEADS = {2: (1, 2, 4, 8), 4: (1, 2, 4)}


def cache_head_dim(head_dim: int) -> int:
    """Returns the size of a head in the cache."""
    return math.ceil(head_dim / LANES) * LANES


def check(kv_heads: int, page: int, dtype) -> None:
    """Raises UserError for a number of key/value heads per chip that the kernel does not take."""
    del page
    element_bytes = jnp.dtype(dtype).itemsize
    counts = _KV_HEADS[element_bytes]
    largest = counts[-1]
    is_multiple = kv_heads % largest == 0
    if kv_heads not in counts and not is_multiple:
        allowed = ', '.join(map(str, counts))
        raise UserError(
            f'{kv_heads} key/value heads on a chip: sampler.attention=ragged takes {allowed} or a multiple of '
            f'{largest}; choose another mesh.model or set sampler.attention=xla'
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """Rows of one call, with the meaning of the kernel's arguments.

    Attributes:
      lengths: positions of every row, at least 1.
      table: pages of every row.
      starts: index of the first query of every row, and the end of the last one.
      count: number of rows, at least 1.
    """

    lengths: Int[Array, ' rows']
    table: Int[Array, 'rows pages_per_row']
    starts: Int[Array, ' rows_and_end']
    count: Int[Array, ' one']


def make_plan(rows: Rows, tokens: int, shape: StepShape) -> tuple[Call | None, Call | None]:
    """Returns the rows of the call for rows with one token, and of the call for chunks."""
    singles = chunks = None
    if shape.most_singles:
        singles = _single_rows(rows, shape.most_singles)
    if shape.has_chunks:
        chunks = _chunk_rows(rows)
    return singles, chunks


def _single_rows(rows: Rows, most: int) -> Call:
    """Returns the leading rows with one token each."""
    lengths = rows.length[:most]
    # Each has one query, so that query i is that of row i.
    starts = jnp.arange(lengths.size + 1, dtype=jnp.int32)
    # Without such a row the first one is computed, and nobody reads its result.
    count = jnp.maximum(rows.singles, 1)
    return Call(
        lengths=lengths,
        table=rows.table[:most],
        starts=starts,
        count=count[None],
    )


def _chunk_rows(rows: Rows) -> Call:
    """Returns the rows after those with one token."""
    # Chunks begin somewhere among the tokens of the step. The queries before them become a row of one position, whose
    # results nobody reads: that costs less than moving all queries to the front. It has one query at least, so that the
    # call is not empty.
    most = rows.length.shape[0]
    number = jnp.arange(most + 1, dtype=jnp.int32)
    next_row = rows.singles + number
    source = jnp.clip(next_row - 1, 0, most - 1)
    is_filler = number == 0
    lengths = jnp.where(is_filler, 1, rows.length[source])
    ends = rows.start.at[next_row].get(mode='clip')
    ends = jnp.where(rows.count == 0, 1, ends)
    first_start = jnp.zeros((1,), jnp.int32)
    starts = jnp.concatenate([first_start, ends])
    count = 1 + rows.count - rows.singles
    return Call(
        lengths=lengths,
        table=rows.table[source],
        starts=starts,
        count=count[None],
    )


def _kernel() -> Callable:
    """Returns JAX's kernel."""
    # Imported here, because the module needs parts of JAX that only TPUs use.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return ragged_paged_attention


def attend(
    q: Float[Array, 'tokens heads head_dim'],
    cache: LayerPages,
    plan: tuple[Call | None, Call | None],
    shape: StepShape,
    window: int,
    scale: float,
    interpret: bool,
) -> tuple[Array | None, Array | None]:
    """Returns the attention of the first `most_singles` tokens as rows of one, and that of all tokens as chunks."""
    del interpret
    page = cache.shape[1]
    kernel = _kernel()

    def call(queries, rows: Call, block_queries: int):
        block_pages = max(BLOCK // page, 1)
        most_pages = rows.table.shape[1]
        return kernel(
            queries,
            cache,
            rows.lengths,
            rows.table,
            rows.starts,
            rows.count,
            sm_scale=scale,
            sliding_window=window or None,
            # Given, because the kernel would look them up by the kind of the first device of the process.
            num_kv_pages_per_block=min(block_pages, most_pages),
            num_queries_per_block=min(block_queries, queries.shape[0]),
        )

    singles, chunks = plan
    single_out = chunk_out = None
    if singles is not None:
        single_q = q[: shape.most_singles]
        single_out = call(single_q, singles, SINGLE_QUERIES)
    if chunks is not None:
        chunk_out = call(q, chunks, CHUNK_QUERIES)
    return single_out, chunk_out
