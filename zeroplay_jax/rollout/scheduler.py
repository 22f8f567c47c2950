"""Runs thousands of episode coroutines over a fixed number of slots.

Episodes that end together have an owner, such as `Episodes` of a training step. `wait` runs rounds until those of an
owner have ended; those of others stay in progress, and continue with the next `wait`, in the same event loop.

One round: put all finished tool results and new requests into their slots, prefill, clone prompts for further samples,
start a decode chunk, read it, and hand its tool calls to the workers. Tools run while the next chunks decode; keys and
values of a waiting rollout stay in its slot, unless its pages are given to an older one (rollout/placement.py). With
`overlap` a round reads the chunk of the round before, so that the host works while the device decodes.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float, Int

from zeroplay_jax.rollout import scoring
from zeroplay_jax.rollout.requests import NEWEST, NO_SLOT, Prefix, Request, Rollout
from zeroplay_jax.rollout.slot_state import DecodeChunk
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tool_workers import ToolWorkers
from zeroplay_jax.rollout.weights import WeightStore
from zeroplay_jax.runtime import signals
from zeroplay_jax.types import ToolCall, Trajectory

T = TypeVar('T')

# Event-loop turns per round in which episodes take results and issue new requests. An episode needs
# one turn to receive a future's result and some more to pass through its own awaits.
_LOOP_TURNS = 4
# Seconds between two looks at deadlines while nothing decodes.
_DEADLINE_CHECK_SECONDS = 0.05
# The same for SIGTERM.
_PREEMPTION_CHECK_SECONDS = 0.5


def _outside_loops(function: Callable[[], T]) -> T:
    """Returns `function()`, which runs an event loop, even if this thread already runs one, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    # A thread can run one event loop at a time, so the function gets a thread of its own.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def run_to_end(coroutine: Coroutine) -> None:
    """Runs a coroutine with `asyncio.run`, even if this thread already runs an event loop, as in a notebook."""
    _outside_loops(functools.partial(asyncio.run, coroutine))


def _nothing() -> None:
    """Default of `on_episode_end`: does nothing."""


def _is_ended() -> bool:
    """Default of `also`: other processes are not waited for."""
    return True


class PromptTooLong(ValueError):
    """A prompt that is empty, or that fills its slot so that no token can be sampled."""


