"""The device side of rollouts: slots with their own position, limit and random stream, and five programs.

Shapes: S slots, T positions of a slot, Q rows of a call, P tokens of a put, C tokens of a prefill
chunk, K steps of a decode chunk, V vocabulary. Every program has static shapes and compiles once.
Weights are an argument, so one compiled program serves every set of weights. The result of a row
depends on that row alone: its tokens, its key and its position. Shapes never depend on the clock,
hence neither do the samples.

  put     host tokens → the end of a row (a prompt, or an observation after a rewind)
  extend  keys and values of up to C tokens of Q rows
  decode  up to K new tokens of every decoding row
  rewind  a row back to a length; nothing is erased, attention masks by position
  clone   a prefilled row → other rows (samples of a request share one prefill)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from zeroplay_jax.policy import attention, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.types import UserError

# Status of a slot. FILL: some tokens lack keys and values. DECODE: ready to sample. REST: waiting for
# a tool, ended or empty.
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
    def positions(self) -> int:
        """Positions allocated per slot: a chunk that begins near the end runs past `context`."""
        return self.context + max(self.chunk, self.burst)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['cache', 'tokens', 'length', 'cached', 'limit', 'phase', 'temperature', 'key'],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SlotState:
    """Everything that rollouts in progress have on the device.

    Attributes:
      cache: keys and values per layer; entries at or beyond `cached` are garbage by contract.
      tokens: int32 [S, T], tokens of the episode exactly as the model sees them.
      length: int32 [S], number of tokens.
      cached: int32 [S], positions whose keys and values are valid, < length.
      limit: int32 [S], length at which the turn stops.
      phase: int32 [S], FILL, DECODE or REST.
      temperature: float32 [S]; 0 samples greedily.
      key: uint32 [S, 2], random stream of the request.
    """

    cache: tuple
    tokens: Int[Array, 'slots positions']
    length: Int[Array, ' slots']
    cached: Int[Array, ' slots']
    limit: Int[Array, ' slots']
    phase: Int[Array, ' slots']
    temperature: Float[Array, ' slots']
    key: UInt32[Array, 'slots 2']


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['tokens', 'logp', 'count'], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class DecodeChunk:
    """Result of one decode call: the first `count` entries of a row are sampled tokens.

    Attributes:
      tokens: int32 [S, K].   logp: float32 [S, K].   count: int32 [S].
    """

    tokens: jax.Array
    logp: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class PutRow:
    """Tokens for a slot: int32 [n] written from position `start`; start 0 opens an episode."""

    slot: int
    tokens: np.ndarray
    start: int
    limit: int
    temperature: float
    key: np.ndarray


@dataclasses.dataclass(frozen=True)
class CloneRow:
    """A slot that becomes a copy of another one, with its own limit, temperature and key."""

    slot: int
    limit: int
    temperature: float
    key: np.ndarray


def _empty(model: ModelConfig, config: SamplerConfig) -> SlotState:
    slots = config.slots
    positions = config.positions

    def zeros(*shape: int, dtype=jnp.int32) -> jax.Array:
        return jnp.zeros(shape, dtype)

    return SlotState(
        cache=attention.empty_cache(
            model.layers, slots, positions, model.kv_heads, model.head_dim, model.dtype
        ),
        tokens=zeros(slots, positions),
        length=zeros(slots),
        cached=zeros(slots),
        limit=zeros(slots),
        phase=jnp.full((slots,), REST, jnp.int32),
        temperature=zeros(slots, dtype=jnp.float32),
        key=zeros(slots, 2, dtype=jnp.uint32),
    )


def _write_rows(field: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """Writes values into rows; a row number beyond the last slot marks an idle entry."""
    return field.at[slots].set(values, mode='drop')


def _put(state: SlotState, slots, tokens, count, start, limit, temperature, key) -> SlotState:
    """tokens[q, :count[q]] are written at start[q] of slots[q]; slot S marks an idle row."""
    _, width = tokens.shape
    offset = jnp.arange(width)[None]
    # Entries beyond `count` get a position out of range, which mode='drop' ignores.
    out_of_range = state.tokens.shape[1]
    position = jnp.where(offset < count[:, None], start[:, None] + offset, out_of_range)
    length = start + count
    # The token before `start` was sampled last. Its keys and values are always computed by `extend`,
    # never taken from a decode chunk that happened to run past it.
    cached = jnp.maximum(start - 1, 0)
    phase = jnp.where(length - 1 > cached, FILL, DECODE)
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[slots[:, None], position].set(tokens, mode='drop'),
        length=_write_rows(state.length, slots, length),
        cached=state.cached.at[slots].min(cached, mode='drop'),
        limit=_write_rows(state.limit, slots, limit),
        phase=_write_rows(state.phase, slots, phase),
        temperature=_write_rows(state.temperature, slots, temperature),
        key=_write_rows(state.key, slots, key),
    )


def _extend(
    model: ModelConfig, config: SamplerConfig, params: Params, state: SlotState, slots
) -> SlotState:
    """Prefills one chunk of every row in `slots` (int32 [Q], S marks an idle row)."""
    start = state.cached.at[slots].get(mode='clip')
    position = start[:, None] + jnp.arange(config.chunk)[None]
    tokens = state.tokens[jnp.minimum(slots, config.slots - 1)[:, None], position]
    cache = transformer.fill_cache(model, params, tokens, slots, start, state.cache)
    # The last token stays uncached: decode feeds it to predict the next one.
    goal = state.length.at[slots].get(mode='clip') - 1
    cached = jnp.minimum(start + config.chunk, goal)
    phase = jnp.where(cached >= goal, DECODE, FILL)
    return dataclasses.replace(
        state,
        cache=cache,
        cached=_write_rows(state.cached, slots, cached),
        phase=_write_rows(state.phase, slots, phase),
    )


def _sample(
    logits: Float[Array, 'slots vocab'],
    temperature: Float[Array, ' slots'],
    key: UInt32[Array, 'slots 2'],
    position: Int[Array, ' slots'],
) -> tuple[Int[Array, ' slots'], Float[Array, ' slots']]:
    """Tokens and their log-probs under softmax(logits / temperature).

    The noise is a function of the request's key and the position alone. Temperature 0 takes the
    most likely token and reports its log-prob at temperature 1.
    """
    is_sampled = temperature > 0
    scaled_logits = logits / jnp.where(is_sampled, temperature, 1.0)[:, None]

    def gumbel_noise(_):
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(key), position)
        noise = jax.vmap(lambda k: jax.random.gumbel(k, scaled_logits.shape[1:]))(keys)
        return jnp.where(is_sampled[:, None], noise, 0.0)

    def no_noise(_):
        return jnp.zeros_like(scaled_logits)

    # Greedy batches skip the noise, which costs as much as the head on a CPU.
    noisy_logits = scaled_logits + jax.lax.cond(jnp.any(is_sampled), gumbel_noise, no_noise, None)
    # First maximum by two plain reductions: several times faster on a CPU than argmax's paired one.
    vocabulary = scaled_logits.shape[1]
    best = jnp.max(noisy_logits, -1, keepdims=True)
    token_ids = jnp.arange(vocabulary, dtype=jnp.int32)
    token = jnp.min(jnp.where(noisy_logits == best, token_ids, vocabulary - 1), -1)
    token_logit = jnp.take_along_axis(scaled_logits, token[:, None], 1)[:, 0]
    logp = token_logit - jax.nn.logsumexp(scaled_logits, -1)
    return token, logp


def _is_live(state: SlotState) -> Array:
    """bool [S]: rows that can decode another token."""
    return (state.phase == DECODE) & (state.length < state.limit)


def _decode(
    model: ModelConfig, config: SamplerConfig, params: Params, state: SlotState
) -> tuple[SlotState, DecodeChunk]:
    """Up to K tokens of every DECODE row below its limit; ends early when no row is left."""
    slots = jnp.arange(config.slots, dtype=jnp.int32)
    eos = jnp.asarray(config.eos or (-1,), jnp.int32)
    out_of_range = state.tokens.shape[1]
    empty_chunk = DecodeChunk(
        tokens=jnp.zeros((config.slots, config.burst), jnp.int32),
        logp=jnp.zeros((config.slots, config.burst), jnp.float32),
        count=jnp.zeros((config.slots,), jnp.int32),
    )
    live_at_start = _is_live(state)
    first_position = jnp.maximum(state.length - 1, 0)
    cache = state.cache
    # The chunk's keys and values go to a small buffer, written to the cache once at the end: a
    # scatter into the whole cache at every step would dominate the time.
    buffer = attention.empty_buffer(
        model.layers, config.slots, config.burst, model.kv_heads, model.head_dim, model.dtype
    )
    state = dataclasses.replace(state, cache=())

    def has_work(carry):
        step, state, *_ = carry
        return (step < config.burst) & jnp.any(_is_live(state))

    def decode_step(carry):
        step, state, chunk, buffer = carry
        live = _is_live(state)
        # Rows that ended keep a valid position; their results are masked below.
        position = jnp.minimum(first_position + step, out_of_range - 1)
        last_token = state.tokens[slots, position]
        hidden, buffer = transformer.hidden_step(
            model, params, last_token, first_position, step, cache, buffer
        )
        next_token_logits = transformer.logits(model, params, hidden)
        token, logp = _sample(next_token_logits, state.temperature, state.key, state.length)
        write_position = jnp.where(live, state.length, out_of_range)
        at_end_token = live & jnp.any(token[:, None] == eos[None], -1)
        chunk = DecodeChunk(
            tokens=chunk.tokens.at[:, step].set(jnp.where(live, token, 0)),
            logp=chunk.logp.at[:, step].set(jnp.where(live, logp, 0.0)),
            count=chunk.count + live,
        )
        state = dataclasses.replace(
            state,
            tokens=state.tokens.at[slots, write_position].set(token, mode='drop'),
            cached=jnp.where(live, state.length, state.cached),
            length=state.length + live,
            phase=jnp.where(at_end_token, REST, state.phase),
        )
        return step + 1, state, chunk, buffer

    carry = (jnp.int32(0), state, empty_chunk, buffer)
    _, state, chunk, buffer = jax.lax.while_loop(has_work, decode_step, carry)
    rows = jnp.where(live_at_start, slots, config.slots)
    cache = tuple(
        attention.write_window(layer_cache, layer_buffer, rows, first_position)
        for layer_cache, layer_buffer in zip(cache, buffer)
    )
    return dataclasses.replace(state, cache=cache), chunk


def _rewind(state: SlotState, slots, length) -> SlotState:
    """Parks rows (int32 [S], slot S marks an idle entry) at `length`; later positions are ignored."""
    cached = jnp.maximum(length - 1, 0)
    return dataclasses.replace(
        state,
        length=state.length.at[slots].min(length, mode='drop'),
        cached=state.cached.at[slots].min(cached, mode='drop'),
        phase=state.phase.at[slots].set(REST, mode='drop'),
    )


def _clone(state: SlotState, source, slots, length, limit, temperature, key) -> SlotState:
    """Copies the first `length` tokens of prefilled row `source` into `slots` (int32 [Q])."""

    def copy_row(field: jax.Array) -> jax.Array:
        return _write_rows(field, slots, field[source][None])

    return dataclasses.replace(
        state,
        cache=jax.tree.map(copy_row, state.cache),
        tokens=copy_row(state.tokens),
        length=_write_rows(state.length, slots, length),
        cached=_write_rows(state.cached, slots, length - 1),
        limit=_write_rows(state.limit, slots, limit),
        phase=_write_rows(state.phase, slots, DECODE),
        temperature=_write_rows(state.temperature, slots, temperature),
        key=_write_rows(state.key, slots, key),
    )


@functools.lru_cache
def programs(model: ModelConfig, config: SamplerConfig, mesh: Mesh) -> dict:
    """The compiled programs of one shape, shared by all sets of weights.

    Raises:
      UserError: slots or heads do not divide over the mesh.
    """
    shards = mesh.shape['replica'] * mesh.shape['fsdp']
    if config.slots % shards:
        raise UserError(
            f'sampler.slots={config.slots} must divide by mesh axes replica × fsdp = {shards}'
        )
    if model.kv_heads % mesh.shape['model']:
        raise UserError(
            f'{model.kv_heads} key/value heads must divide by mesh axis model of '
            f'{mesh.shape["model"]}'
        )
    shapes = jax.eval_shape(functools.partial(_empty, model, config))
    layout = jax.tree.map(lambda _: sharding.slots(mesh), shapes)
    cache_layout = jax.tree.map(lambda _: sharding.cache(mesh), shapes.cache)
    layout = dataclasses.replace(layout, cache=cache_layout)
    replicated = sharding.replicated(mesh)
    chunk_layout = DecodeChunk(replicated, replicated, replicated)
    # functools.partial makes a new object per shape, so that each keeps its own compilations.
    bind = functools.partial
    return dict(
        empty=jax.jit(bind(_empty, model, config), out_shardings=layout),
        put=jax.jit(bind(_put), donate_argnums=0, out_shardings=layout),
        extend=jax.jit(bind(_extend, model, config), donate_argnums=1, out_shardings=layout),
        decode=jax.jit(
            bind(_decode, model, config),
            donate_argnums=1,
            out_shardings=(layout, chunk_layout),
        ),
        rewind=jax.jit(bind(_rewind), donate_argnums=0, out_shardings=layout),
        clone=jax.jit(bind(_clone), donate_argnums=0, out_shardings=layout),
    )


class Sampler:
    """Slots of one set of weights. Pads host arguments to the programs' static shapes."""

    def __init__(self, model: ModelConfig, config: SamplerConfig, mesh: Mesh):
        self.model = model
        self.config = config
        self.mesh = mesh
        self.programs = programs(model, config, mesh)
        # Allocated by the first `put`.
        self.state: SlotState | None = None

    def free_cache(self) -> None:
        """Frees the memory of the slots, which must be idle; the next `put` allocates new ones."""
        self.state = None

    def put(self, rows: Sequence[PutRow]) -> None:
        """Writes tokens into slots; any number of rows of any length."""
        if self.state is None:
            self.state = self.programs['empty']()
        width = self.config.put_tokens
        # Pass i holds the i-th piece of every row: pieces of one row must be written in order.
        passes: list[list[PutRow]] = []
        for row in rows:
            starts = range(0, max(len(row.tokens), 1), width)
            for number, offset in enumerate(starts):
                if number == len(passes):
                    passes.append([])
                piece = row.tokens[offset : offset + width]
                start = row.start + offset
                passes[number].append(dataclasses.replace(row, tokens=piece, start=start))
        for pieces in passes:
            for begin in range(0, len(pieces), self.config.put_rows):
                self._put(pieces[begin : begin + self.config.put_rows])

    def _put(self, rows: Sequence[PutRow]) -> None:
        capacity = self.config.put_rows
        slots = np.full(capacity, self.config.slots, np.int32)
        tokens = np.zeros((capacity, self.config.put_tokens), np.int32)
        count = np.zeros(capacity, np.int32)
        start = np.zeros(capacity, np.int32)
        limit = np.zeros(capacity, np.int32)
        temperature = np.zeros(capacity, np.float32)
        key = np.zeros((capacity, 2), np.uint32)
        for q, row in enumerate(rows):
            slots[q] = row.slot
            tokens[q, : len(row.tokens)] = row.tokens
            count[q] = len(row.tokens)
            start[q] = row.start
            limit[q] = row.limit
            temperature[q] = row.temperature
            key[q] = row.key
        put = self.programs['put']
        self.state = put(self.state, slots, tokens, count, start, limit, temperature, key)

    def extend(self, params: Params, slots: Sequence[int]) -> None:
        """Prefills one chunk of at most `fill_rows` slots."""
        padded_slots = self._pad(slots, self.config.fill_rows)
        self.state = self.programs['extend'](params, self.state, padded_slots)

    def decode(self, params: Params) -> DecodeChunk:
        """Decodes one chunk; returns device arrays without waiting for them."""
        self.state, chunk = self.programs['decode'](params, self.state)
        return chunk

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Parks slots at the given lengths."""
        padded_slots = self._pad(slots, self.config.slots)
        padded_lengths = self._pad(lengths, self.config.slots)
        self.state = self.programs['rewind'](self.state, padded_slots, padded_lengths)

    def clone(self, source: int, rows: Sequence[CloneRow], length: int) -> None:
        """Makes at most `put_rows` slots copies of the first `length` tokens of slot `source`."""
        capacity = self.config.put_rows
        limit = np.zeros(capacity, np.int32)
        temperature = np.zeros(capacity, np.float32)
        key = np.zeros((capacity, 2), np.uint32)
        for q, row in enumerate(rows):
            limit[q] = row.limit
            temperature[q] = row.temperature
            key[q] = row.key
        slots = self._pad([row.slot for row in rows], capacity)
        self.state = self.programs['clone'](
            self.state, np.int32(source), slots, np.int32(length), limit, temperature, key
        )

    def _pad(self, values: Sequence[int], size: int) -> np.ndarray:
        padded = np.full(size, self.config.slots, np.int32)
        padded[: len(values)] = values
        return padded
