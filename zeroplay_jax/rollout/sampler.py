"""The device side of rollouts: slots with their own position, limit and random stream, and five programs on them.

Letters: S slots, T places of a slot, Q rows of a call, P tokens of a put, C tokens of a prefill chunk, K steps of
a decode burst, V vocabulary. Every program has static shapes and compiles once; the weights are an argument, so one
compiled program serves every set of weights. What happens in a row depends on that row alone: its tokens, its key
and its position. The shapes never depend on the clock, hence neither do the samples.

  put     host tokens → a row's end (prompt, or observation after a rewind)
  extend  keys and values of up to C tokens of Q rows
  decode  up to K new tokens of every decoding row
  rewind  a row back to a length; nothing is erased, attention masks by position
  clone   a prefilled row → other rows (members of a group share one prefill)
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zeroplay_jax.policy import attention, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.types import UserError

# Phases of a slot. FILL: tokens without keys and values; DECODE: ready to sample; REST: parked, ended or empty.
FILL, DECODE, REST = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Static shape of the programs (letters as above); `eos` are the token ids that end a turn."""

    slots: int
    context: int
    chunk: int
    fill_rows: int
    burst: int
    put_rows: int
    put_tokens: int
    eos: tuple[int, ...] = ()

    @property
    def places(self) -> int:
        """Places allocated per slot: a chunk or a burst that begins near the end runs past `context`."""
        return self.context + max(self.chunk, self.burst)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['cache', 'tokens', 'length', 'cached', 'limit', 'phase', 'temperature', 'key'],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SlotState:
    """Everything that a rollout in progress has on the device.

    Attributes:
      cache: keys and values per layer; entries at or beyond `cached` are garbage by contract.
      tokens: int32 [S, places], the episode's tokens exactly as the model sees them.
      length: int32 [S], tokens present.   cached: int32 [S], places whose keys and values are valid, < length.
      limit: int32 [S], length at which the turn stops.   phase: int32 [S].
      temperature: float32 [S]; 0 samples greedily.   key: uint32 [S, 2], the request's stream.
    """

    cache: tuple
    tokens: jax.Array
    length: jax.Array
    cached: jax.Array
    limit: jax.Array
    phase: jax.Array
    temperature: jax.Array
    key: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['tokens', 'logp', 'count'], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Burst:
    """What one decode call sampled: tokens int32 [S, K], logp float32 [S, K], count int32 [S] (the first are real)."""

    tokens: jax.Array
    logp: jax.Array
    count: jax.Array


def _empty(model: ModelConfig, config: SamplerConfig) -> SlotState:
    slots, places = config.slots, config.places
    zeros = lambda *shape, dtype=jnp.int32: jnp.zeros(shape, dtype)
    return SlotState(
        cache=attention.empty_cache(
            model.layers, slots, places, model.kv_heads, model.head_dim, model.dtype
        ),
        tokens=zeros(slots, places),
        length=zeros(slots),
        cached=zeros(slots),
        limit=zeros(slots),
        phase=jnp.full((slots,), REST, jnp.int32),
        temperature=zeros(slots, dtype=jnp.float32),
        key=zeros(slots, 2, dtype=jnp.uint32),
    )


def _put(state: SlotState, slots, tokens, count, start, limit, temperature, key) -> SlotState:
    """Row q: tokens[q, :count[q]] come to stand at start[q]; slot S marks an idle row. start 0 opens an episode."""
    rows, width = tokens.shape
    offset = jnp.arange(width)[None]
    place = jnp.where(offset < count[:, None], start[:, None] + offset, state.tokens.shape[1])
    length = start + count
    # The token before `start` was sampled last: its keys and values are always made by `extend`, never taken from
    # a burst that happened to run past it.
    cached = jnp.maximum(start - 1, 0)
    write = lambda old, new: old.at[slots].set(new, mode='drop')
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[slots[:, None], place].set(tokens, mode='drop'),
        length=write(state.length, length),
        cached=state.cached.at[slots].min(cached, mode='drop'),
        limit=write(state.limit, limit),
        phase=write(state.phase, jnp.where(length - 1 > cached, FILL, DECODE)),
        temperature=write(state.temperature, temperature),
        key=write(state.key, key),
    )


def _extend(
    model: ModelConfig, config: SamplerConfig, params: Params, state: SlotState, slots
) -> SlotState:
    """One chunk of every row in `slots` (int32 [Q], S marks an idle row)."""
    start = state.cached.at[slots].get(mode='clip')
    place = start[:, None] + jnp.arange(config.chunk)[None]
    tokens = state.tokens[jnp.minimum(slots, config.slots - 1)[:, None], place]
    cache = transformer.fill_cache(model, params, tokens, slots, start, state.cache)
    goal = state.length.at[slots].get(mode='clip') - 1
    cached = jnp.minimum(start + config.chunk, goal)
    return dataclasses.replace(
        state,
        cache=cache,
        cached=state.cached.at[slots].set(cached, mode='drop'),
        phase=state.phase.at[slots].set(jnp.where(cached >= goal, DECODE, FILL), mode='drop'),
    )


