"""Copies the checkpoints and logs of a run to its workdir in a bucket, beside the training.

The run works in a local folder, as any run does. A thread takes the newest complete checkpoint of this folder, uploads
what it refers to, then its files, and last the object that makes it complete (`runtime.remote_workdir`). A checkpoint
that is saved meanwhile waits; of several that wait only the newest is uploaded.
"""

from __future__ import annotations

import functools
import pathlib
import shutil
from collections.abc import Iterable, Sequence

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.runtime.record import FILE_NAME
from zeroplay_jax.runtime.remote_workdir import (
    Lease,
    Manifest,
    RemoteFile,
    RemoteWorkdir,
    checkpoint_folders,
)
from zeroplay_jax.training.uploads import (
    PARTS,
    STAGING,
    Parts,
    Uploads,
    described,
    link_folder,
    merge,
)

# Folder of the checkpoint of the best evaluation.
_BEST = 'best'
# Gets what is brought down until it is found whole.
DOWNLOADS = '.download'
# Files that a run appends to.
LOGS = ('*.jsonl', 'events.out.tfevents.*')
# Parts of the local folder that are no results.
_NOT_RESULTS = (FOLDER, _BEST, 'damaged', STAGING, DOWNLOADS, '.lock')
_POLL_SECONDS = 0.1
# Between two looks for the parts of other processes.
_PARTS_SECONDS = 0.5


