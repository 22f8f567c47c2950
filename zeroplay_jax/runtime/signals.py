"""Ctrl-C and SIGTERM end a command that is loading at once, with one line; SIGTERM asks a run that trains to save.

Libraries take seconds to import and models minutes to load, mostly in C++ code. A KeyboardInterrupt there becomes a
traceback of the import machinery, an ImportError of a library, or nothing at all where a callback of a library is
interrupted, whose exceptions are ignored.

Clusters send SIGTERM some seconds before they take a machine away. The signal only sets a flag, which rollouts look
at between two rounds: those in progress are dropped, an update is completed first. With several processes, one that got
the signal tells the others, and all of them drop the same step.

This module imports the standard library only, because it is the first one
that a command loads; JAX is imported where processes talk to each other.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

# The status of a process that SIGINT ended: 128 + 2.
_INTERRUPTED_STATUS = 130
# That of one that SIGPIPE ended: 128 + 13.
_NO_READER_STATUS = 141
# Status of a run that SIGTERM asked to end: EX_TEMPFAIL of sysexits.h, the same command may succeed later. No other end
# of a run has it.
PREEMPTED_STATUS = 75


def exit_while_loading() -> None:
    """Makes Ctrl-C end the process at once; does nothing if another handler is installed.

    Call it while nothing has begun that could be left half done, and `raise_again` afterwards.
    """
    # A process that was started in the background ignores the signal, and must continue to ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _install(signal.SIGINT, b'stopped before it began', _INTERRUPTED_STATUS)


def exit_on_sigterm() -> None:
    """Makes SIGTERM end the process at once with `PREEMPTED_STATUS`, unless another handler is installed.

    While a run trains, `watched` replaces the handler.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        line = b'stopped by SIGTERM before a step; the same command starts or resumes the run'
        _install(signal.SIGTERM, line, PREEMPTED_STATUS)


def raise_again() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again; does nothing unless `exit_while_loading` set the handler."""
    # asyncio needs Python's own handler as well: it replaces no other one.
    if is_exit(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def interrupt_held() -> Iterator[None]:
    """Returns a context at whose end a Ctrl-C acts that came within it; a second one ends the process at once.

    It is for calls of libraries that start threads: if one is interrupted half-way, later calls wait for threads that
    do not exist. SIGTERM needs nothing like it, because it sets a flag or ends the process. Without effect outside of
    the main thread, and where another handler is installed.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    line = b'stopped; the last complete checkpoint is there'
    signal.signal(signal.SIGINT, lambda *_: _install(signal.SIGINT, line, _INTERRUPTED_STATUS))
    try:
        yield
    finally:
        # The handler of a second one, if the first one came.
        handler: Any = signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_exit(handler):
            os.close(handler.args[0])
    # An error of the body says more than the interrupt.
    if is_exit(handler):
        raise KeyboardInterrupt


def is_exit(handler: Any) -> bool:
    """Returns whether a handler is one of this module."""
    return isinstance(handler, functools.partial) and handler.func is _exit


def _install(number: int, line: bytes, status: int) -> None:
    # The descriptor is copied, because number 2 is redirected while libraries that print messages load.
    signal.signal(number, functools.partial(_exit, os.dup(2), line, status))


def _exit(terminal: int, line: bytes, status: int, *_: Any) -> NoReturn:
    """Signal handler: writes one line to the file descriptor `terminal` and ends the process."""
    # sys.stderr is avoided, because the interrupted code may be using it. The terminal may be gone.
    try:
        os.write(terminal, b'\nzeroplay_jax: ' + line + b'\n')
    finally:
        os._exit(status)


# Folder of the key-value store with an entry for every process that got the signal.
_FOLDER = 'zeroplay_jax/preempted/'
# Seconds between two looks at what other processes got.
_POLL_SECONDS = 0.5
# What a run completes while it samples rollouts: at most a compilation.
_ROUND = 'this round of its rollouts, which are dropped'


class _Request:
    """Whether this process, or another one of the run, was asked to end."""

    def __init__(self) -> None:
        self.is_watched = False
        self.is_made = False
        # What is completed before the run ends.
        self.work = _ROUND
        self._is_announced = False
        self._next_look = 0.0

    def reached(self) -> bool:
        """Returns whether some process was asked; tells the others if it was this one."""
        if not self.is_watched:
            return self.is_made
        # Imported here: commands watch signals before they load JAX.
        import jax

        from zeroplay_jax.runtime.hosts import key_value_store

        if jax.process_count() == 1:
            return self.is_made
        if self.is_made:
            if not self._is_announced:
                self._is_announced = True
                key_value_store().key_value_set(f'{_FOLDER}{jax.process_index()}', 'asked')
            return True
        # The store is another machine for most processes, and a round may take a millisecond.
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _POLL_SECONDS
            self.is_made = self._is_announced = bool(key_value_store().key_value_dir_get(_FOLDER))
        return self.is_made


