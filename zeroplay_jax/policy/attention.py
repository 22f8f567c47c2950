"""Attention over packed rows (training) and over a key/value cache (sampling).

Axis names in the shapes:
  batch, length: packed rows and their tokens.
  slots, cache_length: sequences in the cache and the tokens that the cache can hold for each.
  rows, chunk: sequences of one prefill call and their tokens in that call.
  burst: decode steps between two writes to the cache.
  heads, kv_heads, head_dim: query heads, key/value heads, size of a head. Each key/value head serves a group of
    heads / kv_heads query heads (grouped-query attention; Ainslie et al. 2023, arXiv:2305.13245).

The axis order of the cache is decided in this module only: keys [slots, kv_heads, head_dim, cache_length], values
[slots, kv_heads, cache_length, head_dim]. In this order both products of a decode step are plain row-major matrix
products, which on a CPU are several times faster than with the usual [slots, cache_length, kv_heads, head_dim].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Added to the scores of masked keys. Large and finite: a query whose keys are all masked gets a uniform softmax,
# where -inf would give NaN.
MASKED_SCORE = -1e30
# Rows of a prefill call that are attended together, see `attend_chunk`.
_PREFILL_ROWS = 4

AnyArray: TypeAlias = Array | np.ndarray

# Keys and values of one layer, as the cache, the buffer of a decode burst and a prefill call hold them.
LayerCache: TypeAlias = tuple[
    Float[Array, 'slots kv_heads head_dim cache_length'],
    Float[Array, 'slots kv_heads cache_length head_dim'],
]
LayerBuffer: TypeAlias = tuple[
    Float[Array, 'slots kv_heads head_dim burst'],
    Float[Array, 'slots kv_heads burst head_dim'],
]
LayerChunk: TypeAlias = tuple[
    Float[Array, 'rows kv_heads head_dim chunk'],
    Float[Array, 'rows kv_heads chunk head_dim'],
]


def empty_cache(
    layers: int, slots: int, cache_length: int, kv_heads: int, head_dim: int, dtype
) -> tuple[LayerCache, ...]:
    """Returns a zero cache: one (keys, values) pair per layer."""
    cache = []
    for _ in range(layers):
        keys = jnp.zeros((slots, kv_heads, head_dim, cache_length), dtype)
        values = jnp.zeros((slots, kv_heads, cache_length, head_dim), dtype)
        cache.append((keys, values))
    return tuple(cache)


def empty_buffer(
    layers: int, slots: int, burst: int, kv_heads: int, head_dim: int, dtype
) -> tuple[LayerBuffer, ...]:
    """Returns zero keys and values for the tokens of one decode burst, in the axis order of the cache."""
    return empty_cache(layers, slots, burst, kv_heads, head_dim, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    spec: str, a: Float[AnyArray, '*a_shape'], b: Float[AnyArray, '*b_shape']
) -> Float[Array, '*shape']:
    """Returns `einsum(spec, a, b)`, accumulated and returned in float32 whatever the dtype of the inputs.

    The backward pass multiplies in the dtype of the inputs. The default one would multiply a float32 gradient with a
    bfloat16 matrix: at half the speed, and with a float32 copy of the matrix.
    """
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _product_forward(spec, a, b):
    return product(spec, a, b), (a, b)


def _product_backward(spec, inputs, gradient):
    einsum = functools.partial(jnp.einsum, spec)
    _, pullback = jax.vjp(einsum, *inputs)
    return pullback(gradient.astype(inputs[0].dtype))


product.defvjp(_product_forward, _product_backward)


def packed_mask(
    segment: Int[AnyArray, 'batch length'], window: int = 0
) -> Bool[Array, 'batch length length']:
    """Returns the causal mask within segments, indexed [batch, query, key].

    Args:
      segment: segment number of every token, 0 for padding.
      window: number of tokens that a query attends to, itself included (sliding window); 0: no limit.
    """
    length = segment.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    if window:
        # Remove the keys that are `window` or more tokens before the query.
        causal &= ~jnp.tril(causal, -window)
    same_segment = segment[:, :, None] == segment[:, None, :]
    visible = causal[None] & same_segment
    # Padding shares segment 0, so without this it would attend to itself.
    return visible & (segment > 0)[:, None, :]


def mask_bias(mask, groups: int):
    """Returns the float32 [batch, 1, groups·queries, keys] bias of a bool [batch, queries, keys] mask.

    The query heads of a group are folded into the query axis, hence the tiling.
    """
    # The bias is added to the scores in four dimensions: with `jnp.where` on the scores, or with the group as a fifth
    # dimension, XLA's CPU backend runs the softmax several times slower.
    bias = jnp.where(mask, 0.0, MASKED_SCORE)
    tiled_bias = jnp.tile(bias, (1, groups, 1))
    return tiled_bias[:, None]


def fold_groups(q, kv_heads: int):
    """Returns scaled queries [batch, kv_heads, groups·queries, head_dim] from [batch, queries, heads, head_dim].

    The query heads that share a key/value head are folded into the query axis, so that each key/value head needs one
    matrix product and is never repeated.
    """
    batch, queries, heads, head_dim = q.shape
    # The heads of a group are neighbours: query head h uses key/value head h // groups.
    folded_queries = heads // kv_heads * queries
    q = q.transpose(0, 2, 1, 3)
    q = q.reshape(batch, kv_heads, folded_queries, head_dim)
    # The queries are scaled instead of the scores: fewer multiplications, and none in float32.
    return q * head_dim**-0.5


def unfold_groups(out, queries: int):
    """Returns attention [batch, queries, heads·head_dim] from [batch, kv_heads, groups·queries, head_dim]."""
    batch, kv_heads, folded_queries, head_dim = out.shape
    heads = kv_heads * folded_queries // queries
    out = out.reshape(batch, heads, queries, head_dim)
    out = out.transpose(0, 2, 1, 3)
    return out.reshape(batch, queries, heads * head_dim)


class Sums(NamedTuple):
    """Softmax of queries over the keys read so far, in float32 (FlashAttention-2; Dao 2023, arXiv:2307.08691).

    Attributes:
      maximum: [...], the largest score of every query.
      total: [...], the sum of the exponentials of its scores relative to the maximum.
      weighted: [..., head_dim], the sum of the values weighted by them.
    """

    maximum: Array
    total: Array
    weighted: Array

    @classmethod
    def of_no_keys(cls, shape: tuple[int, ...]) -> Sums:
        """Returns the sums of queries [..., head_dim] that have read nothing."""
        queries = shape[:-1]
        maximum = jnp.full(queries, MASKED_SCORE, jnp.float32)
        total = jnp.zeros(queries, jnp.float32)
        weighted = jnp.zeros(shape, jnp.float32)
        return cls(maximum, total, weighted)

    def add(self, maximum: Array, weights: Array, weighted: Array) -> Sums:
        """Returns the sums after some keys more.

        Args:
          maximum: [...], the largest score of these keys and those before them.
          weights: [..., keys], the exponentials of the new scores relative to `maximum`.
          weighted: [..., head_dim], the sum of the new values weighted by them.
        """
        # What was summed relative to the old maximum is scaled to the new one.
        scale = jnp.exp(self.maximum - maximum)
        new_total = scale * self.total + jnp.sum(weights, -1)
        new_weighted = scale[..., None] * self.weighted + weighted
        return Sums(maximum, new_total, new_weighted)

    def attention(self) -> Array:
        """Returns the weighted mean of the values [..., head_dim]; 0 for queries that have seen nothing."""
        is_empty = self.total == 0
        total = jnp.where(is_empty, 1.0, self.total)
        return self.weighted / total[..., None]


def attend_packed(
    q: Float[Array, 'batch length heads head_dim'],
    k: Float[Array, 'batch length kv_heads head_dim'],
    v: Float[Array, 'batch length kv_heads head_dim'],
    mask: Bool[Array, 'batch length length'],
) -> Float[Array, 'batch length heads*head_dim']:
    """Returns the attention of packed rows.

    Args:
      q: queries.
      k: keys.
      v: values.
      mask: True where a query attends to a key, see `packed_mask`.
    """
    length, heads = q.shape[1:3]
    kv_heads = k.shape[2]
    q = fold_groups(q, kv_heads)
    k = k.transpose(0, 2, 1, 3)
    v = v.transpose(0, 2, 1, 3)
    scores = product('bkqd,bksd->bkqs', q, k)
    scores = scores + mask_bias(mask, heads // kv_heads)
    # The softmax is computed in float32; only its result is rounded, for the product with the values.
    probs = jax.nn.softmax(scores, -1)
    probs = probs.astype(v.dtype)
    out = jnp.einsum('bkqs,bksd->bkqd', probs, v)
    # Rows of padding hold the mean of all values, see MASKED_SCORE; no caller reads them.
    return unfold_groups(out, length)


def append_to_buffer(
    buffer: LayerBuffer,
    k: Float[Array, 'slots 1 kv_heads head_dim'],
    v: Float[Array, 'slots 1 kv_heads head_dim'],
    step: Int[Array, ''],
) -> LayerBuffer:
    """Returns the buffer of a burst with the keys and values of its step number `step`."""
    new_keys, new_values = buffer
    # The token axis moves to where the buffer has it: last for keys, last but one for values.
    key_column = k[:, 0, :, :, None].astype(new_keys.dtype)
    new_keys = jax.lax.dynamic_update_slice(new_keys, key_column, (0, 0, 0, step))
    value_row = v[:, 0, :, None].astype(new_values.dtype)
    new_values = jax.lax.dynamic_update_slice(new_values, value_row, (0, 0, step, 0))
    return new_keys, new_values


def group_queries(
    q: Float[Array, 'slots 1 heads head_dim'], kv_heads: int
) -> Float[Array, 'slots kv_heads groups head_dim']:
    """Returns the scaled queries of a decode step, grouped by key/value head."""
    slots, _, heads, head_dim = q.shape
    grouped_q = q[:, 0].reshape(slots, kv_heads, heads // kv_heads, head_dim)
    return grouped_q * head_dim**-0.5


def score_burst(
    grouped_q: Float[Array, 'slots kv_heads groups head_dim'],
    new_keys: Float[Array, 'slots kv_heads head_dim burst'],
    step: Int[Array, ''],
    window: int = 0,
) -> Float[Array, 'slots kv_heads groups burst']:
    """Returns the masked scores of a burst's own tokens at its step number `step`."""
    burst_index = jnp.arange(new_keys.shape[3])
    # Entries after `step` are not written yet.
    in_burst = burst_index <= step
    if window:
        in_burst = in_burst & (burst_index > step - window)
    scores = product('skgd,skdt->skgt', grouped_q, new_keys)
    return scores + mask_bias(in_burst[None, None], 1)


