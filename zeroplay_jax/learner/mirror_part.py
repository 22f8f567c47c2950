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
from zeroplay_jax.runtime.remote_parts import Due, Parts
from zeroplay_jax.runtime.remote_workdir import Manifest, RemoteWorkdir, checkpoint_folders

# Between two looks for the step that is due. Nothing is asked while the newest step of this process is complete.
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
        # The newest step that needs nothing more of this process.
        self._newest_complete = newest
        # The last step of which this process has written its files.
        self._answered: Due | None = None
        # The step whose files lie in the staging folder, and these files.
        self._staged: tuple[Due, Manifest] | None = None
        self._thread.start()

    def is_pending(self) -> bool:
        """Returns False, because process 0 waits for the files of this one; raises as `raise_if_failed`."""
        self.raise_if_failed()
        return False

    # ---- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed.wait(_POLL_SECONDS):
            if max(saved_steps(self._folder / FOLDER), default=-1) > self._newest_complete:
                self._try(self._upload_due)
            if self._error is not None:
                return

    def _upload_due(self) -> None:
        """Uploads the files of this process of the step that is due, if there is one."""
        due = self._parts.newest_due()
        if due is None:
            # Process 0 has completed the step, since it removes the parts only then.
            if self._answered is not None:
                self._newest_complete = self._answered.step
            return
        # Process 0 may try again with other files, so this process looks until the step is complete.
        if due == self._answered:
            return
        try:
            files_of_first = self._parts.read_first(due.step)
        except KeyError:
            # The step was completed, or a newer one, after the parts were listed.
            return
        try:
            part = self._parts.read(due.step, self._process, files_of_first)
        except KeyError:
            self._upload(due, files_of_first)
            return
        # Without files: process 0 has not seen yet that the step is gone.
        if part is not None:
            self._answered = due

    def _upload(self, due: Due, files_of_first: Manifest) -> None:
        """Uploads the files of this process of a step, or reports that it does not have it any more."""
        staging = self._folder / STAGING
        # A further attempt uploads the same files: meanwhile the run may have removed the step.
        if self._staged is None or self._staged[0] != due:
            manifest = self._stage(staging, due, files_of_first)
            if manifest is None:
                return
            self._staged = due, manifest
        manifest = self._staged[1]
        self._send_all(staging, manifest, lambda path: True)
        if self._is_closed.is_set():
            return
        self._parts.write(due.step, self._process, files_of_first, manifest)
        self._answered = due
        self._staged = None
        shutil.rmtree(staging, ignore_errors=True)

    def _stage(self, staging: pathlib.Path, due: Due, files_of_first: Manifest) -> Manifest | None:
        """Collects the files of this process of a step; returns None if it does not have the step."""
        self._staged = None
        saved_before = saved_steps(self._folder / FOLDER)
        shutil.rmtree(staging, ignore_errors=True)
        try:
            return self._link(staging, files_of_first)
        except FileNotFoundError as error:
            # A step that was saved while its files were looked for is tried again.
            if max(saved_before) >= due.step:
                self._report_missing(due.step, files_of_first, str(error.filename))
            return None

    def _report_missing(self, step: int, files_of_first: Manifest, file: str) -> None:
        """Tells process 0 that this process has removed a file of the step that is due.

        Args:
          step: number of the step.
          files_of_first: files of process 0.
          file: path of the file.

        Raises:
          RetrievalError: the newest step of this process is damaged.
        """
        newest = max(saved_steps(self._folder / FOLDER))
        folder = self._folder / FOLDER / str(step)
        # The run removes old steps only, and a best step when a later evaluation was better.
        if newest == step and file.startswith(f'{folder}/'):
            raise RetrievalError(f'{folder} is damaged: {file} is missing')
        self._parts.write(step, self._process, files_of_first, None)

    def _link(self, staging: pathlib.Path, files_of_first: Manifest) -> Manifest:
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
