"""Episodes that run together, their requests for rollouts, and what the host records of these while they run."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.pages import RowPages
from zeroplay_jax.rollout.tokens import StopMatcher
from zeroplay_jax.types import POLICY, PROMPT, Trajectory, Turn

# ---- episode batch ---------------------------------------------------------------------------------
#
# Episodes that run together: the version of the weights that plays them, and what is counted for them.
#
# The scheduler may run the episodes of two steps at the same time (`rollout.ahead`). A context variable names the batch
# of the episode that runs, so that requests and judgements belong to a batch without being passed one.


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


# ---- requests --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Request:
    """Rollouts of one prompt.

    Attributes:
      weights: name of the weights.
      prompt: int32 ids.
      identity: names the request within the run; smaller identities are served first.
      env: tools and limits.
      samples: number of rollouts.
      temperature: 0 is greedy decoding.
    """

    weights: str
    prompt: Int[np.ndarray, ' tokens']
    identity: tuple[int, ...]
    env: Environment
    samples: int = 1
    temperature: float = 1.0


class RequestGroup:
    """A request in progress: its samples share the keys and values of the prompt.

    Attributes:
      future: resolved with `results` when all samples have ended.
      version: version of the weights that plays all samples.
      batch: the episodes that made the request; None for a request outside of episodes.
      shard: data shard of all its samples, which share pages.
      held: pages of the prompt, while samples wait for a slot.
      holder_slot: slot of the sample that prefills these pages.
      is_prefilled: whether the keys and values of these pages are valid.
      waiting: numbers of the samples that have no slot yet.
      results: trajectories by sample number; None until a sample has ended.
    """

    def __init__(
        self,
        request: Request,
        future: asyncio.Future,
        version: int = 0,
        batch: EpisodeBatch | None = None,
    ):
        self.request = request
        self.future = future
        self.version = version
        self.batch = batch
        self.shard = 0
        self.held: RowPages | None = None
        self.holder_slot = 0
        self.is_prefilled = False
        self.waiting = collections.deque(range(request.samples))
        self.results: list[Trajectory | None] = [None] * request.samples

    def capacity(self, context: int) -> int:
        """Length at which a rollout ends: that of a slot, or less with a limit of the response."""
        response_tokens = self.request.env.limits.response_tokens
        if not response_tokens:
            return context
        return min(len(self.request.prompt) + response_tokens, context)

    def first_limit(self, context: int) -> int:
        """Length at which the first turn of every sample is cut."""
        turn_end = len(self.request.prompt) + self.request.env.limits.turn_tokens
        return min(turn_end, self.capacity(context))


class ActiveRollout:
    """One sample in a slot: the host's copy of its tokens, and the turn in progress.

    Attributes:
      slot: its slot.
      pages: its pages of the cache.
      is_running: whether a turn is in progress on the device.
      is_evicted: whether its pages were given to another rollout, see rollout/placement.py.
      put_start: position from which tokens are put when the next turn begins.
      turns: ended turns of the current context and of the earlier ones.
      earlier: trajectories of the contexts before the current one, see `end_context`.
      tool_state: tool name → what the tool stores for this rollout.
    """

    def __init__(self, group: RequestGroup, sample: int, slot: int, pages: RowPages):
        request = group.request
        self.group = group
        self.sample = sample
        self.slot = slot
        self.pages = pages
        self.is_running = False
        self.is_evicted = False
        self.put_start = 0
        self.env = request.env
        self.identity = (*request.identity, sample)
        # Author and log-prob of a token are recorded when it arrives; neither is derived from text later.
        self.tokens: list[int] = [int(token) for token in request.prompt]
        self.source = [PROMPT] * len(self.tokens)
        self.logp = [0.0] * len(self.tokens)
        self.turns: list[Turn] = []
        self.earlier: list[Trajectory] = []
        self.tool_state: dict[str, dict[str, Any]] = {}
        # Chunks of the row that are not prefilled yet; not read over pages. The host counts them, because reading the
        # device's state would wait for the device.
        self.chunks_left = 0
        self.begin_turn()

    def begin_turn(self) -> None:
        """Starts a turn at the next token: resets the stop matcher and `turn_start`."""
        self.matcher = StopMatcher(self.env.codec.token_bytes, self.env.stops)
        self.turn_start = len(self.tokens)

    def turn_limit(self, context: int) -> int:
        """Length at which the turn in progress is cut."""
        return min(self.turn_start + self.env.limits.turn_tokens, self.group.capacity(context))

    def append(self, ids: Sequence[int], source: int, logp: Sequence[float]) -> None:
        """Adds tokens of one author."""
        self.tokens += ids
        self.source += [source] * len(ids)
        self.logp += logp

    def end_context(self, start: int, retained: list[int], ended: Trajectory) -> None:
        """Starts a new context of the first `start` tokens and the ids `retained` of the last turn.

        Stores `ended`, the trajectory of the old context, in `earlier`. Policy tokens of the old context become
        PROMPT, so no token is trained on twice.
        """
        self.earlier.append(ended)
        prefix_source = []
        for source in self.source[:start]:
            prefix_source.append(PROMPT if source == POLICY else source)
        self.tokens = self.tokens[:start] + retained
        self.source = prefix_source + [PROMPT] * len(retained)
        self.logp = [0.0] * len(self.tokens)

    def trajectory(self, finish: str, turns: tuple[Turn, ...]) -> Trajectory:
        """Returns the record of the current context, without the earlier ones; `finish` is `Trajectory.finish`."""
        return Trajectory(
            tokens=np.asarray(self.tokens, np.int32),
            source=np.asarray(self.source, np.int8),
            logp=np.asarray(self.logp, np.float32),
            turns=turns,
            finish=finish,
            weights=self.group.request.weights,
            version=self.group.version,
            identity=self.identity,
        )
