"""The device programs of rollouts: slots with their own position, limit and random stream.

  put     host tokens → the end of a row (a prompt, or an observation after a rewind)
  extend  keys and values of up to `chunk` tokens of a few rows
  decode  up to `burst` new tokens of every decoding row
  rewind  a row back to a length; nothing is erased, attention masks by position
  clone   a prefilled row → other rows (samples of a request share one prefill)

Every program has static shapes and compiles once. Weights are an argument, so one compiled program
serves every set of weights. The result of a row depends on that row alone: its tokens, its key and
its position. Shapes never depend on the clock, hence neither do the samples.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from zeroplay_jax.policy import attention, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.types import UserError

# Phase of a slot. FILL: some tokens lack keys and values. DECODE: ready to sample. REST: waiting for
# a tool, ended or empty.
FILL, DECODE, REST = 0, 1, 2
# An id that no token has. It takes the place of the end tokens in a config without any, because an empty
# array would need a branch of its own in the decode loop.
_NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Static shape of the programs.

    Attributes:
      slots: rollouts in progress at the same time.
      context: tokens that a slot can hold.
      chunk: tokens of a row that one prefill call computes.
      fill_rows: rows of a prefill call.
      burst: steps of a decode call.
      put_rows: rows of a put or clone call.
      put_tokens: tokens per row of a put call.
      eos: ids of the tokens that end a turn.
    """

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
        """Positions allocated per slot: more than `context`, because a chunk that begins near its end runs past it."""
        return self.context + max(self.chunk, self.burst)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """All data of rollouts in progress on the device.

    Attributes:
      cache: keys and values per layer; entries at or beyond `cached` are undefined and never read.
      tokens: int32, tokens of the episode exactly as the model sees them.
      length: int32, number of tokens.
      cached: int32, positions whose keys and values are valid, < length.
      limit: int32, length at which the turn stops.
      status: int32, FILL, DECODE or REST.
      temperature: float32; 0 samples greedily.
      key: random stream of the request.
    """

    cache: tuple
    tokens: Int[Array, 'slots positions']
    length: Int[Array, ' slots']
    cached: Int[Array, ' slots']
    limit: Int[Array, ' slots']
    status: Int[Array, ' slots']
    temperature: Float[Array, ' slots']
    key: UInt32[Array, 'slots 2']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeChunk:
    """Result of one decode call: the first `count` entries of a row are sampled tokens.

    Attributes:
      tokens: int32, ids; 0 beyond `count`.
      logp: float32, log-probs under the distribution that was sampled from; 0 beyond `count`.
      count: int32, sampled tokens of the row.
    """

    tokens: Int[Array, 'slots burst']
    logp: Float[Array, 'slots burst']
    count: Int[Array, ' slots']


def _empty(model: ModelConfig, config: SamplerConfig) -> SlotState:
    """Returns the state of empty slots."""
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
        status=jnp.full((slots,), REST, jnp.int32),
        temperature=zeros(slots, dtype=jnp.float32),
        key=zeros(slots, 2, dtype=jnp.uint32),
    )


def _write_rows(field: Array, slots: Int[Array, ' rows'], values: Array | int) -> Array:
    """Writes values into the rows `slots`; a row number beyond the last slot marks an idle entry."""
    # Calls with fewer rows than the program has are padded with idle entries, so that shapes stay static.
    return field.at[slots].set(values, mode='drop')


def _lower_rows(field: Array, slots: Int[Array, ' rows'], values: Array) -> Array:
    """Lowers a field to `values` in the rows `slots` where it is higher; idle entries as in `_write_rows`."""
    return field.at[slots].min(values, mode='drop')


def _put(
    state: SlotState,
    slots: Int[Array, ' rows'],
    tokens: Int[Array, 'rows tokens'],
    count: Int[Array, ' rows'],
    start: Int[Array, ' rows'],
    limit: Int[Array, ' rows'],
    temperature: Float[Array, ' rows'],
    key: UInt32[Array, 'rows 2'],
) -> SlotState:
    """Writes tokens[q, :count[q]] at position start[q] of slots[q]; a number beyond the last slot marks an idle row."""
    _, width = tokens.shape
    offset = jnp.arange(width)[None]
    # Entries beyond `count` get a position out of range, which mode='drop' ignores.
    out_of_range = state.tokens.shape[1]
    position = jnp.where(offset < count[:, None], start[:, None] + offset, out_of_range)
    length = start + count
    # The token before `start` was sampled last. Its keys and values are always computed by `extend`, never
    # taken from a decode chunk that ran past it: the two programs round differently, and whether a chunk
    # ran past the token depends on where the chunk ended.
    cached = jnp.maximum(start - 1, 0)
    status = jnp.where(length - 1 > cached, FILL, DECODE)
    written_tokens = state.tokens.at[slots[:, None], position].set(tokens, mode='drop')
    return dataclasses.replace(
        state,
        tokens=written_tokens,
        length=_write_rows(state.length, slots, length),
        # `cached` is never raised here, because an earlier piece of the same tokens may not be prefilled yet.
        cached=_lower_rows(state.cached, slots, cached),
        limit=_write_rows(state.limit, slots, limit),
        status=_write_rows(state.status, slots, status),
        temperature=_write_rows(state.temperature, slots, temperature),
        key=_write_rows(state.key, slots, key),
    )


