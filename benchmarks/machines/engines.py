"""Rollouts of known lengths, played without a device.

What the device gets next (which slots are prefilled, which decode, which lose their pages) is decided by the real
`rollout.slots.SlotPool`: its decisions depend on lengths only, so they can be played in milliseconds. In place of the
sampler, `Device` counts tokens; what a call costs comes from `costs`.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.machines.costs import CallCosts, Settings
from zeroplay_jax.rollout.environment import Limits
from zeroplay_jax.rollout.requests import Prefix, Request, Rollout
from zeroplay_jax.rollout.sampler import MOST_ENDS, DecodeChunk, SlotClone, SlotPut
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.weights import WeightStore
from zeroplay_jax.types import ENV, POLICY


@dataclasses.dataclass(frozen=True)
class Episode:
    """Lengths of one rollout.

    Attributes:
      turns: per turn its written tokens, and the tokens of the observation after it. The last observation is not read.
      end_token: whether the last turn ends with an end token, at which the device stops. All other turns end with a
        stop string of several tokens: the host finds it after the call, so the device writes on until the call ends.
    """

    turns: tuple[tuple[int, int], ...]
    end_token: bool = False

    @property
    def written(self) -> int:
        """Tokens that the policy writes."""
        return sum(written for written, _ in self.turns)

    @property
    def read(self) -> int:
        """Tokens of the observations that it reads."""
        return sum(observed for _, observed in self.turns[:-1])


@dataclasses.dataclass(frozen=True)
class Group:
    """Rollouts of one prompt.

    Attributes:
      prompt: tokens of the prompt.
      episodes: one per sample.
    """

    prompt: int
    episodes: tuple[Episode, ...]


class Tools:
    """Tool calls in progress: calls of one device call are one batch, and threads take batches in order.

    Args:
      latency: returns the seconds of the next batch.
      threads: batches in progress at the same time.
    """

    def __init__(self, latency: Callable[[], float], threads: int):
        self._latency = latency
        self._free = [0.0] * threads
        self._batches: list[tuple[float, list]] = []

    def submit(self, now: float, rollouts: list) -> None:
        """Starts a batch; empty ones are ignored."""
        if not rollouts:
            return
        thread = min(range(len(self._free)), key=self._free.__getitem__)
        end = max(now, self._free[thread]) + self._latency()
        self._free[thread] = end
        self._batches.append((end, rollouts))

    def finished(self, now: float) -> list:
        """Returns the rollouts whose calls have ended, in the order of their calls."""
        ended: list = []
        pending = []
        for end, rollouts in self._batches:
            if end <= now:
                ended += rollouts
            else:
                pending.append((end, rollouts))
        self._batches = pending
        return ended

    @property
    def next_end(self) -> float | None:
        """When the next batch ends; None if there is none."""
        return min((end for end, _ in self._batches), default=None)


class NoTokens:
    """In place of a codec."""

    token_bytes = ()


class PlayedRollout(Rollout):
    """A rollout whose tokens have no values.

    Attributes:
      observed: tokens of the observation after the turn in progress.
      end: length at which the turn in progress ends.
    """

    def __init__(self, prefix: Prefix, sample: int, episode: Episode):
        nobody: Any = None
        super().__init__(prefix, sample, nobody)
        self._later_turns = collections.deque(episode.turns)
        self._end_token = episode.end_token

    def expect_turn(self) -> None:
        """Starts the next turn of the episode."""
        self.turn_start = len(self.tokens)
        written, self.observed = self._later_turns.popleft()
        self.end = self.turn_start + written

    @property
    def is_last_turn(self) -> bool:
        """Whether no observation follows."""
        return not self._later_turns

    def device_limit(self, limit: int) -> int:
        """Returns the length at which the device stops, at most `limit`: it sees no stop strings of several tokens."""
        return min(limit, self.end) if self.is_last_turn and self._end_token else limit

    def add(self, tokens: int, source: int) -> None:
        """Adds so many tokens of one author."""
        self.append([0] * tokens, source, [0.0] * tokens)


class Device:
    """Counts the tokens of all slots and the seconds of all calls, in place of `rollout.sampler.Sampler`.

    Attributes:
      rollouts: the rollout in every slot.
      busy: seconds of the calls since it was set to 0.
    """

    shards = 1
    has_states = False
    choices = truncation = None

    def __init__(self, config: Settings, costs: CallCosts):
        self.config = config
        self.costs = costs
        self.table: np.ndarray | None = None
        if config.is_paged:
            self.table = np.zeros((config.slots, config.pages_per_slot), int)
        self.age = np.zeros(config.slots, int)
        # Not read: a rollout knows whether the device sees the end of its turn.
        self.ends = np.zeros((config.slots, MOST_ENDS), int)
        self.rollouts: Sequence[Rollout | None] = []
        self._length = np.zeros(config.slots, int)
        self._cached = np.zeros(config.slots, int)
        self._limit = np.zeros(config.slots, int)
        self.busy = 0.0

    def put(self, puts: Sequence[SlotPut]) -> None:
        """Starts turns: the token before `start` is prefilled again, the last one is decoded."""
        for put in puts:
            self._start(put, put.start + len(put.tokens), max(put.start - 1, 0))

    def clone(self, clones: Sequence[SlotClone]) -> None:
        """Starts turns after prefilled prompts."""
        for clone in clones:
            self._start(clone, clone.length, clone.length - 1)

    def _start(self, entry: SlotPut | SlotClone, length: int, cached: int) -> None:
        rollout = self.rollouts[entry.slot]
        assert isinstance(rollout, PlayedRollout)
        self._length[entry.slot] = length
        self._cached[entry.slot] = cached
        self._limit[entry.slot] = rollout.device_limit(entry.limit)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Cuts slots and stops their decoding."""
        for slot, length in zip(slots, lengths):
            self._length[slot] = self._limit[slot] = length
            self._cached[slot] = min(self._cached[slot], length - 1)

    def extend(self, params: Any, slots: Sequence[int], adapter: None) -> None:
        """A prefill call computes all its entries."""
        self.busy += self.costs.extend()

    def decode(self, params: Any, included: np.ndarray, adapter: None) -> DecodeChunk:
        """A decode call, which ends early when no row can continue."""
        before = self._length.copy()
        if self.config.is_paged:
            self._decode_pages(included)
        else:
            self._length += np.where(
                included, np.minimum(self._limit - before, self.config.burst), 0
            )
            self.busy += self.costs.decode(int((self._length - before).max()))
        no_values: Any = None
        cached = self._cached.copy() if self.config.is_paged else None
        return DecodeChunk(no_values, no_values, self._length - before, cached)

    def _decode_pages(self, included: np.ndarray) -> None:
        """The steps of `rollout.token_steps`: every one feeds up to `token_budget` tokens."""
        budget = self.config.token_budget
        # The turns that began first are served first (`token_steps.tokens_of_budget`).
        slots = np.flatnonzero(included)
        slots = slots[np.argsort(self.age[slots])]
        length, cached, limit = self._length[slots], self._cached[slots], self._limit[slots]
        for _ in range(self.config.burst):
            pending = np.where(length < limit, length - cached, 0)
            if not pending.any():
                break
            decoding = pending == 1
            fed = decoding.astype(int)
            prefill = np.where(decoding, 0, pending)
            reserved = min(prefill.sum(), budget // 4)
            fed *= np.cumsum(fed) <= budget - reserved
            earlier = np.cumsum(prefill) - prefill
            fed += np.clip(budget - fed.sum() - earlier, 0, prefill)
            samples = (fed > 0) & (fed == pending)
            has_prefill = bool((fed[pending != 1] > 0).any())
            cached = cached + fed
            self._step(fed, cached, has_prefill)
            length = length + samples
        self._length[slots], self._cached[slots] = length, cached

    def _step(self, fed: np.ndarray, cached: np.ndarray, has_prefill: bool) -> None:
        """A step that feeds these tokens, after which so many are cached."""
        tokens = self.config.token_budget
        if not has_prefill:
            # The first bucket that holds all tokens.
            fitting = [size for size in self.config.decode_buckets if size >= fed.sum()]
            tokens = min(fitting, default=tokens)
        self.busy += self.costs.mixed(tokens, cached[fed > 0], fed[fed > 0])


class Engine:
    """A host: the slots of its device, and the tool calls of their rollouts.

    Args:
      device: the device.
      tools: the tool calls.

    Attributes:
      pool: requests and slots.
      generated: tokens that the policy wrote and that belong to rollouts.
      ended: rollouts that have ended.
    """

    def __init__(self, device: Device, tools: Tools):
        self.device = device
        self.tools = tools
        sampler: Any = device
        self.pool = SlotPool(sampler, seed=0)
        device.rollouts = self.pool.rollouts
        self.generated = 0
        self.ended = 0
        # Weights that nothing reads; where there may be two versions, a device call names its slots.
        self._weights = WeightStore({'policy': 2})
        self._weights.params = collections.defaultdict(dict)
        limits = Limits(0, device.config.turn_tokens, observation_tokens=0)
        self._env: Any = types.SimpleNamespace(limits=limits, codec=NoTokens(), stops=())
        self._numbers = itertools.count()
        # With `overlap`: what the calls in progress do.
        self._unread: list[DecodeChunk] = []

    def add(self, group: Group) -> None:
        """Queues rollouts."""
        number = next(self._numbers)
        prompt = np.zeros(group.prompt, np.int32)
        identity = (0, number)
        prefix = Prefix(Request('policy', prompt, identity, self._env, version=0))
        for sample, episode in enumerate(group.episodes):
            prefix.waiting.append(PlayedRollout(prefix, sample, episode))
        heapq.heappush(self.pool.queue, (identity, number, prefix))

    def round(self, now: float) -> float:
        """Plays one round that begins at `now`; returns its seconds, 0 if there was nothing to compute."""
        self.device.busy = 0.0
        for rollout in self.tools.finished(now):
            self._observe(rollout)
        # As `Scheduler` does.
        self.pool.admit()
        self.pool.prefill(self._weights)
        self.pool.clone_siblings()
        readable = chunks = self.pool.decode(self._weights, bool(self._unread))
        if not chunks and not self._unread:
            return 0.0
        busy = self.device.busy
        host = self.device.costs.host
        read_at = now + busy + host
        if self.device.config.overlap:
            readable, self._unread = self._unread, chunks
            # The host works while the device decodes.
            read_at = now + host
            host = max(host - busy, 0.0)
        self.tools.submit(read_at, list(itertools.chain(*map(self._read, readable))))
        return busy + host

    def _observe(self, rollout: PlayedRollout) -> None:
        """Appends an observation; one that the slot cannot hold ends the rollout."""
        rollout.put_start = len(rollout.tokens)
        if rollout.put_start + rollout.observed >= self.pool.context:
            self._finish(rollout)
            return
        rollout.add(rollout.observed, ENV)
        rollout.expect_turn()
        self.pool.waiting_for_pages.append(rollout)

    def _read(self, chunk: DecodeChunk) -> list[PlayedRollout]:
        """Ends turns after a decode call; returns the rollouts that call a tool."""
        # A turn that ended in the call before is over: what the device wrote since is dropped.
        is_current = chunk.generation == self.pool.placement.generation
        if chunk.cached is not None:
            self.pool.record_prefill(np.where(is_current, chunk.cached, 0))
        callers = []
        counts = np.where(is_current, chunk.count, 0).tolist()
        for slot, (rollout, count) in enumerate(zip(self.pool.rollouts, counts)):
            if not count:
                continue
            assert isinstance(rollout, PlayedRollout)
            tokens = min(count, rollout.end - len(rollout.tokens))
            rollout.add(tokens, POLICY)
            self.generated += tokens
            length = len(rollout.tokens)
            has_ended = length == rollout.end
            if has_ended and not rollout.is_last_turn:
                self.device.rewind([slot], [length])
                self.pool.placement.release_turn(rollout)
                callers.append(rollout)
            # The limit ends a turn that the stop string did not.
            elif has_ended or length >= rollout.turn_limit(self.pool.context):
                self._finish(rollout)
        return callers

    def _finish(self, rollout: PlayedRollout) -> None:
        self.device.rewind([rollout.slot], [len(rollout.tokens)])
        self.pool.placement.close(rollout)
        self.ended += 1
