"""Exchange of values between the processes of a run.

Each process runs its own share of the episodes, with its own sampler slots and search. After every round of episodes
all of them get all rows (selfplay/rows.py). Between two gathers the processes do not
synchronise, since their rollouts take different numbers of rounds; with `rollout.ahead` a process that has ended its
share of a step continues with the next one until all have (`Hosts.meeting`). All processes compute from the same
gathered bytes and so take the same decisions. Episodes of one step exchange values with `Hosts.share` and
`Hosts.await_shared`.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import functools
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zeroplay_jax.types import Preempted, UserError

# How long the end of the process waits for functions in progress. They get this time because a
# thread of a C++ library that is stopped in the middle may crash the process.
_EXIT_SECONDS = 2.0

# A future and the call that will set its result; None ends the thread that takes it.
_Task = tuple[concurrent.futures.Future, Callable[[], Any]] | None
# `_finish` reads both at the end of the process. Threads are listed apart, because they may outlive their pool.
_pools: weakref.WeakSet[DaemonPool] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class DaemonPool:
    """Runs functions in daemon threads, in the order of submission; they never keep the process alive.

    Python joins the threads of `concurrent.futures.ThreadPoolExecutor` when the process ends, so a tool that never
    returns would keep every run from ending.

    Args:
      workers: largest number of threads.
      name: begins the names of the threads.
    """

    def __init__(self, workers: int, name: str):
        self._workers = workers
        self._name = name
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._started = 0
        # The threads hold a reference to the queue and none to the pool. When the pool is garbage-collected,
        # the queue gets a None, which ends the threads.
        weakref.finalize(self, self._tasks.put, None)
        _pools.add(self)

    def submit(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        """Queues a function and starts a thread if fewer than `workers` exist; returns the future of its result."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._tasks.put((future, function))
        if self._started < self._workers:
            name = f'{self._name}-{self._started}'
            thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
            self._started += 1
            _threads.add(thread)
            thread.start()
        return future

    def stop(self) -> None:
        """Cancels the functions that have not begun, and ends the threads after the functions in progress."""
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    task[0].cancel()
        self._tasks.put(None)


def _work(tasks: queue.SimpleQueue[_Task]) -> None:
    while _run_next(tasks):
        pass


def _run_next(tasks: queue.SimpleQueue[_Task]) -> bool:
    """Runs the next function of the queue; returns False if the thread has to end."""
    # A function of its own: a thread that waits for the next task must not keep the variables of the
    # last one alive, such as its result.
    task = tasks.get()
    if task is None:
        # For the next thread of the pool.
        tasks.put(None)
        return False
    future, function = task
    # A future that was cancelled while it waited.
    if not future.set_running_or_notify_cancel():
        return True
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
    # An error refers to this frame: its future would keep itself alive through it.
    del task, future, function
    return True


@atexit.register
def _finish() -> None:
    """Stops all pools and waits up to `_EXIT_SECONDS` for functions in progress; runs at the end of the process."""
    for pool in list(_pools):
        pool.stop()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


Identity = tuple[int, ...]
# What an exception of another process is raised as in this one.
_ERROR_TYPES: dict[str, type[Exception]] = {
    'user': UserError,
    'preempted': Preempted,
    'other': RuntimeError,
}
# Seconds between two looks at who has arrived at a meeting.
_MEETING_SECONDS = 0.02
# Threads that read values of other processes.
_READERS = 32
# The heartbeat detects a dead process much earlier; this only has to exceed the longest step.
_READ_TIMEOUT_MILLISECONDS = 24 * 3600 * 1000


def sums(counts: Sequence[Mapping[str, float]]) -> collections.Counter:
    """Returns the sum of several processes' counters, name by name."""
    totals: collections.Counter[Any] = collections.Counter()
    for process_counts in counts:
        # Unlike `+`, `update` keeps names whose count is zero or negative.
        totals.update(process_counts)
    return totals