def _extend(
    model: ModelConfig,
    config: SamplerConfig,
    params: Params,
    state: SlotState,
    slots: Int[Array, ' rows'],
) -> SlotState:
    """Prefills one chunk of every row in `slots` (a number beyond the last slot marks an idle row)."""
    start = state.cached.at[slots].get(mode='clip')
    position = start[:, None] + jnp.arange(config.chunk)[None]
    # Idle rows read some slot's tokens; `fill_cache` drops their keys and values.
    readable_slots = jnp.minimum(slots, config.slots - 1)
    tokens = state.tokens[readable_slots[:, None], position]
    # A chunk that runs past the last token writes garbage there. It is at or beyond `cached`, so
    # attention never reads it before the true keys and values replace it.
    cache = transformer.fill_cache(model, params, tokens, slots, start, state.cache)
    # The last token stays uncached: decode feeds it to predict the next one.
    goal = state.length.at[slots].get(mode='clip') - 1
    cached = jnp.minimum(start + config.chunk, goal)
    status = jnp.where(cached >= goal, DECODE, FILL)
    return dataclasses.replace(
        state,
        cache=cache,
        cached=_write_rows(state.cached, slots, cached),
        status=_write_rows(state.status, slots, status),
    )


def _sample(
    logits: Float[Array, 'slots vocab'],
    temperature: Float[Array, ' slots'],
    key: UInt32[Array, 'slots 2'],
    position: Int[Array, ' slots'],
) -> tuple[Int[Array, ' slots'], Float[Array, ' slots']]:
    """Samples a token per row; returns tokens and their log-probs under softmax(logits / temperature).

    The noise is a function of the request's key and the position alone. Temperature 0 takes the
    most likely token and reports its log-prob at temperature 1.
    """
    is_sampled = temperature > 0
    # Greedy rows divide by 1: a division by 0 would make their log-probs NaN.
    divisor = jnp.where(is_sampled, temperature, 1.0)
    scaled_logits = logits / divisor[:, None]
    vocabulary = scaled_logits.shape[1]

    def row_noise(position_key):
        return jax.random.gumbel(position_key, (vocabulary,))

    def gumbel_noise(_):
        # Each row has a key of its own: its sample must not depend on the slot or on other rows.
        request_keys = jax.random.wrap_key_data(key)
        position_keys = jax.vmap(jax.random.fold_in)(request_keys, position)
        noise = jax.vmap(row_noise)(position_keys)
        return jnp.where(is_sampled[:, None], noise, 0.0)

    def no_noise(_):
        return jnp.zeros_like(scaled_logits)

    # Greedy batches skip the noise, which costs as much as the head on a CPU.
    noisy_logits = scaled_logits + jax.lax.cond(jnp.any(is_sampled), gumbel_noise, no_noise, None)
    # The first maximum, found by two plain reductions: several times faster on a CPU than argmax.
    best = jnp.max(noisy_logits, -1, keepdims=True)
    token_ids = jnp.arange(vocabulary, dtype=jnp.int32)
    best_ids = jnp.where(noisy_logits == best, token_ids, vocabulary - 1)
    token = jnp.min(best_ids, -1)
    # The log-prob excludes the noise: it is the denominator of the loss's importance ratio.
    token_logit = jnp.take_along_axis(scaled_logits, token[:, None], 1)[:, 0]
    logp = token_logit - jax.nn.logsumexp(scaled_logits, -1)
    return token, logp


def _is_live(state: SlotState) -> Bool[Array, ' slots']:
    """Returns which rows can decode another token."""
    is_decoding = state.status == DECODE
    return is_decoding & (state.length < state.limit)


def _empty_chunk(config: SamplerConfig) -> DecodeChunk:
    shape = (config.slots, config.burst)
    return DecodeChunk(
        tokens=jnp.zeros(shape, jnp.int32),
        logp=jnp.zeros(shape, jnp.float32),
        count=jnp.zeros((config.slots,), jnp.int32),
    )


