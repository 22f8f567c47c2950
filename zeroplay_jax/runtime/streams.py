"""The output streams of a command: they may be closed, and their readers may leave (`| head -1`).

Imports the standard library only, because it is used before anything else of a command.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any, TextIO

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


def outlive_readers() -> None:
    """Makes standard output and error go nowhere once their reader is gone, instead of ending the command.

    Without effect on streams that the program has replaced, and on files and terminals.
    """
    for descriptor, name in ((1, 'stdout'), (2, 'stderr')):
        stream = getattr(sys, name)
        if stream is getattr(sys, f'__{name}__') and _has_reader(descriptor):
            setattr(sys, name, _outliving(stream, descriptor))


class _OutlivingFile(io.FileIO):
    """A stream of bytes that writes nowhere after its reader is gone, and says so on the other stream."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            descriptor = self.fileno()
            _point_nowhere(descriptor)
            line = f'{_NAMES[descriptor]} has no reader any more; the command continues without it'
            try:
                os.write(3 - descriptor, f'zeroplay_jax: {line}\n'.encode())
            except OSError:
                # The other one is gone, too.
                pass
            return memoryview(data).nbytes


def _outliving(stream: io.TextIOWrapper, descriptor: int) -> TextIO:
    """Returns a text stream like `stream` over an `_OutlivingFile`."""
    stream.flush()
    file = _OutlivingFile(descriptor, 'w', closefd=False)
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
