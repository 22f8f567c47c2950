"""Local copies of files, folders and runs in a bucket (gs://bucket/path), kept in the user's cache.

A copy lies at <cache>/gs/<bucket>/<path>, so files lie towards each other as they do in the bucket. The checksum of
every object is kept beside it. A later call asks the bucket for its list of objects and downloads those that are new
or have changed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Container, Iterator, Mapping, Sequence

from zeroplay_jax.extras.buckets import objects
from zeroplay_jax.extras.buckets.objects import Bucket, StoredObject
from zeroplay_jax.extras.buckets.workdir import (
    CHECKPOINT_FOLDERS,
    RUN_FILE,
    Manifest,
    RemoteWorkdir,
)
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.downloads import cache_folder
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.record import FILE_NAME
from zeroplay_jax.types import UserError

# Transfers at the same time: one of them seldom fills a network.
THREADS = 8
# Copies of at least this size are announced.
_ANNOUNCED_BYTES = 1 << 20
# Attempts to read a run that removes its oldest checkpoint meanwhile.
_READS = 5


def fetch(address: str, is_file: bool = False) -> str:
    """Returns the path of the local copy of a file or folder at gs://bucket/path; as `downloads.fetch`."""
    bucket_name, path = objects.split(address)
    bucket = objects.open_bucket(bucket_name)
    stored = _inside(bucket.list(path), path)
    if is_file and stored and not any(entry.name == path for entry in stored):
        raise RetrievalError(f'{address}: is a folder; name a file')
    if any(entry.name == f'{path}/run.json' for entry in stored):
        raise RetrievalError(
            f'{address}: is the workdir of a run; name a policy in it, such as {address}/policy/solver'
        )
    if not stored:
        raise RetrievalError(f'{address}: no such file or folder in the bucket; check the address')
    exported = re.fullmatch(r'(.+)/(policy|iteration\d+)/[^/]+', path)
    if exported:
        # Prompts and tools of an exported policy are read from the config of its run.
        stored += [entry for entry in bucket.list(f'{exported[1]}/run.json') if entry.size]
    root = update(bucket, {entry.name: entry for entry in stored}, address, path)
    return str(root / path)


def update(
    bucket: Bucket, copies: Mapping[str, StoredObject], address: str, cleaned: str
) -> pathlib.Path:
    """Downloads the objects whose copies are missing or outdated; checks their checksums.

    Args:
      bucket: the bucket.
      copies: path below the folder of its copies → the object that is copied there.
      address: of what is copied, for messages.
      cleaned: path of a folder; files in it that are not in `copies` are removed.

    Returns:
      The folder of the copies of this bucket.

    Raises:
      objects.Removed: an object is not there any more.
      RetrievalError: one line; an object could not be downloaded, or a file could not be written.
    """
    root = cache_folder() / 'gs' / bucket.name
    # Another command may copy something else, or another step of the same run.
    with disk_errors(address), locked(root):
        outdated = {}
        for path, entry in copies.items():
            if not _is_current(root, path, entry):
                outdated[path] = entry
        size = sum(entry.size for entry in outdated.values())
        if size >= _ANNOUNCED_BYTES:
            print(
                f'downloads {size / (1 << 20):,.0f} MiB in {len(outdated)} files from gs://{bucket.name}',
                file=sys.stderr,
            )
        with progress.clock('download', size >= _ANNOUNCED_BYTES):
            with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
                download = functools.partial(_download, bucket, root)
                list(threads.map(download, outdated, outdated.values()))
        _remove_others(root / cleaned, root, copies)
    return root


def _download(bucket: Bucket, root: pathlib.Path, path: str, entry: StoredObject) -> None:
    """Downloads an object to root/path, and keeps its checksum."""
    target = root / path
    record = _record(root, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f'.{target.name}.{os.getpid()}')
    try:
        bucket.download(entry.name, draft)
        # A run that reads the file keeps the one that it has opened.
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    record.write_text(_mark(entry), encoding='utf-8')


def forget(address: str) -> None:
    """Removes the checksums of all copies of a folder in a bucket, so that they are downloaded again."""
    bucket_name, path = objects.split(address)
    root = cache_folder() / 'gs' / bucket_name
    with locked(root):
        shutil.rmtree(_records(root) / path, ignore_errors=True)


def _inside(stored: Sequence[StoredObject], path: str) -> list[StoredObject]:
    """Returns the objects that are the file `path` or lie in the folder `path`."""
    inside = []
    for entry in stored:
        # Some programs write an empty object for a folder.
        is_inside = entry.name == path or entry.name.startswith(f'{path}/')
        if is_inside and not entry.name.endswith('/'):
            if '..' in entry.name.split('/'):
                raise RetrievalError(f'{entry.name}: an object with this name has no local copy')
            inside.append(entry)
    return inside


