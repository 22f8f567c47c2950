"""Local copies of files and folders in a bucket (gs://bucket/path), kept in the user's cache.

Files that come with the package, such as zeroplay_jax/mini/texts, are found by the same function from any folder.

A copy lies at <cache>/gs/<bucket>/<path>, so files lie towards each other as they do in the bucket. The checksum of
every object is kept beside it. A later call asks the bucket for its list of objects and downloads those that are new or
have changed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

from . import objects, progress
from .hub import size_text
from .objects import Bucket, StoredObject
from .types import RetrievalError

# Transfers at the same time: one of them seldom fills a network.
THREADS = 8
# Copies of at least this size are announced.
_ANNOUNCED_BYTES = 1 << 20
# Where this package is the top-level `retrieval` of a checkout, nothing lies below the name of its parent folder.
_PACKAGE = pathlib.Path(__file__).absolute().parents[1]


def cache_folder() -> pathlib.Path:
    """Returns the folder of all local copies: $XDG_CACHE_HOME/zeroplay_jax, by default ~/.cache/zeroplay_jax."""
    root = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return pathlib.Path(root).expanduser() / 'zeroplay_jax'


def fetch(address: str, is_file: bool = False) -> str:
    """Returns the path of the local copy of a file or folder in a bucket, brought up to date; a path as it is.

    Args:
      address: gs://bucket/path, or a path; see `packaged` for those that come with the package.
      is_file: whether a folder is refused, before anything is downloaded.

    Raises:
      RetrievalError: one line; no such file or folder, no connection, no credentials, or no space.
    """
    if not objects.is_address(address):
        return packaged(address)
    bucket_name, path = objects.split(address)
    if not path:
        raise RetrievalError(f'{address}: names a bucket; give gs://bucket/path')
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
    run, _, last = path.rpartition('/policy/')
    if run and '/' not in last:
        # Prompts and tools of an exported policy are read from the config of its run.
        stored += [entry for entry in bucket.list(f'{run}/config.json') if entry.size]
    root = cache_folder() / 'gs' / bucket_name
    with disk_errors(address), locked(root):
        update(bucket, {entry.name: entry for entry in stored}, root)
        _remove_others(root / path, root, {entry.name for entry in stored})
    return str(root / path)


def packaged(path: str) -> str:
    """Returns where a file or folder that comes with the package lies; any other path as it is.

    Args:
      path: such as zeroplay_jax/mini/clean. One that exists in the current folder takes precedence: in a checkout the
        user edits that one.
    """
    name = os.path.normpath(path)
    is_packaged = name.startswith(f'{_PACKAGE.name}/mini/') and not os.path.exists(path)
    place = _PACKAGE.parent / name
    return str(place) if is_packaged and place.exists() else path


def address_of(path: str) -> str:
    """Returns the address of which a path is the local copy; any other text as it is."""
    root = cache_folder() / 'gs'
    for folder in (root, root.resolve()):
        if path.startswith(f'{folder}/'):
            return objects.PREFIX + path.removeprefix(f'{folder}/')
    return path


def update(bucket: Bucket, copies: Mapping[str, StoredObject], root: pathlib.Path) -> None:
    """Downloads the objects whose copies are missing or outdated; checks their checksums.

    Args:
      bucket: the bucket.
      copies: path below `root` → the object that is copied there.
      root: folder of the copies.

    Raises:
      objects.Removed: an object is not there any more.
      RetrievalError: one line; an object could not be downloaded.
      OSError: a file could not be written.
    """
    outdated = {path: entry for path, entry in copies.items() if not _is_current(root, path, entry)}
    size = sum(entry.size for entry in outdated.values())
    if size >= _ANNOUNCED_BYTES:
        print(
            f'downloads {size_text(size)} in {len(outdated)} files from gs://{bucket.name}',
            file=sys.stderr,
        )

    def download(path: str) -> None:
        entry = outdated[path]
        target = root / path
        record = _record(root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        record.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f'.{target.name}.{os.getpid()}')
        try:
            bucket.download(entry.name, draft)
            # A run that reads the file keeps the one that it has opened.
            os.replace(draft, target)
        except FileNotFoundError:
            raise objects.Removed(
                f'gs://{bucket.name}/{entry.name}: was removed meanwhile; run the command again'
            ) from None
        finally:
            draft.unlink(missing_ok=True)
        record.write_text(_mark(entry), encoding='utf-8')

    with progress.clock('download', size >= _ANNOUNCED_BYTES):
        with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(download, outdated))


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


def _remove_others(folder: pathlib.Path, root: pathlib.Path, names: set[str]) -> None:
    """Removes the files of a folder that the bucket does not have any more."""
    for path in sorted(folder.rglob('*')):
        if path.is_file() and path.relative_to(root).as_posix() not in names:
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
