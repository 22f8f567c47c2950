"""An index on disk: built beside its place and renamed into it when whole, described and checked by its manifest.

    manifest.json   what it was made from and with, and every file's size and hashes
    corpus/         passages.bin, offsets.npy
    vectors.npy     [N, D], dense indexes
    scann/ | bm25/  what was trained

While it is built it is called `<name>.partial`; the same command goes on with what lies there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import corpus as corpus_lib
from . import progress, shards
from .bm25 import Bm25Index
from .index import ExactIndex, ScannIndex
from .lexical import LexicalEncoder
from .types import Encoder, RetrievalError

FORMAT = 1
KINDS = ('scann', 'exact', 'bm25')
STAGES = ('corpus', 'encode', 'index')
# Opening reads this many blocks of every file, evenly spread with the first and the last; --verify reads all.
_BLOCKS, _BLOCK = 16, 1 << 16
# Another version of these may read their files in another way.
_READERS = {'scann': 'scann', 'bm25': 'bm25s'}

_LIBRARIES = ('jax', 'numpy', 'scann', 'tensorflow-text', 'bm25s')

AnyIndex = ExactIndex | Bm25Index


def build(
    source: pathlib.Path,
    out: pathlib.Path,
    kind: str,
    encoder: Encoder | None,
    parameters: Mapping[str, Any] | None = None,
    *,
    dtype: str = 'float32',
    strict: bool = True,
    stages: tuple[str, ...] = STAGES,
    shard_rows: int = shards.SHARD_ROWS,
    host: int = 0,
    hosts: int = 1,
) -> None:
    """Builds an index folder from a corpus file; what a killed build finished is kept.

    Args:
      source: see `corpus.read`.   out: must not exist.   kind: of `KINDS`.   encoder: None for bm25.
      parameters: of `ScannIndex`.   dtype: vectors on disk, float32 or float16.   strict: see `corpus.write`.
      stages: which parts to do, in order; several hosts do 'encode' with their own `host` of `hosts`.

    Raises:
      RetrievalError: bad input, an `out` that exists, a stage whose predecessor is missing, too little disk.
    """
    if (
        kind not in KINDS
        or (encoder is None) != (kind == 'bm25')
        or dtype not in ('float32', 'float16')
    ):
        raise RetrievalError(
            f'build: kind {kind!r} of {", ".join(KINDS)}; bm25 takes no encoder, the others one; '
            f'dtype {dtype!r} of float32, float16'
        )
    if out.exists():
        raise RetrievalError(f'{out}: is there already; remove it or name another --out')
    if not source.exists():
        raise RetrievalError(
            f'{source}: no such file; name a corpus (.jsonl or .tsv, also .gz or .zst, or a folder)'
        )
    staging = out.with_name(f'{out.name}.partial')
    staging.mkdir(parents=True, exist_ok=True)
    if 'corpus' in stages:
        _corpus_stage(source, staging, strict)
    if not (staging / 'corpus').is_dir():
        raise RetrievalError(f'{staging}: no corpus in it yet; run the stage corpus first')
    if encoder is not None and 'encode' in stages:
        _encode_stage(staging, encoder, shard_rows, host, hosts)
    if 'index' in stages:
        _index_stage(staging, kind, encoder, parameters or {}, dtype)
        os.replace(staging, out)
        shutil.rmtree(out / 'shards', ignore_errors=True)
        (out / 'plan.json').unlink()


def _corpus_stage(source: pathlib.Path, staging: pathlib.Path, strict: bool) -> None:
    files = [path.stat() for path in corpus_lib.files_of(source)]
    size, changed = sum(s.st_size for s in files), max((s.st_mtime_ns for s in files), default=0)
    plan = dict(source=str(source.resolve()), bytes=size, changed=changed, strict=strict)
    if (staging / 'corpus').is_dir():
        shards.check_plan(staging / 'plan.json', plan)
        return
    (staging / 'plan.json').unlink(
        missing_ok=True
    )  # a corpus that was refused may have been mended since
    shards.check_plan(staging / 'plan.json', plan)
    packed = 4 if source.suffix in ('.gz', '.zst') else 1
    _need_space(staging, size * packed)
    unfinished = staging / '.corpus'
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    written = corpus_lib.write(source, unfinished, strict)
    about = dict(
        sha256=written.sha256,
        passages=written.passages,
        skipped=written.skipped,
        source=source.name,
    )
    (unfinished / 'about.json').write_text(json.dumps(about), encoding='utf-8')
    os.replace(unfinished, staging / 'corpus')


def _encode_stage(
    staging: pathlib.Path, encoder: Encoder, shard_rows: int, host: int, hosts: int
) -> None:
    corpus, about = corpus_lib.Corpus(staging / 'corpus'), _about(staging)
    _need_space(
        staging, 8 * len(corpus) * encoder.dimension
    )  # the shards, and the one file made of them

    def texts(rows):
        return (corpus.record(row).contents for row in rows)

    shards.encode(
        encoder, texts, len(corpus), staging / 'shards', about['sha256'], shard_rows, host, hosts
    )


def _index_stage(
    staging: pathlib.Path,
    kind: str,
    encoder: Encoder | None,
    parameters: Mapping[str, Any],
    dtype: str,
) -> None:
    corpus = corpus_lib.Corpus(staging / 'corpus')
    trained = staging / kind
    shutil.rmtree(trained, ignore_errors=True)
    index: AnyIndex
    if encoder is None:
        with progress.clock('index'):
            index = Bm25Index(corpus)
    else:
        if not (staging / 'shards' / 'plan.json').exists():
            raise RetrievalError(f'{staging}: nothing is encoded yet; run the stage encode first')
        plan = json.loads((staging / 'shards' / 'plan.json').read_text(encoding='utf-8'))
        _same('encoder', plan['encoder'], encoder.settings, staging)
        with progress.clock('put vectors together'):
            shards.assemble(staging / 'shards', staging / 'vectors.npy', dtype)
        vectors = np.load(staging / 'vectors.npy', mmap_mode='r')
        if kind == 'scann':
            with progress.clock('index'):
                index = ScannIndex(
                    encoder, corpus, np.array(vectors), **parameters
                )  # ScaNN wants them in memory
        else:
            index = ExactIndex(encoder, corpus, vectors)
    if isinstance(index, ScannIndex | Bm25Index):
        trained.mkdir()
        index.save(trained)
    made = [staging / 'corpus', staging / 'vectors.npy', trained]
    files = sorted(path for top in made for path in (top, *top.rglob('*')) if path.is_file())
    with progress.clock('checksums'):
        described = {path.relative_to(staging).as_posix(): _described(path) for path in files}
    manifest = dict(
        format=FORMAT,
        kind=kind,
        parameters=index.parameters,
        encoder=None if encoder is None else encoder.settings,
        encoder_folder=str(getattr(encoder, 'folder', '')),
        corpus=_about(staging),
        versions={name: importlib.metadata.version(name) for name in _LIBRARIES},
        files=described,
    )
    shards.replace(
        staging / 'manifest.json', lambda file: file.write(json.dumps(manifest, indent=1).encode())
    )


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest; RetrievalError where the folder holds no finished index."""
    path = folder / 'manifest.json'
    try:
        manifest = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise RetrievalError(
            f'{path}: cannot be read ({error}); build it with python -m zeroplay_jax.retrieval.build'
        ) from error
    if not isinstance(manifest, dict) or manifest.get('format') != FORMAT:
        raise RetrievalError(
            f'{path}: not of format {FORMAT}; build the index again with this version'
        )
    return manifest