def _record(root: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the file with the checksum of a copy."""
    return _records(root) / f'{name}.checksum'


def _records(root: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the checksums: not that of the copies, because folders of policies are hashed."""
    return root.with_name(f'{root.name}.checksums')


def _mark(entry: StoredObject) -> str:
    return f'{entry.checksum} {entry.size}\n'


def _is_current(root: pathlib.Path, path: str, entry: StoredObject) -> bool:
    """Returns whether root/path, the copy of an object, has its size and was downloaded with its checksum."""
    try:
        is_recorded = _record(root, path).read_text(encoding='utf-8') == _mark(entry)
        return is_recorded and (root / path).stat().st_size == entry.size
    except (OSError, UnicodeDecodeError):
        return False


def _remove_others(folder: pathlib.Path, root: pathlib.Path, names: Container[str]) -> None:
    """Removes the files of a folder whose paths below `root` are not among names, and folders that are empty then."""
    # What lies in a folder comes before the folder.
    for path in sorted(folder.rglob('*'), reverse=True):
        if path.is_dir():
            with contextlib.suppress(OSError):
                path.rmdir()
        elif path.relative_to(root).as_posix() not in names:
            path.unlink()


@contextlib.contextmanager
def locked(root: pathlib.Path) -> Iterator[None]:
    """Returns a context in which no other process of this machine changes copies of the same bucket."""
    root.mkdir(parents=True, exist_ok=True)
    with root.with_name(f'{root.name}.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def disk_errors(address: str) -> Iterator[None]:
    """Turns errors of the local disk into one line."""
    try:
        yield
    except OSError as error:
        raise RetrievalError(
            f'{address}: its copy cannot be written ({error}); free space, or set XDG_CACHE_HOME to another folder'
        ) from None


def local_run(address: str, checkpoints: str = '', step: int | None = None) -> pathlib.Path:
    """Returns the local copy of a run in a bucket, brought up to date, to be read only.

    The copy has logs, records and results, but policies only if the run has ended.

    Args:
      address: gs://bucket/path.
      checkpoints: 'checkpoints' brings the newest checkpoint as well, 'best' that of the best evaluation.
      step: number of the checkpoint that is brought; None: the newest.

    Raises:
      UserError: one line; there is no run, or it cannot be read.
    """
    remote = RemoteWorkdir.open(address)
    for _ in range(_READS):
        stored = {entry.name: entry for entry in remote.bucket.list(remote.name(''))}
        manifests = remote.manifests()
        if not manifests and remote.name(FILE_NAME) not in stored:
            raise UserError(f'{address}: holds no run that has saved a step; check the address')
        folder = '' if step is None else f'{checkpoints}/{step}/'
        newest: Manifest = {}
        for manifest in manifests.values():
            if any(path.startswith(folder) for path in manifest):
                newest = manifest
        try:
            return _copy(remote, newest, stored, checkpoints)
        # The run has uploaded a newer step and removed this one.
        except (objects.Removed, KeyError):
            continue
    raise UserError(f'{address}: changes faster than it is read; run the command again')


def local_source(address: str, step: int | None = None) -> pathlib.Path:
    """Returns the local copy of a run, or of its folder `best`, with a step; arguments and errors as of `local_run`."""
    run, _, folder = address.rstrip('/').rpartition('/')
    if folder == 'best':
        return local_run(run, folder, step) / folder
    return local_run(address, 'checkpoints', step)


def _copy(
    remote: RemoteWorkdir,
    manifest: Manifest,
    stored: dict[str, StoredObject],
    checkpoints: str,
) -> pathlib.Path:
    """Brings the files of a run down; returns their folder.

    Raises:
      objects.Removed, KeyError: an object was removed meanwhile.
    """
    copies = {}
    for path, file in manifest.items():
        folder = path.partition('/')[0]
        if folder == checkpoints or folder not in CHECKPOINT_FOLDERS:
            copies[remote.name(path)] = stored[remote.name(file.object)]
    for name, entry in stored.items():
        # Results and records have no folder; neither have the two objects of the run itself, which no command reads.
        is_result = '/' not in name.removeprefix(remote.name(''))
        if is_result:
            copies[name] = entry
    # Without checkpoints, those of an earlier copy stay.
    cleaned = remote.name(checkpoints or RUN_FILE)
    root = update(remote.bucket, copies, remote.address, cleaned)
    return root / remote.path
