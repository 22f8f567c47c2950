"""A run whose workdir is in a bucket: it works in a local folder, which is mirrored while the run goes on.

Of a run of several processes each has a local folder of its own, and uploads the shards that it owns.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.retrieval import objects, progress
from zeroplay_jax.retrieval.downloads import THREADS
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.record import FILE_NAME
from zeroplay_jax.runtime.remote_workdir import (
    CHECKPOINT_FOLDERS,
    LEASE_FILE,
    RUN_FILE,
    Lease,
    Manifest,
    RemoteFile,
    RemoteWorkdir,
    checkpoint_files,
    manifest_of,
    manifest_text,
    spool,
)
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.training.mirror import DOWNLOADS, LOGS, Mirror, PartMirror, Parts, Uploads
from zeroplay_jax.training.run_folder import Place
from zeroplay_jax.types import Preempted, TrainingStopped, UserError

# Between two looks whether everything is uploaded.
_WAIT_SECONDS = 0.1
# Between two looks whether a local folder is free.
_LOCK_SECONDS = 0.5
# In which a process ends after it has missed the heartbeat of process 0.
_STOP_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class RemotePlace(Place):
    """The local folder of a run in a bucket. All processes must call the methods.

    Attributes:
      lines: about damaged checkpoints, equal on all processes.
      mirror: uploads the folder: all of it in the first process, and checkpoints only in the others.
    """

    lines: list[str]
    mirror: Uploads

    @property
    def is_shared(self) -> bool:
        return self.hosts.count == 1

    def set_damaged_aside(self) -> list[str]:
        # A damaged checkpoint was replaced when the folder was opened.
        return self.lines

    def raise_if_failed(self) -> None:
        self.hosts.run_on_all_and_gather(self.mirror.raise_if_failed)

    def wait(self) -> None:
        """Waits until the newest checkpoint is in the bucket; raises as `raise_if_failed`."""
        # Process 0 must not wait for one whose uploads have failed.
        while any(self.hosts.run_on_all_and_gather(self.mirror.is_pending)):
            time.sleep(_WAIT_SECONDS)

    def upload_results(self, pattern: str = '*') -> None:
        self.wait()
        self.hosts.run_on_first(Mirror.upload_results, self.mirror, pattern)

    def delete_policies(self, folders: Iterable[str]) -> None:
        self.hosts.run_on_first(Mirror.delete_policies, self.mirror, folders)


@contextlib.contextmanager
def opened(hosts: Hosts, workdir: str, config: Config) -> Iterator[RemotePlace]:
    """Returns a context with the local folder of a run in a bucket.

    The first process takes the lease, and all bring the newest checkpoint down and upload until the context ends. If
    the run ends early by itself or by SIGTERM, the last checkpoint is uploaded before. All processes must call it.

    Raises:
      UserError: one line; the bucket, the run in it or the local folder cannot be used.
      WorkdirError: another process has the lease, or a local folder for longer than processes of a killed run live.
    """
    with contextlib.ExitStack() as stack:
        leases: list[Lease] = []

        def open_in_first() -> _Shared:
            lease, shared = stack.enter_context(_opened(hosts, workdir, config))
            leases.append(lease)
            return shared

        shared = hosts.run_on_first(open_in_first)
        folder = _folder(hosts, config, shared[0], workdir)
        # A process of a run whose first process was killed may still write its folder, which no lease protects.
        seconds = config.distributed.heartbeat + _STOP_SECONDS
        reserved = _reserved(folder, workdir, seconds)
        hosts.run_on_all(stack.enter_context, reserved)
        place = _place(hosts, workdir, shared, leases[0] if leases else None, folder, config)
        stack.callback(place.mirror.close)
        try:
            yield place
        except (Preempted, TrainingStopped) as error:
            try:
                place.wait()
            except UserError as failure:
                # The status of the end is what a launch script looks at.
                error.args = (f'{error}. {failure}',)
            raise


# Id of the run, id of the lease, and the complete steps in the bucket as text.
_Shared = tuple[str, str, list[str]]


@contextlib.contextmanager
def _opened(hosts: Hosts, address: str, config: Config) -> Iterator[tuple[Lease, _Shared]]:
    """Takes the lease of a run in a bucket, in the first process; returns a context with it.

    Raises:
      UserError, WorkdirError: as `opened`.
    """
    with contextlib.ExitStack() as stack:
        remote = RemoteWorkdir.open(address)
        # A folder of other objects is refused before a lease is written to it.
        remote.run_id()
        lease = Lease(remote.bucket, remote.name(LEASE_FILE))
        stack.callback(lease.release)
        # Read after the lease was taken, because its last holder wrote them, or removed the id of its run.
        stored_id = remote.run_id()
        run_id = stored_id or remote.create_run()
        if stored_id is None:
            folder = _folder(hosts, config, run_id, address)
            stack.callback(_remove_unless_begun, remote, folder, lease)
        manifests = remote.manifests()
        texts = [manifest_text(step, files).decode() for step, files in manifests.items()]
        yield lease, (run_id, lease.id, texts)


def _folder(hosts: Hosts, config: Config, run_id: str, address: str) -> pathlib.Path:
    """Returns the local folder of this process."""
    process = hosts.index if hosts.count > 1 else None
    _, path = objects.split(address)
    return spool(config.bucket.spool, run_id, path, process)


@contextlib.contextmanager
def _reserved(folder: pathlib.Path, address: str, seconds: float) -> Iterator[None]:
    """Reserves the local folder of this process while the context is open; a line says that it waits for another one.

    Args:
      folder: the folder.
      address: of the run.
      seconds: to wait for a process that has the folder.

    Raises:
      InUse: one line; the folder is still in use by another process.
      UserError: one line; the folder cannot be written.
    """
    place = f'local folder {folder.parent} on {socket.gethostname()}'
    deadline: float | None = None
    with contextlib.ExitStack() as stack:
        while True:
            # The lock lies beside the folder of the run, so that a run that does not begin leaves none.
            with _writable(folder), contextlib.suppress(run_workdir.InUse):
                stack.enter_context(run_workdir.locked(folder.parent))
                break
            now = time.monotonic()
            if deadline is None:
                print(
                    f'waits up to {seconds:.0f} s for the process that has the {place}',
                    file=sys.stderr,
                )
                deadline = now + seconds
            if now >= deadline:
                raise run_workdir.InUse(
                    f'{address}: another process has the {place}; end it, or wait until it has ended'
                )
            time.sleep(_LOCK_SECONDS)
        yield


def _place(
    hosts: Hosts,
    address: str,
    shared: _Shared,
    lease: Lease | None,
    folder: pathlib.Path,
    config: Config,
) -> RemotePlace:
    """Returns the place of this process, with the newest checkpoint.

    Args:
      hosts: processes of the run.
      address: of its workdir.
      shared: what the first process has read.
      lease: on the workdir, in the first process.
      folder: local folder of this process.
      config: of the run.
    """
    _, lease_id, texts = shared
    manifests: dict[int, Manifest] = {}
    for text in texts:
        step, files = manifest_of(text.encode())
        assert files is not None
        manifests[step] = files
    # A host without credentials is an error in all processes.
    remote = hosts.run_on_all(RemoteWorkdir.open, address)
    lines = bring_down(hosts, remote, folder, manifests)
    keep, seconds = config.checkpoint.keep, config.bucket.seconds
    parts = Parts(remote, lease_id, hosts.count) if hosts.count > 1 else None
    mirror: Uploads
    if lease is not None:
        mirror = Mirror(remote, folder, lease, manifests, keep, seconds, parts)
    else:
        assert parts is not None
        newest = max(manifests, default=-1)
        mirror = PartMirror(remote, folder, parts, hosts.index, newest, seconds)
    return RemotePlace(hosts, folder, lines, mirror)


def _remove_unless_begun(remote: RemoteWorkdir, folder: pathlib.Path, lease: Lease) -> None:
    """Removes the id of a run that did not begin, so that the address is empty again."""
    if (folder / FILE_NAME).exists():
        return
    with contextlib.suppress(RetrievalError):
        if lease.renew():
            remote.bucket.delete(remote.name(RUN_FILE))


# ---- restoring -------------------------------------------------------------------------------------
#
# Brings the newest whole checkpoint of a run down from the bucket, with the logs up to it.


def bring_down(
    hosts: Hosts, remote: RemoteWorkdir, folder: pathlib.Path, manifests: dict[int, Manifest]
) -> list[str]:
    """Makes the newest whole checkpoint the newest one of the local folder of each process.

    In a run of one process, a step in the local folder is taken as it is if it is whole and either not in the bucket,
    because the process died before it was uploaded, or the same there. In a run of several, each process has saved its
    own shards only, and needs those of all: the newest whole step in the bucket becomes the only one. The processes may
    have died before all of them saved a later one. What is in the folder already is not downloaded.

    The steps that are found damaged are moved to folder/damaged, or are no steps any more in the bucket: they are
    removed from `manifests` as well. All processes must call it.

    Args:
      hosts: processes of the run.
      remote: workdir of the run in a bucket.
      folder: local folder of this process; it is created only if something is downloaded.
      manifests: complete steps in the bucket, equal in all processes.

    Returns:
      A line about each damaged step, equal in all processes.

    Raises:
      UserError: one line; there are steps, and all of them are damaged, or the bucket cannot be read or the folder of
        a process cannot be written.
    """
    lines = []
    local_steps = saved_steps(folder / FOLDER) if hosts.count == 1 else []
    candidates = sorted({*local_steps, *manifests}, reverse=True)
    for step in candidates:
        manifest = manifests.get(step)
        is_whole = False
        if step in local_steps and _is_same(folder, step, manifest):
            damage = checkpoint.find_damage(folder / FOLDER / str(step))
            is_whole = not damage
            if damage:
                target = checkpoint.move_aside(folder, step)
                lines.append(f'checkpoint {step} is damaged: {damage}; it is now in {target}')
        if not is_whole and manifest is not None:
            damage = _download(hosts, remote, folder, step, manifest)
            is_whole = not damage
            if damage:
                # A damaged step must not count among those that are kept.
                hosts.run_on_first(remote.delete_manifest, step)
                del manifests[step]
                lines.append(f'checkpoint {step} of {remote.address} is damaged: {damage}')
        if is_whole:
            if lines and step < candidates[0]:
                lines[-1] += (
                    f'; the run resumes from {step}, and steps {step} to {candidates[0] - 1} are run again'
                )
            return lines
    if candidates:
        raise UserError(
            f'{remote.address}: all checkpoints are damaged ({lines[0]}); choose another workdir'
        )
    hosts.run_on_all(_remove_checkpoints, folder)
    return []


def _download(
    hosts: Hosts, remote: RemoteWorkdir, folder: pathlib.Path, step: int, manifest: Manifest
) -> str:
    """Replaces all steps of the local folders by one of the bucket, if it is whole; returns its damage, or ''."""
    staging = folder / DOWNLOADS
    # Only process 0 writes logs and records.
    files = manifest if hosts.is_first else checkpoint_files(manifest)

    def stage() -> str:
        # Of a process that was killed.
        shutil.rmtree(staging, ignore_errors=True)
        return _download_whole(remote, staging, files, folder, hosts.is_first)

    def replace() -> None:
        _remove_checkpoints(folder)
        with _writable(folder):
            _install(folder, staging)

    try:
        with progress.clock(f'download step {step}', hosts.is_first):
            damages = hosts.run_on_all_and_gather(stage)
        damage = next(filter(None, damages), '')
        if not damage:
            hosts.run_on_all(replace)
        return damage
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_checkpoints(folder: pathlib.Path) -> None:
    """Removes all steps from a local folder.

    Raises:
      UserError: one line; the folder cannot be written.
    """
    for name in CHECKPOINT_FOLDERS:
        with _writable(folder), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder / name)


@contextlib.contextmanager
def _writable(folder: pathlib.Path) -> Iterator[None]:
    """Turns errors of the local disk into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f'{folder}: cannot be written ({error}); free disk space, change its rights, or set '
            'config.bucket.spool to another folder'
        ) from None


