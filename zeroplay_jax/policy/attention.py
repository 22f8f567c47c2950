"""The one attention entry: dense over a packed row, or over the key/value cache of a slot.

Letters: B rows, L tokens of a row, S slots, Q rows of a prefill call, C tokens of a chunk, T cache places of a
slot, H query heads, K key/value heads, G = H/K, d head size. The cache's axis order is decided here and nowhere
else: keys [S, K, d, T] and values [S, K, T, d] make both products of a decode step plain row-major matrix
products on a CPU, several times faster there than the usual [S, T, K, d].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

# Large and finite: a row that may see nothing gets a uniform softmax, not NaN.
MASKED = -1e30
# Rows of a prefill call whose caches are read together.
_ROWS = 4

LayerCache = tuple[jax.Array, jax.Array]


def empty_cache(
    layers: int, slots: int, places: int, kv_heads: int, head_dim: int, dtype
) -> tuple[LayerCache, ...]:
    """Zeroed cache, one (keys [S, K, d, T], values [S, K, T, d]) per layer."""
    return tuple(
        (
            jnp.zeros((slots, kv_heads, head_dim, places), dtype),
            jnp.zeros((slots, kv_heads, places, head_dim), dtype),
        )
        for _ in range(layers)
    )


def empty_buffer(
    layers: int, slots: int, burst: int, kv_heads: int, head_dim: int, dtype
) -> tuple[LayerCache, ...]:
    """Zeroed keys and values of the tokens of one decode burst, laid out as the cache with K places."""
    return empty_cache(layers, slots, burst, kv_heads, head_dim, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`einsum(spec, a, b)` summed and returned in float32, whatever the inputs' dtype; backward in the inputs' dtype.

    Left to itself the backward pass would multiply a float32 gradient with a bfloat16 matrix: at half the rate, and
    with a float32 copy of the matrix.
    """
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _product_forward(spec, a, b):
    return product(spec, a, b), (a, b)


def _product_backward(spec, inputs, gradient):
    return jax.vjp(functools.partial(jnp.einsum, spec), *inputs)[1](
        gradient.astype(inputs[0].dtype)
    )


product.defvjp(_product_forward, _product_backward)


def packed_mask(segment: jax.Array, window: int = 0) -> jax.Array:
    """Causal within a segment: bool [B, L, L] (query, key) from int32 [B, L]; 0 marks empty places.

    With a window a place sees itself and the window − 1 places before it, as in `attend_step` and `attend_chunk`.
    """
    length = segment.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    if window:
        causal &= ~jnp.tril(causal, -window)
    same = segment[:, :, None] == segment[:, None, :]
    return causal[None] & same & (segment > 0)[:, None, :]


def _bias(mask: jax.Array, groups: int) -> jax.Array:
    """bool [B, L, T] → float32 [B, 1, G·L, T], to be added to the scores of G folded query heads.

    A sum of four dimensions: a `where`, or a fifth dimension, makes the softmax several times slower on a CPU.
    """
    return jnp.tile(jnp.where(mask, 0.0, MASKED), (1, groups, 1))[:, None]


