"""Episodes that run together: the version of the weights that plays them, and what is counted for them.

The scheduler may run the episodes of two steps at the same time (`rollout.ahead`). A context variable names the batch
of the episode that runs, so that requests and judgements belong to a batch without being passed one.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
from collections.abc import Callable, Coroutine, Mapping


def _nothing() -> None:
    """Default of `on_episode_end`: does nothing."""


class EpisodeBatch:
    """Episodes that are started together or one after the other, such as those of a training step.

    Args:
      versions: name of weights → version that plays the requests of these episodes; the newest where none is named.

    Attributes:
      counts: 'rollouts' (requested by these episodes) and 'judge/…' (their judgements).
      coroutines: episodes that have no task yet.
      tasks: episodes in progress and ended ones whose results nobody has read.
    """

    def __init__(self, versions: Mapping[str, int] | None = None):
        self.versions = dict(versions or {})
        self.counts: collections.Counter[str] = collections.Counter()
        self.coroutines: list[Coroutine] = []
        self.tasks: list[asyncio.Task] = []
        self._on_episode_end: Callable[[], None] = _nothing
        # Episodes that ended before `report_ends`.
        self._unreported = 0
        self._reports = False

    @property
    def has_ended(self) -> bool:
        """Whether all episodes have ended."""
        return not self.coroutines and all(task.done() for task in self.tasks)

    def report_ends(self, on_episode_end: Callable[[], None]) -> None:
        """Calls `on_episode_end` for every episode that has ended, and at the end of every other one."""
        self._on_episode_end = on_episode_end
        self._reports = True
        for _ in range(self._unreported):
            on_episode_end()
        self._unreported = 0

    def start_tasks(self) -> None:
        """Makes tasks of the coroutines; needs a running event loop."""
        token = current_batch.set(self)
        # Every task, and every task that it starts, gets a copy of the variables as they are now.
        new_tasks = [asyncio.ensure_future(coroutine) for coroutine in self.coroutines]
        current_batch.reset(token)
        self.coroutines = []
        for task in new_tasks:
            task.add_done_callback(self._end_episode)
        self.tasks += new_tasks

    def take_results(self) -> list:
        """Returns the results of the ended episodes, in the order in which they were started, and forgets them."""
        results = [task.result() for task in self.tasks]
        self.tasks = []
        return results

    def _end_episode(self, _: asyncio.Task) -> None:
        if self._reports:
            self._on_episode_end()
        else:
            self._unreported += 1


# The batch of the episode that runs; None outside of episodes.
current_batch: contextvars.ContextVar[EpisodeBatch | None] = contextvars.ContextVar(
    'current_batch', default=None
)


def count(name: str, number: int = 1) -> None:
    """Adds to a count of the batch of the episode that runs, if there is one."""
    batch = current_batch.get()
    if batch is not None:
        batch.counts[name] += number
