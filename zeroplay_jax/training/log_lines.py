"""Prints what libraries log above the progress bar instead of into its line."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from absl import logging as absl_logging


class _LinesAbove:
    """A stream that passes whole lines on to `write`; everything else is that of the stream it replaces."""

    def __init__(self, stream: TextIO, write: Callable[[str], None]):
        self._stream = stream
        self._write = write
        self._line = ''

    def write(self, text: str) -> int:
        self._line += text
        # Loggers write a message and its line end in one or in two calls.
        *lines, self._line = self._line.split('\n')
        for line in lines:
            self._write(line)
        return len(text)

    def close_line(self) -> None:
        """Writes an incomplete last line."""
        if self._line:
            self._write(self._line)
            self._line = ''

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lines_above(stream: TextIO, write: Callable[[str], None]) -> Iterator[None]:
    """A context in which messages of loggers, and other writes to standard error, go to `write`, line by line.

    Args:
      stream: standard error, on which a bar is drawn.
      write: prints a line above the bar.
    """
    lines = _LinesAbove(stream, write)
    # Loggers keep the stream that they were made with, so each of them has to be changed: that of absl, which Orbax
    # uses, and those of the root logger.
    handlers: list[Any] = [absl_logging.get_absl_handler().python_handler]
    handlers += logging.getLogger().handlers
    redirected = []
    for handler in handlers:
        if getattr(handler, 'stream', None) is stream:
            handler.stream = lines
            redirected.append(handler)
    sys.stderr = lines
    try:
        yield
    finally:
        sys.stderr = stream
        for handler in redirected:
            handler.stream = stream
        lines.close_line()
