"""Parts of a step in a bucket: the files that each of several processes uploads.

Every process saves the shards that it owns in a folder of its own, and uploads the files that process 0 does not have:

    parts/00000008-1f02c9d4/0.json   written before process 0 uploads: step 8 is due, and these files are its own
    parts/00000008-1f02c9d4/1.json   written when process 1 has uploaded its own files; a null in it: the process has
                                     removed the step meanwhile, so that it must be skipped

The hexadecimal digits are those of the lease. When all parts are there, process 0 writes the object that makes the step
complete (`remote_workdir`), with the files of all parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.remote_workdir import Manifest, RemoteWorkdir, manifest_of, manifest_text

# Folder of the parts.
PARTS = 'parts/'


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

    def write(self, step: int, process: int, manifest: Manifest | None) -> None:
        """Writes the part of a process.

        Args:
          step: number of the step.
          process: index of the process.
          manifest: its files; None: it does not have the step any more.
        """
        self.remote.bucket.write(self._name(step, process), manifest_text(step, manifest))

    def newest_due(self) -> int | None:
        """Returns the newest step that process 0 uploads or has uploaded; None if there is none."""
        steps = []
        for entry in self.remote.bucket.list(self.remote.name(PARTS)):
            step = int(entry.name.removeprefix(self.remote.name(PARTS)).partition('-')[0])
            if entry.name == self._name(step, 0):
                steps.append(step)
        return max(steps, default=None)

    def read(self, step: int, process: int) -> Manifest | None:
        """Returns the files of a process; None if it does not have the step any more.

        Raises:
          KeyError: there is no such part.
        """
        found = self.remote.bucket.read(self._name(step, process))
        if found is None:
            raise KeyError(process)
        return manifest_of(found[0])[1]

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
                part = self.read(step, process)
            except KeyError:
                return None
            if part is None:
                self.remote.bucket.delete(self._name(step, process))
                raise Skipped(step)
            parts.append(part)
        return merge(parts)

    def _name(self, step: int, process: int) -> str:
        return self.remote.name(f'{PARTS}{step:08d}-{self.lease}/{process}.json')


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
