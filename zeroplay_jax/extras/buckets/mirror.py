"""Copies the checkpoints and logs of a run to its workdir in a bucket, beside the training.

The run works in a local folder, as any run does. A thread takes the newest complete checkpoint of this folder, uploads
what it refers to, then its files, and last the object that makes it complete (`workdir`). A checkpoint that is saved
meanwhile waits; of several that wait only the newest is uploaded.

Of a run of several processes each has a folder of its own with the shards that it owns. The first one says which files
of which step it uploads, the others upload what they have beside these, and it completes the step when all have:

    parts/00000003-1f02c9d4/0.json   before process 0 uploads a step: the step, and its own files
    parts/00000003-1f02c9d4/1.json   when process 1 has uploaded its own files; a null in it: the process has removed
                                     the step meanwhile, so that it must be skipped

The first number counts the attempts of process 0: a later one may have another best step, which needs other parts. The
digits are those of the lease.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from zeroplay_jax.extras.buckets.copies import THREADS
from zeroplay_jax.extras.buckets.lease import Lease
from zeroplay_jax.extras.buckets.objects import Unavailable
from zeroplay_jax.extras.buckets.workdir import (
    Manifest,
    RemoteFile,
    RemoteWorkdir,
    checkpoint_files,
    folders_of,
    manifest_of,
    manifest_text,
)
from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.record import FILE_NAME
from zeroplay_jax.types import UserError

# Folder in the local one with links to what is uploaded.
STAGING = '.upload'
# Gets what is brought down until it is found whole.
DOWNLOADS = '.download'
# Files that a run appends to.
LOGS = ('*.jsonl', 'events.out.tfevents.*')
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
# Folder of the checkpoint of the best evaluation.
_BEST = 'best'
_PARTS = 'parts/'
# Parts of the local folder that are no results.
_NOT_RESULTS = (FOLDER, _BEST, 'damaged', STAGING, DOWNLOADS, '.lock')
# Between two looks at the local folder, and at what other processes have uploaded.
_POLL_SECONDS = 0.1
_PARTS_SECONDS = 0.5


class Mirror:
    """A thread that uploads the checkpoints of a local folder until it is closed.

    Args:
      remote: workdir of the run in a bucket.
      folder: local folder in which this process works.
      lease_id: id of the lease on `remote`.
      lease: the lease itself, in the first process; None in others.
      manifests: complete steps in the bucket.
      keep: number of checkpoints to keep in the bucket.
      seconds: for which uploads are tried again while none succeeds.
      process, processes: index of this process, and their number.
    """

    def __init__(
        self,
        remote: RemoteWorkdir,
        folder: pathlib.Path,
        lease_id: str,
        lease: Lease | None,
        manifests: Mapping[int, Manifest],
        keep: int,
        seconds: float,
        process: int = 0,
        processes: int = 1,
    ):
        self._remote = remote
        self._folder = folder
        self._suffix = f'-{lease_id}'
        self._lease = lease
        self._manifests = dict(manifests)
        self._keep = keep
        self._seconds = seconds
        self._process = process
        self._processes = processes
        # Number of the attempts to complete a step; in other processes of the last one that was answered.
        self._attempt = 0
        # The newest step that needs nothing more of another process than the first, and the last that it answered.
        self._newest_complete = max(manifests, default=-1)
        self._answered_step = -1
        # Object → SHA-256 of what this process has uploaded, so that another attempt skips it.
        self._sent: dict[str, str] = {}
        # Names of the folders of iterations that this process has uploaded whole.
        self._uploaded: set[str] = set()
        self._error: Exception | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name='upload', daemon=True)
        self._thread.start()

    def is_pending(self) -> bool:
        """Returns whether this process still has to make its newest checkpoint complete in the bucket.

        Always False in other processes than the first, which waits for their files.

        Raises:
          UserError: as `raise_if_failed`.
        """
        if self._lease is not None and self._next_step() is None:
            return False
        self.raise_if_failed()
        return self._lease is not None

    def raise_if_failed(self) -> None:
        """Raises what ended the uploads.

        Raises:
          UserError: one line; the bucket cannot be written, or another process took the lease.
        """
        newest = max(self._manifests, default=0)
        saved = (
            f'everything is saved in {self._folder}, the bucket has step {newest}: on this machine the same command '
            'uploads the rest and goes on'
        )
        if self._processes > 1:
            saved = 'the same command goes on with the newest complete step in the bucket'
        if self._lost():
            raise UserError(f'{self._lost()}; {saved}')
        if isinstance(self._error, RetrievalError):
            raise UserError(f'{self._error}; {saved}') from None
        if self._error is not None:
            raise self._error

    def upload_results(self) -> None:
        """Uploads exported policies, summary and report from the first process; raises as `raise_if_failed`."""
        self._try(lambda: self._upload_results('*'))
        self.raise_if_failed()

    def close(self) -> None:
        """Ends the thread; the file that it uploads is completed before."""
        self._is_closed.set()
        self._thread.join()
        shutil.rmtree(self._folder / STAGING, ignore_errors=True)

    # What follows runs in the thread.

    def _run(self) -> None:
        while not self._is_closed.wait(_POLL_SECONDS):
            step = self._next_step()
            if step is not None and self._lease is not None:
                self._try(functools.partial(self._upload, step))
            elif step is not None:
                self._try(self._upload_part)
                self._is_closed.wait(_PARTS_SECONDS)
            if self._error is not None or self._lost():
                return

    def _lost(self) -> str:
        """Returns a line about the process that took the lease; '' while there is none."""
        return self._lease.lost if self._lease is not None else ''

    def _next_step(self) -> int | None:
        """Returns the newest complete checkpoint of the local folder if it is not in the bucket."""
        steps = saved_steps(self._folder / FOLDER)
        is_complete = not steps or steps[-1] in self._manifests
        if self._lease is None:
            is_complete = not steps or steps[-1] <= self._newest_complete
        return None if is_complete else steps[-1]

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

    def _upload(self, step: int) -> None:
        """Uploads a checkpoint with everything that it refers to, and removes older ones."""
        folders = [f'{FOLDER}/{step}']
        for best in saved_steps(self._folder / _BEST):
            if best <= step:
                folders.append(f'{_BEST}/{best}')
        manifest = self._stage(step, folders)
        if manifest is None:
            return
        manifest |= self._stage_logs(step)
        self._attempt += 1
        # All further tries upload the same files. The object that completes the step may have arrived though its write
        # seemed to fail, and meanwhile the run appends to its logs and may remove the checkpoint.
        self._try(functools.partial(self._complete, step, manifest))
        if step in self._manifests:
            self._try(self._remove_old)

    def _stage(self, step: int, folders: Iterable[str]) -> Manifest | None:
        """Links the checkpoints of a step into a folder, where they stay when the run removes them; returns the files.

        Returns None if the run has removed one of them: it has saved newer steps since, or had a better evaluation.

        Raises:
          RetrievalError: a file of the newest step is missing.
        """
        staging = self._folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        manifest: Manifest = {}
        try:
            for name in folders:
                # A process whose lease was taken may upload for a while: it must not replace a file of the next one.
                manifest |= link_folder(self._folder, staging, name, name + self._suffix)
        except FileNotFoundError as error:
            folder = self._folder / FOLDER / str(step)
            is_newest = saved_steps(self._folder / FOLDER)[-1] == step
            if is_newest and str(error.filename).startswith(f'{folder}/'):
                raise RetrievalError(f'{folder} is damaged: {error.filename} is missing') from None
            return None
        return manifest

    def _stage_logs(self, step: int) -> Manifest:
        """Copies the logs as they are at a step, and the record, which a resumed run needs, too; returns them."""
        names = {}
        if (self._folder / FILE_NAME).is_file():
            names[FILE_NAME] = FILE_NAME
        for pattern in LOGS:
            for path in self._folder.glob(pattern):
                names[path.name] = f'logs/{step}{self._suffix}/{path.name}'
        for name in names:
            shutil.copyfile(self._folder / name, self._folder / STAGING / name)
        return described(self._folder / STAGING, names)

    def _complete(self, step: int, manifest: Manifest) -> None:
        """Uploads the staged files of a step and the object that completes it."""
        staging = self._folder / STAGING
        files = manifest
        if self._processes > 1:
            # The other processes upload at the same time.
            self._write_part(self._attempt, step, manifest)
            # In the bucket a best step may have the checksums of all processes, which complete steps refer to.
            files = {path: file for path, file in manifest.items() if not _is_seal(path)}
        # What a step refers to comes first, so that a process that dies leaves no step without its logs.
        self._send_all(staging, files, lambda path: path.startswith(f'{FOLDER}/'))
        if self._processes > 1:
            parts = self._await_parts()
            if parts is None:
                return
            manifest = merge([manifest, *parts])
            # The checksums of each process list its own files only.
            seals = {path: _seal(staging, path, manifest) for path in filter(_is_seal, manifest)}
            self._send_all(staging, seals)
            manifest |= seals
        self._upload_iterations()
        # The run has gone beyond the end of which these are.
        if self._is_closed.is_set() or not self._delete(['policy/']):
            return
        self._remote.bucket.write(self._remote.manifest_name(step), manifest_text(step, manifest))
        self._manifests[step] = manifest
        shutil.rmtree(staging, ignore_errors=True)

    def _await_parts(self) -> list[Manifest] | None:
        """Waits until the other processes have uploaded their files of a step; returns these.

        Returns None if the step is skipped, because one of them has removed it or this process ends.
        """
        parts: list[Manifest] = []
        while len(parts) < self._processes - 1:
            part = self._read_part(self._attempt, len(parts) + 1)
            if part is None:
                if self._lost() or self._is_closed.wait(_PARTS_SECONDS):
                    return None
                continue
            if part[1] is None:
                return None
            parts.append(part[1])
        return parts

    def _upload_part(self) -> None:
        """Uploads the files of another process than the first of the step that is due, if there is one."""
        attempt = self._newest_attempt()
        if attempt is None:
            # The first process has completed the step, since it removes the parts only then.
            self._newest_complete = max(self._newest_complete, self._answered_step)
            return
        # It may try again with other files, so this process looks until the step is complete.
        part_of_first = None if attempt == self._attempt else self._read_part(attempt, 0)
        # Without a part the step was completed, or a newer one, after the parts were listed.
        if part_of_first is None:
            return
        step, files_of_first = part_of_first
        assert files_of_first is not None
        # This process may not have saved it yet.
        if saved_steps(self._folder / FOLDER)[-1] < step:
            return
        manifest = self._stage(step, folders_of(checkpoint_files(files_of_first)))
        if manifest is not None:
            for path in manifest.keys() & files_of_first.keys():
                del manifest[path]
        # Further tries upload the same files: meanwhile the run may have removed the step.
        self._try(functools.partial(self._answer, attempt, step, manifest))

    def _answer(self, attempt: int, step: int, manifest: Manifest | None) -> None:
        """Uploads the staged files of this process of a step, or reports that it does not have it any more (None)."""
        self._send_all(self._folder / STAGING, manifest or {})
        if self._is_closed.is_set():
            return
        self._write_part(attempt, step, manifest)
        self._attempt, self._answered_step = attempt, step
        shutil.rmtree(self._folder / STAGING, ignore_errors=True)

    def _write_part(self, attempt: int, step: int, manifest: Manifest | None) -> None:
        """Writes the files of this process; None: it does not have all folders of the first one any more."""
        name = self._part_name(attempt, self._process)
        self._remote.bucket.write(name, manifest_text(step, manifest))

    def _read_part(self, attempt: int, process: int) -> tuple[int, Manifest | None] | None:
        """Returns step and files in the part of a process, as in `_write_part`; None if there is no such part."""
        stored = self._remote.bucket.read(self._part_name(attempt, process))
        return manifest_of(stored[0]) if stored is not None else None

    def _newest_attempt(self) -> int | None:
        """Returns the number of the newest attempt; None if all steps are complete, or none was begun."""
        attempts = []
        for entry in self._remote.bucket.list(self._remote.name(_PARTS)):
            attempt = int(entry.name.removeprefix(self._remote.name(_PARTS)).partition('-')[0])
            if entry.name == self._part_name(attempt, 0):
                attempts.append(attempt)
        return max(attempts, default=None)

    def _part_name(self, attempt: int, process: int) -> str:
        return self._remote.name(f'{_PARTS}{attempt:08d}{self._suffix}/{process}.json')

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
            is_sent = self._sent.get(file.object) == file.sha256
            if is_sent or self._is_closed.is_set() or self._lost():
                return
            self._remote.bucket.upload(self._remote.name(file.object), folder / path)
            self._sent[file.object] = file.sha256

        for late in (False, True):
            paths = [path for path in manifest if is_late(path) == late]
            with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(send, paths))

    def _upload_iterations(self) -> None:
        """Uploads the policies of iterations that were not uploaded yet."""
        for folder in sorted(self._folder.glob('iteration*')):
            if folder.name in self._uploaded:
                continue
            # What another process has left under this name is of steps that are run again. What this one has sent
            # before an outage stays.
            if not self._delete([f'{folder.name}/'], keep=self._sent):
                return
            # The run removes those of steps that it runs again.
            with contextlib.suppress(FileNotFoundError):
                self._upload_results(folder.name)
                self._uploaded.add(folder.name)

    def _upload_results(self, pattern: str) -> None:
        """Uploads what the run has written under names of this pattern, unless another process took the lease."""
        names = {}
        for entry in sorted(self._folder.glob(pattern)):
            # They are not entered: the thread may remove what it has uploaded. Drafts have hidden names.
            if entry.name in _NOT_RESULTS:
                continue
            for path in sorted(entry.rglob('*')) if entry.is_dir() else [entry]:
                part = path.relative_to(self._folder)
                is_hidden = any(name.startswith('.') for name in part.parts)
                if path.is_file() and not is_hidden and not any(map(part.match, LOGS)):
                    names[part.as_posix()] = part.as_posix()
        # The next process would use the same names.
        if self._lease is not None and self._lease.renew():
            manifest = described(self._folder, names)
            # A folder of weights without config.json is refused as a policy, so that file is the last one.
            self._send_all(self._folder, manifest, lambda path: path.endswith('config.json'))

    def _delete(self, prefixes: Iterable[str], keep: Container[str] = ()) -> bool:
        """Removes the objects whose names begin with one of several texts; returns whether this process has the lease.

        Args:
          prefixes: the texts.
          keep: names of objects that stay.
        """
        entries = []
        for prefix in prefixes:
            entries += self._remote.bucket.list(self._remote.name(prefix))
        # The lease was held when they were listed, so none of them is of a process that took it since.
        if self._lease is None or not self._lease.renew():
            return False
        for entry in entries:
            name = entry.name.removeprefix(self._remote.name(''))
            if name not in keep:
                self._sent.pop(name, None)
                self._remote.bucket.delete(entry.name)
        return True

    def _remove_old(self) -> None:
        """Removes the oldest steps, so that `keep` remain, and all objects that no step refers to."""
        for step in sorted(self._manifests)[: -self._keep]:
            # First of all: without its files the step must not count as complete.
            self._remote.bucket.delete(self._remote.manifest_name(step))
            del self._manifests[step]
        used = set()
        for manifest in self._manifests.values():
            used.update(file.object for file in manifest.values())
        # Also what a process that died has left, of a step that it uploaded or removed.
        self._delete((f'{FOLDER}/', f'{_BEST}/', 'logs/', _PARTS), keep=used)


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
        size = (staging / path).stat().st_size
        manifest[path] = RemoteFile(f'{object_folder}/{file}', size, digest)
    return manifest


def merge(parts: Sequence[Manifest]) -> Manifest:
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
