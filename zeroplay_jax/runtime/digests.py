"""SHA-256 of files, several at a time."""

from __future__ import annotations

import concurrent.futures
import hashlib
import pathlib
from collections.abc import Sequence

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