class Mirror(Uploads):
    """Uploads the checkpoints of a run from a thread of process 0, until it is closed.

    Args:
      remote: workdir of the run in a bucket.
      folder: local folder in which the run works.
      lease: of this process on `remote`.
      manifests: complete steps in the bucket.
      keep: number of checkpoints to keep in the bucket.
      seconds: for which uploads are tried again while none succeeds.
      parts: of the other processes, which have folders of their own (`mirror_part`); None for a run of one process.
    """

    def __init__(
        self,
        remote: RemoteWorkdir,
        folder: pathlib.Path,
        lease: Lease,
        manifests: dict[int, Manifest],
        keep: int,
        seconds: float,
        parts: Parts | None = None,
    ):
        super().__init__(remote, folder, seconds)
        self._lease = lease
        self._manifests = dict(manifests)
        self._keep = keep
        self._parts = parts
        # Number of the attempts to complete a step.
        self._attempt = 0
        self._thread.start()

    @property
    def lost(self) -> str:
        """A line about the process that took the lease; '' while this process has it."""
        return self._lease.lost

    @property
    def newest(self) -> int:
        """Number of the newest checkpoint in the bucket; 0 without one."""
        return max(self._manifests, default=0)

    def is_pending(self) -> bool:
        """Returns whether the newest checkpoint of the local folder is not in the bucket yet.

        Raises:
          UserError: as `raise_if_failed`.
        """
        if self._next_step() is None:
            return False
        self.raise_if_failed()
        return True

    def upload_results(self) -> None:
        """Uploads exported policies, summary and report; call it when they are written.

        Raises:
          UserError: as `raise_if_failed`.
        """
        paths = []
        for entry in sorted(self._folder.iterdir()):
            # They are not entered: the thread may remove what it has uploaded.
            if entry.name in _NOT_RESULTS:
                continue
            for path in sorted(entry.rglob('*')) if entry.is_dir() else [entry]:
                part = path.relative_to(self._folder)
                if not path.is_file() or path.is_symlink():
                    continue
                if not any(part.match(pattern) for pattern in LOGS):
                    paths.append(part.as_posix())
        self._try(lambda: self._upload_results(paths))
        self.raise_if_failed()

    def delete_policies(self) -> None:
        """Removes the exported policies of a run that stopped and now continues: they will be outdated.

        Raises:
          UserError: as `raise_if_failed`.
        """
        self._try(lambda: self._delete_objects(['policy/'], keep=()))
        self.raise_if_failed()

    # ---- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed.wait(_POLL_SECONDS):
            step = self._next_step()
            if step is not None:
                self._try(functools.partial(self._upload, step))
            if self._error is not None or self.lost:
                return

    def _next_step(self) -> int | None:
        """Returns the newest complete checkpoint of the local folder if it is not in the bucket."""
        steps = saved_steps(self._folder / FOLDER)
        if not steps or steps[-1] in self._manifests:
            return None
        return steps[-1]

    def _upload(self, step: int) -> None:
        """Uploads a checkpoint with everything that it refers to, and removes older ones."""
        staging = self._folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        try:
            manifest = self._stage(step, staging)
        except FileNotFoundError as error:
            self._check_removed(step, error)
            # The run has saved newer steps since and removed this one, or an evaluation was better than the best.
            return
        self._attempt += 1
        # All further tries upload the same files. The object that completes the step may have arrived though its write
        # seemed to fail, and meanwhile the run appends to its logs and may remove the checkpoint.
        self._try(functools.partial(self._complete, step, manifest))
        if step in self._manifests:
            self._try(self._remove_old)

    def _complete(self, step: int, manifest: Manifest) -> None:
        """Uploads the staged files of a step and the object that completes it."""
        staging = self._folder / STAGING
        files = manifest
        if self._parts is not None:
            # The other processes upload at the same time.
            self._parts.write(self._attempt, 0, step, manifest)
            # In the bucket a best step may have the checksums of all processes, which complete steps refer to.
            files = {path: file for path, file in manifest.items() if not _is_seal(path)}
        # What a step refers to comes first, so that a process that dies leaves no step without its logs.
        self._send_all(staging, files, lambda path: path.startswith(f'{FOLDER}/'))
        if self._parts is not None:
            manifest_of_all = self._with_parts(self._parts, staging, manifest)
            if manifest_of_all is None:
                return
            manifest = manifest_of_all
        if self._is_closed.is_set() or not self._lease.renew():
            return
        self._remote.write_manifest(step, manifest)
        self._manifests[step] = manifest
        shutil.rmtree(staging, ignore_errors=True)

    def _with_parts(
        self, parts: Parts, staging: pathlib.Path, manifest: Manifest
    ) -> Manifest | None:
        """Waits until all processes have uploaded their files of a step; returns the files of all.

        Returns None if the step is skipped, because another process has removed it or this one ends.

        Args:
          manifest: files of this process.
        """
        while True:
            others = parts.collect(self._attempt)
            if others is None:
                return None
            if len(others) == parts.count - 1:
                break
            if self.lost or self._is_closed.wait(_PARTS_SECONDS):
                return None
        merged = merge([manifest, *others])
        # The checksums of each process list its own files only.
        seals = {}
        for path in filter(_is_seal, manifest):
            seals[path] = merged[path] = _seal(staging, path, merged)
        self._send_all(staging, seals)
        return merged

    def _stage(self, step: int, staging: pathlib.Path) -> Manifest:
        """Collects the files of a step in a folder; returns them. Later changes of the run do not reach them.

        Raises:
          FileNotFoundError: the run has removed the step meanwhile.
        """
        manifest: Manifest = {}
        folders = [f'{FOLDER}/{step}']
        for best in saved_steps(self._folder / _BEST):
            if best <= step:
                folders.append(f'{_BEST}/{best}')
        # A process whose lease was taken may upload for a while: it must not replace a file of the next one.
        suffix = f'-{self._lease.id}'
        for name in folders:
            manifest |= link_folder(self._folder, staging, name, name + suffix)
        copies = {}
        # A resumed run needs the record, too.
        if (self._folder / FILE_NAME).is_file():
            copies[FILE_NAME] = FILE_NAME
        for pattern in LOGS:
            for path in self._folder.glob(pattern):
                copies[path.name] = f'logs/{step}{suffix}/{path.name}'
        for name in copies:
            shutil.copyfile(self._folder / name, staging / name)
        return manifest | described(staging, copies)

    def _upload_results(self, paths: Sequence[str]) -> None:
        """Uploads files under their own names, which the process that took the lease would use, too."""
        if not self._lease.renew():
            return
        manifest = described(self._folder, {path: path for path in paths})
        # A folder of weights without config.json is refused as a policy, so that file is the last one.
        self._send_all(self._folder, manifest, lambda path: path.endswith('config.json'))

    def _delete_objects(self, prefixes: Sequence[str], keep: Iterable[str]) -> None:
        """Removes the objects whose names begin with one of several texts, but those to keep."""
        entries = []
        for prefix in prefixes:
            entries += self._remote.bucket.list(self._remote.name(prefix))
        # The lease was held when they were listed, so none of them is of a process that took it since.
        if not self._lease.renew():
            return
        for entry in entries:
            name = entry.name.removeprefix(self._remote.name(''))
            if name not in keep:
                self._sent.pop(name, None)
                self._remote.bucket.delete(entry.name)

    def _remove_old(self) -> None:
        """Removes the oldest steps, so that `keep` remain, and all objects that no step refers to."""
        for step in sorted(self._manifests)[: -self._keep]:
            # First of all: without its files the step must not count as complete.
            self._remote.delete_manifest(step)
            del self._manifests[step]
        used = set()
        for manifest in self._manifests.values():
            used.update(file.object for file in manifest.values())
        # Also what a process that died has left, of a step that it uploaded or removed.
        self._delete_objects((f'{FOLDER}/', f'{_BEST}/', 'logs/', PARTS), keep=used)

    def _saved_text(self) -> str:
        if self._parts is not None:
            return f'the bucket has step {self.newest}, with which the same command goes on'
        return (
            f'everything is saved in {self._folder}, the bucket has step {self.newest}: on this machine the same '
            'command uploads the rest and goes on'
        )


