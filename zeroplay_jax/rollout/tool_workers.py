"""Runs tool calls while other rollouts decode: threads per tool, batches, failures and deadlines.

What happens when a tool fails, in one place:
- `Tool.run` raises: every call of its batch is run again alone; a call that raises alone is 'failed';
- a result has an error code (such as a query that the search server could not answer): that call
  alone gets the observation of this code;
- with `rollout.deterministic=False` calls without a result within the time limit are 'timeout'. The limit begins when
  their batch is submitted and includes the wait for a thread. The rollout continues; what the thread returns later is
  discarded.
The policy reads the tool's text for the code, and the metrics count it. Too many failed calls stop the
run before the update: of any tool above `tools.max_failure_rate`, of the built-in search above
`retrieval.max_failure_rate`.
The counts are those of the rollouts, so that no failure escapes them, whatever it was caused by.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import functools
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zeroplay_jax.rollout.requests import Rollout
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.runtime.hosts import DaemonPool
from zeroplay_jax.tools.base import Invocation, Tool, ToolResult
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import ToolCall, UserError

# A tool with fewer calls since the last check does not stop a run: one failure of two calls is not evidence.
_MIN_CALLS = 10
# Characters of a failed call in the log.
_MAX_LOGGED_ARGUMENTS = 80


@dataclasses.dataclass(frozen=True)
class PendingCall:
    """A call in progress: its rollout, the pool of that if there is one, and the tool state's copy for its thread."""

    pool: SlotPool | None
    rollout: Rollout
    call: ToolCall
    state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Batch:
    tool: Tool
    started: float
    calls: list[PendingCall]


def _snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a deep copy of a tool's state; a shallow one if a value cannot be copied, such as a connection."""
    try:
        return copy.deepcopy(state)
    except Exception:
        return dict(state)


def _check_result(result: ToolResult) -> None:
    """Raises TypeError for a result that could not be written into a context, which is a bug in the tool."""
    if not isinstance(result, ToolResult):
        raise TypeError(
            f'a tool returned {type(result).__name__}; it must return ToolResult objects'
        )
    if result.text is not None and not isinstance(result.text, str):
        raise TypeError(f'ToolResult.text is {type(result.text).__name__}; it must be a text')
    for passages in result.documents:
        for passage in passages:
            # Of a flat list of documents it is the name of a field.
            is_document = isinstance(passage, Mapping) and all(
                isinstance(passage.get(name), str) for name in ('title', 'text')
            )
            if not is_document:
                raise TypeError(
                    "ToolResult.documents must be a list per query of documents with the texts 'title' and 'text', "
                    "such as [[{'title': …, 'text': …}]]"
                )


def _check_rate(calls: int, failed: int, rate: tuple[str, float], what: str, which: str) -> None:
    """Raises UserError if more calls failed than a rate, (field, share), allows."""
    field, limit = rate
    if calls >= _MIN_CALLS and failed > limit * calls:
        raise UserError(
            f'{failed} of {calls} {what} failed or timed out, more than '
            f'config.{field}={limit}; repair the {which} and run the same command again'
        )


