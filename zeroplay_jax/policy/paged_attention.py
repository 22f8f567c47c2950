"""Attention over a paged key/value cache: tokens of any rows, each with its row and position.

A token step has T tokens of several rows. The tokens of a row are consecutive and ascending, so that one call can hold
chunks of prompts and single decoded tokens alike ('ragged'). This is the form that ragged kernels take, and
`attend_pages` is the only function that a kernel has to replace (policy/ragged_attention.py). So is the axis order of a
page, [page, 2·kv_heads, head_dim] with keys and values of a head next to each other: one token is one contiguous row,
which accelerators write without touching its neighbours.

What a token attends to is a function of its row alone, bit for bit at one shape of the step: pages are read in
ascending order whatever their numbers, and a page in which a token sees nothing leaves its sums unchanged. So neither
neighbours nor the longest row of the step matter.

Axis names as in policy/attention.py; and tokens: T; pages, page: pages of the cache and tokens of a page; rows,
pages_per_row: the page table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy.attention import (
    MASKED_SCORE,
    Sums,
    fold_groups,
    product,
    unfold_groups,
)


@dataclasses.dataclass(frozen=True)
class StepShape:
    """What is known of the rows of a step before it runs.

    Attributes:
      most_singles: most leading rows with one token; 0 if all rows are chunks.
      has_chunks: whether rows after them may have several tokens.
    """

    most_singles: int
    has_chunks: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows with tokens in a step, in the order of their tokens. Entries from `count` on are invalid.

    Attributes:
      length: positions of every row up to its last token in the step; at least 1, also in invalid entries.
      start: index of the first token of every row, and at `count` the end of the last one.
      table: pages of every row.
      count: number of rows.
      singles: number of leading rows that have one token, see `StepShape`.
    """

    length: Int[Array, ' rows']
    start: Int[Array, ' rows_and_end']
    table: Int[Array, 'rows pages_per_row']
    count: Int[Array, '']
    singles: Int[Array, '']


