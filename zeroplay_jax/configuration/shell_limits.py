"""The limits of the shell that started a command."""

from __future__ import annotations

import resource

from zeroplay_jax.types import UserError

# Files that a small run has open at once, with a margin; larger ones have connections and index files besides.
_OPEN_FILES = 128
# Checkpoints have files of this size and more.
_FILE_BYTES = 1 << 28


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
