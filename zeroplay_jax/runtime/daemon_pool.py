"""Threads that run functions and never keep the process alive.

`concurrent.futures.ThreadPoolExecutor` is the obvious choice and not usable here: Python joins its
threads when the process ends, so a tool that never returns would keep every run from ending.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

# How long the end of the process waits for functions in progress. They get this time because a
# thread of a C++ library that is stopped in the middle may crash the process.
_EXIT_SECONDS = 2.0

# A future and the call that will set its result; None ends the thread that takes it.
_Task = tuple[concurrent.futures.Future, Callable[[], Any]] | None
# `_finish` reads both at the end of the process. Threads are listed apart, because they may outlive their pool.
_pools: weakref.WeakSet[DaemonPool] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class DaemonPool:
    """Runs functions in daemon threads, in the order of submission.

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