class Scheduler:
    """Runs episode coroutines that await `rollout`.

    Args:
      pools: slots by the name of their weights; several names may share a pool.
      weights: the weights of all pools; None: a new store, without any.
      deterministic: tool calls have no deadline. The order of their results is never fixed, and changes no token.
      tool_timeout: seconds of a call, see `ToolWorkers`.
      overlap: whether a decode chunk starts before the one before is read. The host then finds the end of a turn one
        chunk later, and the device decodes that slot in vain meanwhile. Rollouts are the same, bit for bit.

    Attributes:
      workers: run the tool calls.
      stats: counters ('rollouts', 'generated_tokens', 'rounds', …), seconds per part of a round, and seconds in which
        nothing decoded ('tool_wait_seconds': for tools and judges, 'peer_wait_seconds': for other processes), since the
        scheduler was made.
    """

    def __init__(
        self,
        pools: dict[str, SlotPool],
        weights: WeightStore | None = None,
        *,
        deterministic: bool = True,
        tool_timeout: float = 30.0,
        overlap: bool = False,
    ):
        self.pools = pools
        self.weights = weights or WeightStore()
        self.overlap = overlap
        self.workers = ToolWorkers(deterministic, tool_timeout)
        self.stats: Any = collections.Counter()
        self._new_request: asyncio.Event | None = None
        # Owner → its episodes, in progress or ended, whose results nobody has read; and their event loop.
        self._episodes: dict[object, list[asyncio.Task]] = {}
        self._runner: asyncio.Runner | None = None
        # With `overlap`: the chunks of the last round.
        self._unread: list[tuple[SlotPool, DecodeChunk]] = []
        self._unread_scores: list[scoring.Scores] = []
        # Calls of rollouts without a slot, which the next round submits.
        self._calls: dict[SlotPool | None, list[tuple[Rollout, ToolCall]]] = (
            collections.defaultdict(list)
        )
        # Those that wait for their calls, submitted or not.
        self._callers: set[Rollout] = set()

    def _distinct_pools(self) -> list[SlotPool]:
        """Returns every pool once, in order."""
        return list(dict.fromkeys(self.pools.values()))

    async def rollout(self, request: Request) -> list[Trajectory]:
        """Queues a request and waits for it; returns its trajectories in sample order.

        Episodes await it while `run` or `wait` is in progress: their rounds serve the queue.

        Raises:
          PromptTooLong: the prompt is empty, or as long as a slot.
        """
        pool = self.pools[request.weights]
        prompt_tokens = len(request.prompt)
        if not 0 < prompt_tokens < pool.context:
            raise PromptTooLong(
                f'prompt of {prompt_tokens} tokens; a slot holds {pool.context} (sampler.context)'
            )
        if request.version == NEWEST:
            newest = self.weights.newest[request.weights]
            request = dataclasses.replace(request, version=newest)
        self.stats['rollouts'] += request.samples
        futures = pool.enqueue(request)
        self._wake()
        with self.weights.in_use(request.weights, request.version):
            return [await future for future in futures]

    async def log_probs(self, request: scoring.ScoreRequest) -> list[Float[np.ndarray, ' tokens']]:
        """Returns the log-probs, float32, of texts behind a context, as soon as rounds have computed them."""
        future = self.pools[request.weights].scorer.enqueue(request)
        self._wake()
        with self.weights.in_use(request.weights, request.version):
            return await future

    def _wake(self) -> None:
        """Ends a wait of `_run` for something to do."""
        if self._new_request is not None:
            self._new_request.set()

    async def reply(
        self, request: Request, call: ToolCall, is_run: bool
    ) -> tuple[Rollout, Int[np.ndarray, ' tokens']]:
        """Returns the rollout `Request.before`, which has no slot, with the call of its last turn, and its observation.

        Args:
          request: of the rollout.
          call: the call.
          is_run: whether it has its result or error already; else it is run first.
        """
        rollout = self._without_slot(request)
        if not is_run:
            call = await self._call(rollout, call)
        rollout.turns[-1] = dataclasses.replace(rollout.turns[-1], call=call)
        return rollout, rollout.observation(call)

    async def call(self, request: Request, call: ToolCall) -> ToolCall:
        """Returns a call of a tool of `Request.env` with its result or error; no rollout reads it."""
        return await self._call(self._without_slot(request), call)

    def _without_slot(self, request: Request) -> Rollout:
        return Rollout(Prefix(request), 0, asyncio.get_running_loop().create_future())

    async def _call(self, rollout: Rollout, call: ToolCall) -> ToolCall:
        """Returns a call with its result; calls until the next round are batches together."""
        # Weights at a server have no pool.
        self._calls[self.pools.get(rollout.request.weights)].append((rollout, call))
        self._callers.add(rollout)
        self._wake()
        try:
            return await rollout.future
        finally:
            self._callers.remove(rollout)

    def run(
        self, episodes: Sequence[Coroutine], on_episode_end: Callable[[], None] = _nothing
    ) -> list[Any]:
        """Runs coroutines to their end and returns their results in order.

        The first exception of an episode is raised; the other episodes are cancelled. At the end
        all slots are free, whatever happened. `on_episode_end` is called in the event loop after each episode.
        """
        owner = object()
        self.start(owner, episodes)
        return self.wait(owner, on_episode_end)

    def start(self, owner: object, episodes: Sequence[Coroutine]) -> None:
        """Adds episodes of an owner; they proceed during the next `wait`, whomever it waits for."""
        if self._runner is None:
            # A loop that no thread knows: this thread may run another one.
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        loop = self._runner.get_loop()
        tasks = [loop.create_task(episode) for episode in episodes]
        self._episodes.setdefault(owner, []).extend(tasks)

    def wait(
        self,
        owner: object,
        on_episode_end: Callable[[], None] = _nothing,
        also: Callable[[], bool] = _is_ended,
    ) -> list[Any]:
        """Runs rounds until all episodes of an owner have ended; returns their results in the order of `start`.

        Those of others stay in progress. The first exception of any episode is raised, and all
        episodes are cancelled (`cancel`), as after an interrupt.

        Args:
          owner: given to `start`.
          on_episode_end: called in the event loop after each of these episodes.
          also: a further condition, which must hold too; asked between rounds once they have ended.

        Raises:
          Preempted: the process was asked to end (`signals.watched`).
        """
        runner = self._runner
        assert runner is not None
        tasks = self._episodes[owner]
        # `_run` returns nothing: the runner calls signal.getsignal, which formats a task's result, and the results hold
        # all trajectories of a step.
        try:
            _outside_loops(lambda: runner.run(self._run(tasks, on_episode_end, also)))
        # Errors and interrupts alike.
        except BaseException:
            self.cancel()
            raise
        del self._episodes[owner]
        # Requests may be left of an episode that ended before them.
        for pool in self._distinct_pools():
            pool.abandon(owner)
        for rollout in self._callers:
            if rollout.request.owner is owner:
                rollout.future.cancel()
        if not self._episodes:
            self.cancel()
        return [task.result() for task in tasks]

    def cancel(self) -> None:
        """Cancels all episodes, and frees all slots, so that they can serve the next ones."""
        for task in self._tasks():
            # Only the first error is raised; asyncio would print those of the other episodes as tracebacks.
            if task.done() and not task.cancelled():
                task.exception()
        self._episodes = {}
        self._unread = []
        self._unread_scores = []
        self._calls.clear()
        runner, self._runner = self._runner, None
        try:
            self.workers.abandon()
            for pool in self._distinct_pools():
                pool.abandon()
        finally:
            # Also after an error: no episode may continue in a later `wait`.
            if runner is not None:
                # Cancels all tasks of the event loop.
                _outside_loops(runner.close)

    def _tasks(self) -> list[asyncio.Task]:
        """Returns the episodes of all owners."""
        return list(itertools.chain.from_iterable(self._episodes.values()))

    async def _run(
        self,
        tasks: Sequence[asyncio.Task],
        on_episode_end: Callable[[], None],
        also: Callable[[], bool],
    ) -> None:
        """Alternates between episodes and rounds until these episodes have ended."""
        self._new_request = asyncio.Event()
        reported = 0

        def is_ended() -> bool:
            return reported == len(tasks) and also()

        # Rounds run inside the event loop: they alternate with episodes in one thread, so neither needs locks.
        while not is_ended():
            signals.raise_if_requested()
            for _ in range(_LOOP_TURNS):
                await asyncio.sleep(0)
            for task in self._tasks():
                if task.done():
                    # Raises an episode's exception here, and not after the longest episode.
                    task.result()
            ended = sum(task.done() for task in tasks)
            for _ in range(ended - reported):
                on_episode_end()
            reported = ended
            has_ended = reported == len(tasks)
            if not self._round():
                # Episodes that have ended wait for other processes, all others for tools or judges.
                started = time.perf_counter()
                await self._wait_for_work(is_ended, polls=has_ended)
                name = 'peer_wait_seconds' if has_ended else 'tool_wait_seconds'
                self.stats[name] += time.perf_counter() - started

    async def _wait_for_work(self, is_ended: Callable[[], bool], polls: bool) -> None:
        """Waits for a tool, a new request, or the end of an episode; called when no slot is decoding.

        Args:
          is_ended: whether there is nothing to wait for.
          polls: whether `is_ended` depends on other processes, so that it has to be asked from time to time.
        """
        assert self._new_request is not None
        # The event is cleared before the queues are read: a later request sets it again.
        self._new_request.clear()
        has_requests = any(pool.has_only_requests for pool in self._distinct_pools())
        if has_requests or is_ended():
            return
        new_request = asyncio.ensure_future(self._new_request.wait())
        running = [task for task in self._tasks() if not task.done()]
        # A call that never returns has no future to wait for, so its deadline has to be polled.
        has_deadlines = bool(self.workers.futures) and not self.workers.deterministic
        timeout = None
        if signals.is_watched():
            timeout = _PREEMPTION_CHECK_SECONDS
        if has_deadlines or polls:
            timeout = _DEADLINE_CHECK_SECONDS
        await asyncio.wait(
            [new_request, *self.workers.futures, *running],
            timeout=timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        new_request.cancel()

    def _round(self) -> bool:
        """Runs one round (see the module) over all pools; returns whether a chunk was started or read."""
        started = time.perf_counter()
        self.stats['rounds'] += 1
        self._deliver_tool_results()
        for pool, calls in self._calls.items():
            self.workers.submit(pool, calls)
        self._calls.clear()
        started_chunks: list[tuple[SlotPool, DecodeChunk]] = []
        started_scores: list[scoring.Scores] = []
        for pool in self._distinct_pools():
            pool.admit()
            pool.prefill(self.weights)
            pool.clone_siblings()
            if pool.can_decode:
                has_unread = any(other is pool for other, _ in self._unread)
                for chunk in pool.decode(self.weights, has_unread):
                    started_chunks.append((pool, chunk))
            # One call per round, so that rollouts do not wait for many texts.
            started_scores += pool.scorer.start(self.weights)
        readable, scores = started_chunks, started_scores
        if self.overlap:
            readable, self._unread = self._unread, started_chunks
            scores, self._unread_scores = self._unread_scores, started_scores
        # All pools decode before the first chunk is read, so that devices and host overlap. All arrays are fetched in
        # one transfer, because each transfer waits for the device.
        fetch_started = time.perf_counter()
        chunks, logps = jax.device_get(
            ([chunk for _, chunk in readable], [each.logp for each in scores])
        )
        self.stats['fetch_seconds'] += time.perf_counter() - fetch_started
        self.stats['chunks'] += len(chunks)
        for (pool, _), chunk in zip(readable, chunks, strict=True):
            self.workers.submit(pool, pool.read(chunk))
        for each, logp in zip(scores, logps, strict=True):
            scoring.read(each, logp)
        for pool in self._distinct_pools():
            self.stats.update(pool.placement.stats)
            pool.placement.stats.clear()
        self.stats['seconds'] += time.perf_counter() - started
        return bool(started_chunks or readable or started_scores or scores)

    def _deliver_tool_results(self) -> None:
        """Records the results of finished and overdue calls in their rollouts; `SlotPool.admit` puts them in slots."""
        for pending, call in self.workers.finished():
            rollout = pending.rollout
            if rollout.slot == NO_SLOT:
                # Of `_call`; done if its episode was cancelled.
                if not rollout.future.done():
                    rollout.future.set_result(call)
                continue
            assert pending.pool is not None
            # Its episode has ended without it (`SlotPool.abandon`).
            if pending.pool.rollouts[rollout.slot] is not rollout:
                continue
            rollout.turns[-1] = dataclasses.replace(rollout.turns[-1], call=call)
            pending.pool.add_observations([(rollout, rollout.observation(call))])