_request = _Request()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Returns a context in which SIGTERM makes `raise_if_requested` raise, instead of ending the process.

    Without effect outside of the main thread, as in a notebook's thread, and where the program has its own handler.
    """
    global _request
    previous = signal.getsignal(signal.SIGTERM)
    is_main_thread = threading.current_thread() is threading.main_thread()
    # None: the handler of a C library. SIG_DFL and SIG_IGN are numbers.
    has_own_handler = callable(previous) and not is_exit(previous)
    if not is_main_thread or has_own_handler:
        yield
        return
    _request = _Request()
    _request.is_watched = True
    signal.signal(signal.SIGTERM, _note)
    try:
        yield
    finally:
        # A later run of this process, as in a notebook, was not asked to end.
        _request = _Request()
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def is_watched() -> bool:
    """Returns whether SIGTERM only sets a flag at present, so that waits have to look at it."""
    return _request.is_watched


def raise_if_requested() -> None:
    """Raises Preempted if this process or another one of the run was asked to end.

    Processes notice it at different times, so what they do next must be shared by `Hosts.run_on_all_and_gather`.
    """
    if _request.reached():
        # Imported here: it loads NumPy, and Ctrl-C must end a command before that.
        from zeroplay_jax.types import Preempted

        raise Preempted('stopped by SIGTERM')


@contextlib.contextmanager
def completing(work: str) -> Iterator[None]:
    """Returns a context whose work, named for a line to the user, is completed before the run ends."""
    request = _request
    request.work = work
    try:
        yield
    finally:
        request.work = _ROUND


def _note(*_: Any) -> None:
    """Signal handler: notes the request, and says at once what the run completes first, which may take minutes."""
    if not _request.is_made:
        line = f'SIGTERM: saves and ends after {_request.work}; the last checkpoint is complete in any case'
        # sys.stderr is avoided, because the interrupted code may be using it. The terminal may be gone.
        with contextlib.suppress(OSError):
            os.write(2, f'\nzeroplay_jax: {line}\n'.encode())
    _request.is_made = True


_NAMES = {1: 'standard output', 2: 'standard error'}


def open_closed() -> None:
    """Opens to nowhere the standard streams that were closed when the command began (`2>&-`).

    The next file of the command would get the number of such a stream, and messages of libraries.
    """
    for descriptor, name in enumerate(('stdin', 'stdout', 'stderr')):
        if not _is_open(descriptor):
            _point_nowhere(descriptor)
        if getattr(sys, name) is None:
            mode = 'w' if descriptor else 'r'
            setattr(sys, name, open(descriptor, mode, closefd=False))


def end_with_reader() -> None:
    """Makes the process end silently, as SIGPIPE would, once the reader of its standard output is gone.

    Without effect on a stream that the program has replaced, and on files and terminals.
    """
    # SIGPIPE itself would also end a process whose server or tool closes a connection.
    _watch(1, 'stdout')


def outlive_readers() -> None:
    """Makes standard output and error, also watched ones, go nowhere once their reader is gone; `end_with_reader`."""
    _WatchedFile.outlives = True
    _watch(1, 'stdout')
    _watch(2, 'stderr')


def _watch(descriptor: int, name: str) -> None:
    stream = getattr(sys, name)
    if stream is getattr(sys, f'__{name}__') and _has_reader(descriptor):
        setattr(sys, name, _watched_stream(stream, descriptor))


class _WatchedFile(io.FileIO):
    """A stream of bytes that writes nowhere after its reader is gone, and says so on the other stream; or that ends."""

    outlives = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            if not self.outlives:
                os._exit(_NO_READER_STATUS)
            descriptor = self.fileno()
            _point_nowhere(descriptor)
            line = f'{_NAMES[descriptor]} has no reader any more; the command continues without it'
            try:
                os.write(3 - descriptor, f'zeroplay_jax: {line}\n'.encode())
            except OSError:
                # The other one is gone, too.
                pass
            return memoryview(data).nbytes


def _watched_stream(stream: io.TextIOWrapper, descriptor: int) -> TextIO:
    """Returns a text stream like `stream` over a `_WatchedFile`."""
    stream.flush()
    file = _WatchedFile(descriptor, 'w', closefd=False)
    # `python -u` has no buffer.
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or descriptor == 2,
        write_through=stream.write_through,
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _has_reader(descriptor: int) -> bool:
    """Returns whether a descriptor is a pipe or a socket."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _point_nowhere(descriptor: int) -> None:
    """Makes a descriptor that of /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
