"""Encodes a corpus in shards; a shard file is complete or absent, so an interrupted run resumes where it stopped.

Each shard is encoded by itself, so its bytes do not depend on where a run began. Several hosts with one file system
share the work without communication: host h of n encodes the h-th range of shards, and any of them assembles the
result at the end.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from . import json_text, progress
from .types import Encoder, RetrievalError

# 65,536 rows × 768 × 4 bytes = 200 MB: some minutes on an accelerator, the most that an interruption can cost.
SHARD_ROWS = 1 << 16

# Largest deviation of a unit vector's norm from 1; rounding to float16 stays below it.
_NORM_TOLERANCE = 1e-3
# Missing shards that an error names.
_NAMED_SHARDS = 5


def write_atomically(path: pathlib.Path, write: Callable[[Any], Any]) -> None:
    """Writes a file atomically: calls `write` with an open temporary file, which is then renamed to `path`."""
    # A random name, because several hosts may write the same file and process ids repeat between hosts.
    staged = path.with_name(f'.{path.name}.{os.urandom(8).hex()}')
    try:
        with staged.open('wb') as file:
            write(file)
            # The data must be on disk before the name is, or a power cut leaves an empty file.
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def check_or_write_plan(path: pathlib.Path, plan: Mapping[str, Any]) -> None:
    """Writes the plan if there is no such file, else compares it with the file.

    Args:
      path: the file, plan.json in the folder that is built.
      plan: JSON-able settings that determine the contents of the folder.

    Raises:
      RetrievalError: the file has other settings: the folder holds unfinished work of another build.
    """
    if not path.exists():
        write_atomically(path, lambda file: file.write(json.dumps(plan, indent=1).encode()))
        return
    old_plan = json_text.load_object(path, 'remove the folder and build again')
    changes = differences(old_plan, plan)
    if changes:
        raise RetrievalError(
            f'{path.parent}: unfinished work of another build lies there ({changes}); remove the folder or build with '
            'the same settings'
        )


def differences(built: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Returns the settings in which what was built differs from what is given; '' without any."""
    texts = []
    for key in sorted({*built, *current}):
        if built.get(key) != current.get(key):
            texts.append(f'{key}: {built.get(key)!r} built, {current.get(key)!r} given')
    return '; '.join(texts)


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
    """Encodes those shards of this host that are not there yet.

    Args:
      encoder: encodes the texts.
      texts: function from a range of rows to the texts of these passages, as `Encoder.encode` takes them.
      total: number of passages, N.
      folder: gets `plan.json` and one `vectors-<number>.npy` per shard, float32 [rows, D].
      corpus_sha256: hash of all texts, stored in the plan.
      shard_rows: passages per shard.
      host: number of this host, from 0.
      hosts: number of hosts that share the work.

    Raises:
      RetrievalError: the folder holds unfinished work of other settings, a number is outside its range, or the encoder
        returns vectors of another shape.
    """
    if not 0 <= host < hosts or total < 1 or shard_rows < 1:
        raise RetrievalError(
            f'encode: host {host} of {hosts}, {total} passages, shards of {shard_rows} rows; '
            'give a host below the number of hosts, and at least one passage and row'
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Batches and devices are part of the plan: they change the last bits of the vectors.
    plan = {
        'corpus_sha256': corpus_sha256,
        'encoder': encoder.settings,
        'passages': total,
        'shard_rows': shard_rows,
        'batch_tokens': getattr(encoder, 'batch_tokens', None),
        'devices': f'{jax.local_device_count()} {jax.default_backend()}',
        'jax': jax.__version__,
    }
    check_or_write_plan(folder / 'plan.json', plan)
    ranges = shard_ranges(total, shard_rows)
    # Equal shares up to one shard; every shard belongs to exactly one host.
    first_shard = len(ranges) * host // hosts
    end_shard = len(ranges) * (host + 1) // hosts
    host_shards = range(first_shard, end_shard)
    missing = [shard for shard in host_shards if not _shard_path(folder, shard).exists()]
    host_rows = sum(len(ranges[shard]) for shard in host_shards)
    missing_rows = sum(len(ranges[shard]) for shard in missing)
    encoded_rows = host_rows - missing_rows
    with progress.Bar(host_rows, 'passages', 'encode', initial=encoded_rows) as bar:
        for shard in missing:
            rows = ranges[shard]
            # The texts come from a generator, so that those of a shard need not be in memory together.
            vectors = encoder.encode(_counted(texts(rows), bar))
            if vectors.shape != (len(rows), encoder.dimension):
                raise RetrievalError(
                    f'encode: shard {shard} is {vectors.shape}, not {len(rows)} rows of dimension '
                    f'{encoder.dimension}; correct the encoder'
                )
            write_atomically(_shard_path(folder, shard), functools.partial(np.save, arr=vectors))


def shard_ranges(total: int, shard_rows: int) -> list[range]:
    """Returns the row numbers of every shard: `shard_rows` consecutive ones, fewer in the last shard."""
    return [range(start, min(start + shard_rows, total)) for start in range(0, total, shard_rows)]


def assemble(folder: pathlib.Path, out: pathlib.Path, dtype: str = 'float32') -> None:
    """Writes the vectors of all shards into one .npy file, [N, D] of `dtype`.

    Args:
      folder: the folder that `encode` wrote.
      out: the file.
      dtype: float32 or float16.

    Raises:
      RetrievalError: a shard is missing, or a vector is not finite or its norm is not 1.
    """
    plan = json_text.load_object(folder / 'plan.json', 'remove the folder and build again')
    ranges = shard_ranges(plan['passages'], plan['shard_rows'])
    missing = [shard for shard in range(len(ranges)) if not _shard_path(folder, shard).exists()]
    if missing:
        raise RetrievalError(
            f'{folder}: shards {missing[:_NAMED_SHARDS]} of {len(ranges)} are missing ({len(missing)} in all); '
            'run the stage encode on every host'
        )
    # The header of a .npy file, as np.save would write it for the whole array.
    header = {
        'descr': np.lib.format.dtype_to_descr(np.dtype(dtype)),
        'fortran_order': False,
        'shape': (plan['passages'], plan['encoder']['dimension']),
    }
    # Written without a memory map, with which a full disk would kill the process by SIGBUS instead of raising OSError.
    with out.open('wb') as file:
        np.lib.format.write_array_header_1_0(file, header)
        for shard, rows in enumerate(ranges):
            path = _shard_path(folder, shard)
            vectors = np.load(path)
            bad_rows = np.flatnonzero(~is_unit(vectors))
            if bad_rows.size:
                raise RetrievalError(
                    f'{path}: passage {rows[int(bad_rows[0])]} has no unit vector; correct the encoder '
                    'and remove the file'
                )
            file.write(vectors.astype(dtype, copy=False).data)


def is_unit(vectors: Float[np.ndarray, 'rows dimension']) -> Bool[np.ndarray, ' rows']:
    """Returns whether each vector is finite and of norm 1, up to `_NORM_TOLERANCE`."""
    # Computed in float64, because the vectors can be float16.
    norms = np.sqrt(np.einsum('nd,nd->n', vectors, vectors, dtype=np.float64))
    # The comparison is False for NaN and infinity too.
    return np.abs(norms - 1) < _NORM_TOLERANCE


def _shard_path(folder: pathlib.Path, shard: int) -> pathlib.Path:
    """Returns the file of a shard."""
    return folder / f'vectors-{shard:05d}.npy'


def _counted(texts: Iterable[str], bar: Any) -> Iterator[str]:
    """Yields the texts and advances the progress bar by one after each."""
    for text in texts:
        yield text
        bar.update()
