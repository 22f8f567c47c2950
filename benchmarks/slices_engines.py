"""The rules by which an engine serves rollouts, played without a device.

An engine decides which call the device gets next: which rows are prefilled, which rows decode and for how many steps.
The decisions depend on lengths only, so they can be played in milliseconds. What a call costs comes from
`slices_costs`. `SlotEngine` has the rules of zeroplay_jax/rollout/slots.py and scheduler.py, call by call
(tests/test_slices_rules.py compares the calls). `slices_pages` has those of a paged cache.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

RolloutT = TypeVar('RolloutT', bound='Rollout')


@dataclasses.dataclass(frozen=True)
class Episode:
    """Lengths of one rollout.

    Attributes:
      turns: per turn its written tokens, and the tokens of the observation after it. The last observation is not read.
      end_token: whether the last turn ends with an end token, at which the device stops. All other turns end with a
        stop string: the host finds it after the call, so the device writes on until the call ends.
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
      step: training step to which the rollouts belong.
    """

    prompt: int
    episodes: tuple[Episode, ...]
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of an engine; those of the sampler have the names of SamplerConfig.

    Attributes:
      slots: rollouts in progress on a host.
      context: tokens of a slot.
      chunk: tokens of a row in a prefill call, without pages.
      fill_rows: rows of a prefill call, without pages.
      burst: steps of a decode call.
      turn_tokens: most written tokens of a turn.
      tool_threads: tool calls in progress at the same time.
      page, pages: places of a page and pages of a host.
      token_budget: tokens of a step over pages that prefills and decodes.
      decode_buckets: ascending tokens of smaller steps, which only decode.
      overlap: whether the host reads a decode call while the next one runs.
    """

    slots: int = 64
    context: int = 4096
    chunk: int = 256
    fill_rows: int = 16
    burst: int = 16
    turn_tokens: int = 256
    tool_threads: int = 1
    page: int = 64
    pages: int = 0
    token_budget: int = 512
    decode_buckets: tuple[int, ...] = ()
    overlap: bool = False


class Costs(Protocol):
    """Seconds of the calls of an engine."""

    def extend(self, rows: int) -> float:
        """Seconds of a prefill call whose program has `rows` rows."""

    def decode(self, steps: int) -> tuple[float, float]:
        """Seconds of the steps of a decode call over all slots, and of the write into the cache at its end."""

    def mixed(
        self, tokens: int, rows: int, last: np.ndarray, fed: np.ndarray, has_chunks: bool
    ) -> float:
        """Seconds of a step over pages.

        Args:
          tokens: tokens that the program computes, padding included.
          rows: rows for which it computes logits.
          last: places of every row with tokens in this step.
          fed: tokens of each of these rows.
          has_chunks: whether the program can prefill.
        """

    def host(self, rows: int) -> float:
        """Seconds of the host between two calls, with `rows` rollouts in progress."""


def rows_of_steps(rows: Sequence[RolloutT]) -> list[list[RolloutT]]:
    """Returns the rollouts of every training step: each step is played by weights of its own (`rollout.ahead`)."""
    rows_of_step: dict[int, list[RolloutT]] = {}
    for row in rows:
        rows_of_step.setdefault(row.group.step, []).append(row)
    return [rows_of_step[step] for step in sorted(rows_of_step)]


class Tools:
    """Tool calls in progress: calls of one device call are one batch, and threads take batches in order.

    Args:
      latency: returns the seconds of the next batch.
      threads: batches in progress at the same time.
    """

    def __init__(self, latency, threads: int):
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


