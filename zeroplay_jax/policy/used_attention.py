"""Attention of slots over the places that they use, one row after another: for CPUs.

`attention.attend_step` and `attention.attend_chunk` read every place of every slot in one batched product. Accelerators
need such large products. On a CPU the traffic of the unused places takes most of the time. Here a row reads its cache
up to the shortest of a few lengths that holds it, and rows that do not decode are skipped.

The length that a row reads follows from its own position. A result is therefore a function of the row alone, bit for
bit, as in attention.py. Between the two the results differ by the order of sums.

Axis names and the layout of the cache as in attention.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zeroplay_jax.policy import attention
from zeroplay_jax.policy.attention import LayerBuffer, LayerCache

# Lengths that a row can read. Each is a branch of the program in every layer, so more of them take longer to compile.
_LENGTHS = 8
# The lengths are multiples of this, so that vector instructions need no remainder.
_ALIGNMENT = 16


class DecodingRows(NamedTuple):
    """The slots that a decode step computes.

    Attributes:
      slots: the decoding slots first, in their order.
      count: number of decoding slots.
    """

    slots: Int[Array, ' slots']
    count: Int[Array, '']


def decoding_rows(live: Bool[Array, ' slots']) -> DecodingRows:
    """Returns the slots for which `live` is True as `DecodingRows`."""
    order = jnp.argsort(~live, stable=True)
    return DecodingRows(order.astype(jnp.int32), jnp.sum(live, dtype=jnp.int32))


def read_lengths(cache_length: int) -> tuple[int, ...]:
    """Returns the lengths, ascending, up to which a row of this many places can be read; the last is `cache_length`."""
    step = -(-cache_length // _LENGTHS)
    step = -(-step // _ALIGNMENT) * _ALIGNMENT
    return (*range(step, cache_length, step), cache_length)


def _attend_shortest(
    used: Int[Array, ''], cache_length: int, attend: Callable[[int], tuple[Array, ...]]
) -> tuple[Array, ...]:
    """Returns `attend(length)` for the shortest length that holds `used` places."""
    lengths = read_lengths(cache_length)
    number = jnp.sum(jnp.asarray(lengths) < used)
    branches = [functools.partial(attend, length) for length in lengths]
    return jax.lax.switch(number, branches)


def _read_slot(cache: LayerCache, slot: Int[Array, ''], length: int) -> tuple[Array, Array]:
    """Returns keys [kv_heads, head_dim, length] and values [kv_heads, length, head_dim] of a slot's first places."""
    keys, values = cache
    _, kv_heads, head_dim, _ = keys.shape
    # A slot number beyond the last reads the last slot.
    start = (slot, 0, 0, 0)
    slot_keys = jax.lax.dynamic_slice(keys, start, (1, kv_heads, head_dim, length))
    slot_values = jax.lax.dynamic_slice(values, start, (1, kv_heads, length, head_dim))
    return slot_keys[0], slot_values[0]


def attend_step(
    q: Float[Array, 'slots 1 heads head_dim'],
    k: Float[Array, 'slots 1 kv_heads head_dim'],
    v: Float[Array, 'slots 1 kv_heads head_dim'],
    cache: LayerCache,
    buffer: LayerBuffer,
    base: Int[Array, ' slots'],
    step: Int[Array, ''],
    rows: DecodingRows,
    window: int = 0,
) -> tuple[Float[Array, 'slots 1 heads*head_dim'], LayerBuffer]:
    """Returns the attention of one new token of every decoding slot, as `attention.attend_step`.

    Args:
      q, k, v, cache, buffer, base, step, window: as of `attention.attend_step`.
      rows: the decoding slots. The results of the others are meaningless.
    """
    slots, _, heads, head_dim = q.shape
    kv_heads, cache_length = cache[0].shape[1], cache[0].shape[3]
    new_keys, new_values = attention.append_to_buffer(buffer, k, v, step)
    grouped_q = attention.group_queries(q, kv_heads)
    burst_scores = attention.score_burst(grouped_q, new_keys, step, window)

    def attend_slot(slot, length):
        """Returns the attention to the cache and the probabilities of the burst's tokens."""
        keys, values = _read_slot(cache, slot, length)
        place = jnp.arange(length)
        in_cache = place < base[slot]
        if window:
            in_cache &= place > base[slot] + step - window
        scores = attention.product('kgd,kdt->kgt', grouped_q[slot], keys)
        scores = scores + attention.mask_bias(in_cache[None, None], 1)[0]
        # One softmax over cache and buffer together, then a product with each.
        scores = jnp.concatenate([scores, burst_scores[slot]], -1)
        probs = jax.nn.softmax(scores, -1).astype(values.dtype)
        out = jnp.einsum('kgt,ktd->kgd', probs[..., :length], values)
        return out, probs[..., length:]

    def attend_row(number, results):
        slot = rows.slots[number]
        row_results = _attend_shortest(
            base[slot], cache_length, functools.partial(attend_slot, slot)
        )
        updated = []
        for array, row_array in zip(results, row_results):
            updated.append(jax.lax.dynamic_update_index_in_dim(array, row_array, slot, 0))
        return tuple(updated)

    dtype = new_values.dtype
    no_results = (jnp.zeros(grouped_q.shape, dtype), jnp.zeros(burst_scores.shape, dtype))
    cache_out, burst_probs = jax.lax.fori_loop(0, rows.count, attend_row, no_results)
    burst_out = jnp.einsum('skgt,sktd->skgd', burst_probs, new_values)
    out = (cache_out + burst_out).reshape(slots, 1, heads * head_dim)
    return out, (new_keys, new_values)


def attend_chunk(
    q: Float[Array, 'rows chunk heads head_dim'],
    k: Float[Array, 'rows chunk kv_heads head_dim'],
    v: Float[Array, 'rows chunk kv_heads head_dim'],
    cache: LayerCache,
    slots: Int[Array, ' rows'],
    start: Int[Array, ' rows'],
    window: int = 0,
) -> tuple[Float[Array, 'rows chunk heads*head_dim'], LayerCache]:
    """Writes a chunk of prompt tokens to the cache and returns its attention, as `attention.attend_chunk`."""
    chunk, heads = q.shape[1:3]
    cache = attention.write_chunk(cache, k, v, slots, start)
    slot_count, kv_heads, _, cache_length = cache[0].shape
    folded_q = attention.fold_groups(q, kv_heads)

    def attend_prefix(row_q, slot, first, length):
        keys, values = _read_slot(cache, slot, length)
        bias = attention.chunk_bias(first, chunk, length, window, heads // kv_heads)
        scores = attention.product('kcd,kdt->kct', row_q, keys)
        probs = jax.nn.softmax(scores + bias, -1).astype(values.dtype)
        return (jnp.einsum('kct,ktd->kcd', probs, values),)

    def attend_row(row):
        row_q, slot, first = row
        # An idle row reads as little as possible.
        used = jnp.where(slot < slot_count, first + chunk, 0)
        attend = functools.partial(attend_prefix, row_q, slot, first)
        return _attend_shortest(used, cache_length, attend)[0]

    out = jax.lax.map(attend_row, (folded_q, slots, start))
    return attention.unfold_groups(out, chunk), cache