def _sample(z: jax.Array, temperature: jax.Array, key: jax.Array, position: jax.Array):
    """Tokens int32 [S] and their log-probs float32 [S] under softmax(z / temperature), z float32 [S, V].

    The noise is a function of the request's key and the position alone. Temperature 0 takes the best token and
    reports its log-prob at temperature 1.
    """
    hot = temperature > 0
    z = z / jnp.where(hot, temperature, 1.0)[:, None]

    def gumbel(_):
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(key), position)
        noise = jax.vmap(lambda k: jax.random.gumbel(k, z.shape[1:]))(keys)
        return jnp.where(hot[:, None], noise, 0.0)

    noisy = z + jax.lax.cond(jnp.any(hot), gumbel, lambda _: jnp.zeros_like(z), None)
    # The first best token; two plain reductions are several times faster on a CPU than argmax's paired one.
    best = jnp.max(noisy, -1, keepdims=True)
    token = jnp.min(
        jnp.where(noisy == best, jnp.arange(z.shape[1], dtype=jnp.int32), z.shape[1] - 1), -1
    )
    logp = jnp.take_along_axis(z, token[:, None], 1)[:, 0] - jax.nn.logsumexp(z, -1)
    return token, logp


def _decode(
    model: ModelConfig, config: SamplerConfig, params: Params, state: SlotState
) -> tuple[SlotState, Burst]:
    """Up to K tokens of every DECODE row below its limit; ends early when none is left."""
    slots = jnp.arange(config.slots, dtype=jnp.int32)
    eos = jnp.asarray(config.eos or (-1,), jnp.int32)
    nothing = Burst(
        jnp.zeros((config.slots, config.burst), jnp.int32),
        jnp.zeros((config.slots, config.burst), jnp.float32),
        jnp.zeros((config.slots,), jnp.int32),
    )

    def live(state):
        return (state.phase == DECODE) & (state.length < state.limit)

    begin = live(state)
    base, cache = jnp.maximum(state.length - 1, 0), state.cache
    shape = (model.layers, config.slots, config.burst, model.kv_heads, model.head_dim, model.dtype)
    state = dataclasses.replace(state, cache=())  # only read until the burst is over

    def go_on(carry):
        step, state, *_ = carry
        return (step < config.burst) & jnp.any(live(state))

    def body(carry):
        step, state, burst, buffer = carry
        now = live(state)
        fed = state.tokens[slots, jnp.minimum(base + step, state.tokens.shape[1] - 1)]
        x, buffer = transformer.hidden_step(model, params, fed, base, step, cache, buffer)
        token, logp = _sample(
            transformer.logits(model, params, x), state.temperature, state.key, state.length
        )
        place = jnp.where(now, state.length, state.tokens.shape[1])
        ended = now & jnp.any(token[:, None] == eos[None], -1)
        burst = Burst(
            burst.tokens.at[:, step].set(jnp.where(now, token, 0)),
            burst.logp.at[:, step].set(jnp.where(now, logp, 0.0)),
            burst.count + now,
        )
        state = dataclasses.replace(
            state,
            tokens=state.tokens.at[slots, place].set(token, mode='drop'),
            cached=jnp.where(now, state.length, state.cached),
            length=state.length + now,
            phase=jnp.where(ended, REST, state.phase),
        )
        return step + 1, state, burst, buffer

    carry = (jnp.int32(0), state, nothing, attention.empty_buffer(*shape))
    _, state, burst, buffer = jax.lax.while_loop(go_on, body, carry)
    rows = jnp.where(begin, slots, config.slots)
    cache = tuple(
        attention.write_window(layer, new, rows, base) for layer, new in zip(cache, buffer)
    )
    return dataclasses.replace(state, cache=cache), burst


def _rewind(state: SlotState, slots, length) -> SlotState:
    """Parks rows (int32 [S], slot S marks an idle entry) at `length`: what lies beyond no longer counts."""
    return dataclasses.replace(
        state,
        length=state.length.at[slots].min(length, mode='drop'),
        cached=state.cached.at[slots].min(jnp.maximum(length - 1, 0), mode='drop'),
        phase=state.phase.at[slots].set(REST, mode='drop'),
    )


def _clone(state: SlotState, source, slots, length, limit, temperature, key) -> SlotState:
    """Copies the first `length` tokens of row `source`, prefilled, into `slots` (int32 [Q]), ready to decode."""
    copy = lambda x: x.at[slots].set(x[source][None], mode='drop')
    write = lambda old, new: old.at[slots].set(new, mode='drop')
    return dataclasses.replace(
        state,
        cache=jax.tree.map(copy, state.cache),
        tokens=copy(state.tokens),
        length=write(state.length, length),
        cached=write(state.cached, length - 1),
        limit=write(state.limit, limit),
        phase=write(state.phase, DECODE),
        temperature=write(state.temperature, temperature),
        key=write(state.key, key),
    )