def attend_step(
    q: Float[Array, 'slots 1 heads head_dim'],
    k: Float[Array, 'slots 1 kv_heads head_dim'],
    v: Float[Array, 'slots 1 kv_heads head_dim'],
    cache: LayerCache,
    buffer: LayerBuffer,
    base: Int[Array, ' slots'],
    step: Int[Array, ''],
    window: int = 0,
) -> tuple[Float[Array, 'slots 1 heads*head_dim'], LayerBuffer]:
    """Returns the attention of one new token of every slot, at position base[s] + step of slot s.

    The cache is only read during a burst; the burst's own keys and values go to the buffer. All slots write the
    buffer at the same index, a slice update, which costs a fraction of a scatter into the cache at every step.

    Args:
      q: queries.
      k: keys of the new tokens.
      v: values of the new tokens.
      cache: keys and values of the positions before `base`.
      buffer: keys and values of the burst so far.
      base: number of cached positions of every slot at the start of the burst.
      step: number of the step within the burst, from 0.
      window: as in `packed_mask`.

    Returns:
      The attention and the buffer with the new keys and values.
    """
    keys, values = cache
    slots, _, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    cache_length = keys.shape[3]
    new_keys, new_values = append_to_buffer(buffer, k, v, step)
    grouped_q = group_queries(q, kv_heads)
    # Cache entries from `base` on may belong to an earlier sequence of the slot: they are masked.
    cache_index = jnp.arange(cache_length)[None, None]
    in_cache = cache_index < base[:, None, None]
    if window:
        # The comparison says `position > base + step - window`.
        in_cache = in_cache & (cache_index > base[:, None, None] + step - window)
    cache_scores = product('skgd,skdt->skgt', grouped_q, keys)
    cache_scores = cache_scores + mask_bias(in_cache, 1)
    burst_scores = score_burst(grouped_q, new_keys, step, window)
    # One softmax over cache and buffer together, then a product with each.
    scores = jnp.concatenate([cache_scores, burst_scores], -1)
    probs = jax.nn.softmax(scores, -1)
    probs = probs.astype(values.dtype)
    cache_probs = probs[..., :cache_length]
    cache_out = jnp.einsum('skgt,sktd->skgd', cache_probs, values)
    burst_probs = probs[..., cache_length:]
    burst_out = jnp.einsum('skgt,sktd->skgd', burst_probs, new_values)
    out = cache_out + burst_out
    out = out.reshape(slots, 1, heads * head_dim)
    return out, (new_keys, new_values)


