"""Uploads from a local folder to a bucket, in a thread: further attempts after errors, and what was sent already."""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.retrieval.downloads import THREADS
from zeroplay_jax.retrieval.objects import Unavailable
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.remote_workdir import (
    Manifest,
    RemoteFile,
    RemoteWorkdir,
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

    def _check_removed(self, step: int, error: FileNotFoundError) -> None:
        """Raises RetrievalError if a missing file is one of the newest step: the run removes old ones only.

        Args:
          step: whose files are collected.
          error: the run has removed a file meanwhile, of this step or of the best one.
        """
        folder = self._folder / FOLDER / str(step)
        is_newest = max(saved_steps(self._folder / FOLDER)) == step
        if is_newest and str(error.filename).startswith(f'{folder}/'):
            raise RetrievalError(f'{folder} is damaged: {error.filename} is missing') from None

    def _send_all(
        self,
        folder: pathlib.Path,
        manifest: Manifest,
        is_late: Callable[[str], bool] = lambda path: False,
    ) -> None:
        """Uploads the files of a manifest that this process has not uploaded before.

        Args:
          folder: local folder of the files.
          manifest: the files.
          is_late: path → whether the file is uploaded when all others are there.
        """

        def send(path: str) -> None:
            file = manifest[path]
            if self._sent.get(file.object) == file.sha256:
                return
            if self._is_closed.is_set() or self.lost:
                return
            self._remote.bucket.upload(self._remote.name(file.object), folder / path)
            self._sent[file.object] = file.sha256

        for late in (False, True):
            paths = [path for path in manifest if is_late(path) == late]
            with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(send, paths))


def described(folder: pathlib.Path, object_names: Mapping[str, str]) -> Manifest:
    """Returns the files of a folder with their sizes and SHA-256; `object_names`: path in it → object."""
    digests = file_digests([folder / path for path in object_names])
    manifest = {}
    for (path, name), digest in zip(object_names.items(), digests, strict=True):
        manifest[path] = RemoteFile(name, (folder / path).stat().st_size, digest)
    return manifest


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
#     parts/00000003-1f02c9d4/0.json   before process 0 uploads a step: the step, and its own files
#     parts/00000003-1f02c9d4/1.json   when process 1 has uploaded its own files; a null in it: the process has removed
#                                      the step meanwhile, so that it must be skipped
#
# The first number counts the attempts of process 0: a later one may have another best step, which needs other parts.
# The digits are those of the lease. When all parts of an attempt are there, process 0 writes the object that makes the
# step complete (`remote_workdir`), with the files of all parts.


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

    def write(self, attempt: int, process: int, step: int, manifest: Manifest | None) -> None:
        """Writes the part of a process.

        Args:
          attempt: number of the attempt.
          process: index of the process.
          step: number of the step.
          manifest: files of the process; None: it does not have all folders of process 0 any more.
        """
        self.remote.bucket.write(self._name(attempt, process), manifest_text(step, manifest))

    def newest_attempt(self) -> int | None:
        """Returns the number of the newest attempt; None if all steps are complete, or none was begun."""
        attempts = []
        for entry in self.remote.bucket.list(self.remote.name(PARTS)):
            attempt = int(entry.name.removeprefix(self.remote.name(PARTS)).partition('-')[0])
            if entry.name == self._name(attempt, 0):
                attempts.append(attempt)
        return max(attempts, default=None)

    def read(self, attempt: int, process: int) -> tuple[int, Manifest | None] | None:
        """Returns step and files in the part of a process, as in `write`; None if there is no such part."""
        stored = self.remote.bucket.read(self._name(attempt, process))
        return manifest_of(stored[0]) if stored is not None else None

    def collect(self, attempt: int) -> list[Manifest] | None:
        """Returns the files of the other processes up to the first that has not uploaded its own.

        Returns None if a process does not have the step any more.
        """
        manifests = []
        for process in range(1, self.count):
            part = self.read(attempt, process)
            if part is None:
                break
            _, manifest = part
            if manifest is None:
                return None
            manifests.append(manifest)
        return manifests

    def _name(self, attempt: int, process: int) -> str:
        return self.remote.name(f'{PARTS}{attempt:08d}-{self.lease}/{process}.json')


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
