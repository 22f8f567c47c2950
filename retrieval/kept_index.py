"""An index that is trained once and then read from the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from . import index
from .downloads import cache_folder
from .types import Encoder

# Settings of an index beside its trained files, with their hashes.
_SETTINGS = 'settings.json'


def trained_once(encoder: Encoder, titles: Sequence[str], texts: Sequence[str]) -> index.ScannIndex:
    """Returns `index.ScannIndex.build(encoder, titles, texts)`, trained by the first call with these passages.

    `worlds/` in `downloads.cache_folder` keeps the trained part. A cache that cannot be read or written, or whose files
    were damaged, costs the time of training, and nothing else.
    """
    untrained = index.ExactIndex.build(encoder, titles, texts)
    parts = (encoder, untrained.corpus, untrained._vectors)
    name = _digest(encoder, titles, texts, untrained._vectors.tobytes())
    # What a damaged file raises in ScaNN and NumPy is of many types.
    with contextlib.suppress(Exception):
        return _read(parts, cache_folder() / 'worlds' / name)
    trained = index.ScannIndex(*parts)
    if trained.parameters['kind'] == 'scann':
        # ScaNN raises RuntimeError where the disk is full.
        with contextlib.suppress(Exception):
            _write(trained, cache_folder() / 'worlds' / name)
    return trained


def _digest(encoder: Encoder, titles: Sequence[str], texts: Sequence[str], vectors: bytes) -> str:
    """Returns a hash of all that training and tuning read: passages, vectors, code and ScaNN."""
    total = hashlib.sha256(vectors)
    for module in (index, sys.modules[type(encoder).__module__]):
        total.update(inspect.getsource(module).encode())
    version = importlib.metadata.version('scann')
    total.update(json.dumps([version, list(titles), list(texts)]).encode())
    return total.hexdigest()


def _read(parts: tuple[Encoder, Any, Any], folder: pathlib.Path) -> index.ScannIndex:
    """Returns the index of a folder; raises an exception of any type if there is none, or a file was changed."""
    settings = json.loads((folder / _SETTINGS).read_text())
    if settings['files'] != _hashes(folder):
        raise ValueError('other files')
    parameters = settings['parameters']
    given = {name: parameters[name] for name in index.SCANN_PARAMETERS}
    opened = index.ScannIndex(*parts, **given, saved=folder)
    opened.parameters = parameters
    return opened


def _write(trained: index.ScannIndex, folder: pathlib.Path) -> None:
    """Writes a folder that `_read` reads, in place of a damaged one; raises as the libraries do."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as draft:
        path = pathlib.Path(draft)
        trained.save(path)
        settings = {'parameters': trained.parameters, 'files': _hashes(path)}
        (path / _SETTINGS).write_text(json.dumps(settings))
        # A process that has mapped the files keeps them.
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(path, folder)


def _hashes(folder: pathlib.Path) -> dict[str, str]:
    """Returns the hashes of the files in a folder by name, but for the settings."""
    hashes = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != _SETTINGS:
            hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes
