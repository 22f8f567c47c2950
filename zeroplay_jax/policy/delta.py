"""Gated delta nets (Yang et al. 2024, arXiv:2412.06464): layers with a state of fixed size in place of keys and values.

Every head has a memory S [key_dim, value_dim], float32. A token decays it by a and writes its value v under its key k
at the rate b (eq. 10, transposed): S' = a S + k (b (v − a Sᵀk))ᵀ. It then reads S'ᵀq with its query q. Queries, keys
and values pass through a causal convolution over a few tokens, so the last inputs of that are part of the state.

Axis names as in policy/attention.py, and:
  channels: queries and keys of all key heads, then values of all value heads.
  heads: value heads. Each key head serves a group of neighbouring value heads.
  taps: tokens that the convolution sees.

A state cannot be rewound to an earlier token, as keys and values are by a mask. A slot therefore has two: that of its
last token, and the one with which its turn began. From the latter a next turn is prefilled, the tokens of the turn
before it included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.attention import AnyArray

# Tokens of a packed row or of a prefilled chunk that are computed together.
_CHUNK = 64
# Added to the square of the norm of queries and keys.
_EPSILON = 1e-6

# mix(mixed, filters, log_decay, rate, cache) -> (what the tokens read, new cache)
#   cache: entries of a layer.
#   mixed: [batch, length, channels], inputs of the convolution.
#   filters: [channels, taps], the last one for the token itself.
#   log_decay, rate: float32 [batch, length, heads], log a and b.
#   result: float32 [batch, length, heads, value_dim].
Mix: TypeAlias = Callable[..., tuple[Array, object]]


class Shape(NamedTuple):
    """Sizes of the heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Channels of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values


class Running(NamedTuple):
    """State after the last token of every slot: inputs of the convolution, and memory."""

    inputs: Float[Array, 'slots channels taps-1']
    memory: Float[Array, 'slots heads key_dim value_dim']


class State(NamedTuple):
    """States of one layer: after the last token of every slot, and before the first token that its turn sampled."""

    running: Running
    turn: Running


def empty_state(shape: Shape, slots: int, dtype) -> State:
    """Returns zero states; inputs of the convolution in `dtype`."""

    def running() -> Running:
        inputs = jnp.zeros((slots, shape.channels, shape.taps - 1), dtype)
        heads = (slots, shape.value_heads, shape.key_dim, shape.value_dim)
        return Running(inputs, jnp.zeros(heads, jnp.float32))

    return State(running(), running())


def layout(cache: tuple, mesh: Mesh, of_keys: NamedSharding) -> tuple:
    """Returns the sharding of cache entries: states are whole on the devices of 'model', as the weights are."""

    def of_layer(layer):
        place = sharding.rows(mesh) if isinstance(layer, State) else of_keys
        return jax.tree.map(lambda _: place, layer)

    return tuple(map(of_layer, cache))


def _product(spec: str, *arrays: Array) -> Array:
    # Default precision would round the memory to bfloat16 on TPUs.
    return jnp.einsum(spec, *arrays, precision='highest')


def _convolve(
    window: Float[Array, 'batch window channels'],
    filters: Float[Array, 'channels taps'],
    segment: Int[Array, 'batch window'] | None = None,
) -> Float[Array, 'batch length channels']:
    """Returns the convolution, with SiLU, of the tokens of a window behind its first taps − 1; segments do not mix."""
    taps = filters.shape[1]
    before = taps - 1
    length = window.shape[1] - before
    total = jnp.zeros((), jnp.float32)
    for lag in range(taps):
        earlier = slice(before - lag, before - lag + length)
        tap = window[:, earlier].astype(jnp.float32)
        if segment is not None:
            is_same = segment[:, earlier] == segment[:, before:]
            tap = jnp.where(is_same[..., None], tap, 0.0)
        total = total + tap * filters[:, before - lag].astype(jnp.float32)
    return jax.nn.silu(total).astype(window.dtype)


