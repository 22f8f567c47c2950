"""The rules of a paged engine: `sampler.page`, `sampler.pages` and `sampler.token_budget`.

Keys and values lie in pages that rollouts take as they grow. Admission depends on free pages, samples of one request
share the full pages of their prompt, and a rollout that waits for a tool loses its pages when a growing one needs them.
"""

from __future__ import annotations

import collections

from benchmarks.slices_engines import Costs, Engine, Group, Rollout, Settings, Tools


class _Prompt:
    """The shared pages of a request's prompt.

    Attributes:
      pages: full pages of the prompt.
      users: rollouts that hold them.
      filled: whether a sample has prefilled the prompt, so that its siblings can decode.
    """

    def __init__(self, group: Group, page: int):
        self.group = group
        # The last token of a prompt is decoded, not prefilled.
        self.pages = (group.prompt - 1) // page
        self.users = 0
        self.filled = False


class _Row(Rollout):
    """A rollout with its pages.

    Attributes:
      prompt: shared pages.
      own: pages that belong to this rollout alone.
      pending: tokens that are not prefilled yet.
      admitted: number in the order of admission.
    """

    def __init__(self, prompt: _Prompt, index: int, settings: Settings, admitted: int):
        super().__init__(prompt.group, prompt.group.episodes[index], settings)
        self.prompt = prompt
        self.own = 0
        self.pending = 0
        self.admitted = admitted

    def pages_needed(self, length: int, page: int) -> int:
        """Own pages for `length` tokens."""
        return -(-length // page) - self.prompt.pages


class PagedEngine(Engine):
    """Pages of a host; prefill and decode in one step under a token budget, or prefill calls before decode bursts."""

    def __init__(self, settings: Settings, costs: Costs, tools: Tools):
        super().__init__(settings, costs, tools)
        self.free = settings.pages
        self.rows: dict[_Row, None] = {}
        # Rollouts without pages, in the order in which they get new ones.
        self._evicted: collections.deque[_Row] = collections.deque()
        self._admitted = 0

    @property
    def active(self) -> int:
        """Rollouts in progress, evicted ones included."""
        return len(self.rows) + len(self._evicted)

    def round(self, now: float) -> float:
        """One call of the device, or with `mixed=False` all prefill calls and a burst."""
        self.ended = []
        self._deliver(now)
        self._readmit()
        self._admit()
        seconds = 0.0
        if not self.settings.mixed:
            while self._filling():
                seconds += self._step([], 1)
        # A burst would keep new prompts and observations waiting.
        steps = 1 if self._filling() else self.settings.burst
        called: list[_Row] = []
        seconds += self._step(called, steps, decode=True)
        if seconds:
            seconds += self._spend('host', self.costs.host(self.active))
        self.tools.submit(now + seconds, called)
        return seconds

    # ---- pages -------------------------------------------------------------------------------------

    def _reserve(self, rows: int) -> int:
        """Pages that admission leaves for the growth of `rows` rollouts."""
        return -(-self.settings.reserve * rows // self.settings.page)

    def _admit(self) -> None:
        """Admits groups while their prompts fit beside the growth of all rollouts in progress."""
        settings = self.settings
        while self.queue and not self._evicted:
            group = self.queue[0]
            samples = len(group.episodes)
            prompt = _Prompt(group, settings.page)
            # Every sample has a page of its own for the rest of the prompt.
            needed = prompt.pages + samples
            fits = needed + self._reserve(len(self.rows) + samples) <= self.free
            fits = fits and len(self.rows) + samples <= settings.rows
            is_possible = not self.rows and needed <= self.free
            if not fits and not is_possible:
                break
            self.queue.popleft()
            self.free -= needed
            for index in range(samples):
                row = _Row(prompt, index, settings, self._admitted)
                self._admitted += 1
                row.own = 1
                prompt.users += 1
                self.rows[row] = None
                if index == 0:
                    row.pending = group.prompt - 1

    def _readmit(self) -> None:
        """Gives evicted rollouts pages again; all their tokens are prefilled once more."""
        while self._evicted:
            row = self._evicted[0]
            shared = row.prompt.pages if row.prompt.users else 0
            needed = row.pages_needed(row.length, self.settings.page) + row.prompt.pages - shared
            if needed + self._reserve(1) > self.free and self.rows:
                break
            self._evicted.popleft()
            self.free -= needed
            row.own = row.pages_needed(row.length, self.settings.page)
            row.prompt.users += 1
            row.pending = row.length - 1 - shared * self.settings.page
            self.rows[row] = None

    def _grow(self, row: _Row, length: int) -> bool:
        """Takes pages for `length` tokens; returns whether there are enough, after evicting others."""
        missing = row.pages_needed(length, self.settings.page) - row.own
        while missing > self.free:
            victim = self._victim(row)
            if victim is None:
                return False
            self._evict(victim)
        self.free -= max(missing, 0)
        row.own += max(missing, 0)
        return True

    def _victim(self, needy: _Row) -> _Row | None:
        """Returns the rollout that loses its pages: the last one admitted, if possible one that waits for a tool."""
        candidates = [row for row in self.rows if row is not needy and row.prompt.filled]
        waiting = [row for row in candidates if row.waiting]
        return max(waiting or candidates, key=lambda row: row.admitted, default=None)

    def _evict(self, row: _Row) -> None:
        self.evictions += 1
        self._release(row)
        # A waiting rollout needs no pages before its result arrives.
        if not row.waiting:
            self._evicted.append(row)

    def _release(self, row: _Row) -> None:
        """Gives back the pages of a rollout; the prompt's only with its last user."""
        del self.rows[row]
        self.free += row.own
        row.own = 0
        row.prompt.users -= 1
        if not row.prompt.users:
            self.free += row.prompt.pages

    # ---- one step ----------------------------------------------------------------------------------

    def _deliver(self, now: float) -> None:
        """Appends the observations of finished calls."""
        for row in self.tools.finished(now):
            is_evicted = row not in self.rows
            observed = row.read()
            if not observed:
                self._end(row)
            elif is_evicted:
                self._evicted.append(row)
            elif self._grow(row, row.length):
                row.pending = observed
            else:
                self._evict(row)

    def _end(self, row: _Row) -> None:
        if row in self.rows:
            self._release(row)
        self.ended.append(row.group.step)

    def _filling(self) -> bool:
        """Returns whether tokens wait for their prefill."""
        return any(row.pending for row in self.rows)

    def _step(self, called: list[_Row], steps: int, decode: bool = False) -> float:
        """Plays one call; returns its seconds, 0 if there was nothing to compute.

        Args:
          called: receives the rollouts whose turn ended with a call.
          steps: tokens per decoding row; more than 1 only if nothing waits for its prefill.
          decode: whether rows decode beside the prefill.
        """
        decoding: dict[_Row, int] = {}
        if decode:
            decoding = self._decoding_rows(steps)
        pieces = self._prefill_pieces(self.settings.token_budget - len(decoding))
        if not decoding and not pieces:
            return 0.0
        steps = max(decoding.values(), default=1)
        places = [row.length + count // 2 for row, count in decoding.items()]
        tokens = sum(count for count, _ in pieces)
        program = self.settings.bucket(tokens + len(decoding))
        seconds = steps * self.costs.mixed(program, len(decoding), places, pieces)
        # The time of a shared step is split by its tokens.
        prefill_share = tokens / (tokens + len(decoding))
        self._spend('prefill', seconds * prefill_share)
        self._spend('decode', seconds * (1 - prefill_share))
        self.prefilled += tokens
        self.computed += steps * program
        self.wanted += tokens + sum(decoding.values())
        self.row_steps += steps * len(decoding)
        for row, count in decoding.items():
            accepted, follows = row.write(count)
            self.generated += accepted
            if follows == 'end':
                self._end(row)
            elif follows == 'tool':
                called.append(row)
        return seconds

    def _decoding_rows(self, steps: int) -> dict[_Row, int]:
        """Returns the rows that decode, with the tokens that the device writes; takes their pages."""
        decoding: dict[_Row, int] = {}
        for row in list(self.rows):
            # A sibling decodes when the first sample has prefilled the prompt. Growing may evict later rows.
            is_ready = not row.waiting and not row.pending and row.prompt.filled
            if not is_ready or row not in self.rows:
                continue
            count = row.device_steps(steps)
            if self._grow(row, row.length + count):
                decoding[row] = count
        # A row that was evicted for another one does not decode.
        return {row: count for row, count in decoding.items() if row in self.rows}

    def _prefill_pieces(self, budget: int) -> list[tuple[int, int]]:
        """Prefills waiting tokens in the order of admission; returns (tokens, last place) of every piece."""
        pieces = []
        for row in self.rows:
            if budget <= 0:
                break
            if not row.pending:
                continue
            count = min(row.pending, budget)
            budget -= count
            row.pending -= count
            pieces.append((count, row.length - row.pending))
            if not row.pending:
                row.prompt.filled = True
        return pieces
