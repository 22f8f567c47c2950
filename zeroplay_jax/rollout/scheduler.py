"""Runs thousands of episode coroutines over a fixed number of slots.

One round: write all finished tool results and new requests into their slots by one device call, prefill, start a
decode chunk, read it, and hand its tool calls to the workers. Tools run while the next chunks decode; keys and values
of a waiting rollout stay in its slot.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import jax

from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.slot_programs import DecodeChunk
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tool_workers import ToolWorkers
from zeroplay_jax.types import Trajectory

# Event-loop turns per round in which episodes take results and issue new requests. An episode needs
# one turn to receive a future's result and some more to pass through its own awaits.
_LOOP_TURNS = 4
# Seconds between two looks at deadlines while nothing decodes.
_DEADLINE_CHECK_SECONDS = 0.05


def run_to_end(coroutine: Coroutine) -> None:
    """Runs a coroutine with `asyncio.run`, even if this thread already runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(coroutine)
        return
    # A thread can run one event loop at a time, so the coroutine gets a thread of its own.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, coroutine).result()


class PromptTooLong(ValueError):
    """A prompt that is empty, or that fills its slot so that no token can be sampled."""


class Scheduler:
    """Runs episode coroutines that await `rollout`.

    Args:
      pools: slots by the name of their weights.
      deterministic, tool_timeout: see `ToolWorkers`.

    Attributes:
      workers: run the tool calls.
      stats: counters ('rollouts', 'generated_tokens', 'rounds', …) and seconds per part of a round, since the
        scheduler was made.
      profile: whether to wait after every device call, so that `stats` separates prefill from decode.
    """

    def __init__(
        self,
        pools: dict[str, SlotPool],
        *,
        deterministic: bool = True,
        tool_timeout: float = 30.0,
    ):
        self.pools = pools
        self.workers = ToolWorkers(deterministic, tool_timeout)
        self.stats: Any = collections.Counter()
        self.profile = False
        self._request_count = 0
        self._new_request: asyncio.Event | None = None

    def publish_weights(self, weights: str, params: Params, version: int) -> None:
        """Gives a pool new weights, under this version, and forgets its cached prompts.

        Args:
          weights: name of the pool.
          params: in the layout of the sampler (`learner.publisher`); kept by reference.
          version: recorded in the trajectories that the weights sample.

        Raises:
          RuntimeError: its slots are in use; no trajectory mixes two versions.
        """
        pool = self.pools[weights]
        if pool.active:
            raise RuntimeError(f'weights {weights!r} published while {pool.active} rollouts run')
        pool.params = params
        pool.version = version
        # Keys and values of a prompt that the old weights computed must not be reused.
        pool.forget_prompts()

    async def rollout(self, request: Request) -> list[Trajectory]:
        """Queues a request and waits for it; returns its trajectories in sample order.

        Episodes await it while `run` is in progress: the rounds of `run` serve the queue.

        Raises:
          PromptTooLong: the prompt is empty, or as long as a slot.
        """
        pool = self.pools[request.weights]
        prompt_tokens = len(request.prompt)
        if not 0 < prompt_tokens < pool.context:
            raise PromptTooLong(
                f'prompt of {prompt_tokens} tokens; a slot holds {pool.context} (sampler.context)'
            )
        future = asyncio.get_running_loop().create_future()
        # The number breaks ties, so that the queue never compares two requests.
        self._request_count += 1
        self.stats['rollouts'] += request.samples
        pool.enqueue(request, self._request_count, future)
        if self._new_request is not None:
            self._new_request.set()
        return await future

    def run(
        self, episodes: Sequence[Coroutine], on_episode_end: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Runs coroutines to their end and returns their results in order.

        The first exception of an episode ends the run and is raised; the other episodes are cancelled. At the end
        all slots are free, whatever happened. `on_episode_end` is called in the event loop after each episode.
        """
        # `_run` returns nothing: asyncio.run calls signal.getsignal, which formats a task's result,
        # and these results hold all trajectories of a step.
        results: list[Any] = []
        run_to_end(self._run(episodes, on_episode_end, results))
        return results

    async def _run(self, episodes, on_episode_end, results) -> None:
        """Alternates between episodes and rounds until all episodes have ended; appends to `results`."""
        self._new_request = asyncio.Event()
        tasks = [asyncio.ensure_future(episode) for episode in episodes]
        for task in tasks:
            task.add_done_callback(lambda _: on_episode_end())
        # Rounds run inside the event loop: they alternate with episodes in one thread, so neither needs locks.
        try:
            while not all(task.done() for task in tasks):
                for _ in range(_LOOP_TURNS):
                    await asyncio.sleep(0)
                # `result` raises an episode's exception here, and not after the longest episode.
                for task in tasks:
                    if task.done():
                        task.result()
                if not self._round():
                    await self._wait_for_work(tasks)
            results += [task.result() for task in tasks]
        finally:
            # Executed after errors and interrupts as well, so that the slots can serve the next run.
            for task in tasks:
                task.cancel()
            self.workers.abandon()
            for pool in self.pools.values():
                pool.abandon()

    async def _wait_for_work(self, tasks) -> None:
        """Waits for a tool, a new request, or the end of an episode; called when no slot is decoding."""
        assert self._new_request is not None
        # The event is cleared before the queues are read: a later request sets it again.
        self._new_request.clear()
        can_admit = any(pool.queue and not pool.active for pool in self.pools.values())
        if can_admit or all(task.done() for task in tasks):
            return
        new_request = asyncio.ensure_future(self._new_request.wait())
        running = [task for task in tasks if not task.done()]
        # A call that never returns has no future to wait for, so its deadline has to be polled.
        timeout = None
        if self.workers.futures and not self.workers.deterministic:
            timeout = _DEADLINE_CHECK_SECONDS
        await asyncio.wait(
            [new_request, *self.workers.futures, *running],
            timeout=timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        new_request.cancel()

    def _round(self) -> bool:
        """Runs one round (see the module) over all pools; returns whether any pool decoded."""
        started = time.perf_counter()
        self.stats['rounds'] += 1
        self._deliver_tool_results()
        chunks: list[tuple[SlotPool, DecodeChunk]] = []
        for pool in self.pools.values():
            pool.admit()
            self._timed('prefill', pool, pool.prefill)
            pool.clone_siblings()
            if pool.can_decode:
                chunks.append((pool, self._timed('decode', pool, pool.decode)))
        # All pools decode before the first chunk is read, so that devices and host overlap.
        fetch_started = time.perf_counter()
        fetched = []
        for pool, chunk in chunks:
            # All arrays are fetched in one transfer, because each transfer waits for the device.
            fetched.append((pool, jax.device_get(chunk)))
        self.stats['fetch_seconds'] += time.perf_counter() - fetch_started
        for pool, chunk in fetched:
            self.stats['generated_tokens'] += int(chunk.count.sum())
            self.stats['chunks'] += 1
            calls = pool.read_chunk(chunk.tokens, chunk.logp, chunk.count, chunk.cached)
            self.workers.submit(pool, calls)
        for pool in self.pools.values():
            self.stats.update(pool.placement.stats)
            pool.placement.stats.clear()
        self.stats['seconds'] += time.perf_counter() - started
        return bool(chunks)

    def _timed(self, name: str, pool: SlotPool, call: Callable[[], Any]) -> Any:
        """Calls `call`; with `profile`, waits for the device and adds the time to `stats`."""
        # Device calls return before they end. Waiting for them would end the overlap with the host.
        if not self.profile:
            return call()
        started = time.perf_counter()
        result = call()
        jax.block_until_ready(pool.sampler.state)
        self.stats[f'{name}_seconds'] += time.perf_counter() - started
        return result

    def _deliver_tool_results(self) -> None:
        """Records the results of finished and overdue calls in their rollouts; `SlotPool.admit` puts them in slots."""
        for pending, call in self.workers.finished():
            rollout = pending.rollout
            rollout.turns[-1] = dataclasses.replace(rollout.turns[-1], call=call)
            pending.pool.add_observations([(rollout, rollout.env.observation(call))])
