"""Copies the checkpoints and logs of a run to its workdir in a bucket, beside the training.

The run works in a local folder, as any run does. A thread takes the newest complete checkpoint of this folder, uploads
what it refers to, then its files, and last the object that makes it complete (`runtime.remote_workdir`). A checkpoint
that is saved meanwhile waits; of several that wait only the newest is uploaded.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.retrieval.downloads import THREADS
from zeroplay_jax.retrieval.objects import Unavailable
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.record import FILE_NAME
from zeroplay_jax.runtime.remote_workdir import (
    Lease,
    Manifest,
    RemoteFile,
    RemoteWorkdir,
    checkpoint_folders,
    manifest_of,
    manifest_text,
)
from zeroplay_jax.types import UserError

# Folder in the local one with links to what is uploaded.
STAGING = '.upload'
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
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


# ---- the first process -----------------------------------------------------------------------------


class Mirror(Uploads):
    """Uploads the checkpoints of a run from a thread of process 0, until it is closed.

    Args:
      remote: workdir of the run in a bucket.
      folder: local folder in which the run works.
      lease: of this process on `remote`.
      manifests: complete steps in the bucket.
      keep: number of checkpoints to keep in the bucket.
      seconds: for which uploads are tried again while none succeeds.
      parts: of the other processes, which have folders of their own (`PartMirror`); None for a run of one process.
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

    def upload_results(self, pattern: str = '*') -> None:
        """Uploads exported policies, summary and report, when they are written; raises as `raise_if_failed`.

        Args:
          pattern: of the names in the local folder.
        """
        paths = []
        for entry in sorted(self._folder.glob(pattern)):
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

    def delete_policies(self, folders: Iterable[str]) -> None:
        """Removes folders of exported policies, which will be outdated; raises as `raise_if_failed`."""
        prefixes = [f'{name}/' for name in folders]
        self._try(lambda: self._delete_objects(prefixes, keep=()))
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
# Uploads the shards of a process, which has a folder of its own. Process 0 says which step is due (`Parts`), and
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
