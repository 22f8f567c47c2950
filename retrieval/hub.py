"""Folders and files of the Hugging Face Hub by name: hf://owner/model, or hf://owner/dataset/path/file.jsonl.

They are downloaded into the library's cache, after a line with their size. What is in the cache needs no connection.
"""

from __future__ import annotations

import logging
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from . import progress
from .types import RetrievalError

PREFIX = 'hf://'
# Files of a model: no weights in other formats, which many repositories hold as well.
MODEL_FILES = ('*.json', '*.jinja', '*.txt', '*.model', '*.safetensors')
# No part of a name is empty, `.` or `..`, which would lead out of the folder that it is fetched into.
_PART = r'(?!\.{0,2}(?:/|$))[^/\\\x00-\x1f]+'
_OWNER = r'(?!\.{1,2}(?:/|$))[\w.-]+'
_MODEL = re.compile(rf'hf://{_OWNER}/{_OWNER}')
_FILE = re.compile(rf'hf://{_OWNER}/{_OWNER}(?:/{_PART})+')
# Path of a snapshot in the library's cache, or of a file in it; the folder's name has the revision.
_CACHED = re.compile(r'/(?:.*/)?(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+(/.+)?')
# Path of what this process has fetched → its name.
_names: dict[str, str] = {}
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
    owner, dataset, path = name.removeprefix(PREFIX).split('/', 2)
    local = _fetch(name, f'{owner}/{dataset}', 'dataset', (path,)) / path
    if not local.is_file():
        raise RetrievalError(f'{name}: the dataset has no such file; look at its list of files')
    _names[str(local)] = name
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
    """Returns the local folder with the files of a repository that fit the patterns; prints the size of a download."""
    # Imported here, because it is slow to load and needed for such names only.
    import huggingface_hub

    # The library's warnings about retries would repeat the error below.
    logging.getLogger('huggingface_hub').setLevel(logging.ERROR)
    options: dict[str, Any] = {'repo_type': kind, 'allow_patterns': list(patterns)}
    try:
        try:
            files = huggingface_hub.snapshot_download(repository, dry_run=True, **options)
        except Exception as error:
            return _cached(huggingface_hub, repository, options, error)
        missing = [file for file in files if file.will_download]
        if missing:
            size = size_text(sum(file.file_size or 0 for file in missing))
            line = (
                f'downloads {size} in {len(missing)} files from the Hugging Face Hub: {repository}'
            )
            print(line, file=sys.stderr)
        with progress.clock(f'fetch {repository}'):
            return pathlib.Path(huggingface_hub.snapshot_download(repository, **options))
    # Connection, cache and permission errors have many types.
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise RetrievalError(
            f'{name} could not be fetched ({reason}); download it where there is a connection, and give its path'
        ) from None


def _cached(
    library: Any, repository: str, options: dict[str, Any], error: Exception
) -> pathlib.Path:
    """Returns the folder of a repository in the cache; raises `error`, of the connection, if it is not there."""
    try:
        return pathlib.Path(library.snapshot_download(repository, local_files_only=True, **options))
    except Exception:
        raise error from None


def size_text(count: int) -> str:
    """Returns a number of bytes as text, such as '5.8 GiB'."""
    for unit, name in _UNITS:
        if count >= unit:
            return f'{count / unit:.1f} {name}'
    return f'{count} bytes'