def attend_packed(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of packed rows. q [B, L, H, d], k and v [B, L, K, d], mask bool [B, L, L] → [B, L, H·d]."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = (
        q.transpose(0, 2, 1, 3).reshape(batch, kv_heads, heads // kv_heads * length, dim)
        * dim**-0.5
    )
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = product('bkqd,bksd->bkqs', q, k) + _bias(mask, heads // kv_heads)
    probs = jax.nn.softmax(scores, -1).astype(v.dtype)
    out = jnp.einsum('bkqs,bksd->bkqd', probs, v).reshape(batch, heads, length, dim)
    return out.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)


def attend_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerCache,
    buffer: LayerCache,
    base: jax.Array,
    step: jax.Array,
    window: int = 0,
) -> tuple[jax.Array, LayerCache]:
    """One token of every slot, in a burst. q [S, 1, H, d], k and v [S, 1, K, d] → [S, 1, H·d], new buffer.

    Place base[s] + step of slot s is fed. The cache holds what lies before base (int32 [S]) and is only read; the
    burst's own keys and values go to the buffer, all slots at the same place, which costs a fraction of a scatter
    into the cache at every step.
    """
    (keys, values), (new_keys, new_values) = cache, buffer
    slots, _, heads, dim = q.shape
    kv_heads, places, burst = keys.shape[1], keys.shape[3], new_keys.shape[3]
    column = k[:, 0, :, :, None].astype(keys.dtype)
    new_keys = jax.lax.dynamic_update_slice(new_keys, column, (0, 0, 0, step))
    new_values = jax.lax.dynamic_update_slice(
        new_values, v[:, 0, :, None].astype(values.dtype), (0, 0, step, 0)
    )
    grouped = q[:, 0].reshape(slots, kv_heads, heads // kv_heads, dim) * dim**-0.5
    place, own = jnp.arange(places)[None, None], jnp.arange(burst)
    before, within = place < base[:, None, None], own <= step
    if window:
        before, within = (
            before & (place > base[:, None, None] + step - window),
            within & (own > step - window),
        )
    scores = jnp.concatenate(
        [
            product('skgd,skdt->skgt', grouped, keys) + _bias(before, 1),
            product('skgd,skdt->skgt', grouped, new_keys) + _bias(within[None, None], 1),
        ],
        -1,
    )
    probs = jax.nn.softmax(scores, -1).astype(values.dtype)
    out = jnp.einsum('skgt,sktd->skgd', probs[..., :places], values)
    out = out + jnp.einsum('skgt,sktd->skgd', probs[..., places:], new_values)
    return out.reshape(slots, 1, heads * dim), (new_keys, new_values)


def attend_chunk(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerCache,
    slots: jax.Array,
    start: jax.Array,
    window: int = 0,
) -> tuple[jax.Array, LayerCache]:
    """C tokens of Q slots. q [Q, C, H, d], k and v [Q, C, K, d], slots and start int32 [Q] → [Q, C, H·d], new cache.

    The chunk lies at places start … start+C−1 of its slot, which must exist (the cache is allocated longer than a
    slot may grow). A slot number beyond the last marks an idle row: it reads something and writes nothing.
    """
    rows, chunk, heads, dim = q.shape
    cache = write_window(cache, (k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)), slots, start)
    kv_heads, places = cache[0].shape[1], cache[0].shape[3]
    grouped = (
        q.transpose(0, 2, 1, 3).reshape(rows, kv_heads, heads // kv_heads * chunk, dim) * dim**-0.5
    )

    def one(row):
        query, slot, first = row
        keys, values = (x.at[slot].get(mode='clip') for x in cache)
        scores = product('kcd,kdt->kct', query, keys)
        place, own = jnp.arange(places)[None], first + jnp.arange(chunk)[:, None]
        seen = place <= own
        if window:
            seen &= place > own - window
        probs = jax.nn.softmax(scores + _bias(seen[None], heads // kv_heads)[0], -1).astype(
            values.dtype
        )
        return jnp.einsum('kct,ktd->kcd', probs, values)

    # A few rows at a time: gathered all at once, their caches and scores would pass through main memory twice.
    out = jax.lax.map(one, (grouped, slots, start), batch_size=_ROWS).reshape(
        rows, heads, chunk, dim
    )
    return out.transpose(0, 2, 1, 3).reshape(rows, chunk, heads * dim), cache


def write_window(
    cache: LayerCache, new: LayerCache, slots: jax.Array, start: jax.Array
) -> LayerCache:
    """Copies new (keys [Q, K, d, C], values [Q, K, C, d]) to places start[q] … of slots[q]; slot S drops a row."""
    index = jnp.stack([slots, start], 1)

    def write(whole, part, axis):
        where = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2, 3),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, axis),
        )
        drop = jax.lax.GatherScatterMode.FILL_OR_DROP
        return jax.lax.scatter(
            whole, index, part.astype(whole.dtype), where, unique_indices=True, mode=drop
        )

    return write(cache[0], new[0], 3), write(cache[1], new[1], 2)