@functools.lru_cache
def programs(model: ModelConfig, config: SamplerConfig, mesh: Mesh) -> dict:
    """The compiled programs of one shape; every set of weights shares them."""
    shards = mesh.shape['replica'] * mesh.shape['fsdp']
    if config.slots % shards:
        raise UserError(
            f'sampler.slots={config.slots} must divide by mesh axes replica × fsdp = {shards}'
        )
    if model.kv_heads % mesh.shape['model']:
        raise UserError(
            f'{model.kv_heads} key/value heads must divide by mesh axis model of {mesh.shape["model"]}'
        )
    shape = jax.eval_shape(functools.partial(_empty, model, config))
    own = jax.tree.map(lambda _: sharding.slots(mesh), shape)
    own = dataclasses.replace(own, cache=jax.tree.map(lambda _: sharding.cache(mesh), shape.cache))
    everywhere = Burst(*(sharding.replicated(mesh),) * 3)
    bind = functools.partial  # a new object per shape: each keeps its own compilations
    return dict(
        empty=jax.jit(bind(_empty, model, config), out_shardings=own),
        put=jax.jit(bind(_put), donate_argnums=0, out_shardings=own),
        extend=jax.jit(bind(_extend, model, config), donate_argnums=1, out_shardings=own),
        decode=jax.jit(
            bind(_decode, model, config), donate_argnums=1, out_shardings=(own, everywhere)
        ),
        rewind=jax.jit(bind(_rewind), donate_argnums=0, out_shardings=own),
        clone=jax.jit(bind(_clone), donate_argnums=0, out_shardings=own),
    )


class Sampler:
    """Slots of one set of weights. Host arguments are padded here to the programs' shapes."""

    def __init__(self, model: ModelConfig, config: SamplerConfig, mesh: Mesh):
        self.model, self.config, self.mesh = model, config, mesh
        self.programs = programs(model, config, mesh)
        self.state: SlotState | None = None  # made by the first `put`

    def rest(self) -> None:
        """Gives the memory of the slots back, which must be idle; the next `put` begins with new ones."""
        self.state = None

    def put(self, rows: list[tuple]) -> None:
        """rows: (slot, tokens int32 [n], start, limit, temperature, key uint32 [2]); any number, any length."""
        c = self.config
        if self.state is None:
            self.state = self.programs['empty']()
        pieces: list[
            list[tuple]
        ] = []  # one list per pass, because a row's pieces must stay in order
        for slot, tokens, start, *rest in rows:
            for i, at in enumerate(range(0, max(len(tokens), 1), c.put_tokens)):
                if i == len(pieces):
                    pieces.append([])
                pieces[i].append((slot, tokens[at : at + c.put_tokens], start + at, *rest))
        for piece in pieces:
            for at in range(0, len(piece), c.put_rows):
                self._put(piece[at : at + c.put_rows])

    def _put(self, rows):
        c = self.config
        slots = np.full(c.put_rows, c.slots, np.int32)
        tokens = np.zeros((c.put_rows, c.put_tokens), np.int32)
        count, start, limit = (np.zeros(c.put_rows, np.int32) for _ in range(3))
        temperature, key = np.zeros(c.put_rows, np.float32), np.zeros((c.put_rows, 2), np.uint32)
        for q, (slot, ids, at, stop, heat, stream) in enumerate(rows):
            slots[q], count[q], start[q], limit[q], temperature[q], key[q] = (
                slot,
                len(ids),
                at,
                stop,
                heat,
                stream,
            )
            tokens[q, : len(ids)] = ids
        self.state = self.programs['put'](
            self.state, slots, tokens, count, start, limit, temperature, key
        )

    def extend(self, params: Params, slots: list[int]) -> None:
        """One chunk of at most `fill_rows` slots."""
        self.state = self.programs['extend'](
            params, self.state, self._pad(slots, self.config.fill_rows)
        )

    def decode(self, params: Params) -> Burst:
        """One burst; returns device arrays without waiting for them."""
        self.state, burst = self.programs['decode'](params, self.state)
        return burst

    def rewind(self, slots: list[int], lengths: list[int]) -> None:
        """Parks slots at the given lengths."""
        size = self.config.slots
        self.state = self.programs['rewind'](
            self.state, self._pad(slots, size), self._pad(lengths, size)
        )

    def clone(self, source: int, rows: list[tuple], length: int) -> None:
        """rows: (slot, limit, temperature, key), at most `put_rows`: each becomes a copy of slot `source`."""
        c = self.config
        limit, temperature = np.zeros(c.put_rows, np.int32), np.zeros(c.put_rows, np.float32)
        key = np.zeros((c.put_rows, 2), np.uint32)
        for q, (_, stop, heat, stream) in enumerate(rows):
            limit[q], temperature[q], key[q] = stop, heat, stream
        slots = self._pad([row[0] for row in rows], c.put_rows)
        self.state = self.programs['clone'](
            self.state, np.int32(source), slots, np.int32(length), limit, temperature, key
        )

    def _pad(self, values, size):
        out = np.full(size, self.config.slots, np.int32)
        out[: len(values)] = values
        return out