class Hosts:
    """Communication between the processes of a run; with a single process every call is local.

    Attributes:
      index: index of this process.
      count: number of processes.
      seconds: time spent in `gather` and `gather_bytes`, waiting for slower processes included.
    """

    def __init__(self) -> None:
        self.index = jax.process_index()
        self.count = jax.process_count()
        self.seconds = 0.0
        # Identity → future of its value: an episode may wait for a value before another episode shares it.
        self._shared: dict[Identity, asyncio.Future] = {}
        self._readers = DaemonPool(_READERS, 'shared')
        self._meetings = 0

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes the files of the run."""
        return self.index == 0

    def owns(self, identity: Identity) -> bool:
        """Returns whether this process runs the episode of that identity."""
        return self.owner(identity) == self.index

    def owner(self, identity: Identity) -> int:
        """Returns the index of the process that runs the episode of that identity."""
        # The last integer counts the items of a step, so consecutive items go to different processes.
        return identity[-1] % self.count

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes in process order. All processes must call it at the same point.

        Args:
          value: a JSON value; NumPy scalars are allowed.
        """
        if self.count == 1:
            return [value]
        messages = self.gather_bytes(_encode_json(value).encode())
        return [json.loads(message) for message in messages]

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Returns the messages of all processes in process order. All processes must call it at the same point."""
        if self.count == 1:
            return [message]
        started = time.perf_counter()
        size = np.array([len(message)])
        sizes = multihost_utils.process_allgather(size)[:, 0]
        # All processes need the same shape.
        padded_message = np.zeros(padded_size(int(sizes.max())), np.uint8)
        padded_message[: len(message)] = np.frombuffer(message, np.uint8)
        padded_messages = np.asarray(multihost_utils.process_allgather(padded_message))
        self.seconds += time.perf_counter() - started
        return [padded[:size].tobytes() for padded, size in zip(padded_messages, sizes)]

    def run_on_first(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls a function with these arguments in process 0; returns its result, a JSON value, in all.

        All processes must call this.

        Raises:
          Exception: as `run_on_all_and_gather`.
        """
        return self.run_on_all_and_gather(
            lambda: call(*arguments, **keywords) if self.is_first else None
        )[0]

    def run_on_all(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls a function with these arguments in every process; returns the result of this one, any object.

        All processes must call this.

        Raises:
          Exception: as `run_on_all_and_gather`.
        """
        results: list[Any] = []
        self.run_on_all_and_gather(lambda: results.append(call(*arguments, **keywords)))
        return results[0]

    def run_on_all_and_gather(self, call: Callable[[], Any]) -> list[Any]:
        """Runs `call` in every process and returns all results in process order.

        An exception in one process is raised in all of them, so that no process waits for a failed one.

        Args:
          call: returns a JSON value; it may differ between processes.

        Raises:
          UserError, Preempted or RuntimeError: `call` failed in another process. In the failed process: its own
            exception.
        """
        if self.count == 1:
            return [call()]
        value = exception = None
        try:
            value = call()
        # Any exception must reach the other processes, which wait in `gather`.
        except Exception as error:
            exception = error
        text = None if exception is None else str(exception) or repr(exception)
        results = self.gather([value, text, _kind(exception)])
        for process, (_, error_text, kind) in enumerate(results):
            if error_text is None:
                continue
            # The first failed process determines the error, so that all of them report the same one.
            if process == self.index and exception is not None:
                raise exception
            raise _ERROR_TYPES[kind](f'process {process}: {error_text}') from exception
        return [value for value, _, _ in results]

    def share(self, identity: Identity, value: Any) -> None:
        """Makes a JSON value readable in all processes. Only the process that owns the identity may call it.

        A second call with the same identity does nothing, so an episode can share a default in a `finally` block.
        Needs a running event loop.
        """
        future = self._future(identity)
        if future.done():
            return
        future.set_result(value)
        if self.count > 1:
            key_value_store().key_value_set(_key(identity), _encode_json(value))

    async def await_shared(self, identity: Identity) -> Any:
        """Waits until the owner of the identity shares a value, and returns it.

        It waits up to a day for another process, and without a limit for this one, so every episode must share its
        value even if it fails.
        """
        if self.owns(identity):
            return await self._future(identity)
        # The store's read blocks, so it runs in a thread and does not stop the other episodes. The event loop's own
        # threads would do, but the end of the loop waits for them: after an error nobody may share the value.
        read = functools.partial(_read_blocking, _key(identity))
        future = self._readers.submit(read)
        text = await asyncio.wrap_future(future)
        return json.loads(text)

    def clear_shared(self, keep: int | None = None) -> None:
        """Deletes shared values. All processes call it, when none of them runs an episode whose values are deleted.

        Args:
          keep: identities that begin with this step number are kept; None: none are.
        """
        if keep is None:
            # Reads of cancelled episodes may occupy the threads.
            self._readers = DaemonPool(_READERS, 'shared')
        kept: dict[Identity, asyncio.Future] = {}
        for identity, future in self._shared.items():
            if keep is not None and identity[0] == keep:
                kept[identity] = future
            # Each key is deleted once, by the process that set it.
            elif self.count > 1 and self.owns(identity) and future.done():
                key_value_store().key_value_delete(_key(identity))
        self._shared = kept

    def meeting(self) -> Meeting:
        """Returns a new meeting of all processes; all of them must make their meetings in the same order."""
        self._meetings += 1
        return Meeting(self, self._meetings)

    def _future(self, identity: Identity) -> asyncio.Future:
        """Returns the future of an identity; creates it in the running event loop if there is none."""
        if identity not in self._shared:
            loop = asyncio.get_running_loop()
            self._shared[identity] = loop.create_future()
        return self._shared[identity]


class Meeting:
    """Tells whether all processes have arrived at a point, without waiting for them.

    Args:
      hosts: the processes, of which there are several.
      number: of the meeting.
    """

    def __init__(self, hosts: Hosts, number: int):
        self._hosts = hosts
        self._folder = f'zeroplay_jax/meeting_{number}/'
        self._has_arrived = False
        self._is_complete = False
        self._next_look = 0.0

    def arrive(self) -> None:
        """Notes that this process has arrived; further calls do nothing."""
        if not self._has_arrived:
            self._has_arrived = True
            key_value_store().key_value_set(f'{self._folder}{self._hosts.index}', 'arrived')

    def is_complete(self) -> bool:
        """Returns whether all processes have arrived, this one by calling it."""
        self.arrive()
        # The store is another machine for most processes, and a round of the scheduler may take a millisecond.
        if not self._is_complete and time.monotonic() >= self._next_look:
            arrived = key_value_store().key_value_dir_get(self._folder)
            self._is_complete = len(arrived) == self._hosts.count
            self._next_look = time.monotonic() + _MEETING_SECONDS
        return self._is_complete

    def close(self) -> None:
        """Deletes what this process noted, after all processes have seen it."""
        key_value_store().key_value_delete(f'{self._folder}{self._hosts.index}')


def padded_size(size: int) -> int:
    """Returns a size of at least `size`, by less than a quarter larger, of which there are four between powers of 2."""
    # Every size is compiled once, so there must be few of them.
    step_bits = max(size.bit_length() - 3, 0)
    step = 1 << step_bits
    steps = -(-size // step)  # ceiling
    return steps * step


def _kind(error: Exception | None) -> str:
    """Returns the key of an exception in `_ERROR_TYPES`."""
    if isinstance(error, UserError):
        return 'user'
    return 'preempted' if isinstance(error, Preempted) else 'other'


def _encode_json(value: Any) -> str:
    # NumPy scalars are the only values beyond plain JSON; .item() converts them.
    return json.dumps(value, default=lambda scalar: scalar.item())


def _key(identity: Identity) -> str:
    return 'zeroplay_jax/' + '/'.join(map(str, identity))


def key_value_store() -> Any:
    """Returns the client of JAX's distributed key-value store.

    Episodes share values at different times in different processes, which rules out collectives. JAX has no public
    interface to this store, hence the private import.
    """
    from jax._src import distributed

    return distributed.global_state.client


def _read_blocking(key: str) -> str:
    return key_value_store().blocking_key_value_get(key, _READ_TIMEOUT_MILLISECONDS)