def rows_of_tokens(
    table: Int[Array, 'rows pages_per_row'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    shape: StepShape,
) -> Rows:
    """Returns the rows of a step.

    Args:
      table: pages of every row, those without tokens included.
      row: row of every token. The tokens of a row are consecutive; idle tokens come last.
      position: position of every token within its row, ascending by 1; -1 marks an idle token.
      shape: rows with one token come before chunks.
    """
    tokens = row.shape[0]
    most_rows = min(table.shape[0], tokens)
    is_used = position >= 0
    used = jnp.sum(is_used, dtype=jnp.int32)
    # The first token has no predecessor: -1 is the number of no row.
    before_first = jnp.full((1,), -1, row.dtype)
    previous_row = jnp.concatenate([before_first, row[:-1]])
    is_first = is_used & (row != previous_row)
    first_tokens = jnp.cumsum(is_first, dtype=jnp.int32)
    count = first_tokens[-1]
    number = jnp.arange(most_rows + 1, dtype=jnp.int32)
    start = jnp.searchsorted(first_tokens, number, side='right', method='compare_all')
    # Invalid rows start where the used tokens end, so that they are empty.
    start = jnp.minimum(start.astype(jnp.int32), used)
    first_token = start[:-1]
    end = start[1:]
    last_token = jnp.maximum(end - 1, 0)
    length = position[last_token] + 1
    if shape.has_chunks:
        row_tokens = end - first_token
        most_singles = jnp.minimum(count, shape.most_singles)
        may_be_single = number[:-1] < most_singles
        is_single = (row_tokens == 1) & may_be_single
        # The product is 0 from the first row on that has several tokens.
        is_leading = jnp.cumprod(is_single.astype(jnp.int32))
        singles = jnp.sum(is_leading)
    else:
        singles = count
    row_id = row.at[first_token].get(mode='clip')
    return Rows(
        length=jnp.maximum(length, 1),
        start=start,
        table=table.at[row_id].get(mode='clip'),
        count=count,
        singles=singles,
    )


# Keys and values of one layer, interleaved: key of head 0, value of head 0, key of head 1, …
LayerPages: TypeAlias = Float[Array, 'pages page two_kv_heads head_dim']
# (queries of a step, pages of a layer, window) → attention.
AttendTokens: TypeAlias = Callable[
    [Float[Array, 'tokens heads head_dim'], LayerPages, int], Float[Array, 'tokens heads*head_dim']
]


def empty_pages(
    layers: int, pages: int, page: int, kv_heads: int, head_dim: int, dtype
) -> tuple[LayerPages, ...]:
    """Returns zero pages: one array per layer."""
    shape = (pages, page, 2 * kv_heads, head_dim)
    return tuple(jnp.zeros(shape, dtype) for _ in range(layers))


def write_tokens(
    cache: LayerPages,
    k: Float[Array, 'tokens kv_heads head_dim'],
    v: Float[Array, 'tokens kv_heads head_dim'],
    page: Int[Array, ' tokens'],
    index: Int[Array, ' tokens'],
) -> LayerPages:
    """Returns the cache with the keys and values of tokens at index[t] of page[t]; pages out of range are dropped."""
    tokens, kv_heads, head_dim = k.shape
    pairs = jnp.stack([k, v], 2).astype(cache.dtype)
    entries = pairs.reshape(tokens, 2 * kv_heads, head_dim)
    pages, page_tokens, _, cached_dim = cache.shape
    if cached_dim > head_dim:
        # A kernel wants heads as wide as its tiles (`ragged_attention.cache_head_dim`).
        missing = cached_dim - head_dim
        entries = jnp.pad(entries, ((0, 0), (0, 0), (0, missing)))
    # One index per token into the cache as a list of tokens: TPUs write such a scatter in place, one row per token. The
    # dropped tokens get different indices, because all are declared unique.
    capacity = pages * page_tokens
    cached_tokens = cache.reshape(capacity, 2 * kv_heads, cached_dim)
    is_written = page < pages
    place = page * page_tokens + index
    dropped = capacity + jnp.arange(tokens)
    target = jnp.where(is_written, place, dropped)
    cached_tokens = cached_tokens.at[target].set(entries, mode='drop', unique_indices=True)
    return cached_tokens.reshape(cache.shape)


def make_attend(
    table: Int[Array, 'rows pages_per_row'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
) -> AttendTokens:
    """Returns `attend_pages` for the tokens of a step."""

    def attend(q, cache: LayerPages, window: int = 0):
        return attend_pages(q, cache, table, row, position, window)

    return attend


def attend_pages(
    q: Float[Array, 'tokens heads head_dim'],
    cache: LayerPages,
    table: Int[Array, 'rows pages_per_row'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    window: int = 0,
) -> Float[Array, 'tokens heads*head_dim']:
    """Returns the attention of tokens to the positions of their rows up to their own, in plain XLA.

    Pages are read up to the longest row of the step and not further. Entries beyond a token's position may hold
    anything, NaN included.

    Args:
      q: queries.
      cache: keys and values, those of the tokens themselves included.
      table: pages of every row, in the order of positions.
      row: row of every token. A number beyond the last row marks an idle token.
      position: position of every token within its row, ascending within the row; -1 marks an idle token, whose
        result is 0.
      window: number of positions that a token attends to, its own included; 0: no limit.
    """
    tokens, heads, head_dim = q.shape
    page_tokens = cache.shape[1]
    kv_heads = cache.shape[2] // 2
    groups = heads // kv_heads
    # Every token is a batch of one query.
    folded_q = fold_groups(q[:, None], kv_heads)
    token_table = table.at[row].get(mode='clip')
    index = jnp.arange(page_tokens)

    def attend_page(number, sums: Sums) -> Sums:
        page_ids = token_table[:, number]
        pairs = cache[page_ids]
        pairs = pairs.reshape(tokens, page_tokens, kv_heads, 2, head_dim)
        keys = pairs[:, :, :, 0]
        values = pairs[:, :, :, 1]
        key_position = number * page_tokens + index
        # Masked before the product and not by a zero probability, because 0 · NaN is NaN.
        is_written = key_position[None] <= position[:, None]
        values = jnp.where(is_written[:, :, None, None], values, 0)
        seen = _seen(key_position, position[:, None], window)
        # The query heads of a group are folded into the query axis, hence the tiling.
        seen = jnp.tile(seen, (1, groups, 1))
        return _add_page(sums, folded_q, keys, values, seen[:, None])

    first_page = _first_page(position, window, page_tokens)
    last_page = jnp.max(position) // page_tokens
    sums = Sums.of_no_keys(folded_q.shape)
    sums = jax.lax.fori_loop(first_page, last_page + 1, attend_page, sums)
    out = sums.attention().astype(q.dtype)
    out = unfold_groups(out, 1)
    return out.reshape(tokens, heads * head_dim)


def _seen(key_position, query_position, window: int):
    """Returns whether queries at [tokens, 1] attend to keys at [page], bool [tokens, 1, page]."""
    key_position = key_position[None, None]
    query_position = query_position[:, :, None]
    seen = key_position <= query_position
    if window:
        in_window = key_position > query_position - window
        seen &= in_window
    return seen


def _first_page(position: Int[Array, ' tokens'], window: int, page_tokens: int):
    """Returns the index of the first page that any token sees; 0 without a window."""
    if not window:
        return jnp.int32(0)
    # No token sees a page before the window of the one that is nearest to its row's begin.
    is_idle = position < 0
    window_start = position - window + 1
    first_seen = jnp.where(is_idle, jnp.iinfo(jnp.int32).max, window_start)
    first_position = jnp.min(first_seen)
    return jnp.maximum(first_position, 0) // page_tokens


def _add_page(sums: Sums, q, keys, values, seen) -> Sums:
    """Returns the sums after one page more.

    Args:
      sums: those of the pages before it.
      q: queries [tokens, kv_heads, queries, head_dim].
      keys, values: of the page [tokens, page, kv_heads, head_dim].
      seen: whether a query attends to an entry [tokens, 1, queries, page].
    """
    scores = product('bkqd,bpkd->bkqp', q, keys)
    scores = jnp.where(seen, scores, MASKED_SCORE)
    page_maximum = jnp.max(scores, -1)
    maximum = jnp.maximum(sums.maximum, page_maximum)
    weights = jnp.exp(scores - maximum[..., None])
    rounded_weights = weights.astype(values.dtype)
    weighted = product('bkqp,bpkd->bkqd', rounded_weights, values)
    new_sums = sums.add(maximum, weights, weighted)
    # A page without visible keys must not change a bit: how many such pages a token meets depends on its neighbours.
    has_keys = jnp.any(seen, -1)
    return Sums(
        maximum=jnp.where(has_keys, new_sums.maximum, sums.maximum),
        total=jnp.where(has_keys, new_sums.total, sums.total),
        weighted=jnp.where(has_keys[..., None], new_sums.weighted, sums.weighted),
    )
