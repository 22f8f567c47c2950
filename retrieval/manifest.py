"""The manifest of an index folder: what it was built from, and size and hashes of every file.

Its own SHA-256 is in manifest.sha256, as `sha256sum --check` reads it. Folders of earlier versions lack this file.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

from . import json_text, shards
from .suggestions import similar_path
from .types import RetrievalError

# Version of the folder's layout.
FORMAT = 1
# Name of the file with the hash of the manifest.
CHECKSUM = 'manifest.sha256'
# Opening an index reads this many blocks of every file, evenly spread with the first and the last one.
BLOCKS = 16
BLOCK_BYTES = 1 << 16
# The files of an index of up to this size are read whole when it is opened: less than a second.
WHOLE_BYTES = 1 << 30


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the manifest.

    Raises:
      RetrievalError: the folder holds no complete index of this format.
    """
    path = folder / 'manifest.json'
    checksum_path = folder / CHECKSUM
    try:
        content = path.read_bytes()
        manifest = json_text.parse_object(content)
        has_checksum = checksum_path.exists()
        if has_checksum and checksum_path.read_bytes() != _checksum_line(content):
            raise ValueError(f'its bytes do not fit {CHECKSUM}, copy the folder again')
    except (OSError, ValueError) as error:
        fix = f'build it with python -m zeroplay_jax.retrieval.build{similar_path(folder)}'
        # The workdir of the quickstart has the index in a folder of its own.
        if (folder / 'index' / 'manifest.json').is_file():
            fix = f'name {folder / "index"}'
        raise RetrievalError(f'{path}: cannot be read ({error}); {fix}') from error
    if manifest.get('format') != FORMAT:
        raise RetrievalError(
            f'{path}: not of format {FORMAT}; build the index again with this version'
        )
    return manifest


def write_manifest(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest and its checksum, each atomically."""
    content = json.dumps(manifest, indent=1).encode()
    line = _checksum_line(content)
    # The manifest comes last: a folder without one is incomplete.
    shards.write_atomically(folder / CHECKSUM, lambda file: file.write(line))
    shards.write_atomically(folder / 'manifest.json', lambda file: file.write(content))


def _checksum_line(content: bytes) -> bytes:
    """Returns the content of manifest.sha256, given that of manifest.json."""
    return f'{hashlib.sha256(content).hexdigest()}  manifest.json\n'.encode()


def fingerprint(folder: pathlib.Path) -> str:
    """Returns the identity of an index: the SHA-256 of its manifest, which holds the hashes of all other files."""
    return hashlib.sha256((folder / 'manifest.json').read_bytes()).hexdigest()


def verify(folder: pathlib.Path, everything: bool = True) -> dict[str, Any]:
    """Returns the manifest after comparing the files with it.

    Args:
      folder: an index folder.
      everything: read all bytes, also of an index larger than `WHOLE_BYTES` (False: its sizes and sampled blocks).

    Raises:
      RetrievalError: there is no manifest of this format, or a file is missing or differs in size or bytes.
    """
    manifest = read_manifest(folder)
    total = sum(expected['bytes'] for expected in manifest['files'].values())
    reads_all = everything or total <= WHOLE_BYTES
    for name, expected in manifest['files'].items():
        path = folder / name
        size = None
        if path.is_file():
            size = path.stat().st_size
        # The cheapest check first: an interrupted copy has another size.
        if size != expected['bytes']:
            raise RetrievalError(
                f'{path}: {expected["bytes"]} bytes expected, found {size}; copy or build it again'
            )
        # The samples find most damage without reading gigabytes.
        is_intact = _sample(path) == expected['sample']
        if is_intact and reads_all:
            is_intact = _sha256(path) == expected['sha256']
        if not is_intact:
            raise RetrievalError(
                f'{path}: its bytes are not those that were built; copy or build it again'
            )
    return manifest


def describe(path: pathlib.Path) -> dict[str, Any]:
    """Returns the entry of a file in a manifest: its size and hashes."""
    return {'bytes': path.stat().st_size, 'sha256': _sha256(path), 'sample': _sample(path)}


def _sha256(path: pathlib.Path) -> str:
    """Returns the hash of a whole file."""
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _sample(path: pathlib.Path) -> str:
    """Returns the BLAKE2b hash of `BLOCKS` blocks of the file; a file of up to a megabyte is read whole."""
    total = hashlib.blake2b(digest_size=16)
    # The last block ends with the file, where an interrupted write shows.
    last_start = max(0, path.stat().st_size - BLOCK_BYTES)
    with path.open('rb') as file:
        for number in range(BLOCKS):
            file.seek(last_start * number // (BLOCKS - 1))
            total.update(file.read(BLOCK_BYTES))
    return total.hexdigest()
