"""Copies the checkpoints and logs of a run to its workdir in a bucket, beside the training.

The run works in a local folder, as any run does. A thread takes the newest complete checkpoint of this folder, uploads
what it refers to, then its files, and last the object that makes it complete (`runtime.remote_workdir`). A checkpoint
that is saved meanwhile waits; of several that wait only the newest is uploaded.
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
from collections.abc import Callable, Iterable, Sequence

from zeroplay_jax.learner import checksums
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.retrieval.object_cache import THREADS
from zeroplay_jax.retrieval.objects import Unavailable
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.digests import file_digests
from zeroplay_jax.runtime.lease import Lease
from zeroplay_jax.runtime.remote_workdir import Manifest, RemoteFile, RemoteWorkdir
from zeroplay_jax.types import UserError

# Folder of the checkpoint of the best evaluation.
_BEST = 'best'
_STAGING = '.upload'
# Gets what is brought down until it is found whole.
DOWNLOADS = '.download'
# Files that a run appends to.
_LOGS = ('*.jsonl', 'events.out.tfevents.*')
# Written when a run starts, or after its report; a resumed run needs them.
RECORDS = ('config.json', 'inputs.json', 'tools.json', 'from.json', '.run_id', '.reported')
# Parts of the local folder that are no results.
_NOT_RESULTS = (FOLDER, _BEST, 'damaged', _STAGING, DOWNLOADS, '.lock')
# Digits of the id of the lease in the names of objects.
_SUFFIX_DIGITS = 8
_POLL_SECONDS = 0.1
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class Mirror:
    """Uploads the checkpoints of a run from a thread, until it is closed.

    Args:
      remote: workdir of the run in a bucket.
      folder: local folder in which the run works.
      lease: of this process on `remote`.
      manifests: complete steps in the bucket.
      keep: number of checkpoints to keep in the bucket.
      seconds: for which uploads are tried again while none succeeds.
    """

    def __init__(
        self,
        remote: RemoteWorkdir,
        folder: pathlib.Path,
        lease: Lease,
        manifests: dict[int, Manifest],
        keep: int,
        seconds: float,
    ):
        self._remote = remote
        self._folder = folder
        self._lease = lease
        self._manifests = dict(manifests)
        self._keep = keep
        self._seconds = seconds
        # Object → SHA-256 of what this process has uploaded, so that another attempt skips it.
        self._sent: dict[str, str] = {}
        self._error: Exception | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name='upload', daemon=True)
        self._thread.start()

    @property
    def newest(self) -> int:
        """Number of the newest checkpoint in the bucket; 0 without one."""
        return max(self._manifests, default=0)

    def raise_if_failed(self) -> None:
        """Raises what ended the uploads.

        Raises:
          UserError: one line; the bucket cannot be written, or another process took the lease.
        """
        if self._lease.lost:
            raise UserError(f'{self._lease.lost}; {self._saved_text()}')
        if isinstance(self._error, RetrievalError):
            raise UserError(f'{self._error}; {self._saved_text()}') from None
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Waits until the newest checkpoint of the local folder is in the bucket.

        Raises:
          UserError: as `raise_if_failed`.
        """
        while self._next_step() is not None:
            self.raise_if_failed()
            time.sleep(_POLL_SECONDS)

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
                if not any(part.match(pattern) for pattern in _LOGS):
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

    def close(self) -> None:
        """Ends the thread; the file that it uploads is completed before."""
        self._is_closed.set()
        self._thread.join()
        shutil.rmtree(self._folder / _STAGING, ignore_errors=True)

    # ---- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed.wait(_POLL_SECONDS):
            step = self._next_step()
            if step is not None:
                self._try(functools.partial(self._upload, step))
            if self._error is not None or self._lease.lost:
                return

    def _next_step(self) -> int | None:
        """Returns the newest complete checkpoint of the local folder if it is not in the bucket."""
        steps = saved_steps(self._folder / FOLDER)
        if not steps or steps[-1] in self._manifests:
            return None
        return steps[-1]

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
        staging = self._folder / _STAGING
        shutil.rmtree(staging, ignore_errors=True)
        try:
            manifest = self._staged(step, staging)
        except FileNotFoundError as error:
            own_folder = self._folder / FOLDER / str(step)
            is_of_step = str(error.filename).startswith(f'{own_folder}/')
            # The run removes old steps only.
            if is_of_step and self._next_step() == step:
                raise RetrievalError(
                    f'{own_folder} is damaged: {error.filename} is missing'
                ) from None
            # The run has saved newer steps since and removed this one, or an evaluation was better than the best.
            return
        # What a step refers to comes first, so that a process that dies leaves no step without its logs.
        is_own = f'{FOLDER}/'
        self._send_all(staging, manifest, lambda path: not path.startswith(is_own))
        self._send_all(staging, manifest, lambda path: path.startswith(is_own))
        if self._is_closed.is_set() or not self._lease.renew():
            return
        self._remote.write_manifest(step, manifest)
        self._manifests[step] = manifest
        shutil.rmtree(staging, ignore_errors=True)
        self._remove_old()

    def _staged(self, step: int, staging: pathlib.Path) -> Manifest:
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
        suffix = f'-{self._lease.id[:_SUFFIX_DIGITS]}'
        for name in folders:
            manifest |= _link_folder(self._folder, staging, name, name + suffix)
        copies = {}
        for name in RECORDS:
            if (self._folder / name).is_file():
                copies[name] = name
        for pattern in _LOGS:
            for path in self._folder.glob(pattern):
                copies[path.name] = f'logs/{step}{suffix}/{path.name}'
        for name in copies:
            shutil.copyfile(self._folder / name, staging / name)
        digests = file_digests([staging / name for name in copies])
        for (name, object_name), digest in zip(copies.items(), digests, strict=True):
            size = (staging / name).stat().st_size
            manifest[name] = RemoteFile(object_name, size, digest)
        return manifest

    def _send_all(
        self, folder: pathlib.Path, manifest: Manifest, is_included: Callable[[str], bool]
    ) -> None:
        """Uploads the files of a manifest that this process has not uploaded before."""

        def send(path: str) -> None:
            file = manifest[path]
            if self._sent.get(file.object) == file.sha256:
                return
            if self._is_closed.is_set() or self._lease.lost:
                return
            self._remote.bucket.upload(self._remote.name(file.object), folder / path)
            self._sent[file.object] = file.sha256

        with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(send, filter(is_included, manifest)))

    def _upload_results(self, paths: Sequence[str]) -> None:
        """Uploads files under their own names, which the process that took the lease would use, too."""
        if not self._lease.renew():
            return
        digests = file_digests([self._folder / path for path in paths])
        manifest = {
            path: RemoteFile(path, (self._folder / path).stat().st_size, digest)
            for path, digest in zip(paths, digests, strict=True)
        }
        # A folder of weights without config.json is refused as a policy, so that file is the last one.
        self._send_all(self._folder, manifest, lambda path: not path.endswith('config.json'))
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
        self._delete_objects((f'{FOLDER}/', f'{_BEST}/', 'logs/'), keep=used)

    def _saved_text(self) -> str:
        return (
            f'everything is saved in {self._folder}, the bucket has step {self.newest}: on this machine the same '
            'command uploads the rest and goes on'
        )


def _link_folder(
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
    digests = checksums.read(folder / name)
    if digests is None:
        raise RetrievalError(f'{folder / name}: {checksums.FILE_NAME} is damaged')
    (seal,) = file_digests([folder / name / checksums.FILE_NAME])
    digests[checksums.FILE_NAME] = seal
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