def attend_chunk(
    q: Float[Array, 'rows chunk heads head_dim'],
    k: Float[Array, 'rows chunk kv_heads head_dim'],
    v: Float[Array, 'rows chunk kv_heads head_dim'],
    cache: LayerCache,
    slots: Int[Array, ' rows'],
    start: Int[Array, ' rows'],
    window: int = 0,
    reads_used: bool = False,
) -> tuple[Float[Array, 'rows chunk heads*head_dim'], LayerCache]:
    """Writes a chunk of prompt tokens to the cache and returns its attention to all positions up to it (prefill).

    Args:
      q: queries.
      k: keys of the chunk.
      v: values of the chunk.
      cache: keys and values of all slots.
      slots: slot of every row. A number beyond the last slot marks an idle row: nothing is written for it and its
        result is meaningless.
      start: position of the first token of every row. start + chunk must not exceed cache_length; the cache is
        allocated longer than a sequence may become.
      window: as in `packed_mask`.
      reads_used: whether a row reads its used places only, see below; otherwise all places of its slot.

    Returns:
      The attention and the cache with the chunk in it.
    """
    chunk, heads = q.shape[1:3]
    cache = write_chunk(cache, k, v, slots, start)
    slot_count, kv_heads, _, cache_length = cache[0].shape
    folded_q = fold_groups(q, kv_heads)

    def attend_prefix(row_q, slot, first, length):
        keys, values = _read_slot(cache, slot, length)
        bias = chunk_bias(first, chunk, length, window, heads // kv_heads)
        scores = product('kcd,kdt->kct', row_q, keys)
        probs = jax.nn.softmax(scores + bias, -1).astype(values.dtype)
        return jnp.einsum('kct,ktd->kcd', probs, values)

    def attend_row(row):
        row_q, slot, first = row
        attend = functools.partial(attend_prefix, row_q, slot, first)
        if not reads_used:
            return attend(cache_length)
        # An idle row reads as little as possible.
        used = jnp.where(slot < slot_count, first + chunk, 0)
        return _attend_shortest(used, cache_length, attend)

    # Rows are computed a few at a time: the caches and scores of all rows together exceed the processor's cache, and
    # would be written to main memory and read back. Rows that read different lengths are computed one after another.
    batch_size = None if reads_used else _PREFILL_ROWS
    out = jax.lax.map(attend_row, (folded_q, slots, start), batch_size=batch_size)
    return unfold_groups(out, chunk), cache


def chunk_bias(
    first: Int[Array, ''], chunk: int, keys: int, window: int, groups: int
) -> Float[Array, '1 queries keys']:
    """Returns the bias of the scores of a chunk, whose first token has position `first`, to a slot's first places.

    Args:
      first: position of the chunk.
      chunk: tokens of the chunk.
      keys: number of places.
      window: as in `packed_mask`.
      groups: query heads of a key/value head; they are folded into the query axis.
    """
    key_position = jnp.arange(keys)[None]
    query_position = first + jnp.arange(chunk)[:, None]
    mask = key_position <= query_position
    if window:
        mask &= key_position > query_position - window
    return mask_bias(mask[None], groups)[0]


def write_chunk(
    cache: LayerCache,
    k: Float[Array, 'rows chunk kv_heads head_dim'],
    v: Float[Array, 'rows chunk kv_heads head_dim'],
    slots: Int[Array, ' rows'],
    start: Int[Array, ' rows'],
) -> LayerCache:
    """Returns the cache with the keys and values of a prefill call; arguments as of `attend_chunk`."""
    # A call writes first and attends then, so that a chunk attends to itself, and to an earlier chunk of its row in the
    # same call, through the cache.
    new_keys = k.transpose(0, 2, 3, 1)
    new_values = v.transpose(0, 2, 1, 3)
    return write_window(cache, (new_keys, new_values), slots, start)


def write_window(
    cache: LayerCache,
    chunk: LayerChunk,
    slots: Int[Array, ' rows'],
    start: Int[Array, ' rows'],
) -> LayerCache:
    """Returns the cache with the keys and values of `chunk` at positions start[row], … of slots[row].

    Args:
      cache: keys and values of all slots.
      chunk: keys and values to write. They are cast to the dtype of the cache.
      slots: slot of every row; a row with a number beyond the last slot is dropped.
      start: position of the first token of every row. Rows of the same slot must not overlap.
    """
    index = jnp.stack([slots, start], 1)

    def write(cache_array, update, position_axis):
        # This scatters whole windows, which `.at[].set` cannot express: it would scatter token by token.
        dimension_numbers = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2, 3),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, position_axis),
        )
        return jax.lax.scatter(
            cache_array,
            index,
            update.astype(cache_array.dtype),
            dimension_numbers,
            unique_indices=True,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )

    keys = write(cache[0], chunk[0], 3)
    values = write(cache[1], chunk[1], 2)
    return keys, values