def _is_seal(path: str) -> bool:
    """Returns whether a file has the checksums of a checkpoint."""
    return path.rpartition('/')[2] == checkpoint.FILE_NAME


def _seal(staging: pathlib.Path, path: str, manifest: Manifest) -> RemoteFile:
    """Writes the checksums of a checkpoint of several processes; returns the new entry of that file.

    Args:
      staging: folder with links to the files that are uploaded.
      path: of the file in it.
      manifest: files of all processes.
    """
    folder = path.removesuffix(checkpoint.FILE_NAME)
    digests = {}
    for name, file in manifest.items():
        if name.startswith(folder) and name != path:
            digests[name.removeprefix(folder)] = file.sha256
    # The link must not lead to the file of the run.
    (staging / path).unlink()
    checkpoint.write_digests(staging / folder, digests)
    return described(staging, {path: manifest[path].object})[path]


# ---- one process of several ------------------------------------------------------------------------
#
# Uploads the shards of a process, which has a folder of its own. Process 0 says which step is due (`uploads`), and
# completes it when all processes have uploaded theirs.


# Between two looks for the step that is due. Nothing is asked while the newest step of this process is complete.
_PART_POLL_SECONDS = 0.5


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
        # The last attempt of process 0 that this process has answered, and its step.
        self._answered = (-1, -1)
        self._thread.start()

    def is_pending(self) -> bool:
        """Returns False, because process 0 waits for the files of this one; raises as `raise_if_failed`."""
        self.raise_if_failed()
        return False

    # ---- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed.wait(_PART_POLL_SECONDS):
            if max(saved_steps(self._folder / FOLDER), default=-1) > self._newest_complete:
                self._try(self._upload_due)
            if self._error is not None:
                return

    def _upload_due(self) -> None:
        """Uploads the files of this process of the step that is due, if there is one."""
        attempt = self._parts.newest_attempt()
        last_attempt, last_step = self._answered
        if attempt is None:
            # Process 0 has completed the step, since it removes the parts only then.
            self._newest_complete = max(self._newest_complete, last_step)
            return
        # Process 0 may try again with other files, so this process looks until the step is complete.
        if attempt == last_attempt:
            return
        part_of_first = self._parts.read(attempt, 0)
        # The step was completed, or a newer one, after the parts were listed.
        if part_of_first is None:
            return
        step, files_of_first = part_of_first
        assert files_of_first is not None
        saved_before = saved_steps(self._folder / FOLDER)
        manifest: Manifest | None
        try:
            manifest = self._stage(files_of_first)
        except FileNotFoundError as error:
            # A step that was saved while its files were looked for is tried again.
            if max(saved_before) < step:
                return
            self._check_removed(step, error)
            # The run removes old steps, and a best step when a later evaluation was better.
            manifest = None
        # Further tries upload the same files: meanwhile the run may have removed the step.
        self._try(functools.partial(self._answer, attempt, step, manifest))

    def _answer(self, attempt: int, step: int, manifest: Manifest | None) -> None:
        """Uploads the staged files of this process of a step, or reports that it does not have it any more (None)."""
        self._send_all(self._folder / STAGING, manifest or {})
        if self._is_closed.is_set():
            return
        self._parts.write(attempt, self._process, step, manifest)
        self._answered = (attempt, step)
        shutil.rmtree(self._folder / STAGING, ignore_errors=True)

    def _stage(self, files_of_first: Manifest) -> Manifest:
        """Links the files of this process into a folder; returns those that process 0 does not upload.

        Raises:
          FileNotFoundError: this process does not have the step, or has it no more.
        """
        staging = self._folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        manifest: Manifest = {}
        for name, object_folder in checkpoint_folders(files_of_first).items():
            files = link_folder(self._folder, staging, name, object_folder)
            for path, file in files.items():
                if path not in files_of_first:
                    manifest[path] = file
        return manifest

    def _saved_text(self) -> str:
        return 'the same command goes on with the newest complete step in the bucket'
