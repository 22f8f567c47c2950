"""The rules of a paged engine: `sampler.page`, `sampler.pages` and `sampler.token_budget`.

A rollout starts a turn when all pages that the turn may need are reserved, so it never waits for another one within a
turn. Between turns it keeps its pages until an older rollout needs them; then it is evicted, and its tokens are
prefilled again with its next turn. Samples of a request share the pages that their prompt fills. Every step of a decode
call takes one token of each decoding row, and prefills with the rest of the token budget. A step without prefill takes
the smallest program that holds its tokens (`sampler.decode_buckets`). With `rollout.overlap` the host reads a decode
call while the next one runs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.slices_engines import Costs, Engine, Group, Rollout, Settings, Tools, rows_of_steps
from zeroplay_jax.rollout.pages import PageAllocator, RowPages


class _Request:
    """A request with samples that wait for a slot.

    Attributes:
      held: pages of its prompt, None if the prompt has to be prefilled again.
      holder: rollout that prefills the prompt.
      is_prefilled: whether samples can start after the prompt.
    """

    def __init__(self, group: Group, number: int):
        self.group = group
        self.waiting = collections.deque(range(len(group.episodes)))
        self.number = number
        self.held: RowPages | None = None
        self.holder: _Row | None = None
        self.is_prefilled = False


class _Row(Rollout):
    """A rollout in a slot.

    Attributes:
      order: older rollouts have smaller ones.
      age: number of its turn in the order in which turns began.
      cached: tokens with keys and values.
      start: position from which the tokens of the next turn are new.
      is_running: whether it is within a turn.
    """

    def __init__(self, request: _Request, sample: int, settings: Settings):
        super().__init__(request.group, request.group.episodes[sample], settings)
        self.order = (request.number, sample)
        self.pages = RowPages()
        self.age = 0
        self.slot = 0
        self.cached = 0
        self.start = 0
        self.is_running = False
        self.is_evicted = False

    def put(self) -> None:
        """Sets what has to be prefilled: the token before `start` again, and all new ones but the last."""
        self.cached = max(self.start - 1, 0)


@dataclasses.dataclass(frozen=True)
class _Written:
    """What a decode call did for a rollout.

    Attributes:
      row: the rollout.
      turn: its turn at the start of the call.
      tokens: sampled tokens.
      cached: its cached tokens at the end of the call.
    """

    row: _Row
    turn: int
    tokens: int
    cached: int

    @property
    def is_current(self) -> bool:
        """Whether the rollout is still within that turn."""
        return self.row.is_running and self.row.turn == self.turn


class PagedEngine(Engine):
    """Pages of a host."""

    def __init__(self, settings: Settings, costs: Costs, tools: Tools):
        super().__init__(settings, costs, tools)
        self.allocator = PageAllocator(settings.pages, settings.page)
        self.rows: list[_Row | None] = [None] * settings.slots
        self._free_slots = set(range(settings.slots))
        self._open: list[_Request] = []
        self._ready: list[_Row] = []
        self._requests = 0
        self._turns = 0
        # With `overlap`: what the call in progress does.
        self._unread: list[_Written] = []

    @property
    def active(self) -> int:
        """Rollouts in slots."""
        return len(self.rows) - len(self._free_slots)

    def round(self, now: float) -> float:
        """One round of the scheduler."""
        self.ended = []
        for row in self.tools.finished(now):
            row.start = row.length
            if row.read():
                self._ready.append(row)
            else:
                self._finish(row)
        self._begin_turns()
        self._admit()
        self._clone()
        running = [row for row in self._in_slots() if row.is_running]
        if running or self._unread:
            return self._decode_and_read(now, running)
        return 0.0

    def _decode_and_read(self, now: float, running: list[_Row]) -> float:
        """Starts decode calls at `now` and reads them, or with `overlap` those of the last round; returns seconds."""
        decoded = 0.0
        written: list[_Written] = []
        for rows in rows_of_steps(running):
            seconds, written_rows = self._decode(rows)
            decoded += seconds
            written += written_rows
        host = self.costs.host(self.active)
        if self.settings.overlap:
            readable, self._unread = self._unread, written
            # The host works while the device decodes.
            read_at = now + host
            host = max(host - decoded, 0.0)
        else:
            readable = written
            read_at = now + decoded + host
        self._spend('host', host)
        self.tools.submit(read_at, self._read(readable))
        return decoded + host

    def _in_slots(self) -> list[_Row]:
        return [row for row in self.rows if row is not None]

    # ---- admission ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Samples of prefilled prompts first, then requests whose first sample can play its first turn."""
        self._clone()
        # Rollouts that wait for pages come before new ones.
        while self.queue and not self._ready and self._fits(self.queue[0]):
            request = _Request(self.queue.popleft(), self._requests)
            self._requests += 1
            self._open.append(request)
            self._start(request)
        for request in self._open:
            if request.held is None and not self._ready:
                self._start(request)
        self._close_served()

    def _fits(self, group: Group) -> bool:
        waiting_slots = sum(len(request.waiting) for request in self._open)
        waiting_pages = 0
        for request in self._open:
            waiting_pages += len(request.waiting) * self._sample_pages(request.group)
        needed = self._sample_pages(group) + self.allocator.shared_pages(group.prompt)
        has_slot = len(self._free_slots) > waiting_slots
        return has_slot and self.allocator.available - waiting_pages >= needed

    def _first_limit(self, group: Group) -> int:
        return min(group.prompt + self.settings.turn_tokens, self.settings.context)

    def _sample_pages(self, group: Group) -> int:
        """Pages of a sample's first turn beyond those that it shares."""
        pages = self.allocator.pages_for(self._first_limit(group))
        return pages - self.allocator.shared_pages(group.prompt)

    def _start(self, request: _Request) -> None:
        """Gives the next sample a slot and pages for the prompt, which is kept for the others."""
        allocator = self.allocator
        group = request.group
        row = _Row(request, request.waiting[0], self.settings)
        limit = self._first_limit(group)

        def take_pages() -> RowPages | None:
            return row.pages if allocator.reserve(row.pages, limit) else None

        if not self._enter(request, row, take_pages):
            return
        allocator.grow(row.pages, group.prompt)
        row.put()
        request.held = allocator.hold(row.pages, group.prompt)
        request.holder = row
        request.is_prefilled = False

    def _clone(self) -> None:
        """Starts samples whose prompt is prefilled, unless a rollout waits for pages."""
        is_blocked = bool(self._ready)
        for request in self._open:
            while request.is_prefilled and request.waiting and not is_blocked:
                assert request.held is not None
                prompt = request.group.prompt
                limit = self._first_limit(request.group)
                fork = functools.partial(self.allocator.fork, request.held, prompt, limit)
                row = _Row(request, request.waiting[0], self.settings)
                if not self._enter(request, row, fork):
                    break
                row.cached = prompt - 1
        self._close_served()

    def _enter(
        self, request: _Request, row: _Row, take_pages: Callable[[], RowPages | None]
    ) -> bool:
        """Takes a slot and the pages of the first turn; returns False without them."""
        if not self._free_slots:
            return False
        pages = take_pages()
        if pages is None:
            if self.active:
                return False
            # Nobody will give pages back, so prompts that are kept for samples are dropped.
            for other in self._open:
                if other is not request:
                    self._drop_prompt(other)
            pages = take_pages()
            if pages is None:
                return False
        request.waiting.popleft()
        row.pages = pages
        row.slot = min(self._free_slots)
        self._run_turn(row)
        self._free_slots.remove(row.slot)
        self.rows[row.slot] = row
        return True

    def _drop_prompt(self, request: _Request) -> None:
        if request.held is not None:
            self.allocator.release(request.held)
            request.held = None
            request.is_prefilled = False

    def _close_served(self) -> None:
        for request in self._open:
            if not request.waiting:
                self._drop_prompt(request)
        self._open = [request for request in self._open if request.waiting]

    # ---- turns -------------------------------------------------------------------------------------

    def _begin_turns(self) -> None:
        """Starts turns that get pages, oldest rollouts first; none overtakes an older one."""
        self._ready.sort(key=lambda row: row.order)
        while self._ready and self._begin_turn(self._ready[0]):
            self._ready.pop(0)

    def _begin_turn(self, row: _Row) -> bool:
        if not self._reserve(row):
            if any(other.is_running for other in self._in_slots()):
                return False
            for request in self._open:
                self._drop_prompt(request)
            if not self._reserve(row):
                return False
        self.allocator.grow(row.pages, row.length)
        if row.is_evicted:
            row.start = 0
            row.is_evicted = False
        self._run_turn(row)
        row.put()
        return True

    def _run_turn(self, row: _Row) -> None:
        row.is_running = True
        row.age = self._turns
        self._turns += 1

    def _reserve(self, row: _Row) -> bool:
        """Reserves the pages of a turn; evicts younger waiting rollouts if their pages suffice."""
        allocator = self.allocator
        missing = allocator.missing(row.pages, row.limit)
        parked = []
        for other in self._in_slots():
            if not other.is_running and other.pages.pages and other.order > row.order:
                parked.append(other)
        # The youngest loses its pages first.
        parked.sort(key=lambda other: other.order)
        victims: list[_Row] = []
        while parked and allocator.freed_by([victim.pages for victim in victims]) < missing:
            victims.append(parked.pop())
        if allocator.freed_by([victim.pages for victim in victims]) < missing:
            return False
        for victim in victims:
            allocator.release(victim.pages)
            victim.is_evicted = True
            self.evictions += 1
        return allocator.reserve(row.pages, row.limit)

    def _finish(self, row: _Row) -> None:
        self.allocator.release(row.pages)
        self.rows[row.slot] = None
        self._free_slots.add(row.slot)
        row.is_running = False
        self.ended.append(row.group.step)

    # ---- calls of the device -----------------------------------------------------------------------

    def _decode(self, running: list[_Row]) -> tuple[float, list[_Written]]:
        """A decode call of up to `burst` steps; returns its seconds and what it did."""
        settings = self.settings
        budget = settings.token_budget
        # The host does not know how many tokens a call in progress samples.
        calls_in_progress = 2 if settings.overlap else 1
        for row in running:
            most = row.length + calls_in_progress * settings.burst
            self.allocator.grow(row.pages, min(most, row.limit))
        # The turns that began first are served first (`token_steps.tokens_of_budget`).
        running = sorted(running, key=lambda row: row.age)
        # `row.length` is the host's; on the device a row writes on until the call ends.
        first_length, cached = self._on_device(running)
        length = first_length.copy()
        limit = np.array([row.limit for row in running], int)
        ends = np.array([row.length + row.device_steps(1 << 30) for row in running], int)
        seconds = 0.0
        for _ in range(settings.burst):
            pending = np.where(length < np.minimum(limit, ends), length - cached, 0)
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
            seconds += self._step(fed, samples, (fed[pending != 1] > 0).any(), cached)
            cached = cached + fed
            length = length + samples
        written = []
        for row, tokens, now_cached in zip(running, (length - first_length).tolist(), cached):
            written.append(_Written(row, row.turn, tokens, int(now_cached)))
        if self.trace is not None:
            counts = [(entry.row.slot, entry.tokens) for entry in written if entry.tokens]
            self.trace.append(('decode', sorted(counts)))
        return seconds, written

    def _on_device(self, running: list[_Row]) -> tuple[np.ndarray, np.ndarray]:
        """Returns length and cached tokens of every row at the end of the call that the host has not read."""
        unread = {id(entry.row): entry for entry in self._unread if entry.is_current}
        length, cached = [], []
        for row in running:
            entry = unread.get(id(row))
            length.append(row.length + (entry.tokens if entry else 0))
            cached.append(entry.cached if entry else row.cached)
        return np.array(length, int), np.array(cached, int)

    def _step(
        self, fed: np.ndarray, samples: np.ndarray, prefills: bool, cached: np.ndarray
    ) -> float:
        """A step that feeds these tokens; returns its seconds."""
        settings = self.settings
        tokens = settings.token_budget
        if not prefills:
            # The first bucket that holds all tokens.
            fitting = [size for size in settings.decode_buckets if size >= fed.sum()]
            tokens = min(fitting, default=tokens)
        cost = self.costs.mixed(
            tokens,
            min(settings.slots, tokens),
            (cached + fed)[fed > 0],
            fed[fed > 0],
            # The step of the budget has the calls for chunks also when there are none.
            tokens == settings.token_budget,
        )
        wanted = int(fed.sum())
        prefilled = int((fed - samples).sum())
        share = prefilled / wanted
        self._spend('prefill', cost * share)
        self._spend('decode', cost * (1 - share))
        self.computed += tokens
        self.wanted += wanted
        self.prefilled += prefilled
        self.row_steps += settings.slots
        return cost

    def _read(self, written: Sequence[_Written]) -> list[_Row]:
        """Ends turns after a decode call; returns the rollouts that call a tool."""
        # A turn that ended in the call before is over: what the device wrote since is dropped.
        current = [entry for entry in written if entry.is_current]
        for entry in current:
            row = entry.row
            accepted, follows = row.write(entry.tokens)
            self.generated += accepted
            # A token that was sampled last is not cached yet.
            row.cached = min(entry.cached, row.length - 1)
            if follows == 'tool':
                row.is_running = False
                self.allocator.cut(row.pages, row.length)
        # Samples can start after the prompts that the call has prefilled.
        for request in self._open:
            holder = request.holder
            if request.held is not None and holder is not None:
                request.is_prefilled |= holder.cached >= request.group.prompt - 1
        for entry in current:
            row = entry.row
            if not row.waiting and (not row.remaining or row.length >= row.limit):
                self._finish(row)
        return [entry.row for entry in current if entry.row.waiting]