# Attention of slots over the places that they use, one row after another: for CPUs.
#
# `attend_step`, and `attend_chunk` by default, read every place of a slot in large products, which accelerators need.
# On a CPU the traffic of the unused places takes most of the time. Here a row reads its cache up to the
# shortest of a few lengths that holds it, and rows that do not decode are skipped.
#
# The length that a row reads follows from its own position. A result is therefore a function of the row alone, bit for
# bit, as above. Between the two the results differ by the order of sums.


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


def _attend_shortest(used: Int[Array, ''], cache_length: int, attend: Callable[[int], Any]) -> Any:
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


def attend_used_step(
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
    """Returns the attention of one new token of every decoding slot, as `attend_step`.

    Args:
      q, k, v, cache, buffer, base, step, window: as of `attend_step`.
      rows: the decoding slots. The results of the others are meaningless.
    """
    slots, _, heads, head_dim = q.shape
    kv_heads, cache_length = cache[0].shape[1], cache[0].shape[3]
    new_keys, new_values = append_to_buffer(buffer, k, v, step)
    grouped_q = group_queries(q, kv_heads)
    burst_scores = score_burst(grouped_q, new_keys, step, window)

    def attend_slot(slot, length):
        """Returns the attention to the cache and the probabilities of the burst's tokens."""
        keys, values = _read_slot(cache, slot, length)
        place = jnp.arange(length)
        in_cache = place < base[slot]
        if window:
            in_cache &= place > base[slot] + step - window
        scores = product('kgd,kdt->kgt', grouped_q[slot], keys)
        scores = scores + mask_bias(in_cache[None, None], 1)[0]
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
        return jax.tree.map(
            lambda array, row_array: jax.lax.dynamic_update_index_in_dim(array, row_array, slot, 0),
            results,
            row_results,
        )

    dtype = new_values.dtype
    no_results = (jnp.zeros(grouped_q.shape, dtype), jnp.zeros(burst_scores.shape, dtype))
    cache_out, burst_probs = jax.lax.fori_loop(0, rows.count, attend_row, no_results)
    burst_out = jnp.einsum('skgt,sktd->skgd', burst_probs, new_values)
    out = (cache_out + burst_out).reshape(slots, 1, heads * head_dim)
    return out, (new_keys, new_values)
