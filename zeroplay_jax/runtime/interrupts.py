"""Ctrl-C while a command loads: one line and status 130.

Libraries take seconds to import, most of it in C++ code. A KeyboardInterrupt there becomes a traceback
of the import machinery, or an ImportError of a library. Imports nothing but the standard library: it
is the first module that a command loads.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Any, NoReturn

# The status of a process that SIGINT ended: 128 + 2.
_STATUS = 130


def exit_while_loading() -> None:
    """From now on Ctrl-C ends the process at once: nothing has begun that could be left half done."""
    # Started in the background, a process ignores the signal; that must remain so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A copy: file descriptor 2 leads elsewhere while talkative libraries load (`quiet`).
        signal.signal(signal.SIGINT, functools.partial(_exit, os.dup(2)))


def raise_again() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again. Does nothing under any other handler."""
    # asyncio, too, handles Ctrl-C only where it finds Python's own handler.
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, functools.partial) and handler.func is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(terminal: int, *_: Any) -> NoReturn:
    # Not through sys.stderr, which may be in use by the interrupted code.
    os.write(terminal, b'\nzeroplay_jax: stopped before it began\n')
    os._exit(_STATUS)
