"""Encodes a corpus in shards: each is a file that is there whole or not at all, so a killed run goes on where it was.

A shard is encoded by itself, so its bytes do not depend on where a run began. Several hosts with one file system share
the work without talking to each other: host h of n encodes the h-th range of shards, whoever finishes last assembles.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from . import progress
from .types import Encoder, RetrievalError

# 65,536 rows × 768 × 4 bytes = 200 MB: some minutes on an accelerator, and what a kill can cost.
SHARD_ROWS = 1 << 16


def replace(path: pathlib.Path, write: Callable[[Any], None]) -> None:
    """Writes a file aside and renames it, so that `path` never is half a file."""
    staged = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        with staged.open('wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def check_plan(path: pathlib.Path, plan: Mapping[str, Any]) -> None:
    """Keeps what a folder is being made from; work found there must have been made from the same.

    Raises:
      RetrievalError: it was not (names what differs).
    """
    if path.exists():
        found = json.loads(path.read_text(encoding='utf-8'))
        differing = sorted(key for key in {*found, *plan} if found.get(key) != plan.get(key))
        if differing:
            key = differing[0]
            raise RetrievalError(
                f'{path.parent}: unfinished work of another build lies there: {key} was {found.get(key)!r}, now is '
                f'{plan.get(key)!r} ({len(differing)} differ); remove the folder or build with the same settings'
            )
    else:
        replace(path, lambda file: file.write(json.dumps(plan, indent=1).encode()))


def encode(
    encoder: Encoder,
    texts: Callable[[range], Iterable[str]],
    total: int,
    folder: pathlib.Path,
    corpus_sha256: str,
    shard_rows: int = SHARD_ROWS,
    host: int = 0,
    hosts: int = 1,
) -> None:
    """Encodes this host's shards that are not there yet.

    Args:
      texts: rows → texts of these passages, in wire form.   total: N.
      folder: gets `plan.json` and one `vectors-<number>.npy` per shard, float32 [rows, D].
      corpus_sha256: of the texts.   host, hosts: which part of the shards to encode.

    Raises:
      RetrievalError: unfinished work of other settings lies in the folder (names which).
    """
    if not 0 <= host < hosts or total < 1 or shard_rows < 1:
        raise RetrievalError(
            f'encode: host {host} of {hosts}, {total} passages, shards of {shard_rows} rows'
        )
    folder.mkdir(parents=True, exist_ok=True)
    plan = dict(
        corpus_sha256=corpus_sha256,
        encoder=encoder.settings,
        passages=total,
        shard_rows=shard_rows,
        batch_tokens=getattr(encoder, 'batch_tokens', None),
        devices=f'{jax.local_device_count()} {jax.default_backend()}',
        jax=jax.__version__,
    )
    check_plan(folder / 'plan.json', plan)
    ranges = shard_ranges(total, shard_rows)
    mine = range(len(ranges) * host // hosts, len(ranges) * (host + 1) // hosts)
    missing = [shard for shard in mine if not _path(folder, shard).exists()]
    rows = sum(len(ranges[shard]) for shard in mine)
    done = rows - sum(len(ranges[shard]) for shard in missing)
    with progress.bar(rows, 'passages', 'encode', initial=done) as bar:
        for shard in missing:
            vectors = encoder.encode(_counted(texts(ranges[shard]), bar))
            if vectors.shape != (len(ranges[shard]), encoder.dimension):
                raise RetrievalError(
                    f'encode: shard {shard} is {vectors.shape}, not {len(ranges[shard])} rows'
                )
            replace(_path(folder, shard), functools.partial(np.save, arr=vectors))


def shard_ranges(total: int, shard_rows: int) -> list[range]:
    """Rows of every shard."""
    return [range(start, min(start + shard_rows, total)) for start in range(0, total, shard_rows)]


def assemble(folder: pathlib.Path, out: pathlib.Path, dtype: str = 'float32') -> None:
    """Writes one file of all shards, [N, D] of `dtype`; refuses where a shard is missing or holds what is no vector.

    Raises:
      RetrievalError: which shards are missing, or which row is not finite and of length 1.
    """
    plan = json.loads((folder / 'plan.json').read_text(encoding='utf-8'))
    ranges = shard_ranges(plan['passages'], plan['shard_rows'])
    missing = [shard for shard in range(len(ranges)) if not _path(folder, shard).exists()]
    if missing:
        raise RetrievalError(
            f'{folder}: shards {missing[:5]} of {len(ranges)} are missing ({len(missing)} in all)'
        )
    header = dict(
        descr=np.lib.format.dtype_to_descr(np.dtype(dtype)),
        fortran_order=False,
        shape=(plan['passages'], plan['encoder']['dimension']),
    )
    with out.open('wb') as file:  # and not through a memory map, which a full disk would kill
        np.lib.format.write_array_header_1_0(file, header)
        for shard, rows in enumerate(ranges):
            part = np.load(_path(folder, shard))
            bad = np.flatnonzero(~is_unit(part))
            if bad.size:
                raise RetrievalError(
                    f'{_path(folder, shard)}: passage {rows[int(bad[0])]} has no unit vector'
                )
            file.write(part.astype(dtype, copy=False).data)


def is_unit(vectors: np.ndarray) -> np.ndarray:
    """Whether each vector [D] of [N, D] is finite and of length 1: bool [N]."""
    lengths = np.sqrt(np.einsum('nd,nd->n', vectors, vectors, dtype=np.float64))
    return np.abs(lengths - 1) < 1e-3  # False for NaN and infinity too


def _path(folder: pathlib.Path, shard: int) -> pathlib.Path:
    return folder / f'vectors-{shard:05d}.npy'


def _counted(texts: Iterable[str], bar) -> Iterable[str]:
    for text in texts:
        yield text
        bar.update()
