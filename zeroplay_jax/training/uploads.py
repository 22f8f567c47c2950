"""Uploads from a local folder to a bucket, in a thread: further attempts after errors, and what was sent already."""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.retrieval.downloads import THREADS
from zeroplay_jax.retrieval.objects import Unavailable
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.remote_workdir import (
    Manifest,
    RemoteFile,
    RemoteWorkdir,
    checkpoint_files,
    manifest_of,
    manifest_text,
)
from zeroplay_jax.types import UserError

# Folder in the local one with links to what is uploaded.
STAGING = '.upload'
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class Uploads(abc.ABC):
    """A thread that uploads files of a local folder, from `start` until it is closed.

    Args:
      remote: workdir of the run in a bucket.
      folder: local folder in which the run works.
      seconds: for which uploads are tried again while none succeeds.
    """

    def __init__(self, remote: RemoteWorkdir, folder: pathlib.Path, seconds: float):
        self._remote = remote
        self._folder = folder
        self._seconds = seconds
        # Object → SHA-256 of what this process has uploaded, so that another attempt skips it.
        self._sent: dict[str, str] = {}
        self._error: Exception | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name='upload', daemon=True)

    @property
    def lost(self) -> str:
        """A line about the process that took the lease of this one; '' while there is none."""
        return ''

    @abc.abstractmethod
    def is_pending(self) -> bool:
        """Returns whether the newest checkpoint of the local folder still has to be made complete in the bucket.

        Raises:
          UserError: as `raise_if_failed`.
        """

    def raise_if_failed(self) -> None:
        """Raises what ended the uploads.

        Raises:
          UserError: one line; the bucket cannot be written, or another process took the lease.
        """
        if self.lost:
            raise UserError(f'{self.lost}; {self._saved_text()}')
        if isinstance(self._error, RetrievalError):
            raise UserError(f'{self._error}; {self._saved_text()}') from None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the thread; the file that it uploads is completed before."""
        self._is_closed.set()
        self._thread.join()
        shutil.rmtree(self._folder / STAGING, ignore_errors=True)

    # ---- in the thread -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _run(self) -> None:
        """Uploads until `_is_closed` is set."""

    @abc.abstractmethod
    def _saved_text(self) -> str:
        """Returns what is saved where after an error, in words."""

    def _try(self, call: Callable[[], None]) -> None:
        """Calls a function, again after errors that may pass; sets `_error` if it fails in the end."""
        deadline = 0.0
        num_sent = -1
        pause = _FIRST_PAUSE
        while True:
            try:
                call()
                return
            except Unavailable as error:
                # A large checkpoint may take longer than the outages during its upload last.
                if len(self._sent) != num_sent:
                    num_sent = len(self._sent)
                    deadline = time.monotonic() + self._seconds
                    pause = _FIRST_PAUSE
                if time.monotonic() + pause > deadline:
                    self._error = RetrievalError(
                        f'{error} (tried for {self._seconds:.0f} s, config.bucket.seconds)'
                    )
                    return
            except Exception as error:
                self._error = error
                return
            if self._is_closed.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _send_all(
        self, folder: pathlib.Path, manifest: Manifest, is_included: Callable[[str], bool]
    ) -> None:
        """Uploads the files of a manifest that this process has not uploaded before."""

        def send(path: str) -> None:
            file = manifest[path]
            if self._sent.get(file.object) == file.sha256:
                return
            if self._is_closed.is_set() or self.lost:
                return
            self._remote.bucket.upload(self._remote.name(file.object), folder / path)
            self._sent[file.object] = file.sha256

        with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(send, filter(is_included, manifest)))


def link_folder(
    folder: pathlib.Path, staging: pathlib.Path, name: str, object_folder: str
) -> Manifest:
    """Links the files of a checkpoint into a folder, where they stay when the run removes it; returns them.

    Args:
      folder: local folder of the run.
      staging: gets the files under the same paths.
      name: of the checkpoint, such as 'checkpoints/8'.
      object_folder: of its objects in the bucket.

    Raises:
      FileNotFoundError: the run has removed the checkpoint meanwhile.
    """
    digests = checkpoint.read(folder / name)
    if digests is None:
        raise RetrievalError(f'{folder / name}: {checkpoint.FILE_NAME} is damaged')
    (seal,) = file_digests([folder / name / checkpoint.FILE_NAME])
    digests[checkpoint.FILE_NAME] = seal
    manifest = {}
    for file, digest in digests.items():
        path = f'{name}/{file}'
        (staging / path).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(folder / path, staging / path)
        manifest[path] = RemoteFile(
            f'{object_folder}/{file}', (staging / path).stat().st_size, digest
        )
    return manifest


# ---- parts of a step -------------------------------------------------------------------------------
#
# Parts of a step in a bucket: the files that each of several processes uploads.
#
# Every process saves the shards that it owns in a folder of its own, and uploads the files that process 0 does not
# have:
#
#     parts/00000008-1f02c9d4/0.json            before process 0 uploads: step 8 is due, and these files are its own
#     parts/00000008-1f02c9d4/1-5be0a1c7.json   when process 1 has uploaded its own files; a null in it: the process has
#                                               removed the step meanwhile, so that it must be skipped
#
# The digits after the step are those of the lease, and those of a part name the files of process 0 that it
# complements: another attempt of process 0 may find another best step in its folder, which needs other parts. When all
# parts are there, process 0 writes the object that makes the step complete (`remote_workdir`), with the files of all
# parts.


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
