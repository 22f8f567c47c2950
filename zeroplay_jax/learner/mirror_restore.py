"""Brings the newest whole checkpoint of a run down from a bucket, with the logs up to it."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil

from zeroplay_jax.learner import checksums
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.learner.mirror import DOWNLOADS, RECORDS
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.object_cache import THREADS
from zeroplay_jax.runtime.digests import file_digests
from zeroplay_jax.runtime.remote_workdir import Manifest, RemoteWorkdir
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
            damage = checksums.find_damage(folder / FOLDER / str(step))
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
        raise UserError(
            f'{remote.address}: all checkpoints are damaged ({lines[0]}); choose another workdir'
        )
    return []


def _conclude(lines: list[str], step: int, newest: int) -> None:
    """Adds to the last line what the run does, if there is one."""
    if lines and step < newest:
        lines[-1] += (
            f'; the run resumes from {step}, and steps {step} to {newest - 1} are run again'
        )


def _is_local(folder: pathlib.Path, step: int, manifest: Manifest | None) -> bool:
    """Returns whether the local folder has a step, and the bucket the same or none of this number."""
    path = f'{FOLDER}/{step}/{checksums.FILE_NAME}'
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


def _download_whole(remote: RemoteWorkdir, staging: pathlib.Path, manifest: Manifest) -> str:
    """Downloads the files of a step, and the records as they are now; returns the damage in words, or ''."""
    paths = list(manifest)
    names = {path: file.object for path, file in manifest.items()}
    for name in RECORDS:
        names.setdefault(name, name)

    def download(path: str) -> str:
        target = staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
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


def _install(folder: pathlib.Path, staging: pathlib.Path) -> None:
    """Moves downloaded files into the local folder, the checkpoint last."""
    # Curves of later steps, and logs of another machine, would be mixed with them.
    for pattern in ('*.jsonl', 'events.out.tfevents.*'):
        for path in folder.glob(pattern):
            path.unlink()
    for path in sorted(staging.iterdir()):
        if path.is_file():
            os.replace(path, folder / path.name)
    for name in ('best', FOLDER):
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
