"""Lookup of passages by a text key (an id or a title) through a sorted table of hashes on disk.

A table is one file: uint64 [2, K], where row 0 holds the hashes of the keys in ascending order and row 1 the passage
number of each key. It is memory-mapped and searched by bisection, so a lookup reads a few pages of the file however
many passages there are.
"""

from __future__ import annotations

import hashlib
import pathlib

import numpy as np
from jaxtyping import UInt64

from .types import RetrievalError


def key_hash(key: str) -> int:
    """Returns the first 8 bytes of BLAKE2b of a key, as an unsigned integer."""
    # A policy can produce a lone surrogate, which plain UTF-8 refuses to encode.
    encoded = key.encode('utf-8', 'surrogatepass')
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    return int.from_bytes(digest, 'little')


def write_table(
    path: pathlib.Path, hashes: UInt64[np.ndarray, ' keys'], rows: UInt64[np.ndarray, ' keys']
) -> None:
    """Writes the table of `hashes` and the passage number that belongs to each."""
    # The stable sort keeps the rows of equal hashes ascending, so that the first passage is found first.
    order = np.argsort(hashes, kind='stable')
    np.save(path, np.stack([hashes[order], rows[order]]))


class KeyTable:
    """A table written by `write_table`, opened for lookups."""

    def __init__(self, path: pathlib.Path):
        """Opens the file.

        Raises:
          RetrievalError: the file cannot be read or has another shape or dtype.
        """
        try:
            # Not read into memory: the table of 21 million ids takes 0.3 GB.
            table = np.load(path, mmap_mode='r')
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f'{path}: cannot be read ({error}); build the index again'
            ) from error
        if table.ndim != 2 or len(table) != 2 or table.dtype != np.uint64:
            raise RetrievalError(
                f'{path}: {table.dtype} {table.shape} is not a table of hashes; build the index again'
            )
        self._hashes = table[0]
        self._rows = table[1]

    def candidates(self, key: str) -> list[int]:
        """Returns the ascending numbers of the passages whose key has the hash of `key`.

        Different keys can share a hash: the caller compares the real key of each candidate.
        """
        # A Python integer would make NumPy convert the whole table to float64.
        wanted_hash = np.uint64(key_hash(key))
        first = np.searchsorted(self._hashes, wanted_hash, side='left')
        last = np.searchsorted(self._hashes, wanted_hash, side='right')
        return [int(row) for row in self._rows[first:last]]