class Rollout:
    """A rollout in progress."""

    def __init__(self, group: Group, episode: Episode, settings: Settings):
        self.group = group
        self.episode = episode
        self.context = settings.context
        self.turn_tokens = settings.turn_tokens
        self.length = group.prompt
        self.turn = 0
        self.waiting = False
        self.begin_turn()

    def begin_turn(self) -> None:
        """Sets what the turn in progress may still write."""
        self.remaining = self.episode.turns[self.turn][0]
        self.limit = min(self.length + self.turn_tokens, self.context)

    @property
    def is_last_turn(self) -> bool:
        """Whether no observation follows."""
        return self.turn + 1 == len(self.episode.turns)

    def device_steps(self, steps: int) -> int:
        """Returns how many of `steps` steps write a token on the device."""
        possible = min(steps, self.limit - self.length)
        if self.is_last_turn and self.episode.end_token:
            return min(possible, self.remaining)
        return possible

    def write(self, tokens: int) -> tuple[int, str]:
        """Takes the tokens of a call; returns those that count and what follows: '', 'tool' or 'end'."""
        accepted = min(tokens, self.remaining)
        self.length += accepted
        self.remaining -= accepted
        if self.remaining:
            # The limit ends a turn that the stop string did not.
            return accepted, 'end' if self.length >= self.limit else ''
        if self.is_last_turn:
            return accepted, 'end'
        self.waiting = True
        return accepted, 'tool'

    def read(self) -> int:
        """Appends the observation; returns its tokens, 0 if the slot cannot hold it and one further token."""
        observed = self.episode.turns[self.turn][1]
        self.waiting = False
        if self.length + observed >= self.context:
            return 0
        self.length += observed
        self.turn += 1
        self.begin_turn()
        return observed


class Engine:
    """What all engines count.

    Attributes:
      queue: groups that wait, in the order in which they are served.
      seconds: seconds by cause.
      generated: tokens that belong to rollouts.
      row_steps: steps × rows of the decode programs; `generated` of them were useful.
      prefilled: tokens that were prefilled.
      computed: tokens that the programs of prefill or of paged steps computed.
      wanted: those of them that belong to a rollout.
      ended: training steps of the rollouts that ended in the last round.
      evictions: rollouts whose pages were taken.
      trace: calls in order, if it is a list.
    """

    def __init__(self, settings: Settings, costs: Costs, tools: Tools):
        self.settings = settings
        self.costs = costs
        self.tools = tools
        self.queue: collections.deque[Group] = collections.deque()
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.generated = 0
        self.row_steps = 0
        self.prefilled = 0
        self.computed = 0
        self.wanted = 0
        self.ended: list[int] = []
        self.evictions = 0
        self.trace: list | None = None

    @property
    def active(self) -> int:
        """Rollouts in progress."""
        raise AttributeError

    def round(self, now: float) -> float:
        """Plays one round that begins at `now`; returns its seconds, 0 if there was nothing to compute."""
        raise AttributeError

    def _spend(self, cause: str, seconds: float) -> float:
        self.seconds[cause] += seconds
        return seconds


class _Open:
    """A request.

    Attributes:
      waiting: samples without a slot.
      source: slot of the first sample, which keeps the prompt for the others.
      holder: rollout of the first sample.
    """

    def __init__(self, group: Group):
        self.group = group
        self.waiting = collections.deque(group.episodes)
        self.source = -1
        self.holder: Rollout | None = None


