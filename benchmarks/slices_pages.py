"""The rules of a paged engine: `sampler.page`, `sampler.pages` and `sampler.token_budget`.

A rollout starts a turn when all pages that the turn may need are reserved, so it never waits for another one within a
turn. Between turns it keeps its pages until an older rollout needs them; then it is evicted, and its tokens are
prefilled again with its next turn. Samples of a request share the pages that their prompt fills. With a token budget
every step of a decode call takes one token of each decoding row, and prefills with the rest of the budget. A step
without prefill takes the smallest program that holds its tokens (`sampler.decode_buckets`).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import numpy as np

from benchmarks.slices_engines import Costs, Engine, Group, Rollout, Settings, Tools
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
      age: number in the order of admission.
      cached: tokens with keys and values.
      start: position from which the tokens of the next turn are new.
      calls_left: prefill calls, where prefill is a call of its own.
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
        self.calls_left = 0
        self.is_running = False
        self.is_evicted = False

    def put(self, chunk: int) -> None:
        """Sets what has to be prefilled: the token before `start` again, and all new ones but the last."""
        self.cached = max(self.start - 1, 0)
        self.calls_left = -(-(self.length - 1 - self.cached) // chunk)


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
        self._admitted = 0

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
        seconds = 0.0
        if not self.settings.token_budget:
            seconds += self._prefill()
        self._clone()
        running = [row for row in self._in_slots() if row.is_running]
        if running:
            seconds += self._decode(running)
            seconds += self._spend('host', self.costs.host(self.active))
            self.tools.submit(now + seconds, [row for row in running if row.waiting])
        return seconds

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
        row.put(self.settings.chunk)
        request.held = allocator.hold(row.pages, group.prompt)
        request.holder = row
        request.is_prefilled = False

    def _clone(self) -> None:
        """Starts samples whose prompt is prefilled."""
        for request in self._open:
            while request.is_prefilled and request.waiting:
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
        row.age = self._admitted
        self._admitted += 1
        row.slot = min(self._free_slots)
        row.is_running = True
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
        row.is_running = True
        row.put(self.settings.chunk)
        return True

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

    def _prefill(self) -> float:
        """All that waits, in calls of `fill_rows` rows in the order of the slots."""
        settings = self.settings
        seconds = 0.0
        while True:
            batch = [row for row in self._in_slots() if row.calls_left][: settings.fill_rows]
            if not batch:
                break
            pieces = []
            for row in batch:
                count = min(row.length - 1 - row.cached, settings.chunk)
                row.cached += count
                row.calls_left -= 1
                pieces.append((count, row.cached))
            fed, ends = np.array(pieces).T
            tokens = settings.fill_rows * settings.chunk
            seconds += self._spend('prefill', self.costs.mixed(tokens, 0, ends, fed, True))
            self._count(tokens, int(fed.sum()), int(fed.sum()))
            if self.trace is not None:
                self.trace.append(('extend', [row.slot for row in batch]))
        for request in self._open:
            request.is_prefilled = request.held is not None
        return seconds

    def _count(self, computed: int, wanted: int, prefilled: int) -> None:
        self.computed += computed
        self.wanted += wanted
        self.prefilled += prefilled

    def _decode(self, running: list[_Row]) -> float:
        """A decode call: up to `burst` steps on the device, then the host ends turns."""
        settings = self.settings
        budget = settings.token_budget
        for row in running:
            self.allocator.grow(row.pages, min(row.length + settings.burst, row.limit))
        # With a budget the oldest rollouts are served first (`token_steps.tokens_of_budget`).
        running = sorted(running, key=lambda row: row.age)
        # `row.length` is the host's; on the device a row writes on until the call ends.
        length = np.array([row.length for row in running])
        cached = np.array([row.cached for row in running])
        limit = np.array([row.limit for row in running])
        ends = np.array([row.length + row.device_steps(1 << 30) for row in running])
        seconds = 0.0
        for _ in range(settings.burst):
            pending = np.where(length < np.minimum(limit, ends), length - cached, 0)
            if not pending.any():
                break
            decoding = pending == 1
            fed = decoding.astype(int)
            if budget:
                prefill = np.where(decoding, 0, pending)
                reserved = min(prefill.sum(), budget // 4)
                fed *= np.cumsum(fed) <= budget - reserved
                earlier = np.cumsum(prefill) - prefill
                fed += np.clip(budget - fed.sum() - earlier, 0, prefill)
            samples = (fed > 0) & (fed == pending)
            has_chunks = bool(budget) and bool((fed[pending != 1] > 0).any())
            tokens = budget or settings.slots
            if not has_chunks:
                # The first bucket that holds all tokens.
                fitting = [size for size in settings.decode_buckets if size >= fed.sum()]
                tokens = min(fitting, default=tokens)
            ends_of_rows, tokens_of_rows = (cached + fed)[fed > 0], fed[fed > 0]
            # The step of the budget has the calls for chunks also when there are none.
            cost = self.costs.mixed(
                tokens,
                min(settings.slots, tokens),
                ends_of_rows,
                tokens_of_rows,
                bool(budget) and tokens == budget,
            )
            seconds += cost
            prefilled = int((fed - samples).sum())
            share = prefilled / int(fed.sum())
            self._spend('prefill', cost * share)
            self._spend('decode', cost * (1 - share))
            self._count(tokens, int(fed.sum()), prefilled)
            self.row_steps += settings.slots
            cached = cached + fed
            length = length + samples
        self._read(running, length, cached)
        return seconds

    def _read(self, running: list[_Row], length: np.ndarray, cached: np.ndarray) -> None:
        """Ends turns after a decode call; samples can start after the prompts that it has prefilled."""
        counts = {}
        for row, new_length, new_cached in zip(running, length.tolist(), cached.tolist()):
            count = new_length - row.length
            if count:
                counts[row.slot] = count
            accepted, follows = row.write(count)
            self.generated += accepted
            # A token that was sampled last is not cached yet.
            row.cached = min(new_cached, row.length - 1)
            if follows == 'tool':
                row.is_running = False
                self.allocator.cut(row.pages, row.length)
        if self.trace is not None:
            self.trace.append(('decode', sorted(counts.items())))
        for request in self._open:
            holder = request.holder
            if request.held is not None and holder is not None:
                request.is_prefilled |= holder.cached >= request.group.prompt - 1
        for row in running:
            if not row.waiting and (not row.remaining or row.length >= row.limit):
                self._finish(row)