def _decode(
    model: ModelConfig, config: SamplerConfig, params: Params, state: SlotState
) -> tuple[SlotState, DecodeChunk]:
    """Decodes up to `burst` tokens of every DECODE row below its limit; ends early when no row can continue."""
    slots = jnp.arange(config.slots, dtype=jnp.int32)
    eos = jnp.asarray(config.eos or (_NO_TOKEN,), jnp.int32)
    out_of_range = state.tokens.shape[1]
    empty_chunk = _empty_chunk(config)
    live_at_start = _is_live(state)
    first_position = jnp.maximum(state.length - 1, 0)
    cache = state.cache
    # The chunk's keys and values go to a small buffer, written to the cache once at the end: a
    # scatter into the whole cache at every step would dominate the time.
    buffer = attention.empty_buffer(
        model.layers, config.slots, config.burst, model.kv_heads, model.head_dim, model.dtype
    )
    # The loop only reads the cache, so the cache is a constant of the loop and not part of its carry.
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
        is_end_token = jnp.any(token[:, None] == eos[None], -1)
        at_end_token = live & is_end_token
        chunk = DecodeChunk(
            tokens=chunk.tokens.at[:, step].set(jnp.where(live, token, 0)),
            logp=chunk.logp.at[:, step].set(jnp.where(live, logp, 0.0)),
            count=chunk.count + live,
        )
        # The end token is part of the episode, as in the chat template. Stop strings are matched by the
        # host, which has the bytes of the tokens.
        state = dataclasses.replace(
            state,
            tokens=state.tokens.at[slots, write_position].set(token, mode='drop'),
            cached=jnp.where(live, state.length, state.cached),
            length=state.length + live,
            status=jnp.where(at_end_token, REST, state.status),
        )
        return step + 1, state, chunk, buffer

    carry = (jnp.int32(0), state, empty_chunk, buffer)
    _, state, chunk, buffer = jax.lax.while_loop(has_work, decode_step, carry)
    # Rows that did not decode have garbage in the buffer, which must not reach their cache.
    rows = jnp.where(live_at_start, slots, config.slots)
    written_layers = []
    for layer_cache, layer_buffer in zip(cache, buffer):
        written = attention.write_window(layer_cache, layer_buffer, rows, first_position)
        written_layers.append(written)
    return dataclasses.replace(state, cache=tuple(written_layers)), chunk


def _rewind(state: SlotState, slots: Int[Array, ' rows'], length: Int[Array, ' rows']) -> SlotState:
    """Cuts rows to `length` and sets them to REST; entries beyond the last slot are idle."""
    # The token at `length - 1` will be fed again, by `extend` or `decode`.
    cached = jnp.maximum(length - 1, 0)
    return dataclasses.replace(
        state,
        length=_lower_rows(state.length, slots, length),
        cached=_lower_rows(state.cached, slots, cached),
        status=_write_rows(state.status, slots, REST),
    )


def _clone(
    state: SlotState,
    source: Int[Array, ''],
    slots: Int[Array, ' rows'],
    length: Int[Array, ''],
    limit: Int[Array, ' rows'],
    temperature: Float[Array, ' rows'],
    key: UInt32[Array, 'rows 2'],
) -> SlotState:
    """Copies the first `length` tokens of prefilled row `source` into `slots`."""

    def copy_row(field: Array) -> Array:
        # The whole row is copied, because a copy up to `length` would need a shape that depends on data. The
        # source may have decoded further; `length` and `cached` hide its later tokens.
        return _write_rows(field, slots, field[source][None])

    return dataclasses.replace(
        state,
        cache=jax.tree.map(copy_row, state.cache),
        tokens=copy_row(state.tokens),
        length=_write_rows(state.length, slots, length),
        cached=_write_rows(state.cached, slots, length - 1),
        limit=_write_rows(state.limit, slots, limit),
        status=_write_rows(state.status, slots, DECODE),
        temperature=_write_rows(state.temperature, slots, temperature),
        key=_write_rows(state.key, slots, key),
    )


def _layout(model: ModelConfig, config: SamplerConfig, mesh: Mesh) -> SlotState:
    """Returns the sharding of every array of a state."""
    shapes = jax.eval_shape(functools.partial(_empty, model, config))
    layout = jax.tree.map(lambda _: sharding.slots(mesh), shapes)
    # The cache is also split by heads, because it is by far the largest part of the state.
    cache_layout = jax.tree.map(lambda _: sharding.cache(mesh), shapes.cache)
    return dataclasses.replace(layout, cache=cache_layout)


@functools.lru_cache
def programs(model: ModelConfig, config: SamplerConfig, mesh: Mesh) -> dict:
    """Returns the jitted programs of one shape by name ('empty' and those of the module), shared by all weights.

    Raises:
      UserError: slots or heads cannot be split evenly over the mesh.
    """
    shards = mesh.shape['replica'] * mesh.shape['fsdp']
    if config.slots % shards:
        raise UserError(
            f'sampler.slots={config.slots} must be divisible by mesh axes replica × fsdp = {shards}'
        )
    if model.kv_heads % mesh.shape['model']:
        raise UserError(
            f'{model.kv_heads} key/value heads must be divisible by mesh axis model of '
            f'{mesh.shape["model"]}'
        )
    layout = _layout(model, config, mesh)
    # The host reads a chunk as a whole, so every device has all of it.
    replicated = sharding.replicated(mesh)
    chunk_layout = DecodeChunk(replicated, replicated, replicated)
    # functools.partial makes a new object per shape, so that each keeps its own compilations.
    bind = functools.partial
    # The state is donated: with two copies of the cache only half as many slots would fit into memory.
    update = bind(jax.jit, donate_argnames='state')
    return dict(
        empty=jax.jit(bind(_empty, model, config), out_shardings=layout),
        put=update(bind(_put), out_shardings=layout),
        extend=update(bind(_extend, model, config), out_shardings=layout),
        decode=update(bind(_decode, model, config), out_shardings=(layout, chunk_layout)),
        rewind=update(bind(_rewind), out_shardings=layout),
        clone=update(bind(_clone), out_shardings=layout),
    )