def _heads(shape: Shape, convolved: Float[Array, '*batch channels']) -> tuple[Array, Array, Array]:
    """Returns queries, keys and values [..., heads, …] in float32; queries and keys have length 1 and are scaled."""
    *batch, _ = convolved.shape
    parts = jnp.split(convolved.astype(jnp.float32), (shape.keys, 2 * shape.keys), -1)

    def unit(x):
        x = x.reshape(*batch, shape.key_heads, shape.key_dim)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _EPSILON)
        return jnp.repeat(x, shape.value_heads // shape.key_heads, -2)

    q, k = unit(parts[0]), unit(parts[1])
    v = parts[2].reshape(*batch, shape.value_heads, shape.value_dim)
    return q * shape.key_dim**-0.5, k, v


def _inverse(lower: Float[Array, '*batch chunk chunk']) -> Float[Array, '*batch chunk chunk']:
    """Returns the inverse of I + L for the part L of a matrix below its diagonal.

    Blocks of the diagonal are inverted in pairs, which doubles their size: a few products of matrices, where a
    substitution would take a step per token.
    """
    chunk = lower.shape[-1]
    index = jnp.arange(chunk)
    inverse = jnp.broadcast_to(jnp.eye(chunk, dtype=lower.dtype), lower.shape)
    size = 1
    while size < chunk:
        block = index // size
        # The lower left block of every pair.
        is_pair = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block[None])
        between = jnp.where(is_pair, lower, 0.0)
        inverse = inverse - _product('...ij,...jk,...kl->...il', inverse, between, inverse)
        size *= 2
    return inverse


def _chunk(carry: tuple[Array, Array], tokens: tuple[Array, ...]) -> tuple[tuple, Array]:
    """Computes a chunk of tokens (arXiv:2412.06464, §3.3): what they write depends on each other linearly.

    Args:
      carry: memory [batch, heads, key_dim, value_dim] and segment [batch] of the token before the chunk.
      tokens: q, k, v [batch, heads, chunk, …], log_decay, rate [batch, heads, chunk], segment [batch, chunk].
    """
    memory, before = carry
    q, k, v, log_decay, rate, segment = tokens
    chunk = segment.shape[1]
    since_start = jnp.cumsum(log_decay, -1)
    # A token sees those before it in its segment, and the memory if that is of its segment.
    is_seen = jnp.tril(jnp.ones((chunk, chunk), bool)) & (segment[:, :, None] == segment[:, None])
    is_seen = is_seen[:, None]
    # Masked before the exponential, which could overflow, and its gradient then be NaN.
    between = jnp.where(is_seen, since_start[..., None] - since_start[..., None, :], 0.0)
    decay = jnp.where(is_seen, jnp.exp(between), 0.0)
    continues = segment == before[:, None]
    from_memory = jnp.where(continues[:, None], jnp.exp(since_start), 0.0)[..., None]
    # (I + L) u = known, for what the tokens write.
    rated_k = k * rate[..., None]
    lower = jnp.tril(_product('bhik,bhjk->bhij', rated_k, k) * decay, -1)
    known = v * rate[..., None] - from_memory * _product('bhik,bhkv->bhiv', rated_k, memory)
    written = _product('bhij,bhjv->bhiv', _inverse(lower), known)
    seen = _product('bhik,bhjk->bhij', q, k) * decay
    out = from_memory * _product('bhik,bhkv->bhiv', q, memory)
    out = out + _product('bhij,bhjv->bhiv', seen, written)
    # Behind the last token there is what its segment wrote.
    end = since_start[..., -1:]
    is_last = segment == segment[:, -1:]
    to_end = jnp.where(is_last[:, None], jnp.exp(end - since_start), 0.0)
    kept = from_memory[..., -1:, :]
    memory = kept * memory + _product('bhik,bhiv->bhkv', k * to_end[..., None], written)
    return (memory, segment[:, -1]), out


def chunked(
    q: Float[Array, 'batch length heads key_dim'],
    k: Float[Array, 'batch length heads key_dim'],
    v: Float[Array, 'batch length heads value_dim'],
    log_decay: Float[Array, 'batch length heads'],
    rate: Float[Array, 'batch length heads'],
    segment: Int[Array, 'batch length'],
    memory: Float[Array, 'batch heads key_dim value_dim'],
) -> tuple[
    Float[Array, 'batch length heads value_dim'], Float[Array, 'batch heads key_dim value_dim']
]:
    """Returns what the tokens read, and the memory behind them; all in float32.

    Args:
      q, k, v, log_decay, rate: of the tokens.
      segment: segment number of every token. Each begins with a memory of zeros, but the first.
      memory: before the first token.
    """
    batch, length = segment.shape
    chunk = min(_CHUNK, length)
    missing = -length % chunk

    def cut(x, fill):
        """Returns [chunks, batch, heads, chunk, …] of [batch, length, heads, …], or without heads."""
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=fill)
        x = x.reshape(batch, -1, chunk, *x.shape[2:])
        x = jnp.moveaxis(x, 1, 0)
        return x if x.ndim == 3 else jnp.moveaxis(x, 2, 3)

    # Tokens behind the end neither decay nor write.
    tokens = (*(cut(x, 'constant') for x in (q, k, v, log_decay, rate)), cut(segment, 'edge'))
    # The backward pass keeps the memory between chunks and computes the rest again.
    step = jax.checkpoint(_chunk, prevent_cse=False)
    (memory, _), out = jax.lax.scan(step, (memory, segment[:, 0]), tokens)
    # [chunks, batch, heads, chunk, value_dim] → [batch, length, heads, value_dim]
    out = jnp.moveaxis(out, (0, 3), (1, 2))
    return out.reshape(batch, -1, *out.shape[3:])[:, :length], memory


