"""Runs thousands of episode coroutines over a fixed number of slots.

One round: write finished tool results into their slots, admit requests, prefill, start a decode
chunk, read it, and hand its tool calls to the workers. Tools run while the next chunks decode;
keys and values of a waiting rollout stay in its slot.
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
from zeroplay_jax.rollout.slot_programs import DecodeChunk
from zeroplay_jax.rollout.slots import Request, SlotPool
from zeroplay_jax.rollout.tool_workers import ToolWorkers
from zeroplay_jax.types import Trajectory

# Event-loop turns per round in which episodes take results and issue new requests. An episode needs
# one turn to receive a future's result and some more to pass through its own awaits.
_LOOP_TURNS = 4
# Seconds between two looks at deadlines while nothing decodes.
_DEADLINE_CHECK_SECONDS = 0.05


def run_to_end(coroutine: Coroutine) -> None:
    """asyncio.run, also below an event loop that runs already, such as a notebook's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(coroutine)
        return
    # Event loops do not nest within a thread, so this one gets a thread of its own.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, coroutine).result()


class PromptTooLong(ValueError):
    """A prompt that leaves no room for a single new token."""


class Scheduler:
    """Runs episode coroutines that await `rollout`.

    Args:
      pools: slots by the name of their weights.
      deterministic, tool_timeout: see `ToolWorkers`.

    Attributes:
      stats: counters ('rollouts', 'generated_tokens', 'rounds', …) and seconds per part of a round.
      profile: wait after every device call, so that `stats` separates prefill from decode.
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
        """Gives a pool new weights.

        Raises:
          RuntimeError: its slots are in use; no trajectory mixes two versions.
        """
        pool = self.pools[weights]
        if pool.active:
            raise RuntimeError(f'weights {weights!r} published while {pool.active} rollouts run')
        pool.params = params
        pool.version = version
        # Keys and values of old weights must not serve as a prompt's.
        pool.forget_prompts()

    async def rollout(self, request: Request) -> list[Trajectory]:
        """The request's trajectories, in sample order.

        Raises:
          PromptTooLong: the prompt does not leave room for one token.
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
        """Runs coroutines to their end and returns their results in order."""
        # `_run` returns nothing: asyncio.run calls signal.getsignal, which formats a task's result,
        # and these results hold all trajectories of a step.
        results: list[Any] = []
        run_to_end(self._run(episodes, on_episode_end, results))
        return results

    async def _run(self, episodes, on_episode_end, results) -> None:
        self._new_request = asyncio.Event()
        tasks = [asyncio.ensure_future(episode) for episode in episodes]
        for task in tasks:
            task.add_done_callback(lambda _: on_episode_end())
        # The loop drives the devices from within the event loop: rounds and episodes alternate in one
        # thread, so neither needs locks.
        try:
            while not all(task.done() for task in tasks):
                for _ in range(_LOOP_TURNS):
                    await asyncio.sleep(0)
                # An exception of an episode ends the run at once, not after the longest episode.
                for task in tasks:
                    if task.done():
                        task.result()
                if not self._round():
                    await self._wait_for_work(tasks)
            results += [task.result() for task in tasks]
        finally:
            # Also after an interrupt, so that the slots can serve the next run.
            for task in tasks:
                task.cancel()
            self.workers.abandon()
            for pool in self.pools.values():
                pool.abandon()

    async def _wait_for_work(self, tasks) -> None:
        """Nothing decodes: waits for a tool, a new request, or the end of an episode."""
        assert self._new_request is not None
        # Cleared before the queues are read: a request that comes later sets it again.
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
        """One round over all pools; False when no slot is decoding."""
        started = time.perf_counter()
        self.stats['rounds'] += 1
        self._deliver_tool_results()
        chunks: list[tuple[SlotPool, DecodeChunk]] = []
        for pool in self.pools.values():
            pool.admit()
            self._timed('prefill', pool, pool.prefill)
            pool.clone_siblings()
            if self._has_decodable(pool):
                chunks.append((pool, self._timed('decode', pool, pool.decode)))
        # All pools decode before the first chunk is read, so that devices and host overlap.
        fetch_started = time.perf_counter()
        fetched = []
        for pool, chunk in chunks:
            # One transfer for the three arrays: each would wait for the device on its own.
            arrays = jax.device_get((chunk.tokens, chunk.logp, chunk.count))
            fetched.append((pool, arrays))
        self.stats['fetch_seconds'] += time.perf_counter() - fetch_started
        for pool, (tokens, logp, count) in fetched:
            self.stats['generated_tokens'] += int(count.sum())
            self.stats['chunks'] += 1
            calls = pool.read_chunk(tokens, logp, count)
            self.workers.submit(pool, calls)
        self.stats['seconds'] += time.perf_counter() - started
        return bool(chunks)

    def _has_decodable(self, pool: SlotPool) -> bool:
        """Whether some rollout of the pool does not wait for a tool."""
        # The host knows enough; asking the device would wait for it.
        waiting = self.workers.waiting_rollouts()
        for rollout in pool.rollouts:
            if rollout is not None and id(rollout) not in waiting:
                return True
        return False

    def _timed(self, name: str, pool: SlotPool, call: Callable[[], Any]) -> Any:
        # Device calls return before they end. Waiting for each costs the overlap with the host.
        if not self.profile:
            return call()
        started = time.perf_counter()
        result = call()
        jax.block_until_ready(pool.sampler.state)
        self.stats[f'{name}_seconds'] += time.perf_counter() - started
        return result

    def _deliver_tool_results(self) -> None:
        """Writes the results of finished (or overdue) calls into their slots."""
        # All observations of a pool in one put: a put is a device call.
        replies: dict[int, list] = collections.defaultdict(list)
        pools: dict[int, SlotPool] = {}
        for pending, call in self.workers.finished():
            rollout = pending.rollout
            rollout.turns[-1] = dataclasses.replace(rollout.turns[-1], call=call)
            observation = rollout.env.observation(call)
            pools[id(pending.pool)] = pending.pool
            replies[id(pending.pool)].append((rollout, observation))
        for key, observations in replies.items():
            pools[key].add_observations(observations)
