"""Hides messages that C++ libraries write to the terminal directly, bypassing Python's logging."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

_STDERR = 2  # the file descriptor, which C++ writes to


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides all output of this process to file descriptor 2; if the block raises, prints the hidden output."""
    # Text that Python has buffered was written before the block and must appear.
    sys.stderr.flush()
    terminal = os.dup(_STDERR)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), _STDERR)
        try:
            yield
        except BaseException:
            # The hidden output probably explains the exception.
            hidden.seek(0)
            os.write(terminal, hidden.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, _STDERR)
            os.close(terminal)
