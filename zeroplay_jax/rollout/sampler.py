"""The host side of the slot programs: pads arguments to the static shapes and keeps the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, UInt32

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout.slot_programs import DecodeChunk, SamplerConfig, SlotState, programs


@dataclasses.dataclass(frozen=True)
class PutRow:
    """Tokens for a slot.

    Attributes:
      slot: number of the slot.
      tokens: int32, written from position `start`.
      start: position; 0 begins an episode.
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
class CloneRow:
    """A slot that starts after a prompt of another one, with its own limit, temperature and key.

    Attributes:
      slot: number of the slot.
      source: page of its shard that holds the end of the prompt.
      page: page of its shard that the end of the prompt is copied to.
      length: tokens of the prompt.
      limit, temperature, key: as of `PutRow`.
    """

    slot: int
    source: int
    page: int
    length: int
    limit: int
    temperature: float
    key: UInt32[np.ndarray, ' 2']


Row = TypeVar('Row', PutRow, CloneRow)


@dataclasses.dataclass(frozen=True)
class _TurnSettings:
    """Settings of the rows of one device call, as arrays; entries without a row are 0."""

    limit: Int[np.ndarray, ' rows']
    temperature: Float[np.ndarray, ' rows']
    key: UInt32[np.ndarray, 'rows 2']


def _turn_settings(
    rows: Iterable[PutRow | CloneRow], indices: Iterable[int], capacity: int
) -> _TurnSettings:
    settings = _TurnSettings(
        limit=np.zeros(capacity, np.int32),
        temperature=np.zeros(capacity, np.float32),
        key=np.zeros((capacity, 2), np.uint32),
    )
    for index, row in zip(indices, rows):
        settings.limit[index] = row.limit
        settings.temperature[index] = row.temperature
        settings.key[index] = row.key
    return settings


def _passes(rows: Iterable[PutRow], width: int) -> list[list[PutRow]]:
    """Returns the rows cut into pieces of `width` tokens; pass i holds the i-th piece of every row.

    Pieces of one row must be written in order: the last one leaves the final length behind, and
    rows of one device call have no order.
    """
    passes: list[list[PutRow]] = []
    for row in rows:
        # A row without tokens still has one piece, which sets its length, limit and key.
        starts = range(0, max(len(row.tokens), 1), width)
        for number, offset in enumerate(starts):
            if number == len(passes):
                passes.append([])
            tokens = row.tokens[offset : offset + width]
            piece = dataclasses.replace(row, tokens=tokens, start=row.start + offset)
            passes[number].append(piece)
    return passes


