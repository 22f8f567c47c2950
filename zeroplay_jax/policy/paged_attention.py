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

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy.attention import MASKED_SCORE, fold_groups, product, unfold_groups

# Keys and values of one layer, interleaved: key of head 0, value of head 0, key of head 1, …
LayerPages: TypeAlias = Float[Array, 'pages page two_kv_heads head_dim']
# (queries of a step, pages of a layer, window) → attention.
AttendTokens: TypeAlias = Callable[
    [Float[Array, 'tokens heads head_dim'], LayerPages, int], Float[Array, 'tokens heads*head_dim']
]
# (running maximum, sum of exponentials, weighted sum of values) of the softmax over the pages read so far.
_Sums: TypeAlias = tuple[Array, Array, Array]


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
        entries = jnp.pad(entries, ((0, 0), (0, 0), (0, cached_dim - head_dim)))
    # One index per token into the cache as a list of tokens: TPUs write such a scatter in place, one row per token. The
    # dropped tokens get different indices, because all are declared unique.
    cached_tokens = cache.reshape(pages * page_tokens, 2 * kv_heads, cached_dim)
    dropped = pages * page_tokens + jnp.arange(tokens)
    target = jnp.where(page < pages, page * page_tokens + index, dropped)
    cached_tokens = cached_tokens.at[target].set(entries, mode='drop', unique_indices=True)
    return cached_tokens.reshape(cache.shape)


def make_attend(
    table: Int[Array, 'rows pages_per_row'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    block: int = 1,
) -> AttendTokens:
    """Returns `attend_pages` for the tokens of a step."""

    def attend(q, cache: LayerPages, window: int = 0):
        return attend_pages(q, cache, table, row, position, window, block)

    return attend


def attend_pages(
    q: Float[Array, 'tokens heads head_dim'],
    cache: LayerPages,
    table: Int[Array, 'rows pages_per_row'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    window: int = 0,
    block: int = 1,
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
      block: the tokens come in blocks of this many of one row; keys and values are read once per block.
    """
    tokens, heads, head_dim = q.shape
    page_tokens = cache.shape[1]
    kv_heads = cache.shape[2] // 2
    groups = heads // kv_heads
    blocks = tokens // block
    block_q = fold_groups(q.reshape(blocks, block, heads, head_dim), kv_heads)
    block_position = position.reshape(blocks, block)
    last_position = jnp.max(block_position, 1)
    block_table = table.at[row[::block]].get(mode='clip')

    def attend_page(number, sums: _Sums) -> _Sums:
        page_ids = block_table[:, number]
        pairs = cache[page_ids].reshape(blocks, page_tokens, kv_heads, 2, head_dim)
        keys = pairs[:, :, :, 0]
        key_position = number * page_tokens + jnp.arange(page_tokens)
        # Masked before the product and not by a zero probability, because 0 · NaN is NaN.
        is_written = key_position[None] <= last_position[:, None]
        values = jnp.where(is_written[:, :, None, None], pairs[:, :, :, 1], 0)
        seen = key_position[None, None] <= block_position[:, :, None]
        if window:
            seen &= key_position[None, None] > block_position[:, :, None] - window
        # The query heads of a group are folded into the query axis, hence the tiling.
        seen = jnp.tile(seen, (1, groups, 1))[:, None]
        return _add_page(sums, block_q, keys, values, seen)

    shape = block_q.shape[:-1]
    sums = (
        jnp.full(shape, MASKED_SCORE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(block_q.shape, jnp.float32),
    )
    first_page = jnp.int32(0)
    if window:
        # No token sees a page before the window of the one that is nearest to its row's begin.
        first_seen = jnp.where(position >= 0, position - window + 1, jnp.iinfo(jnp.int32).max)
        first_page = jnp.maximum(jnp.min(first_seen), 0) // page_tokens
    used_pages = jnp.max(position) // page_tokens + 1
    _, total, weighted = jax.lax.fori_loop(first_page, used_pages, attend_page, sums)
    # Idle tokens have summed nothing.
    out = weighted / jnp.where(total == 0, 1.0, total)[..., None]
    out = unfold_groups(out.astype(q.dtype), block)
    return out.reshape(tokens, heads * head_dim)


def _add_page(sums: _Sums, q, keys, values, seen) -> _Sums:
    """Returns the sums after one page more.

    Args:
      sums: those of the pages before it.
      q: queries [blocks, kv_heads, queries, head_dim].
      keys, values: of the page [blocks, page, kv_heads, head_dim].
      seen: whether a query attends to an entry [blocks, 1, queries, page].
    """
    scores = product('bkqd,bpkd->bkqp', q, keys)
    scores = jnp.where(seen, scores, MASKED_SCORE)
    maximum, total, weighted = sums
    new_maximum = jnp.maximum(maximum, jnp.max(scores, -1))
    weights = jnp.exp(scores - new_maximum[..., None])
    # What was summed relative to the old maximum is scaled to the new one.
    scale = jnp.exp(maximum - new_maximum)
    page_weighted = product('bkqp,bpkd->bkqd', weights.astype(values.dtype), values)
    new_total = scale * total + jnp.sum(weights, -1)
    new_weighted = scale[..., None] * weighted + page_weighted
    # A page without visible keys must not change a bit: how many such pages a token meets depends on its neighbours.
    has_keys = jnp.any(seen, -1)
    return (
        jnp.where(has_keys, new_maximum, maximum),
        jnp.where(has_keys, new_total, total),
        jnp.where(has_keys[..., None], new_weighted, weighted),
    )
