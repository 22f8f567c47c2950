"""The host side of the slot programs: pads arguments to the static shapes and keeps the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt32

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
    """A slot that becomes a copy of another one, with its own limit, temperature and key."""

    slot: int
    limit: int
    temperature: float
    key: UInt32[np.ndarray, ' 2']


@dataclasses.dataclass(frozen=True)
class _TurnSettings:
    """Settings of the rows of one device call, as arrays; entries beyond the last row are 0."""

    limit: Int[np.ndarray, ' rows']
    temperature: Float[np.ndarray, ' rows']
    key: UInt32[np.ndarray, 'rows 2']


def _turn_settings(rows: Iterable[PutRow | CloneRow], capacity: int) -> _TurnSettings:
    settings = _TurnSettings(
        limit=np.zeros(capacity, np.int32),
        temperature=np.zeros(capacity, np.float32),
        key=np.zeros((capacity, 2), np.uint32),
    )
    for index, row in enumerate(rows):
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

    Args:
      model: architecture of the weights.
      config: shape of the slots and programs.
      mesh: devices of this process, see `sharding.local_mesh`.
    """

    def __init__(self, model: ModelConfig, config: SamplerConfig, mesh: Mesh):
        self.model = model
        self.config = config
        self.mesh = mesh
        self.programs = programs(model, config, mesh)
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
            for begin in range(0, len(pieces), self.config.put_rows):
                self._put(pieces[begin : begin + self.config.put_rows])

    def _put(self, rows: Sequence[PutRow]) -> None:
        """Calls the program 'put' once, with at most `put_rows` rows of at most `put_tokens` tokens."""
        capacity = self.config.put_rows
        slots = np.full(capacity, self.config.slots, np.int32)
        tokens = np.zeros((capacity, self.config.put_tokens), np.int32)
        count = np.zeros(capacity, np.int32)
        start = np.zeros(capacity, np.int32)
        for index, row in enumerate(rows):
            row_tokens = len(row.tokens)
            slots[index] = row.slot
            tokens[index, :row_tokens] = row.tokens
            count[index] = row_tokens
            start[index] = row.start
        settings = _turn_settings(rows, capacity)
        self.state = self.programs['put'](
            self.state,
            slots,
            tokens,
            count,
            start,
            settings.limit,
            settings.temperature,
            settings.key,
        )

    def extend(self, params: Params, slots: Sequence[int]) -> None:
        """Prefills one chunk of each of these slots, at most `fill_rows` of them."""
        padded_slots = self._pad(slots, self.config.fill_rows)
        self.state = self.programs['extend'](params, self.state, padded_slots)

    def decode(self, params: Params) -> DecodeChunk:
        """Decodes one chunk; returns device arrays without waiting for them."""
        self.state, chunk = self.programs['decode'](params, self.state)
        return chunk

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Cuts the rows of these slots to the given lengths and stops their decoding until the next `put`."""
        padded_slots = self._pad(slots, self.config.slots)
        # The padding value of lengths is never read: its slot does not exist.
        padded_lengths = self._pad(lengths, self.config.slots)
        self.state = self.programs['rewind'](self.state, padded_slots, padded_lengths)

    def clone(self, source: int, rows: Sequence[CloneRow], length: int) -> None:
        """Makes at most `put_rows` slots copies of the first `length` tokens of slot `source`."""
        capacity = self.config.put_rows
        slots = self._pad([row.slot for row in rows], capacity)
        settings = _turn_settings(rows, capacity)
        # NumPy scalars, because Python integers are traced with a weak type.
        self.state = self.programs['clone'](
            self.state,
            np.int32(source),
            slots,
            np.int32(length),
            settings.limit,
            settings.temperature,
            settings.key,
        )

    def _pad(self, values: Sequence[int], size: int) -> Int[np.ndarray, ' rows']:
        """Returns the values as int32, padded to `size` with the number of a slot that does not exist."""
        padded = np.full(size, self.config.slots, np.int32)
        padded[: len(values)] = values
        return padded