class ToolWorkers:
    """Threads of all tools. Tools do not wait for one another.

    All methods belong to the thread of the event loop, except `_run`, which worker threads execute.

    Args:
      deterministic: wait for every call. Otherwise calls have a time limit, which is the only part of a
        rollout that depends on the clock.
      timeout: seconds for tools without a limit of their own.

    Attributes:
      seconds: tool name → seconds of each `Tool.run`; the engine clears it at the beginning of a step.
      counts: '<tool name>/calls' and '<tool name>/failed' since the last `check_failure_rate`.
      answers: 'calls' and 'failed' of answers in evaluations, as `counts`.
    """

    def __init__(self, deterministic: bool, timeout: float):
        self.deterministic = deterministic
        self.timeout = timeout
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)
        self.counts: collections.Counter[str] = collections.Counter()
        self.answers: collections.Counter[str] = collections.Counter()
        self._pools: dict[int, DaemonPool] = {}
        self._batches: dict[asyncio.Future, _Batch] = {}

    @property
    def futures(self) -> list[asyncio.Future]:
        """Futures of the batches in progress."""
        return list(self._batches)

    def submit(self, pool: SlotPool | None, calls: Sequence[tuple[Rollout, ToolCall]]) -> None:
        """Starts the calls of one decode chunk, batched per tool; `finished` returns their results."""
        # Grouped by `id`: tools of two roles may share a name and be different objects.
        calls_of_tool: dict[int, list[PendingCall]] = collections.defaultdict(list)
        tools: dict[int, Tool] = {}
        for rollout, call in calls:
            tool = rollout.env.tools[call.tool]
            # The thread gets a copy, because a call that fails or times out must not change the state.
            state = _snapshot(rollout.tool_state.get(tool.name, {}))
            pending = PendingCall(pool, rollout, call, state)
            tools[id(tool)] = tool
            calls_of_tool[id(tool)].append(pending)
        for key, pending_calls in calls_of_tool.items():
            tool = tools[key]
            for begin in range(0, len(pending_calls), tool.max_batch):
                self._start(tool, pending_calls[begin : begin + tool.max_batch])

    def _start(self, tool: Tool, pending_calls: list[PendingCall]) -> None:
        """Submits one batch to the threads of its tool."""
        # A pool per tool: a slow tool must not occupy the threads of the others.
        if id(tool) not in self._pools:
            self._pools[id(tool)] = DaemonPool(tool.workers, f'tool-{tool.name}')
        invocations = []
        for pending in pending_calls:
            invocation = Invocation(
                arguments=pending.call.arguments or {},
                state=pending.state,
                rollout=pending.rollout.identity,
            )
            invocations.append(invocation)
        run = functools.partial(self._run, tool, invocations)
        future = asyncio.wrap_future(self._pools[id(tool)].submit(run))
        self._batches[future] = _Batch(tool, time.monotonic(), pending_calls)

    def _run(self, tool: Tool, calls: Sequence[Invocation]) -> list[ToolResult]:
        """Returns the results of a batch in order, whatever the tool raises; runs in a worker thread.

        Changes the states of the calls, logs calls that raise alone, and adds the duration to `seconds`.
        """
        started = time.perf_counter()
        # A batch that raised may have changed some states; every call runs again on its initial state.
        initial_states = [_snapshot(call.state) for call in calls]
        try:
            returned = tool.run(calls)
            if not isinstance(returned, Iterable):
                kind = type(returned).__name__
                raise TypeError(
                    f'run returned a {kind}; it must return a list with a ToolResult per call'
                )
            results = list(returned)
            if len(results) != len(calls):
                raise ValueError(f'{len(calls)} calls returned {len(results)} results')
            for result in results:
                _check_result(result)
            return results
        # BaseException, because this is a thread of its own: `sys.exit` in a tool, or a CancelledError of an event loop
        # that it runs, would otherwise end the run.
        except BaseException as error:
            # An exception of a tool becomes an observation of the rollout and does not end the run.
            for call, state in zip(calls, initial_states):
                call.state.clear()
                call.state.update(state)
            if len(calls) > 1:
                # One bad call must not fail the calls of other rollouts: which calls share a batch depends
                # on the clock, and results must not.
                results = []
                for call in calls:
                    results += self._run(tool, [call])
                return results
            arguments = str(dict(calls[0].arguments))[:_MAX_LOGGED_ARGUMENTS]
            frame = traceback.extract_tb(error.__traceback__)[-1]
            tool.failure_log.add(f'{arguments}: {error!r} at {frame.filename}:{frame.lineno}')
            return [ToolResult(error='failed')]
        finally:
            self.seconds[tool.name].append(time.perf_counter() - started)

    def finished(self) -> list[tuple[PendingCall, ToolCall]]:
        """Returns the tool calls that ended or timed out since this method was last called, with their results.

        Removes their batches, counts calls and failures, and stores the tool state of successful calls in
        their rollouts.
        """
        ended: list[tuple[PendingCall, ToolCall]] = []
        # The items are copied, because the loop removes finished batches.
        for future, batch in list(self._batches.items()):
            if not future.done() and not self._is_overdue(batch):
                continue
            del self._batches[future]
            results: Sequence[ToolResult]
            if future.done():
                results = future.result()
            else:
                results = [ToolResult(error='timeout') for _ in batch.calls]
                for _ in batch.calls:
                    batch.tool.failure_log.add(f'no result within {self._limit(batch.tool):g} s')
                self._replace_threads(future, batch.tool)
            self._count(batch.tool, results)
            for pending, result in zip(batch.calls, results, strict=True):
                # A failed call leaves the state unchanged, so that the same call can be tried again.
                if result.error is None:
                    pending.rollout.tool_state[batch.tool.name] = pending.state
                completed = pending.rollout.env.with_result(pending.call, result)
                ended.append((pending, completed))
        return ended

    def _replace_threads(self, future: asyncio.Future, tool: Tool) -> None:
        """Cancels a batch if it has not begun, and gives the tool new threads for its next call."""
        future.cancel()
        # The old threads may never return. A pool without references ends its threads when their calls return.
        self._pools.pop(id(tool), None)

    def _count(self, tool: Tool, results: Sequence[ToolResult]) -> None:
        failed = sum(result.error in ('failed', 'timeout') for result in results)
        self.counts[f'{tool.name}/calls'] += len(results)
        self.counts[f'{tool.name}/failed'] += failed

    def check_failure_rate(
        self, limit: float, search_limit: float | None = None, tools: Iterable[Tool] = ()
    ) -> None:
        """Stops a run if a tool failed too often since the last call; resets the counts.

        Args:
          limit: largest allowed share of failed or timed-out calls of one tool (`tools.max_failure_rate`).
          search_limit: that share of the built-in search, and of answers of a policy at a server
            (`retrieval.max_failure_rate`); None: `limit`.
          tools: the tools of the run, whose calls that failed before they were run count too.

        Raises:
          UserError: a tool with at least _MIN_CALLS calls exceeds its limit.
        """
        counts, answers = self.counts, self.answers
        self.counts, self.answers = collections.Counter(), collections.Counter()
        tool_rate = 'tools.max_failure_rate', limit
        search_rate = tool_rate
        if search_limit is not None:
            search_rate = 'retrieval.max_failure_rate', search_limit
        searches = set()
        for tool in tools:
            if isinstance(tool, SearchTool):
                searches.add(tool.name)
            failed_before_run = tool.failure_log.take_failed_before_run()
            counts[f'{tool.name}/calls'] += failed_before_run
            counts[f'{tool.name}/failed'] += failed_before_run
        # Sorted, so that all processes name the same tool.
        for name in sorted({key.partition('/')[0] for key in counts}):
            calls, failed = counts[f'{name}/calls'], counts[f'{name}/failed']
            rate = search_rate if name in searches else tool_rate
            _check_rate(calls, failed, rate, f'calls of the tool {name!r}', 'tool')
        whose = 'answers of the policy', "policy's server"
        _check_rate(answers['calls'], answers['failed'], search_rate, *whose)

    def _is_overdue(self, batch: _Batch) -> bool:
        if self.deterministic:
            return False
        return time.monotonic() - batch.started > self._limit(batch.tool)

    def _limit(self, tool: Tool) -> float:
        """Seconds that a call may take."""
        if tool.timeout is not None:
            return tool.timeout
        return self.timeout

    def abandon(self) -> None:
        """Drops all calls in progress; `finished` will not return them."""
        # Threads cannot be interrupted. They end with their calls or with the process.
        for future, batch in self._batches.items():
            if not future.done():
                self._replace_threads(future, batch.tool)
        self._batches.clear()
