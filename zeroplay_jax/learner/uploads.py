"""Uploads from a local folder to a bucket, in a thread: further attempts after errors, and what was sent already."""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.retrieval.object_cache import THREADS
from zeroplay_jax.retrieval.objects import Unavailable
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.digests import file_digests
from zeroplay_jax.runtime.remote_workdir import Manifest, RemoteFile, RemoteWorkdir
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
