"""The device programs of rollouts, and their calls: pads arguments to the static shapes and keeps the state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from zeroplay_jax.policy import (
    attention,
    delta,
    experts,
    sharding,
    transformer,
)
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout import slot_state
from zeroplay_jax.rollout.slot_state import (
    DECODE,
    FILL,
    NO_TOKEN,
    REST,
    DecodeChunk,
    SlotState,
    empty_chunk,
    empty_state,
    locate,
)
from zeroplay_jax.settings.rollouts import SamplerConfig

# The device programs of rollouts: slots with their own position, limit and random stream.
#
#   put     host tokens → the end of a slot (a prompt, or an observation after a rewind)
#   extend  keys and values of a few chunks of `chunk` tokens; not over pages
#   decode  up to `burst` new tokens of every decoding slot; over pages also keys and values of prompts and observations
#   rewind  a slot back to a length; nothing is erased, attention masks by position
#   clone   a prefilled prompt → other slots (samples of a request share one prefill, unless its pages were needed)
#
# Every program has static shapes and compiles once. Weights are an argument, so one compiled program
# serves every set of weights. The result of a slot depends on that slot alone: its tokens, its key
# and its position. Shapes never depend on the clock, hence neither do the samples; `decode_buckets` are an exception,
# whose smaller steps round differently.
#
# `extend` and `decode` here are those of pages as long as a slot; rollout/token_steps.py has `decode` of shorter pages.
# With several data shards every shard runs the programs on its own slots and pages.


# Tokens per slot that a decode call compares with; the host finds the ends of turns with others.
MOST_ENDS = 8
# Pages of every slot; None where page s belongs to slot s.
PageTable: TypeAlias = Int[Array, 'slots pages_per_slot'] | None


def _write(field: Array, slots: Int[Array, ' entries'], values: Array | int) -> Array:
    """Writes values into the entries `slots` of a field; a number beyond the last slot marks an idle entry."""
    # Calls with fewer entries than the program has are padded with idle entries, so that shapes stay static.
    return field.at[slots].set(values, mode='drop')


def _lower(field: Array, slots: Int[Array, ' entries'], values: Array) -> Array:
    """Lowers a field to `values` in the entries `slots` where it is higher; idle entries as in `_write`."""
    return field.at[slots].min(values, mode='drop')


def _put(
    config: SamplerConfig,
    state: SlotState,
    slots: Int[Array, ' entries'],
    tokens: Int[Array, 'entries tokens'],
    count: Int[Array, ' entries'],
    start: Int[Array, ' entries'],
    limit: Int[Array, ' entries'],
    temperature: Float[Array, ' entries'],
    key: UInt32[Array, 'entries 2'],
    table: PageTable = None,
) -> SlotState:
    """Writes tokens[q, :count[q]] at position start[q] of slots[q]; a number beyond the last slot: an idle entry."""
    _, width = tokens.shape
    offset = jnp.arange(width)[None]
    # Entries beyond `count` get a position out of range, which mode='drop' ignores.
    out_of_range = config.positions
    position = jnp.where(offset < count[:, None], start[:, None] + offset, out_of_range)
    length = start + count
    # The token before `start` was sampled last. Its keys and values are always computed by `extend`, never
    # taken from a decode chunk that ran past it: the two programs round differently, and whether a chunk
    # ran past the token depends on where the chunk ended.
    cached = jnp.maximum(start - 1, 0)
    status = jnp.where(length - 1 > cached, FILL, DECODE)
    page, index = locate(config, table, slots[:, None], position)
    written_tokens = state.tokens.at[page, index].set(tokens, mode='drop')
    return dataclasses.replace(
        state,
        tokens=written_tokens,
        length=_write(state.length, slots, length),
        # `cached` is never raised here, because an earlier piece of the same tokens may not be prefilled yet.
        cached=_lower(state.cached, slots, cached),
        limit=_write(state.limit, slots, limit),
        status=_write(state.status, slots, status),
        temperature=_write(state.temperature, slots, temperature),
        key=_write(state.key, slots, key),
    )


def _extend(
    model: ModelConfig,
    config: SamplerConfig,
    params: Params,
    state: SlotState,
    slots: Int[Array, ' entries'],
    adapter: Int[Array, ' slots'] | None = None,
) -> SlotState:
    """Prefills one chunk per entry of `slots`; a number beyond the last slot marks an idle entry.

    A slot that is there several times gets consecutive chunks.
    """
    # Chunks of the same slot in earlier entries.
    entry = jnp.arange(slots.shape[0])
    is_earlier = (slots[None] == slots[:, None]) & (entry[None] < entry[:, None])
    start = state.cached.at[slots].get(mode='clip')
    start = start + config.chunk * jnp.sum(is_earlier, -1, dtype=jnp.int32)
    position = start[:, None] + jnp.arange(config.chunk)[None]
    # Idle entries read some slot's tokens; `hidden_chunk` drops their keys and values.
    readable_slots = jnp.minimum(slots, config.slots - 1)
    tokens = state.tokens[readable_slots[:, None], position]
    # A chunk that runs past the last token writes garbage there. It is at or beyond `cached`, so
    # attention never reads it before the true keys and values replace it.
    if adapter is not None:
        adapter = adapter[readable_slots]
    reads_used = config.attention == 'used'
    count = None
    if model.delta is not None:
        # States end before the last token, as what is cached does.
        end = state.length.at[slots].get(mode='clip') - 1
        count = jnp.clip(end - start, 0, config.chunk)
    # The hidden states are unused, and XLA removes what only they need: the first decode step feeds the last prompt
    # token and samples from its hidden state.
    _, cache = transformer.hidden_chunk(
        model, params, tokens, slots, start, state.cache, reads_used, adapter, count
    )
    # The last token stays uncached: decode feeds it to predict the next one.
    goal = state.length.at[slots].get(mode='clip') - 1
    # The last chunk of a slot decides.
    cached = state.cached.at[slots].max(jnp.minimum(start + config.chunk, goal), mode='drop')
    status = jnp.where(cached.at[slots].get(mode='clip') >= goal, DECODE, FILL)
    return dataclasses.replace(
        state,
        cache=cache,
        cached=cached,
        status=_write(state.status, slots, status),
    )


def _is_live(state: SlotState, included: Bool[Array, ' slots'] | None) -> Bool[Array, ' slots']:
    """Returns which slots can decode another token; only those `included`, if it is given."""
    is_decoding = state.status == DECODE
    is_live = is_decoding & (state.length < state.limit)
    return is_live if included is None else is_live & included


def _decode(
    model: ModelConfig,
    config: SamplerConfig,
    params: Params,
    state: SlotState,
    table: None = None,  # not used: page s belongs to slot s
    age: None = None,  # not used: all slots decode at the same time
    included: Bool[Array, ' slots'] | None = None,
    adapter: Int[Array, ' slots'] | None = None,
    ends: Int[Array, 'slots ends'] | None = None,
    truncation: Float[Array, 'slots 2'] | None = None,
) -> tuple[SlotState, DecodeChunk]:
    """Decodes up to `burst` tokens of every DECODE slot below its limit; ends early when no slot can continue.

    Args:
      model, config, params, state: static shapes, weights, and the slots.
      table, age: None.
      included: slots that this call serves; None: all. The others are left as they are.
      adapter: adapter of every slot (policy/adapters.py); None: the only one, if the weights have adapters.
      ends, truncation: of every slot, as of `Sampler`; None: there are none.
    """
    slots = jnp.arange(config.slots, dtype=jnp.int32)
    ends = slot_state.end_tokens(config, ends)
    out_of_range = config.positions
    reads_used = config.attention == 'used'
    first_chunk = empty_chunk(config)
    live_at_start = _is_live(state, included)
    first_position = jnp.maximum(state.length - 1, 0)
    cache = state.cache
    # The chunk's keys and values go to a small buffer, written to the cache once at the end: a
    # scatter into the whole cache at every step would dominate the time.
    buffer = transformer.empty_buffer(model, config.slots, config.burst, cache)
    buffer += experts.empty_record(model.experts, model.layers, config.slots, config.burst)
    # The loop only reads the cache, so the cache is a constant of the loop and not part of its carry.
    state = dataclasses.replace(state, cache=())

    def has_work(carry):
        step, state, *_ = carry
        return (step < config.burst) & jnp.any(_is_live(state, included))

    def decode_step(carry):
        step, state, chunk, buffer = carry
        live = _is_live(state, included)
        # Slots that ended read positions beyond their end; their results are masked below.
        position = first_position + step
        last_token = state.tokens[slots, position]
        decoding = attention.decoding_rows(live) if reads_used else None
        hidden, buffer = transformer.hidden_step(
            model, params, last_token, first_position, step, cache, buffer, decoding, adapter, live
        )
        next_logits = transformer.logits(model, params, hidden)
        token, logp, kept = slot_state.draw(
            config.kept, next_logits, state.temperature, state.key, state.length, truncation
        )
        write_position = jnp.where(live, state.length, out_of_range)
        is_end_token = jnp.any(token[:, None] == ends, -1)
        at_end_token = live & is_end_token
        chunk = DecodeChunk(
            tokens=chunk.tokens.at[:, step].set(jnp.where(live, token, 0)),
            logp=chunk.logp.at[:, step].set(jnp.where(live, logp, 0.0)),
            count=chunk.count + live,
            kept=None if kept is None else chunk.kept.at[:, step].set(kept),
        )
        # The end token is part of the rollout, as in the chat template. Stop strings of several tokens are matched by
        # the host, which has the bytes of the tokens.
        state = dataclasses.replace(
            state,
            tokens=state.tokens.at[slots, write_position].set(token, mode='drop'),
            cached=jnp.where(live, state.length, state.cached),
            length=state.length + live,
            status=jnp.where(at_end_token, REST, state.status),
        )
        return step + 1, state, chunk, buffer

    carry = (jnp.int32(0), state, first_chunk, buffer)
    _, state, chunk, buffer = jax.lax.while_loop(has_work, decode_step, carry)
    # Slots that did not decode have garbage in the buffer, which must not reach their cache.
    written_slots = jnp.where(live_at_start, slots, config.slots)
    cache = _write_burst(model, cache, buffer, written_slots, first_position)
    return dataclasses.replace(state, cache=cache), chunk


def _write_burst(model: ModelConfig, cache, buffer, slots, first_position) -> tuple:
    """Returns the cache with what a burst computed, from `first_position` of `slots` on; idle entries as elsewhere."""
    written = list(transformer.write_buffer(cache[: model.layers], buffer, slots, first_position))
    for record, new_record in zip(cache[model.layers :], buffer[model.layers :]):
        place = slots[:, None], first_position[:, None] + jnp.arange(new_record.shape[1])
        written.append(record.at[place].set(new_record, mode='drop'))
    return tuple(written)


def _record(state: SlotState, slots: Int[Array, ' entries'], table: PageTable = None) -> Array:
    """Returns the experts, [entries, positions, choices], of all positions of `slots`."""
    *_, record = state.cache
    pages = slots[:, None] if table is None else table.at[slots].get(mode='clip')
    by_page = record.at[pages].get(mode='clip')
    return by_page.reshape(slots.shape[0], -1, record.shape[-1])


def _rewind(
    state: SlotState, slots: Int[Array, ' entries'], length: Int[Array, ' entries']
) -> SlotState:
    """Cuts slots to `length` and sets them to REST; numbers beyond the last slot mark idle entries."""
    # The token at `length - 1` will be fed again, by `extend` or `decode`.
    cached = jnp.maximum(length - 1, 0)
    return dataclasses.replace(
        state,
        length=_lower(state.length, slots, length),
        cached=_lower(state.cached, slots, cached),
        status=_write(state.status, slots, REST),
    )


def _clone(
    state: SlotState,
    source: Int[Array, ' entries'],
    slots: Int[Array, ' entries'],
    pages: Int[Array, ' entries'],
    length: Int[Array, ' entries'],
    limit: Int[Array, ' entries'],
    temperature: Float[Array, ' entries'],
    key: UInt32[Array, 'entries 2'],
) -> SlotState:
    """Makes each of `slots` start after a prefilled prompt of `length` tokens, whose last page is copied.

    Args:
      state: the slots.
      source: pages that hold the ends of the prompts.
      slots: those that get the prompts.
      pages: their pages for the ends of the prompts. The pages before it are shared and need no copy.
      length: tokens of the prompts.
      limit, temperature, key: of every one.
    """

    # One entry after another: on CPUs, all of a call at once take the memory of as many slots. Idle entries come after
    # the others, and no page that is read is also written.
    def copy_entry(entry, fields):
        def copy_page(field: Array, copied: Array) -> Array:
            # The whole page is copied, because a copy of the prompt's part would need a shape that depends on data. The
            # rollout that prefilled it may have decoded further; `length` and `cached` hide its later tokens.
            page = jax.lax.dynamic_index_in_dim(copied, source[entry])
            return jax.lax.dynamic_update_index_in_dim(field, page, pages[entry], 0)

        cache, tokens = fields
        copied = (tuple(map(delta.at_turn, cache)), tokens)
        return jax.tree.map(copy_page, fields, copied)

    count = jnp.sum(pages < state.tokens.shape[0], dtype=jnp.int32)
    cache, tokens = jax.lax.fori_loop(0, count, copy_entry, (state.cache, state.tokens))
    return dataclasses.replace(
        state,
        cache=cache,
        tokens=tokens,
        length=_write(state.length, slots, length),
        cached=_write(state.cached, slots, length - 1),
        limit=_write(state.limit, slots, limit),
        status=_write(state.status, slots, DECODE),
        temperature=_write(state.temperature, slots, temperature),
        key=_write(state.key, slots, key),
    )


def _layout(model: ModelConfig, config: SamplerConfig, mesh: Mesh) -> SlotState:
    """Returns the sharding of every array of a state."""
    shapes = jax.eval_shape(functools.partial(empty_state, model, config))
    layout = jax.tree.map(lambda _: sharding.rows(mesh), shapes)
    # The cache is also split by heads, because it is by far the largest part of the state.
    cache_sharding = sharding.pages(mesh) if config.is_paged else sharding.cache(mesh)
    layers = delta.layout(shapes.cache[: model.layers], mesh, cache_sharding)
    return dataclasses.replace(layout, cache=(*layers, *layout.cache[model.layers :]))


@functools.lru_cache
def programs(model: ModelConfig, config: SamplerConfig, mesh: Mesh) -> dict:
    """Returns the jitted programs of one shape by name ('empty' and those of the module), shared by all weights.

    Over pages shorter than a slot there is no 'extend'.

    All arrays but the weights have their first axis over the data shards. Numbers of slots and pages count within a
    shard.

    Raises:
      UserError: the devices do not have the kernel of `config.attention`.
    """
    shards = sharding.data_shards(mesh)
    model = experts.on_mesh(model, mesh)
    # One shard's part of the slots: what every program below sees.
    local = config.of_shard(shards)
    head_dim = model.head_dim
    # What only samplers over pages need is loaded by these alone.
    if config.attention == 'ragged':
        from zeroplay_jax.policy import ragged_attention

        ragged_attention.check(model.kv_heads, config.page, model.dtype, mesh)
        head_dim = ragged_attention.cache_head_dim(head_dim, mesh)
    if config.attention == 'used' and mesh.devices.flat[0].platform != 'cpu':
        # Accelerators would compute one slot after another, too.
        local = dataclasses.replace(local, attention='xla')
    layout = _layout(model, config, mesh)
    # functools.partial makes a new object per shape, so that each keeps its own compilations.
    bind = functools.partial
    if config.is_paged:
        from zeroplay_jax.rollout import token_steps

        decode = bind(token_steps.decode, model, local, mesh)
    else:
        decode = bind(_decode, model, local)
    # The host reads chunks. A single shard gives them to all devices of the 'model' axis; several keep their own parts,
    # because to gather them would be a collective.
    chunk_layout = sharding.replicated(mesh) if shards == 1 else sharding.rows(mesh)
    cached_layout = chunk_layout if config.is_paged else None
    kept_layout = chunk_layout if config.kept else None
    chunk = DecodeChunk(chunk_layout, chunk_layout, chunk_layout, cached_layout, kept=kept_layout)

    def state_update(function, has_params=False, out_shardings=layout):
        # The state is donated: with two copies of the cache only half as many slots would fit into memory.
        return jax.jit(
            sharding.per_data_shard(function, mesh, has_params),
            donate_argnums=int(has_params),
            out_shardings=out_shardings,
        )

    compiled = dict(
        empty=jax.jit(bind(empty_state, model, config, head_dim), out_shardings=layout),
        put=state_update(bind(_put, local)),
        decode=state_update(decode, has_params=True, out_shardings=(layout, chunk)),
        rewind=state_update(bind(_rewind)),
        clone=state_update(bind(_clone)),
    )
    if not config.is_paged:
        compiled['extend'] = state_update(bind(_extend, model, local), has_params=True)
    if model.experts:
        # Does not donate the state.
        record = sharding.per_data_shard(_record, mesh)
        compiled['record'] = jax.jit(record, out_shardings=chunk_layout)
    return compiled


@dataclasses.dataclass(frozen=True)
class SlotPut:
    """Tokens for a slot.

    Attributes:
      slot: number of the slot.
      tokens: int32, written from position `start`.
      start: position; 0: the whole rollout. A model with states (policy/delta.py) starts nowhere else than where the
        turn before began to sample.
      limit: length at which the turn stops.
      temperature: 0 samples greedily.
      key: random stream, see `identity_key`.
    """

    slot: int
    tokens: Int[np.ndarray, ' tokens']
    start: int
    limit: int
    temperature: float
    key: UInt32[np.ndarray, ' 2']


@dataclasses.dataclass(frozen=True)
class SlotClone:
    """A slot that starts after a prompt of another one, with its own limit, temperature and key.

    Attributes:
      slot: number of the slot.
      source: page of its shard that holds the end of the prompt.
      page: page of its shard that the end of the prompt is copied to.
      length: tokens of the prompt.
      limit, temperature, key: as of `SlotPut`.
    """

    slot: int
    source: int
    page: int
    length: int
    limit: int
    temperature: float
    key: UInt32[np.ndarray, ' 2']


Entry = TypeVar('Entry', SlotPut, SlotClone)


_FIELD_DTYPES = {'temperature': np.float32, 'key': np.uint32}


def _columns(
    entries: Sequence[SlotPut | SlotClone], indices: Sequence[int], capacity: int, *fields: str
) -> list[np.ndarray]:
    """Returns fields of the entries of one device call as arrays; 0 where an entry is idle."""
    columns = []
    for field in fields:
        shape = (capacity, 2) if field == 'key' else (capacity,)
        column = np.zeros(shape, _FIELD_DTYPES.get(field, np.int32))
        for index, entry in zip(indices, entries):
            column[index] = getattr(entry, field)
        columns.append(column)
    return columns


def _passes(puts: Iterable[SlotPut], width: int) -> list[list[SlotPut]]:
    """Returns puts cut into pieces of `width` tokens; pass i holds the i-th piece of every one.

    Pieces for one slot must be written in order: the last one leaves the final length behind, and
    entries of one device call have no order.
    """
    passes: list[list[SlotPut]] = []
    for put in puts:
        # A put without tokens still has one piece, which sets its length, limit and key.
        starts = range(0, max(len(put.tokens), 1), width)
        for number, offset in enumerate(starts):
            if number == len(passes):
                passes.append([])
            tokens = put.tokens[offset : offset + width]
            piece = dataclasses.replace(put, tokens=tokens, start=put.start + offset)
            passes[number].append(piece)
    return passes


class Sampler:
    """The slots of a pool on the device, whatever weights a call reads; the caller decides what is in which slot.

    The slots are split evenly over the data shards of the mesh, in order.

    Args:
      model: architecture of the weights.
      config: shape of the slots and programs.
      mesh: devices of this process, see `sharding.local_mesh`.

    Attributes:
      shards: number of data shards.
      table: int32 [slots, pages per slot], pages of every slot, numbered within its shard; None where a page is as long
        as a slot. The owner of the sampler sets and changes it.
      choices: as of `experts.blank_choices`.
      has_states: whether layers have a state per slot (policy/delta.py), which cannot be rewound.
      age: int32 [slots], number of every slot's turn in the order in which turns began; the owner sets it too. Over
        pages shorter than a slot older turns are served first.
      ends: int32 [slots, MOST_ENDS], tokens with which a turn of every slot ends besides those of the config, then
        NO_TOKEN; the owner may set it. A slot that has ended takes no more of a decode call.
      truncation: float32 [slots, 2], as of `slot_state.draw`, which the owner sets; None where `config.kept` is 0.
    """

    def __init__(self, model: ModelConfig, config: SamplerConfig, mesh: Mesh):
        self.model = model
        self.config = config
        self.mesh = mesh
        self.programs = programs(model, config, mesh)
        self.shards = sharding.data_shards(mesh)
        self.shard_config = config.of_shard(self.shards)
        self.choices = experts.blank_choices(model.experts, model.layers)
        self.has_states = model.delta is not None
        self.table: np.ndarray | None = None
        self.age = np.zeros(config.slots, np.int32)
        self.ends = np.full((config.slots, MOST_ENDS), NO_TOKEN, np.int32)
        self.truncation = np.zeros((config.slots, 2), np.float32) if config.kept else None
        if config.is_paged:
            self.table = np.zeros((config.slots, config.pages_per_slot), np.int32)
        # The first `put` allocates it, so a sampler that never runs takes no device memory.
        self.state: SlotState | None = None

    def free_cache(self) -> None:
        """Frees the memory of the slots, which must be idle; the next `put` allocates new ones."""
        self.state = None

    def put(self, puts: Sequence[SlotPut]) -> None:
        """Writes tokens into slots, any number of any length; allocates the state if there is none."""
        if self.state is None:
            self.state = self.programs['empty']()
        for pieces in _passes(puts, self.config.put_tokens):
            for call in self._split_into_calls(pieces, self.config.put_rows):
                self._put(call)

    def _split_into_calls(
        self, entries: Sequence[Entry], entries_per_shard: int
    ) -> list[list[Entry]]:
        """Returns the entries in device calls with at most `entries_per_shard` of every shard."""
        calls: list[list[Entry]] = []
        entries_of_shard = [0] * self.shards
        for entry in entries:
            shard = entry.slot // self.shard_config.slots
            call_index = entries_of_shard[shard] // entries_per_shard
            entries_of_shard[shard] += 1
            if call_index == len(calls):
                calls.append([])
            calls[call_index].append(entry)
        return calls

    def _arrange(
        self, slots: Sequence[int], entries_per_shard: int
    ) -> tuple[Int[np.ndarray, ' entries'], list[int]]:
        """Returns the slots as an array of a device call, and the index of each in it.

        Every shard has `entries_per_shard` entries, those of shard s from s · entries_per_shard on, with slots numbered
        within the shard. Idle entries have the number of a slot that does not exist.
        """
        numbers = np.full(self.shards * entries_per_shard, self.shard_config.slots, np.int32)
        indices = []
        entries_of_shard = [0] * self.shards
        for slot in slots:
            shard, number = divmod(slot, self.shard_config.slots)
            if entries_of_shard[shard] == entries_per_shard:
                raise ValueError(
                    f'more than {entries_per_shard} slots of one data shard in a device call'
                )
            index = shard * entries_per_shard + entries_of_shard[shard]
            entries_of_shard[shard] += 1
            numbers[index] = number
            indices.append(index)
        return numbers, indices

    def _page_table(self) -> Int[np.ndarray, 'slots pages_per_slot'] | None:
        # A copy, because the device may read the array after this call, when its owner has changed it.
        return None if self.table is None else self.table.copy()

    def _put(self, puts: Sequence[SlotPut]) -> None:
        """Calls the program 'put' once, with at most `put_rows` entries per shard of at most `put_tokens` tokens."""
        slots, indices = self._arrange([put.slot for put in puts], self.config.put_rows)
        tokens = np.zeros((len(slots), self.config.put_tokens), np.int32)
        count = np.zeros(len(slots), np.int32)
        for index, put in zip(indices, puts):
            count[index] = len(put.tokens)
            tokens[index, : count[index]] = put.tokens
        fields = _columns(puts, indices, len(slots), 'start', 'limit', 'temperature', 'key')
        self.state = self.programs['put'](
            self.state, slots, tokens, count, *fields, self._page_table()
        )

    def extend(
        self,
        params: Params,
        slots: Sequence[int],
        adapter: Int[np.ndarray, ' slots'] | None = None,
    ) -> None:
        """Prefills one chunk per entry of `slots`: ascending, at most `shard_config.fill_rows` entries of a shard.

        A slot may have several entries. Over pages shorter than a slot `decode` prefills instead.

        `params` and `adapter` are as in `decode`.
        """
        padded_slots, _ = self._arrange(slots, self.shard_config.fill_rows)
        self.state = self.programs['extend'](params, self.state, padded_slots, adapter)

    def decode(
        self,
        params: Params,
        included: Bool[np.ndarray, ' slots'] | None = None,
        adapter: Int[np.ndarray, ' slots'] | None = None,
    ) -> DecodeChunk:
        """Decodes one chunk; returns device arrays without waiting for them.

        Args:
          params: weights.
          included: slots that this call serves; None: all. The others are left as they are.
          adapter: adapter of every slot (policy/adapters.py); None: the only one, if the weights have adapters.
        """
        age = self.age.copy() if self.config.is_paged else None
        self.state, chunk = self.programs['decode'](
            params,
            self.state,
            self._page_table(),
            age,
            included,
            adapter,
            self.ends.copy(),
            jax.tree.map(np.copy, self.truncation),
        )
        return chunk

    def record(self, slot: int) -> tuple[jax.Array, int]:
        """Returns experts, [entries, positions, choices], and the entry of a slot in them; does not wait for them."""
        slots, (entry,) = self._arrange([slot], 1)
        return self.programs['record'](self.state, slots, self._page_table()), entry

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Cuts these slots to the given lengths and stops their decoding until the next `put`."""
        # Nothing was put yet: a round was interrupted before its first device call.
        if self.state is None:
            return
        padded_slots, indices = self._arrange(slots, self.shard_config.slots)
        # The other lengths are never read: their slots do not exist.
        padded_lengths = np.zeros_like(padded_slots)
        padded_lengths[indices] = lengths
        self.state = self.programs['rewind'](self.state, padded_slots, padded_lengths)

    def clone(self, clones: Sequence[SlotClone]) -> None:
        """Starts slots after prefilled prompts, any number of them."""
        for call in self._split_into_calls(clones, self.config.put_rows):
            self._clone(call)

    def _clone(self, clones: Sequence[SlotClone]) -> None:
        """Calls the program 'clone' once, with at most `put_rows` entries per shard."""
        slots, indices = self._arrange([clone.slot for clone in clones], self.config.put_rows)
        # Idle entries copy to a page that does not exist.
        pages = np.full(len(slots), self.shard_config.page_count, np.int32)
        for index, clone in zip(indices, clones):
            pages[index] = clone.page
        source, *fields = _columns(
            clones, indices, len(slots), 'source', 'length', 'limit', 'temperature', 'key'
        )
        self.state = self.programs['clone'](self.state, source, slots, pages, *fields)