class Sampler:
    """The slots of one set of weights on the device; the caller decides what is in which slot.

    The slots are split evenly over the data shards of the mesh, in order.

    Args:
      model: architecture of the weights.
      config: shape of the slots and programs.
      mesh: devices of this process, see `sharding.local_mesh`.

    Attributes:
      shards: number of data shards.
      table: int32 [slots, pages per slot], pages of every slot, numbered within its shard; None where a page is as long
        as a slot. The owner of the sampler sets and changes it.
      age: int32 [slots], number of every slot's rollout in the order of admission; the owner sets it too. Over pages
        shorter than a slot older rollouts are served first.
    """

    def __init__(self, model: ModelConfig, config: SamplerConfig, mesh: Mesh):
        self.model = model
        self.config = config
        self.mesh = mesh
        self.programs = programs(model, config, mesh)
        self.shards = sharding.data_shards(mesh)
        self.shard_config = config.of_shard(self.shards)
        self.table: np.ndarray | None = None
        self.age = np.zeros(config.slots, np.int32)
        if config.is_paged:
            self.table = np.zeros((config.slots, config.pages_per_slot), np.int32)
        # The first `put` allocates it, so a sampler that never runs takes no device memory.
        self.state: SlotState | None = None

    def free_cache(self) -> None:
        """Frees the memory of the slots, which must be idle; the next `put` allocates new ones."""
        self.state = None

    def put(self, rows: Sequence[PutRow]) -> None:
        """Writes tokens into slots, any number of rows of any length; allocates the state if there is none."""
        if self.state is None:
            self.state = self.programs['empty']()
        for pieces in _passes(rows, self.config.put_tokens):
            for call in self._split_into_calls(pieces, self.config.put_rows):
                self._put(call)

    def _split_into_calls(self, rows: Sequence[Row], rows_per_shard: int) -> list[list[Row]]:
        """Returns the rows in device calls with at most `rows_per_shard` rows of every shard."""
        calls: list[list[Row]] = []
        rows_of_shard = [0] * self.shards
        for row in rows:
            shard = row.slot // self.shard_config.slots
            call_index = rows_of_shard[shard] // rows_per_shard
            rows_of_shard[shard] += 1
            if call_index == len(calls):
                calls.append([])
            calls[call_index].append(row)
        return calls

    def _arrange(
        self, slots: Sequence[int], rows_per_shard: int
    ) -> tuple[Int[np.ndarray, ' rows'], list[int]]:
        """Returns the slots as an array of a device call, and the index of each in it.

        Every shard has `rows_per_shard` entries, those of shard s from s · rows_per_shard on, with slots numbered
        within the shard. Idle entries have the number of a slot that does not exist.
        """
        numbers = np.full(self.shards * rows_per_shard, self.shard_config.slots, np.int32)
        indices: list[int] = []
        rows_of_shard = [0] * self.shards
        for slot in slots:
            shard, number = divmod(slot, self.shard_config.slots)
            if rows_of_shard[shard] == rows_per_shard:
                raise ValueError(
                    f'more than {rows_per_shard} rows of one data shard in a device call'
                )
            index = shard * rows_per_shard + rows_of_shard[shard]
            rows_of_shard[shard] += 1
            numbers[index] = number
            indices.append(index)
        return numbers, indices

    def _page_table(self) -> Int[np.ndarray, 'slots pages_per_slot'] | None:
        # A copy, because the device may read the array after this call, when its owner has changed it.
        return None if self.table is None else self.table.copy()

    def _put(self, rows: Sequence[PutRow]) -> None:
        """Calls the program 'put' once, with at most `put_rows` rows per shard of at most `put_tokens` tokens."""
        slots, indices = self._arrange([row.slot for row in rows], self.config.put_rows)
        capacity = len(slots)
        tokens = np.zeros((capacity, self.config.put_tokens), np.int32)
        count = np.zeros(capacity, np.int32)
        start = np.zeros(capacity, np.int32)
        for index, row in zip(indices, rows):
            row_tokens = len(row.tokens)
            tokens[index, :row_tokens] = row.tokens
            count[index] = row_tokens
            start[index] = row.start
        settings = _turn_settings(rows, indices, capacity)
        self.state = self.programs['put'](
            self.state,
            slots,
            tokens,
            count,
            start,
            settings.limit,
            settings.temperature,
            settings.key,
            self._page_table(),
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
        rows: Bool[np.ndarray, ' slots'] | None = None,
        adapter: Int[np.ndarray, ' slots'] | None = None,
    ) -> DecodeChunk:
        """Decodes one chunk; returns device arrays without waiting for them.

        Args:
          params: weights.
          rows: slots that these weights play; None: all. The others are left as they are.
          adapter: adapter of every slot (policy/adapters.py); None: the only one, if the weights have adapters.
        """
        age = self.age.copy() if self.config.is_paged else None
        self.state, chunk = self.programs['decode'](
            params, self.state, self._page_table(), age, rows, adapter
        )
        return chunk

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Cuts the rows of these slots to the given lengths and stops their decoding until the next `put`."""
        # Nothing was put yet: a round was interrupted before its first device call.
        if self.state is None:
            return
        padded_slots, indices = self._arrange(slots, self.shard_config.slots)
        # The other lengths are never read: their slots do not exist.
        padded_lengths = np.zeros_like(padded_slots)
        padded_lengths[indices] = lengths
        self.state = self.programs['rewind'](self.state, padded_slots, padded_lengths)

    def clone(self, rows: Sequence[CloneRow]) -> None:
        """Starts slots after prefilled prompts, any number of rows."""
        for call in self._split_into_calls(rows, self.config.put_rows):
            self._clone(call)

    def _clone(self, rows: Sequence[CloneRow]) -> None:
        """Calls the program 'clone' once, with at most `put_rows` rows per shard."""
        slots, indices = self._arrange([row.slot for row in rows], self.config.put_rows)
        # Idle entries copy to a page that does not exist.
        pages = np.full(len(slots), self.shard_config.page_count, np.int32)
        source = np.zeros(len(slots), np.int32)
        length = np.zeros(len(slots), np.int32)
        for index, row in zip(indices, rows):
            pages[index] = row.page
            source[index] = row.source
            length[index] = row.length
        settings = _turn_settings(rows, indices, len(slots))
        self.state = self.programs['clone'](
            self.state,
            source,
            slots,
            pages,
            length,
            settings.limit,
            settings.temperature,
            settings.key,
        )