def _is_same(folder: pathlib.Path, step: int, manifest: Manifest | None) -> bool:
    """Returns whether the bucket has the same content of a local step, or none of this number."""
    path = f'{FOLDER}/{step}/{checkpoint.FILE_NAME}'
    if not (folder / path).is_file():
        return False
    # Equal checksums mean equal files. In a run that is not deterministic, another machine may have run the step anew.
    return manifest is None or path in manifest and _is_equal(folder / path, manifest[path])


def _download_whole(
    remote: RemoteWorkdir,
    staging: pathlib.Path,
    manifest: Manifest,
    present: pathlib.Path,
    has_record: bool,
) -> str:
    """Downloads the files of a step, and the record as it is now; returns the damage in words, or ''.

    Args:
      remote: workdir of the run in a bucket.
      staging: gets the files.
      manifest: the files.
      present: a folder whose files are linked instead, where they are equal.
      has_record: whether the record is downloaded, too.
    """
    names = {path: file.object for path, file in manifest.items()}
    if has_record:
        names.setdefault(FILE_NAME, FILE_NAME)

    def download(path: str) -> str:
        target = staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # The record of the step may be older than that in the bucket.
        if path != FILE_NAME and _is_equal(present / path, manifest[path]):
            os.link(present / path, target)
            return ''
        try:
            remote.bucket.download(remote.name(names[path]), target)
        except objects.Removed:
            # The record may be younger than the step, or not written by this run.
            return f'{path} is missing' if path in manifest else ''
        return ''

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        missing = list(filter(None, threads.map(download, names)))
    if missing:
        return missing[0]
    digests = file_digests([staging / path for path in manifest])
    for (path, file), digest in zip(manifest.items(), digests, strict=True):
        # A run that is started writes its record anew, so that of an older step may have changed.
        if digest != file.sha256 and path != FILE_NAME:
            return f'{path} differs from its checksum'
    return ''


def _is_equal(path: pathlib.Path, file: RemoteFile) -> bool:
    """Returns whether a local file has the content of a file of a step."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    (digest,) = file_digests([path])
    return digest == file.sha256


def _install(folder: pathlib.Path, staging: pathlib.Path) -> None:
    """Moves downloaded files into the local folder, which has no steps any more."""
    # Curves of later steps, and logs of another machine, would be mixed with them.
    for pattern in LOGS:
        for path in folder.glob(pattern):
            path.unlink()
    # Files come first, and the run's own step last: with it the run counts as begun.
    for path in sorted(staging.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        os.rename(path, folder / path.name)