def fingerprint(folder: pathlib.Path) -> str:
    """What tells one index from another: SHA-256 of its manifest, which holds the hashes of everything else."""
    return hashlib.sha256((folder / 'manifest.json').read_bytes()).hexdigest()


def verify(folder: pathlib.Path, everything: bool = True) -> dict[str, Any]:
    """Compares the files with the manifest and returns it: all bytes, or sizes and sampled blocks only.

    Raises:
      RetrievalError: a file that is missing, of another size or of other bytes (named).
    """
    manifest = read_manifest(folder)
    for name, said in manifest['files'].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != said['bytes']:
            raise RetrievalError(
                f'{path}: {said["bytes"]} bytes belong there, found {size}; copy or build it again'
            )
        if _sample(path) != said['sample'] or (everything and _sha256(path) != said['sha256']):
            raise RetrievalError(
                f'{path}: its bytes are not those that were built; copy or build it again'
            )
    return manifest


def open_index(
    folder: pathlib.Path, encoder: Encoder | None = None, encoder_folder: str | None = None
) -> AnyIndex:
    """Opens an index; only sizes and samples are checked (`verify` reads everything).

    Args:
      folder: as `build` left it.
      encoder: None: as the manifest says, from `encoder_folder` or the folder it was built with.

    Raises:
      RetrievalError: damage, another version of a library that has to read it, or an encoder of other settings.
    """
    manifest = verify(folder, everything=False)
    kind = manifest['kind']
    if kind in _READERS:
        name = _READERS[kind]
        found = importlib.metadata.version(name)
        if found != manifest['versions'][name]:
            raise RetrievalError(
                f'{folder}: built with {name} {manifest["versions"][name]}, installed is {found}; '
                'install that version or build the index again'
            )
    corpus = corpus_lib.Corpus(folder / 'corpus')
    if len(corpus) != manifest['corpus']['passages']:
        raise RetrievalError(
            f'{folder}: {len(corpus)} passages, the manifest says {manifest["corpus"]["passages"]}'
        )
    if kind == 'bm25':
        return Bm25Index(corpus, saved=folder / 'bm25')
    encoder = encoder or _encoder(manifest, encoder_folder)
    _same('encoder', manifest['encoder'], encoder.settings, folder)
    vectors = np.load(folder / 'vectors.npy', mmap_mode='r')
    if kind == 'exact':
        return ExactIndex(encoder, corpus, vectors)
    names = ('overfetch', 'reordered', 'leaves', 'leaves_searched', 'threshold', 'reorder')
    chosen = {
        name: manifest['parameters'][name] for name in names if name in manifest['parameters']
    }
    return ScannIndex(encoder, corpus, vectors, **chosen, saved=folder / 'scann')


