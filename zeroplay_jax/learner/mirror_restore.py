"""Brings the newest whole checkpoint of a run down from a bucket, with the logs up to it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import shutil
from collections.abc import Iterator

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.learner.mirror import DOWNLOADS, RECORDS
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.object_cache import THREADS
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.digests import file_digests
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.remote_workdir import (
    CHECKPOINT_FOLDERS,
    Manifest,
    RemoteFile,
    RemoteWorkdir,
    checkpoint_files,
)
from zeroplay_jax.types import UserError

_DAMAGED = 'damaged'


def bring_down(
    remote: RemoteWorkdir, folder: pathlib.Path, manifests: dict[int, Manifest]
) -> list[str]:
    """Makes the newest whole checkpoint the newest one of a local folder; returns a line about each damaged one.

    A step in the local folder is taken as it is if it is whole and either not in the bucket, because the process died
    before it was uploaded, or the same there. Any other one is downloaded, with logs and records.

    The steps that are found damaged are moved to folder/damaged, or are no steps any more in the bucket: they are
    removed from `manifests` as well.

    Args:
      remote: workdir of the run in a bucket.
      folder: local folder of the run; it is created only if something is downloaded.
      manifests: complete steps in the bucket.

    Raises:
      UserError: one line; there are steps, and all of them are damaged.
      RetrievalError: the bucket cannot be read.
    """
    lines: list[str] = []
    candidates = sorted({*saved_steps(folder / FOLDER), *manifests}, reverse=True)
    for step in candidates:
        manifest = manifests.get(step)
        if _is_local(folder, step, manifest):
            damage = checkpoint.find_damage(folder / FOLDER / str(step))
            if not damage:
                _conclude(lines, step, candidates[0])
                return lines
            target = folder / _DAMAGED / str(step)
            _move(folder / FOLDER / str(step), target)
            lines.append(f'checkpoint {step} is damaged: {damage}; it is now in {target}')
        if manifest is not None:
            damage = _download(remote, folder, step, manifest)
            if not damage:
                _conclude(lines, step, candidates[0])
                return lines
            # A damaged step must not count among those that are kept.
            remote.delete_manifest(step)
            del manifests[step]
            lines.append(f'checkpoint {step} of {remote.address} is damaged: {damage}')
    if candidates:
        raise _all_damaged(remote, lines)
    return []


def bring_down_on_all(
    hosts: Hosts, remote: RemoteWorkdir, folder: pathlib.Path, manifests: dict[int, Manifest]
) -> list[str]:
    """Makes the newest whole step in the bucket the only checkpoint of the folder of each process.

    For runs of several processes, each of which has saved its own shards in a folder of its own and needs those of all.
    What is in the folder already is not downloaded. Steps in the folders that are not in the bucket are removed: the
    processes may have died before all of them saved it. All processes must call it.

    Args:
      hosts: processes of the run.
      remote: as in `bring_down`.
      folder: local folder of this process.
      manifests: complete steps in the bucket, equal in all processes; damaged ones are removed.

    Returns:
      A line about each damaged step, equal in all processes.

    Raises:
      UserError: one line; there are steps, and all of them are damaged, or the bucket cannot be read or the folder of
        a process cannot be written.
    """
    lines: list[str] = []
    candidates = sorted(manifests, reverse=True)
    for step in candidates:
        # Only process 0 writes logs and records.
        files = manifests[step] if hosts.is_first else checkpoint_files(manifests[step])
        with _staged_on_all(hosts, remote, folder, step, files) as damage:
            if not damage:
                hosts.run_on_all_and_gather(functools.partial(_replace, folder))
        if not damage:
            _conclude(lines, step, candidates[0])
            return lines
        hosts.run_on_all_and_gather(functools.partial(_delete_manifest, hosts, remote, step))
        del manifests[step]
        lines.append(f'checkpoint {step} of {remote.address} is damaged: {damage}')
    if candidates:
        raise _all_damaged(remote, lines)
    hosts.run_on_all_and_gather(functools.partial(_remove_checkpoints, folder))
    return []


@contextlib.contextmanager
def _staged_on_all(
    hosts: Hosts, remote: RemoteWorkdir, folder: pathlib.Path, step: int, files: Manifest
) -> Iterator[str]:
    """Downloads files into a folder that exists in this context only; returns their damage in any process, or ''."""
    staging = folder / DOWNLOADS

    def download() -> str:
        # Of a process that was killed.
        shutil.rmtree(staging, ignore_errors=True)
        try:
            return _download_whole(remote, staging, files, folder, hosts.is_first)
        except RetrievalError as error:
            raise UserError(str(error)) from None

    try:
        with progress.clock(f'download step {step}', hosts.is_first):
            damages = hosts.run_on_all_and_gather(download)
        yield next(filter(None, damages), '')
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _delete_manifest(hosts: Hosts, remote: RemoteWorkdir, step: int) -> None:
    """Removes the object that makes a damaged step complete, in process 0."""
    if not hosts.is_first:
        return
    try:
        remote.delete_manifest(step)
    except RetrievalError as error:
        raise UserError(str(error)) from None


def _all_damaged(remote: RemoteWorkdir, lines: list[str]) -> UserError:
    return UserError(
        f'{remote.address}: all checkpoints are damaged ({lines[0]}); choose another workdir'
    )


def _replace(folder: pathlib.Path) -> None:
    """Replaces all steps of a local folder by the downloaded one.

    Raises:
      UserError: one line; the folder cannot be written.
    """
    _remove_checkpoints(folder)
    try:
        _install(folder, folder / DOWNLOADS)
    except OSError as error:
        raise unwritable(folder, error) from None


def _remove_checkpoints(folder: pathlib.Path) -> None:
    """Removes all steps from a local folder.

    Raises:
      UserError: one line; the folder cannot be written.
    """
    for name in CHECKPOINT_FOLDERS:
        try:
            shutil.rmtree(folder / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise unwritable(folder, error) from None


def unwritable(folder: pathlib.Path, error: OSError) -> UserError:
    """Returns the error of a run whose local folder cannot be written."""
    return UserError(
        f'{folder}: cannot be written ({error}); free disk space, change its rights, or set '
        'config.bucket.spool to another folder'
    )


def _conclude(lines: list[str], step: int, newest: int) -> None:
    """Adds to the last line what the run does, if there is one."""
    if lines and step < newest:
        lines[-1] += (
            f'; the run resumes from {step}, and steps {step} to {newest - 1} are run again'
        )


def _is_local(folder: pathlib.Path, step: int, manifest: Manifest | None) -> bool:
    """Returns whether the local folder has a step, and the bucket the same or none of this number."""
    path = f'{FOLDER}/{step}/{checkpoint.FILE_NAME}'
    if not (folder / path).is_file():
        return False
    if manifest is None:
        return True
    # Equal checksums mean equal files. In a run that is not deterministic, another machine may have run the step anew.
    (digest,) = file_digests([folder / path])
    return path in manifest and manifest[path].sha256 == digest


def _download(remote: RemoteWorkdir, folder: pathlib.Path, step: int, manifest: Manifest) -> str:
    """Downloads a step into the local folder, if it is whole; returns its damage in words, or ''."""
    staging = folder / DOWNLOADS
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with progress.clock(f'download step {step}'):
            damage = _download_whole(remote, staging, manifest)
        if not damage:
            _install(folder, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return damage


def _download_whole(
    remote: RemoteWorkdir,
    staging: pathlib.Path,
    manifest: Manifest,
    present: pathlib.Path | None = None,
    has_records: bool = True,
) -> str:
    """Downloads the files of a step, and the records as they are now; returns the damage in words, or ''.

    Args:
      remote: workdir of the run in a bucket.
      staging: gets the files.
      manifest: the files.
      present: a folder whose files are linked instead, where they are equal.
      has_records: whether records are downloaded, too.
    """
    paths = list(manifest)
    names = {path: file.object for path, file in manifest.items()}
    for name in RECORDS if has_records else ():
        names.setdefault(name, name)

    def download(path: str) -> str:
        target = staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if present is not None and path in manifest and _is_equal(present / path, manifest[path]):
            os.link(present / path, target)
            return ''
        try:
            remote.bucket.download(remote.name(names[path]), target)
        except FileNotFoundError:
            # Records may be younger than the step, such as that of the report, or not written by this run.
            return f'{path} is missing' if path in manifest else ''
        return ''

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        missing = list(filter(None, threads.map(download, names)))
    if missing:
        return missing[0]
    digests = file_digests([staging / path for path in paths])
    for path, digest in zip(paths, digests, strict=True):
        # A run that is started writes its records anew, so those of an older step may have changed.
        if digest != manifest[path].sha256 and path not in RECORDS:
            return f'{path} differs from its checksum'
    return ''


def _is_equal(path: pathlib.Path, file: RemoteFile) -> bool:
    """Returns whether a local file has the content of a file of a step."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    (digest,) = file_digests([path])
    return digest == file.sha256


def _install(folder: pathlib.Path, staging: pathlib.Path) -> None:
    """Moves downloaded files into the local folder, the checkpoint last."""
    # Curves of later steps, and logs of another machine, would be mixed with them.
    for pattern in ('*.jsonl', 'events.out.tfevents.*'):
        for path in folder.glob(pattern):
            path.unlink()
    for path in sorted(staging.iterdir()):
        if path.is_file():
            os.replace(path, folder / path.name)
    # The run's own step comes last: with it the run counts as begun.
    for name in reversed(CHECKPOINT_FOLDERS):
        if not (staging / name).is_dir():
            continue
        (folder / name).mkdir(exist_ok=True)
        for step in (staging / name).iterdir():
            _move(step, folder / name / step.name)


def _move(source: pathlib.Path, target: pathlib.Path) -> None:
    """Renames a folder; one that is at the target is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(source, target)
