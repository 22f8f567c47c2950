"""A run whose workdir is in a bucket: it works in a local folder, which is mirrored while the run goes on.

Of a run of several processes each has a local folder of its own, and uploads the shards that it owns.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Iterator

from zeroplay_jax.extras.buckets import objects
from zeroplay_jax.extras.buckets.copies import THREADS
from zeroplay_jax.extras.buckets.lease import Lease
from zeroplay_jax.extras.buckets.mirror import DOWNLOADS, LOGS, Mirror
from zeroplay_jax.extras.buckets.workdir import (
    CHECKPOINT_FOLDERS,
    LEASE_FILE,
    RUN_FILE,
    Manifest,
    RemoteFile,
    RemoteWorkdir,
    checkpoint_files,
    manifest_of,
    manifest_text,
    spool,
)
from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.record import FILE_NAME
from zeroplay_jax.settings.kinds import warn
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Preempted, TrainingStopped, UserError

# Between two looks whether everything is uploaded.
_WAIT_SECONDS = 0.1
# Between two looks whether a local folder is free.
_LOCK_SECONDS = 0.5
# In which a process ends after it has missed the heartbeat of process 0.
_STOP_SECONDS = 10.0


@contextlib.contextmanager
def opened(hosts: Hosts, address: str, config: Config) -> Iterator[Place]:
    """Returns a context with the local folder of a run in a bucket.

    The first process takes the lease, and all bring the newest checkpoint down and upload until the context ends. If
    the run ends early by itself or by SIGTERM, the last checkpoint is uploaded before. All processes must call it.

    Raises:
      UserError: one line; the bucket, the run in it or the local folder cannot be used.
      WorkdirError: another process has the lease, or a local folder for longer than processes of a killed run live.
    """
    with contextlib.ExitStack() as stack:
        leases: list[Lease] = []

        def open_in_first() -> tuple[str, str, list[str]]:
            remote = RemoteWorkdir.open(address)
            # A folder of other objects is refused before a lease is written to it.
            remote.run_id()
            lease = Lease(remote.bucket, remote.name(LEASE_FILE))
            stack.callback(lease.release)
            leases.append(lease)
            # Read after the lease was taken, because its last holder wrote them, or removed the id of its run.
            stored_id = remote.run_id()
            run_id = stored_id or remote.create_run()
            if stored_id is None:
                folder = _folder(hosts, config, run_id, address)
                stack.callback(_remove_unless_begun, remote, folder, lease)
            manifests = remote.manifests()
            texts = [manifest_text(step, files).decode() for step, files in manifests.items()]
            return run_id, lease.id, texts

        run_id, lease_id, texts = hosts.run_on_first(open_in_first)
        folder = _folder(hosts, config, run_id, address)
        # A process of a run whose first process was killed may still write its folder, which no lease protects.
        seconds = config.distributed.heartbeat + _STOP_SECONDS
        hosts.run_on_all(stack.enter_context, _reserved(folder, address, seconds))
        # A host without credentials is an error in all processes.
        remote = hosts.run_on_all(RemoteWorkdir.open, address)
        manifests: dict[int, Manifest] = {}
        for text in texts:
            step, files = manifest_of(text.encode())
            manifests[step] = files or {}
        lines = bring_down(hosts, remote, folder, manifests)
        for line in lines if hosts.is_first else ():
            warn(line)
        mirror = Mirror(
            remote,
            folder,
            lease_id,
            leases[0] if leases else None,
            manifests,
            config.checkpoint.keep,
            config.bucket.seconds,
            hosts.index,
            hosts.count,
        )
        stack.callback(mirror.close)
        try:
            yield Place(
                folder,
                is_shared=hosts.count == 1,
                is_whole=True,
                after_step=lambda: hosts.run_on_all_and_gather(mirror.raise_if_failed),
                at_end=functools.partial(_finish, hosts, mirror),
            )
        except (Preempted, TrainingStopped) as error:
            try:
                wait(hosts, mirror)
            except UserError as failure:
                # The status of the end is what a launch script looks at.
                error.args = (f'{error}. {failure}',)
            raise


def wait(hosts: Hosts, mirror: Mirror) -> None:
    """Waits until the newest checkpoint is in the bucket; all processes must call it.

    Raises:
      UserError: as `Mirror.raise_if_failed`.
    """
    # Process 0 must not wait for one whose uploads have failed.
    while any(hosts.run_on_all_and_gather(mirror.is_pending)):
        time.sleep(_WAIT_SECONDS)


def _finish(hosts: Hosts, mirror: Mirror) -> None:
    wait(hosts, mirror)
    hosts.run_on_first(mirror.upload_results)


def _folder(hosts: Hosts, config: Config, run_id: str, address: str) -> pathlib.Path:
    """Returns the local folder of this process."""
    process = hosts.index if hosts.count > 1 else None
    _, path = objects.split(address)
    return spool(config.bucket.spool, run_id, path, process)


def _remove_unless_begun(remote: RemoteWorkdir, folder: pathlib.Path, lease: Lease) -> None:
    """Removes the id of a run that did not begin, so that the address is empty again."""
    with contextlib.suppress(RetrievalError):
        if not (folder / FILE_NAME).exists() and lease.renew():
            remote.bucket.delete(remote.name(RUN_FILE))


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
            if deadline is None:
                deadline = time.monotonic() + seconds
                line = f'waits up to {seconds:.0f} s for the process that has the {place}'
                print(line, file=sys.stderr)
            if time.monotonic() >= deadline:
                raise run_workdir.InUse(
                    f'{address}: another process has the {place}; end it, or wait until it has ended'
                )
            time.sleep(_LOCK_SECONDS)
        yield


def bring_down(
    hosts: Hosts, remote: RemoteWorkdir, folder: pathlib.Path, manifests: dict[int, Manifest]
) -> list[str]:
    """Makes the newest whole checkpoint the newest one of the local folder of each process, with the logs up to it.

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
                hosts.run_on_first(remote.bucket.delete, remote.manifest_name(step))
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
    """Removes all steps from a local folder."""
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
    if manifest is None:
        return (folder / path).is_file()
    # Equal checksums mean equal files. In a run that is not deterministic, another machine may have run the step anew.
    return path in manifest and _is_equal(folder / path, manifest[path])


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
        # A run that is started writes its record anew, so that of an older step may have changed.
        if path != FILE_NAME and not _is_equal(target, manifest[path]):
            return f'{path} differs from its checksum'
        return ''

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        damages = list(threads.map(download, names))
    return next(filter(None, damages), '')


def _is_equal(path: pathlib.Path, file: RemoteFile) -> bool:
    """Returns whether a local file has the content of a file of a step."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return file_digests([path]) == [file.sha256]


def _install(folder: pathlib.Path, staging: pathlib.Path) -> None:
    """Moves downloaded files into the local folder, which has no steps any more."""
    # Curves of later steps, and logs of another machine, would be mixed with them.
    for pattern in LOGS:
        for path in folder.glob(pattern):
            path.unlink()
    # Files come first, and the run's own step last: with it the run counts as begun.
    for path in sorted(staging.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        os.rename(path, folder / path.name)
