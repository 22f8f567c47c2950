"""The one attention entry: dense over a packed row, or over the key/value cache of a slot.

Letters: B rows, L tokens of a row, S slots, Q rows of a prefill call, C tokens of a chunk, T cache places of a
slot, H query heads, K key/value heads, G = H/K, d head size. The cache's axis order is decided here and nowhere
else: keys [S, K, d, T] and values [S, K, T, d] make both products of a decode step plain row-major matrix
products on a CPU, several times faster there than the usual [S, T, K, d].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Large and finite: a row that may see nothing gets a uniform softmax, not NaN.
MASKED = -1e30

LayerCache = tuple[jax.Array, jax.Array]


def empty_cache(layers: int, slots: int, places: int, kv_heads: int, head_dim: int, dtype) -> tuple[LayerCache, ...]:
    """Zeroed cache, one (keys [S, K, d, T], values [S, K, T, d]) per layer."""
    return tuple(
        (
            jnp.zeros((slots, kv_heads, head_dim, places), dtype),
            jnp.zeros((slots, kv_heads, places, head_dim), dtype),
        )
        for _ in range(layers)
    )


def packed_mask(segment: jax.Array) -> jax.Array:
    """Causal within a segment: bool [B, L, L] (query, key) from int32 [B, L]; 0 marks empty places."""
    length = segment.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    same = segment[:, :, None] == segment[:, None, :]
    return causal[None] & same & (segment > 0)[:, None, :]


def _softmax(scores: jax.Array, mask: jax.Array, dtype) -> jax.Array:
    return jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), MASKED), -1).astype(dtype)


def attend_packed(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of packed rows. q [B, L, H, d], k and v [B, L, K, d], mask bool [B, L, L] → [B, L, H·d]."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.transpose(0, 2, 1, 3).reshape(batch, kv_heads, heads // kv_heads * length, dim)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum('bkqd,bksd->bkqs', q, k) * dim**-0.5
    scores = scores.reshape(batch, kv_heads, heads // kv_heads, length, length)
    probs = _softmax(scores, mask[:, None, None], v.dtype).reshape(batch, kv_heads, -1, length)
    out = jnp.einsum('bkqs,bksd->bkqd', probs, v).reshape(batch, heads, length, dim)
    return out.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)


def attend_step(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, position: jax.Array, live: jax.Array
) -> tuple[jax.Array, LayerCache]:
    """One token of every slot. q [S, 1, H, d], k and v [S, 1, K, d], position int32 [S] → [S, 1, H·d], new cache.

    Rows where `live` (bool [S]) is False write nothing; what they return is meaningless.
    """
    keys, values = cache
    slots, _, heads, dim = q.shape
    kv_heads, places = keys.shape[1], keys.shape[3]
    rows = jnp.arange(slots)
    place = jnp.where(live, position, places)  # out of range: dropped
    keys = keys.at[rows, :, :, place].set(k[:, 0].astype(keys.dtype), mode='drop')
    values = values.at[rows, :, place].set(v[:, 0].astype(values.dtype), mode='drop')
    grouped = q[:, 0].reshape(slots, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum('skgd,skdt->skgt', grouped, keys) * dim**-0.5
    seen = jnp.arange(places)[None] <= position[:, None]
    probs = _softmax(scores, seen[:, None, None], values.dtype)
    out = jnp.einsum('skgt,sktd->skgd', probs, values)
    return out.reshape(slots, 1, heads * dim), (keys, values)


def attend_chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, slots: jax.Array, start: jax.Array
) -> tuple[jax.Array, LayerCache]:
    """C tokens of Q slots. q [Q, C, H, d], k and v [Q, C, K, d], slots and start int32 [Q] → [Q, C, H·d], new cache.

    The chunk lies at places start … start+C−1 of its slot, which must exist (the cache is allocated C longer than
    a slot may grow). A slot number beyond the last marks an idle row: it reads something and writes nothing.
    """
    keys, values = cache
    rows, chunk, heads, dim = q.shape
    kv_heads, places = keys.shape[1], keys.shape[3]
    keys = _write_chunk(keys, k.transpose(0, 2, 3, 1), slots, start, axis=3)
    values = _write_chunk(values, v.transpose(0, 2, 1, 3), slots, start, axis=2)
    own_k, own_v = keys.at[slots].get(mode='clip'), values.at[slots].get(mode='clip')
    grouped = q.transpose(0, 2, 1, 3).reshape(rows, kv_heads, heads // kv_heads * chunk, dim)
    scores = jnp.einsum('qkcd,qkdt->qkct', grouped, own_k) * dim**-0.5
    scores = scores.reshape(rows, kv_heads, heads // kv_heads, chunk, places)
    position = start[:, None] + jnp.arange(chunk)[None]
    seen = jnp.arange(places)[None, None] <= position[:, :, None]
    probs = _softmax(scores, seen[:, None, None], own_v.dtype).reshape(rows, kv_heads, -1, places)
    out = jnp.einsum('qkct,qktd->qkcd', probs, own_v).reshape(rows, heads, chunk, dim)
    out = out.transpose(0, 2, 1, 3).reshape(rows, chunk, heads * dim)
    return out, (keys, values)


def _write_chunk(cache: jax.Array, new: jax.Array, slots: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """Writes new[q] (its places on `axis`) into cache[slots[q]] from place start[q] on, one window per row."""
    where = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, axis)
    )
    index = jnp.stack([slots, start], 1)
    new = new.astype(cache.dtype)
    return jax.lax.scatter(cache, index, new, where, unique_indices=True, mode=jax.lax.GatherScatterMode.FILL_OR_DROP)
