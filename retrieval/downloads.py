"""Local copies of files and folders: of the Hugging Face Hub (hf://owner/model), of buckets (gs://bucket/path).

Models and datasets of the Hub go to the library's cache. What is in the cache needs no connection.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Container, Iterator, Mapping, Sequence

from . import objects, progress
from .objects import Bucket, StoredObject
from .types import RetrievalError, first_line

PREFIX = 'hf://'
# Files of a model: no weights in other formats, which many repositories hold as well.
MODEL_FILES = ('*.json', '*.jinja', '*.txt', '*.model', '*.safetensors')
# No part of a name is empty, `.` or `..`, which would lead out of the folder that it is fetched into.
_PART = r'(?!\.{0,2}(?:/|$))[^/\\\x00-\x1f]+'
_OWNER = r'(?!\.{1,2}(?:/|$))[\w.-]+'
_MODEL = re.compile(rf'hf://{_OWNER}/{_OWNER}')
# With `datasets/` as in the library's own addresses, or without.
_FILE = re.compile(rf'hf://(?:datasets/)?+{_OWNER}/{_OWNER}(?:/{_PART})+')
# Path of a snapshot in the library's cache, or of a file in it; the folder's name has the revision.
_CACHED = re.compile(r'/(?:.*/)?(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+(/.+)?')
# Path of what this process has fetched → its name.
_names: dict[str, str] = {}
# What the library raises → the reason, and what to do.
_REFUSALS = {
    'GatedRepoError': (
        'its owner grants access',
        'ask for it on its page, and set HF_TOKEN to your token',
    ),
    'RepositoryNotFoundError': (
        'there is none of this name, or it is private',
        'correct the name, or set HF_TOKEN to your token',
    ),
    'OfflineModeIsEnabled': ('HF_HUB_OFFLINE is set', 'unset it, or give the path of a copy'),
}
_UNITS = ((1 << 30, 'GiB'), (1 << 20, 'MiB'), (1 << 10, 'KiB'))


def is_name(text: str) -> bool:
    """Returns whether a text names something on the Hub, and not a path."""
    return text.startswith(PREFIX)


def check_name(text: str, is_file: bool = False) -> None:
    """Raises RetrievalError for a name of a wrong form; nothing is asked over the network.

    Args:
      is_file: whether it has to name a file of a dataset, instead of a model.
    """
    if is_file and not _FILE.fullmatch(text):
        raise RetrievalError(
            f'{text}: names no file of a dataset; give hf://owner/dataset/path/file.jsonl'
        )
    if not is_file and not _MODEL.fullmatch(text):
        raise RetrievalError(f'{text}: names no model; give hf://owner/model')


def fetch_model(name: str) -> str:
    """Returns the folder of a model, downloaded if it is not in the cache; a path is returned as it is.

    Raises:
      RetrievalError: one line; no such model, no connection, or no space.
    """
    if not is_name(name):
        return name
    check_name(name)
    folder = str(_fetch(name, name.removeprefix(PREFIX), 'model', MODEL_FILES))
    _names[folder] = name
    return folder


def fetch_file(name: str) -> str:
    """Returns the path of a file of a dataset, downloaded if it is not in the cache; a path is returned as it is.

    Raises:
      RetrievalError: one line; no such file, no connection, or no space.
    """
    if not is_name(name):
        return name
    check_name(name, is_file=True)
    owner, dataset, path = name.removeprefix(PREFIX).removeprefix('datasets/').split('/', 2)
    local = _fetch(name, f'{owner}/{dataset}', 'dataset', (path,)) / path
    if not local.is_file():
        raise RetrievalError(f'{name}: the dataset has no such file; look at its list of files')
    _names[str(local)] = f'{PREFIX}{owner}/{dataset}/{path}'
    return str(local)


def name_of(path: str) -> str:
    """Returns the name by which this process fetched a file or folder; any other text as it is."""
    return _names.get(path, path)


def name_in_path(path: str) -> str:
    """Returns the name of what a path in any cache of the library holds, whatever its revision; other text as it is."""
    match = _CACHED.fullmatch(path.rstrip('/'))
    if match is None:
        return path
    owner, repository, file = match.groups(default='')
    return f'{PREFIX}{owner}/{repository}{file}'


def _fetch(name: str, repository: str, kind: str, patterns: Sequence[str]) -> pathlib.Path:
    """Returns the local folder with the files of a repository that fit the patterns."""
    # Imported here, because it is slow to load and needed for such names only.
    import huggingface_hub

    # The library's warnings about retries would repeat the error below.
    logging.getLogger('huggingface_hub').setLevel(logging.ERROR)
    try:
        # Without a connection it takes what is in its cache.
        folder = huggingface_hub.snapshot_download(
            repository, repo_type=kind, allow_patterns=list(patterns)
        )
        return pathlib.Path(folder)
    # Connection, cache and permission errors have many types.
    except Exception as error:
        # What is not in the cache either was not fetched for another reason.
        is_absent = type(error).__name__ == 'LocalEntryNotFoundError'
        cause = error.__cause__ or error if is_absent else error
        fix = 'download it where there is a connection, and give its path'
        reason, fix = _REFUSALS.get(type(cause).__name__, (first_line(cause), fix))
        raise RetrievalError(f'{name} could not be fetched ({reason}); {fix}') from None


def size_text(count: int) -> str:
    """Returns a number of bytes as text, such as '5.8 GiB'."""
    for unit, name in _UNITS:
        if count >= unit:
            return f'{count / unit:.1f} {name}'
    return f'{count} bytes'


# ---- buckets ---------------------------------------------------------------------------------------
#
# Local copies of files and folders in a bucket (gs://bucket/path), kept in the user's cache.
#
# Files that come with the package, such as zeroplay_jax/mini/texts, are found by the same function from any folder.
#
# A copy lies at <cache>/gs/<bucket>/<path>, so files lie towards each other as they do in the bucket. The checksum of
# every object is kept beside it. A later call asks the bucket for its list of objects and downloads those that are new
# or have changed.


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
    exported = re.fullmatch(r'(.+)/(policy|iteration\d+)/[^/]+', path)
    if exported:
        # Prompts and tools of an exported policy are read from the config of its run.
        stored += [entry for entry in bucket.list(f'{exported[1]}/run.json') if entry.size]
    root = update(bucket, {entry.name: entry for entry in stored}, address, path)
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
                f'downloads {size_text(size)} in {len(outdated)} files from gs://{bucket.name}',
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