def _encoder(manifest: Mapping[str, Any], folder: str | None) -> Encoder:
    said = dict(manifest['encoder'])
    if said.pop('kind') == 'lexical':
        return LexicalEncoder(**said)
    from .encoder import (
        TextEncoder,
    )  # here and not above: TensorFlow, which other indexes do without

    names = ('query_prefix', 'passage_prefix', 'max_tokens', 'dtype')
    return TextEncoder(folder or manifest['encoder_folder'], **{name: said[name] for name in names})


def _same(
    what: str, said: Mapping[str, Any], found: Mapping[str, Any], folder: pathlib.Path
) -> None:
    differing = sorted(key for key in {*said, *found} if said.get(key) != found.get(key))
    if differing:
        pairs = '; '.join(
            f'{key}: {said.get(key)!r} built, {found.get(key)!r} given' for key in differing
        )
        raise RetrievalError(
            f'{folder}: the {what} is another than that of the index ({pairs}); give the same'
        )


def _about(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / 'corpus' / 'about.json').read_text(encoding='utf-8'))


def _need_space(folder: pathlib.Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise RetrievalError(
            f'{folder}: {wanted / 1e9:.1f} GB are needed there, {free / 1e9:.1f} GB are free; make room or choose '
            'another --out'
        )


def _described(path: pathlib.Path) -> dict[str, Any]:
    return dict(bytes=path.stat().st_size, sha256=_sha256(path), sample=_sample(path))


def _sha256(path: pathlib.Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _sample(path: pathlib.Path) -> str:
    """BLAKE2b over the sampled blocks; a file of up to a megabyte is read whole."""
    size, total = path.stat().st_size, hashlib.blake2b(digest_size=16)
    last = max(0, size - _BLOCK)
    with path.open('rb') as file:
        for number in range(_BLOCKS):
            file.seek(last * number // (_BLOCKS - 1))
            total.update(file.read(_BLOCK))
    return total.hexdigest()
