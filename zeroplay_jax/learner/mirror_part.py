"""Uploads the shards of one process of several, each of which has a folder of its own.

Process 0 says which step is due (`runtime.remote_parts`), and completes it when all processes have uploaded theirs
(`mirror`).
"""

from __future__ import annotations

import pathlib
import shutil

from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.learner.uploads import STAGING, Uploads, link_folder
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.remote_parts import Parts
from zeroplay_jax.runtime.remote_workdir import Manifest, RemoteWorkdir, checkpoint_folders

# Between two looks for the step that is due. Nothing is asked while this process has uploaded its newest step.
_POLL_SECONDS = 0.5


class PartMirror(Uploads):
    """Uploads the files that only this process has from a thread, until it is closed.

    Args:
      remote: workdir of the run in a bucket.
      folder: local folder of this process.
      parts: of all processes.
      process: index of this process, which is not the first.
      newest: the newest step in the bucket; -1 if there is none.
      seconds: for which uploads are tried again while none succeeds.
    """

    def __init__(
        self,
        remote: RemoteWorkdir,
        folder: pathlib.Path,
        parts: Parts,
        process: int,
        newest: int,
        seconds: float,
    ):
        super().__init__(remote, folder, seconds)
        self._parts = parts
        self._process = process
        self._newest_sent = newest
        self._thread.start()

    def is_pending(self) -> bool:
        """Returns False, because process 0 waits for the files of this one; raises as `raise_if_failed`."""
        self.raise_if_failed()
        return False

    # ---- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed.wait(_POLL_SECONDS):
            if max(saved_steps(self._folder / FOLDER), default=-1) > self._newest_sent:
                self._try(self._upload_due)
            if self._error is not None:
                return

    def _upload_due(self) -> None:
        """Uploads the files of this process of the step that is due, if there is one."""
        step = self._parts.newest_due()
        if step is None:
            return
        try:
            part = self._parts.read(step, self._process)
        except KeyError:
            pass
        else:
            # An attempt that seemed to fail had arrived, or process 0 has not seen yet that the step is gone.
            self._newest_sent = step if part is not None else self._newest_sent
            return
        files_of_first = self._parts.read(step, 0)
        assert files_of_first is not None
        staging = self._folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        try:
            manifest = self._staged(staging, files_of_first)
        except FileNotFoundError as error:
            self._report_missing(step, str(error.filename))
            return
        self._send_all(staging, manifest, lambda path: True)
        if self._is_closed.is_set():
            return
        self._parts.write(step, self._process, manifest)
        self._newest_sent = step
        shutil.rmtree(staging, ignore_errors=True)

    def _report_missing(self, step: int, file: str) -> None:
        """Tells process 0 that this process does not have a file of the step that is due, unless it comes later.

        Raises:
          RetrievalError: the newest step of this process is damaged.
        """
        newest = max(saved_steps(self._folder / FOLDER))
        folder = self._folder / FOLDER / str(step)
        # The run removes old steps only, and a best step when a later evaluation was better.
        if newest == step and file.startswith(f'{folder}/'):
            raise RetrievalError(f'{folder} is damaged: {file} is missing')
        # Process 0 may have completed its files a moment before this process.
        if newest >= step:
            self._parts.write(step, self._process, None)

    def _staged(self, staging: pathlib.Path, files_of_first: Manifest) -> Manifest:
        """Links the files of this process into a folder; returns those that process 0 does not upload.

        Raises:
          FileNotFoundError: this process does not have the step, or has it no more.
        """
        manifest: Manifest = {}
        for name, object_folder in checkpoint_folders(files_of_first).items():
            files = link_folder(self._folder, staging, name, object_folder)
            for path, file in files.items():
                if path not in files_of_first:
                    manifest[path] = file
        return manifest

    def _saved_text(self) -> str:
        return 'the same command goes on with the newest complete step in the bucket'
