"""Makes Ctrl-C end a command that is still loading with one line and status 130.

Libraries take seconds to import, mostly in C++ code. A KeyboardInterrupt there becomes a traceback of the
import machinery, or an ImportError of a library. This module imports the standard library only, because it
is the first one that a command loads.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Any, NoReturn

# The status of a process that SIGINT ended: 128 + 2.
_STATUS = 130


def exit_while_loading() -> None:
    """Makes Ctrl-C end the process at once; does nothing if another handler is installed.

    Call it while nothing has begun that could be left half done, and `raise_again` afterwards.
    """
    # A process that was started in the background ignores the signal, and must continue to ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The descriptor is copied, because number 2 is redirected while libraries that print messages load.
        signal.signal(signal.SIGINT, functools.partial(_exit, os.dup(2)))


def raise_again() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again; does nothing unless `exit_while_loading` set the handler."""
    # asyncio needs Python's own handler as well: it replaces no other one.
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, functools.partial) and handler.func is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(terminal: int, *_: Any) -> NoReturn:
    """Signal handler: writes one line to the file descriptor `terminal` and ends the process."""
    # sys.stderr is avoided, because the interrupted code may be using it.
    os.write(terminal, b'\nzeroplay_jax: stopped before it began\n')
    os._exit(_STATUS)
