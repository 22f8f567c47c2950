"""Local copies of files and folders: of the Hugging Face Hub (hf://owner/model), of buckets (gs://bucket/path).

Models and datasets of the Hub go to the library's cache. What is in the cache needs no connection. An extra copies from
buckets (`extras.buckets`). Files that come with the package, such as zeroplay_jax/mini/texts, are found from
any folder.
"""

from __future__ import annotations

import importlib
import logging
import os
import pathlib
import re
from collections.abc import Sequence

from .types import RetrievalError, first_line

PREFIX = 'hf://'
_BUCKET_PREFIX = 'gs://'
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
# Where this package is the top-level `retrieval` of a checkout, nothing lies below the name of its parent folder.
_PACKAGE = pathlib.Path(__file__).absolute().parents[1]
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
    """Returns the folder of a model of the Hub, downloaded if it is not in the cache; others as `fetch` does.

    Raises:
      RetrievalError: one line; no such model, no connection, or no space.
    """
    if not is_name(name):
        return fetch(name)
    check_name(name)
    folder = str(_fetch(name, name.removeprefix(PREFIX), 'model', MODEL_FILES))
    _names[folder] = name
    return folder


def fetch_file(name: str) -> str:
    """Returns the path of a file of a dataset of the Hub, downloaded if it is not in the cache; others as `fetch` does.

    Raises:
      RetrievalError: one line; no such file, no connection, or no space.
    """
    if not is_name(name):
        return fetch(name)
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


def is_address(text: object) -> bool:
    """Returns whether a text is an address in a bucket, and not a path."""
    return str(text).startswith(_BUCKET_PREFIX)


def fetch(address: str, is_file: bool = False) -> str:
    """Returns the path of the local copy of a file or folder in a bucket, brought up to date; a path as it is.

    Args:
      address: gs://bucket/path, or a path; see `packaged` for those that come with the package.
      is_file: whether a folder is refused, before anything is downloaded.

    Raises:
      RetrievalError: one line; no such file or folder, no connection, no credentials, or no space.
    """
    if not is_address(address):
        return packaged(address)
    # By its name: extras stand above this package, which knows nothing else of them.
    extras = importlib.import_module('zeroplay_jax.extras')
    return extras.load_extra('buckets', 'copies').fetch(address, is_file)


def packaged(path: str) -> str:
    """Returns where a file or folder that comes with the package lies; any other path as it is.

    Args:
      path: such as zeroplay_jax/mini/base. One that exists in the current folder takes precedence: in a checkout the
        user edits that one.
    """
    name = os.path.normpath(path)
    is_packaged = name.startswith(f'{_PACKAGE.name}/mini/') and not os.path.exists(path)
    place = _PACKAGE.parent / name
    return str(place) if is_packaged and place.exists() else path


def cache_folder() -> pathlib.Path:
    """Returns the folder of all local copies: $XDG_CACHE_HOME/zeroplay_jax, by default ~/.cache/zeroplay_jax."""
    root = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return pathlib.Path(root).expanduser() / 'zeroplay_jax'


def address_of(path: str) -> str:
    """Returns the address of which a path is the local copy; any other text as it is."""
    root = cache_folder() / 'gs'
    for folder in (root, root.resolve()):
        if path.startswith(f'{folder}/'):
            return _BUCKET_PREFIX + path.removeprefix(f'{folder}/')
    return path
