"""Runs tool calls beside decoding: threads per tool, batches, failures and deadlines.

What happens when a tool fails, in one place:
- `Tool.run` raises: every call of its batch is run again alone; a call that raises alone is 'failed';
- a result has an error code (such as a query that the search server could not answer): that call
  alone gets the observation of this code;
- with `rollout.deterministic=False` a call that takes longer than its time limit is 'timeout'. The
  rollout continues; what the thread returns later is discarded.
The policy reads the tool's text for the code; the metrics count it; searches that fail too often
stop the run after the step (`retrieval.max_failure_rate`).
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import copy
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from zeroplay_jax.rollout.slots import ActiveRollout, SlotPool
from zeroplay_jax.tools.base import Invocation, Tool, ToolResult
from zeroplay_jax.types import ToolCall


@dataclasses.dataclass(frozen=True)
class PendingCall:
    """A call that is being run: its place, and the copy of the tool state that the thread works on."""

    pool: SlotPool
    rollout: ActiveRollout
    call: ToolCall
    state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Batch:
    tool: Tool
    started: float
    calls: list[PendingCall]


class ToolWorkers:
    """Threads of all tools. Tools do not wait for one another.

    Args:
      deterministic: wait for every call. Otherwise calls have a time limit, the one thing in a
        rollout that depends on the clock.
      timeout: seconds for tools without a limit of their own.
    """

    def __init__(self, deterministic: bool, timeout: float):
        self.deterministic = deterministic
        self.timeout = timeout
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)
        self._executors: dict[int, concurrent.futures.ThreadPoolExecutor] = {}
        self._batches: dict[asyncio.Future, _Batch] = {}

    @property
    def futures(self) -> list[asyncio.Future]:
        """Of the batches in progress."""
        return list(self._batches)

    def waiting_rollouts(self) -> set[int]:
        """`id()`s of the rollouts with a call in progress."""
        waiting = set()
        for batch in self._batches.values():
            waiting.update(id(pending.rollout) for pending in batch.calls)
        return waiting

    def submit(self, pool: SlotPool, calls: Sequence[tuple[ActiveRollout, ToolCall]]) -> None:
        """Starts the calls of one decode chunk, batched per tool."""
        calls_of_tool: dict[int, list[PendingCall]] = collections.defaultdict(list)
        tools: dict[int, Tool] = {}
        for rollout, call in calls:
            tool = rollout.env.tools[call.tool]
            # The thread gets a copy: a call that fails or comes too late must leave no trace.
            state = copy.deepcopy(rollout.tool_state.get(tool.name, {}))
            tools[id(tool)] = tool
            calls_of_tool[id(tool)].append(PendingCall(pool, rollout, call, state))
        for key, pending in calls_of_tool.items():
            for begin in range(0, len(pending), tools[key].max_batch):
                self._start(tools[key], pending[begin : begin + tools[key].max_batch])

    def _start(self, tool: Tool, pending: list[PendingCall]) -> None:
        if id(tool) not in self._executors:
            self._executors[id(tool)] = concurrent.futures.ThreadPoolExecutor(
                tool.workers, thread_name_prefix=f'tool-{tool.name}'
            )
        invocations = [
            Invocation(one.call.arguments or {}, one.state, one.rollout.identity) for one in pending
        ]
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executors[id(tool)], self._run, tool, invocations)
        self._batches[future] = _Batch(tool, time.monotonic(), pending)

    def _run(self, tool: Tool, calls: Sequence[Invocation]) -> list[ToolResult]:
        """In a worker thread: results in order, whatever the tool raises."""
        started = time.perf_counter()
        initial_states = copy.deepcopy([call.state for call in calls])
        try:
            results = list(tool.run(calls))
            if len(results) != len(calls):
                raise ValueError(f'{len(calls)} calls brought {len(results)} results')
            return results
        except Exception as error:
            # Whatever a tool raises is an observation of the rollout, not the end of the run.
            for call, state in zip(calls, initial_states):
                call.state.clear()
                call.state.update(state)
            if len(calls) > 1:
                return [self._run(tool, [call])[0] for call in calls]
            arguments = str(dict(calls[0].arguments))[:80]
            logging.warning('%s(%s) failed: %r', tool.name, arguments, error)
            return [ToolResult(error='failed')]
        finally:
            self.seconds[tool.name].append(time.perf_counter() - started)

    def finished(self) -> list[tuple[PendingCall, ToolCall]]:
        """Calls that ended or timed out since the last look, each with its result."""
        ended: list[tuple[PendingCall, ToolCall]] = []
        for future, batch in list(self._batches.items()):
            if not future.done() and not self._is_overdue(batch):
                continue
            del self._batches[future]
            results: Sequence[ToolResult]
            if future.done():
                results = future.result()
            else:
                results = [ToolResult(error='timeout') for _ in batch.calls]
            for pending, result in zip(batch.calls, results, strict=True):
                if result.error is None:
                    pending.rollout.tool_state[batch.tool.name] = pending.state
                completed = pending.rollout.env.with_result(pending.call, result)
                ended.append((pending, completed))
        return ended

    def _is_overdue(self, batch: _Batch) -> bool:
        if self.deterministic:
            return False
        limit = self.timeout if batch.tool.timeout is None else batch.tool.timeout
        return time.monotonic() - batch.started > limit

    def abandon(self) -> None:
        """Forgets all calls in progress."""
        self._batches.clear()
