"""Parts of a step in a bucket: the files that each of several processes uploads.

Every process saves the shards that it owns in a folder of its own, and uploads the files that process 0 does not have:

    parts/00000008-1f02c9d4/0.json            before process 0 uploads: step 8 is due, and these files are its own
    parts/00000008-1f02c9d4/1-5be0a1c7.json   when process 1 has uploaded its own files; a null in it: the process has
                                              removed the step meanwhile, so that it must be skipped

The digits after the step are those of the lease, and those of a part name the files of process 0 that it complements:
another attempt of process 0 may find another best step in its folder, which needs other parts. When all parts are
there, process 0 writes the object that makes the step complete (`remote_workdir`), with the files of all parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.remote_workdir import (
    Manifest,
    RemoteWorkdir,
    checkpoint_files,
    manifest_of,
    manifest_text,
)

# Folder of the parts.
PARTS = 'parts/'
_DIGITS = 8


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that the processes of a run have written since one of them took the lease.

    Attributes:
      remote: workdir of the run in a bucket.
      lease: digits of the id of the lease.
      count: number of processes.
    """

    remote: RemoteWorkdir
    lease: str
    count: int

    def write_first(self, step: int, first: Manifest) -> None:
        """Writes the part of process 0: its files of a step, which is due with it."""
        self.remote.bucket.write(self._first_name(step), manifest_text(step, first))

    def write(self, step: int, process: int, first: Manifest, manifest: Manifest | None) -> None:
        """Writes the part of another process.

        Args:
          step: number of the step.
          process: index of the process.
          first: files of process 0.
          manifest: files of the process; None: it does not have all folders of `first` any more.
        """
        name = self._name(step, process, first)
        self.remote.bucket.write(name, manifest_text(step, manifest))

    def newest_due(self) -> Due | None:
        """Returns the newest step that process 0 uploads; None if all are complete, or none was begun."""
        due = []
        for entry in self.remote.bucket.list(self.remote.name(PARTS)):
            step = int(entry.name.removeprefix(self.remote.name(PARTS)).partition('-')[0])
            if entry.name == self._first_name(step):
                due.append(Due(step, entry.checksum))
        return max(due, default=None)

    def read_first(self, step: int) -> Manifest:
        """Returns the files of process 0.

        Raises:
          KeyError: the step is not due.
        """
        first = self._read(self._first_name(step))
        assert first is not None
        return first

    def read(self, step: int, process: int, first: Manifest) -> Manifest | None:
        """Returns the files of another process; None if it does not have all folders of `first` any more.

        Args:
          step: number of the step.
          process: index of the process.
          first: files of process 0.

        Raises:
          KeyError: there is no such part.
        """
        return self._read(self._name(step, process, first))

    def collect(self, step: int, first: Manifest) -> Manifest | None:
        """Returns the files of all processes, or None if not all of them have uploaded theirs.

        Args:
          step: number of the step.
          first: files of process 0.

        Raises:
          Skipped: a process does not have the step any more. Its part is removed, so that it looks again.
          RetrievalError: two processes have uploaded different contents of one file.
        """
        parts = [first]
        for process in range(1, self.count):
            try:
                part = self.read(step, process, first)
            except KeyError:
                return None
            if part is None:
                self.remote.bucket.delete(self._name(step, process, first))
                raise Skipped(step)
            parts.append(part)
        return merge(parts)

    def _read(self, name: str) -> Manifest | None:
        stored = self.remote.bucket.read(name)
        if stored is None:
            raise KeyError(name)
        content, _ = stored
        return manifest_of(content)[1]

    def _first_name(self, step: int) -> str:
        return self.remote.name(f'{PARTS}{step:08d}-{self.lease}/0.json')

    def _name(self, step: int, process: int, first: Manifest) -> str:
        # Logs differ between attempts of process 0; other processes have none.
        text = manifest_text(step, checkpoint_files(first))
        digits = hashlib.sha256(text).hexdigest()[:_DIGITS]
        return self.remote.name(f'{PARTS}{step:08d}-{self.lease}/{process}-{digits}.json')


class Due(NamedTuple):
    """A step that process 0 uploads.

    Attributes:
      step: number of the step.
      checksum: of the part of process 0; another attempt of it may have other files.
    """

    step: int
    checksum: str


class Skipped(Exception):
    """A process has removed the step before it was uploaded."""


def merge(parts: Iterable[Manifest]) -> Manifest:
    """Returns the files of all parts.

    Raises:
      RetrievalError: two parts have different contents of one file.
    """
    merged: Manifest = {}
    for part in parts:
        for path, file in part.items():
            # Orbax writes each shard in one process only. If that changes, a mixture must not look like a checkpoint.
            if merged.setdefault(path, file) != file:
                raise RetrievalError(f'{path}: two processes have saved different contents')
    return merged