def packed(shape: Shape, segment: Int[AnyArray, 'batch length']) -> Mix:
    """Returns the function of packed rows, whose segments do not see each other. It passes the (absent) cache on."""
    segment = jnp.asarray(segment)
    before = ((0, 0), (shape.taps - 1, 0))

    def mix(mixed, filters, log_decay, rate, cache):
        # No segment has the number −1.
        window_segment = jnp.pad(segment, before, constant_values=-1)
        window = jnp.pad(mixed, (*before, (0, 0)))
        q, k, v = _heads(shape, _convolve(window, filters, window_segment))
        heads = (len(segment), shape.value_heads, shape.key_dim, shape.value_dim)
        out, _ = chunked(q, k, v, log_decay, rate, segment, jnp.zeros(heads, jnp.float32))
        return out, cache

    return mix


def chunk_of_rows(
    shape: Shape,
    slots: Int[Array, ' rows'],
    start: Int[Array, ' rows'],
    count: Int[Array, ' rows'],
) -> Mix:
    """Returns the function of a prefill call, which sets both states of its slots.

    Args:
      shape: of the heads.
      slots: slot of every row; rows of one slot are in order. A number beyond the last slot marks an idle row.
      start: position of the first token of every row. At 0 a slot's state is that of nothing.
      count: tokens of every row; what follows them changes no state.
    """

    def mix(mixed, filters, log_decay, rate, state: State):
        is_token = jnp.arange(mixed.shape[1])[None] < count[:, None]
        log_decay = jnp.where(is_token[..., None], log_decay, 0.0)
        rate = jnp.where(is_token[..., None], rate, 0.0)

        def feed(running: Running, row):
            slot, first, tokens, mixed, log_decay, rate = row
            inputs, memory = jax.tree.map(
                lambda x: jnp.where(first == 0, 0, x.at[slot].get(mode='clip')), running
            )
            window = jnp.concatenate([inputs.T, mixed])
            q, k, v = _heads(shape, _convolve(window[None], filters))
            segment = jnp.ones((1, len(rate)), jnp.int32)
            out, memory = chunked(q, k, v, log_decay[None], rate[None], segment, memory[None])
            last = jax.lax.dynamic_slice_in_dim(window, tokens, shape.taps - 1)
            new = Running(last.T, memory[0])
            running = jax.tree.map(lambda x, y: x.at[slot].set(y, mode='drop'), running, new)
            return running, out[0]

        # One after another: rows of a slot depend on each other, and no bit of a row on its neighbours.
        rows = (slots, start, count, mixed, log_decay, rate)
        turn, out = jax.lax.scan(feed, state.turn, rows)

        def copy(running, new):
            return running.at[slots].set(new.at[slots].get(mode='clip'), mode='drop')

        return out, State(jax.tree.map(copy, state.running, turn), turn)

    return mix


def step(
    shape: Shape, position: Int[Array, ' slots'], live: Bool[Array, ' slots'] | None = None
) -> Mix:
    """Returns the function of one decode step of every slot, which changes the running state of the live ones.

    Args:
      shape: of the heads.
      position: position of the token of every slot. At 0 a slot's state is that of nothing.
      live: slots that decode; None: all.
    """

    def mix(mixed, filters, log_decay, rate, old: Running):
        is_first = position == 0

        def initial(x):
            return jnp.where(is_first.reshape(-1, *[1] * (x.ndim - 1)), 0, x)

        inputs, memory = jax.tree.map(initial, old)
        window = jnp.concatenate([inputs, mixed[:, 0, :, None]], -1)
        convolved = _convolve(window.swapaxes(1, 2), filters)
        q, k, v = _heads(shape, convolved[:, 0])
        memory = memory * jnp.exp(log_decay[:, 0, :, None, None])
        written = (v - _product('shk,shkv->shv', k, memory)) * rate[:, 0, :, None]
        memory = memory + k[..., None] * written[..., None, :]
        out = _product('shk,shkv->shv', q, memory)
        new = Running(window[..., 1:], memory)
        if live is not None:

            def keep(old, new):
                return jnp.where(live.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            new = jax.tree.map(keep, old, new)
        return out[:, None], new

    return mix


def at_turn(layer: tuple) -> tuple:
    """Returns the cache entries of a layer as they are copied to a sibling: those with which the turn began."""
    return State(layer.turn, layer.turn) if isinstance(layer, State) else layer
