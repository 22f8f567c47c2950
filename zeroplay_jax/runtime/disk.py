"""Files on disk: replaced completely or not at all, and their SHA-256, several at a time."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib
from collections.abc import Iterable, Sequence
from pathlib import Path


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Replaces a file by UTF-8 text, or by its pieces, as `write_bytes` does."""
    pieces = [text] if isinstance(text, str) else text
    write_bytes(path, (piece.encode() for piece in pieces))


def write_bytes(path: Path, pieces: Iterable[bytes]) -> None:
    """Replaces a file atomically; after a failure the previous file is unchanged.

    Args:
      path: the file to write; its folder must exist.
      pieces: the content, which is joined without separators.
    """
    # os.replace is atomic only within one file system, so the draft lies in the same folder. The process id keeps
    # two processes that write the same file from sharing a draft.
    draft = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        with draft.open('wb') as file:
            file.writelines(pieces)
        os.replace(draft, path)
    except OSError as error:
        # The user knows the name of the file, not that of its draft.
        if error.filename:
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        # After a success there is no draft any more, because os.replace has moved it.
        draft.unlink(missing_ok=True)


# Hashing releases Python's lock, and a network disk has more to give than one reader takes.
_THREADS = 8


def file_digests(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns the SHA-256 of files, in hexadecimal digits and their order; reads every byte, 1 to 2 GB/s and core.

    Raises:
      OSError: a file cannot be read.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(_digest, paths))


def _digest(path: pathlib.Path) -> str:
    # Read in blocks, so that a file of any size needs little memory.
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()
