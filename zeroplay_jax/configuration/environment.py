"""The environment of a command: its output streams, and the limits of the shell that started it."""

from __future__ import annotations

import io
import os
import resource
import stat
import sys
from typing import Any, TextIO

from zeroplay_jax.types import UserError

# Files that a small run has open at once, with a margin; larger ones have connections and index files besides.
_OPEN_FILES = 128
# Checkpoints have files of this size and more.
_FILE_BYTES = 1 << 28
_NAMES = {1: 'standard output', 2: 'standard error'}


def outlive_readers() -> None:
    """Makes standard output and error go nowhere once their reader is gone (`| head -1`), instead of ending a run.

    Without effect on streams that the program has replaced, and on files and terminals. A descriptor that was closed
    when the command began (`2>&-`) is opened to nowhere: the next file of the run would get its number.
    """
    for descriptor, name in enumerate(('stdin', 'stdout', 'stderr')):
        stream = getattr(sys, name)
        if not _is_open(descriptor):
            _point_nowhere(descriptor)
            if stream is None:
                setattr(sys, name, open(descriptor, 'r+' if descriptor else 'r', closefd=False))
        elif descriptor and stream is getattr(sys, f'__{name}__') and _has_reader(descriptor):
            setattr(sys, name, _outliving(stream, descriptor))


def check_limits() -> None:
    """Refuses limits of the shell under which no run ends; raises the limit of open files where that is allowed.

    Raises:
      UserError: one line.
    """
    most_files, most_possible = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most_files < _OPEN_FILES:
        if 0 <= most_possible < _OPEN_FILES:
            raise UserError(
                f'the shell allows {most_files} open files (ulimit -n), a run needs {_OPEN_FILES} or more; raise the '
                f'limit, such as ulimit -n 4096 (its hard limit is {most_possible})'
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, most_possible))
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most_bytes < _FILE_BYTES:
        raise UserError(
            f'the shell allows files of {most_bytes} bytes (ulimit -f), checkpoints and compiled programs are larger; '
            'raise the limit: ulimit -f unlimited'
        )


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


def _outliving(stream: TextIO, descriptor: int) -> TextIO:
    """Returns a text stream like `stream` over an `_OutlivingFile`."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_OutlivingFile(descriptor, 'w', closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=descriptor == 2,
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
