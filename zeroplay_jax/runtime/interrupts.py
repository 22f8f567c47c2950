"""Makes Ctrl-C and SIGTERM end a command that is still loading at once, with one line and a status of its own.

Libraries take seconds to import and models minutes to load, mostly in C++ code. A KeyboardInterrupt there becomes a
traceback of the import machinery, an ImportError of a library, or nothing at all where a callback of a library is
interrupted, whose exceptions are ignored. This module imports the standard library only, because it is the first one
that a command loads.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Any, NoReturn

# The status of a process that SIGINT ended: 128 + 2.
_INTERRUPTED_STATUS = 130
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

    While a run trains, `preemption.watched` replaces the handler.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        line = b'stopped by SIGTERM; the same command resumes the run'
        _install(signal.SIGTERM, line, PREEMPTED_STATUS)


def raise_again() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again; does nothing unless `exit_while_loading` set the handler."""
    # asyncio needs Python's own handler as well: it replaces no other one.
    if is_exit(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