class SlotEngine(Engine):
    """Slots of fixed length: prefill everything that waits, then a burst of decode steps of all slots."""

    def __init__(self, settings: Settings, costs: Costs, tools: Tools):
        super().__init__(settings, costs, tools)
        self.rollouts: list[Rollout | None] = [None] * settings.slots
        self._chunks_left: dict[Rollout, int] = {}
        self._pieces: dict[Rollout, int] = {}
        self._slot_of: dict[Rollout, int] = {}
        self._open: list[_Open] = []

    @property
    def active(self) -> int:
        """Rollouts in slots."""
        return len(self._chunks_left)

    def round(self, now: float) -> float:
        """One round of `Scheduler._round`."""
        self.ended = []
        for rollout in self.tools.finished(now):
            observed = rollout.read()
            if observed:
                self._start_prefill(rollout, observed)
            else:
                self._finish(rollout)
        self._admit()
        seconds = self._prefill()
        self._clone()
        decoding = [rollout for rollout in self.rollouts if rollout and not rollout.waiting]
        if decoding:
            for rollouts in rows_of_steps(decoding):
                seconds += self._decode(rollouts)
            seconds += self._spend('host', self.costs.host(self.active))
            self.tools.submit(now + seconds, [r for r in decoding if r.waiting])
        return seconds

    def _start_prefill(self, rollout: Rollout, tokens: int) -> None:
        self._chunks_left[rollout] = -(-tokens // self.settings.chunk)
        self._pieces[rollout] = tokens

    def _finish(self, rollout: Rollout) -> None:
        self.rollouts[self._slot_of.pop(rollout)] = None
        del self._chunks_left[rollout]
        self.ended.append(rollout.group.step)

    def _enter(self, request: _Open, slot: int) -> Rollout:
        rollout = Rollout(request.group, request.waiting.popleft(), self.settings)
        self.rollouts[slot] = rollout
        self._slot_of[rollout] = slot
        self._chunks_left[rollout] = 0
        return rollout

    def _admit(self) -> None:
        """`SlotPool.admit`: siblings of prefilled prompts first, then groups whose first sample fits."""
        self._clone()
        while self.queue:
            free = self._free_slots()
            if len(free) <= sum(len(request.waiting) for request in self._open):
                break
            request = _Open(self.queue.popleft())
            request.source = free[0]
            request.holder = self._enter(request, request.source)
            self._start_prefill(request.holder, request.group.prompt - 1)
            if request.waiting:
                self._open.append(request)

    def _clone(self) -> None:
        """`SlotPool.clone_siblings`."""
        for request in self._open:
            if not self._is_prefilled(request):
                continue
            free = self._free_slots()
            # The first sibling takes the slot that keeps the prompt, if its rollout has ended.
            if self.rollouts[request.source] is None:
                free.insert(0, request.source)
            slots = free[: len(request.waiting)]
            for slot in slots:
                self._enter(request, slot)
            if slots:
                self._record('clone', request.source, slots)
        self._open = [request for request in self._open if request.waiting]

    def _free_slots(self) -> list[int]:
        """Slots without a rollout that keep no prompt."""
        kept = {request.source for request in self._open}
        empty = [slot for slot, rollout in enumerate(self.rollouts) if rollout is None]
        return [slot for slot in empty if slot not in kept]

    def _is_prefilled(self, request: _Open) -> bool:
        holder = request.holder
        assert holder is not None
        # After its first turn a rollout's pending prefill is an observation: the prompt is complete.
        return not self._chunks_left.get(holder) or holder.turn > 0 or holder.waiting

    def _prefill(self) -> float:
        """`SlotPool.prefill`: all chunks that wait, in calls of `fill_rows` chunks in the order of the slots."""
        settings = self.settings
        seconds = 0.0
        while True:
            pending = [r for r in self.rollouts if r is not None and self._chunks_left[r]]
            if not pending:
                return seconds
            batch: list[Rollout] = []
            for rollout in pending:
                # A call has one version of the weights.
                if rollout.group.step == pending[0].group.step:
                    free_rows = settings.fill_rows - len(batch)
                    batch += [rollout] * min(self._chunks_left[rollout], free_rows)
            seconds += self._spend('prefill', self.costs.extend(settings.fill_rows))
            self.computed += settings.fill_rows * settings.chunk
            for rollout in batch:
                self._chunks_left[rollout] -= 1
                tokens = min(self._pieces[rollout], settings.chunk)
                self._pieces[rollout] -= tokens
                self.prefilled += tokens
                self.wanted += tokens
            self._record('extend', [self._slot_of[rollout] for rollout in batch])

    def _decode(self, decoding: list[Rollout]) -> float:
        """A decode call, which ends early when no row can continue; returns its seconds."""
        steps_of = [rollout.device_steps(self.settings.burst) for rollout in decoding]
        steps = max(steps_of)
        self._record('decode', [(self._slot_of[r], n) for r, n in zip(decoding, steps_of)])
        for rollout, device_steps in zip(decoding, steps_of):
            accepted, follows = rollout.write(device_steps)
            self.generated += accepted
            if follows == 'end':
                self._finish(rollout)
        self.row_steps += steps * self.settings.slots
        decode_seconds, write_seconds = self.costs.decode(steps)
        return self._spend('decode', decode_seconds) + self._spend('cache write', write_seconds)

    def _record(self, *call) -> None:
        if self.trace is not None:
            self.trace.append(call)
