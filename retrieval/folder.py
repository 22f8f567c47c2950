"""An index on disk: built in a temporary folder, renamed when complete, described and checked by its manifest.

    manifest.json   what it was built from, and size and hashes of every file
    corpus/         passages and lookup tables (see `corpus`)
    vectors.npy     [N, D], dense indexes only
    scann/ | bm25/  the trained index

The temporary folder is called `<name>.partial`; repeating the command resumes an interrupted build.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import corpus as corpus_lib
from . import json_text, progress, shards
from .command import similar_path
from .corpus import Corpus
from .index import SCANN_PARAMETERS, Bm25Index, ExactIndex, ScannIndex
from .lexical import LexicalEncoder
from .types import Encoder, RetrievalError

KINDS = ('scann', 'exact', 'bm25')
STAGES = ('corpus', 'encode', 'index')

# Libraries whose version is recorded.
_LIBRARIES = ('jax', 'numpy', 'scann', 'tensorflow-text', 'bm25s')
# Kind of the trained index → the library that reads its files: another version may read them differently.
_LIBRARY_OF_KIND = {'scann': 'scann', 'bm25': 'bm25s'}

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
    passage_words: int = 0,
    fields: Mapping[str, str] | None = None,
    stages: tuple[str, ...] = STAGES,
    shard_rows: int = shards.SHARD_ROWS,
    host: int = 0,
    hosts: int = 1,
) -> None:
    """Builds an index folder from a corpus; the same call resumes an interrupted build.

    Args:
      source: a corpus file or a folder of texts, see `sources.read`.
      out: folder of the index; must not exist.
      kind: one of `KINDS`.
      encoder: encodes passages and queries; None for bm25.
      parameters: keyword arguments of `ScannIndex`; ignored for other kinds.
      dtype: dtype of the vectors on disk, float32 or float16.
      strict: whether the first bad line of the corpus is an error (False: bad lines are skipped, logged and counted).
      passage_words: longer passages are cut to at most so many words, see `sources.read`; 0 cuts none.
      fields: names of the fields of a passage, see `rows.record_of`.
      stages: members of `STAGES` to run, in order; several hosts can run 'encode', each with its own `host`.
      shard_rows: passages per shard.
      host: number of this host, from 0.
      hosts: number of hosts that share the encoding.

    Raises:
      RetrievalError: bad input, an `out` that exists, or a stage before its predecessor.
    """
    needs_encoder = kind != 'bm25'
    valid_encoder = (encoder is not None) == needs_encoder
    # The stage corpus alone is the same for every kind and can run without the encoder.
    if stages == ('corpus',):
        valid_encoder = needs_encoder or encoder is None
    if kind not in KINDS or not valid_encoder or dtype not in ('float32', 'float16'):
        raise RetrievalError(
            f'build: kind {kind!r} of {", ".join(KINDS)}; bm25 takes no encoder, the others one; '
            f'dtype {dtype!r} of float32, float16'
        )
    if out.exists():
        raise RetrievalError(f'{out}: exists already; remove it or name another --out')
    if not source.exists():
        raise RetrievalError(
            f'{source}: no such file; name a corpus (.jsonl, .tsv, .parquet or a folder)'
            f'{similar_path(source)}'
        )
    # The temporary folder is beside `out`, so that the rename stays within one file system.
    staging = out.with_name(f'{out.name}.partial')
    is_new = not staging.exists()
    staging.mkdir(parents=True, exist_ok=True)
    # Each stage checks that the previous one was done with the same settings.
    if 'corpus' in stages:
        try:
            _corpus_stage(source, staging, strict, passage_words, fields)
        except RetrievalError:
            # A refused corpus has left nothing that a later build could use.
            if is_new:
                shutil.rmtree(staging)
            raise
    if not (staging / 'corpus').is_dir():
        raise RetrievalError(f'{staging}: no corpus in it yet; run the stage corpus first')
    if encoder is not None and 'encode' in stages:
        _encode_stage(staging, encoder, shard_rows, host, hosts)
    if 'index' in stages:
        _index_stage(staging, kind, encoder, parameters or {}, dtype)
        # The index appears under its name only when it is complete.
        os.replace(staging, out)
        # Removed only now: an interrupted build needs the intermediate files.
        shutil.rmtree(out / 'shards', ignore_errors=True)
        (out / 'plan.json').unlink()


def _corpus_stage(
    source: pathlib.Path,
    staging: pathlib.Path,
    strict: bool,
    passage_words: int,
    fields: Mapping[str, str] | None,
) -> None:
    """Writes the corpus and its plan, unless the folder already has the corpus of the same source and settings.

    The plan is the file plan.json: source, size, time of change and settings, by which a resumed build is recognised.

    Raises:
      RetrievalError: the folder has the corpus of another source or other settings, or the source cannot be used.
    """
    size = changed = 0
    for path in corpus_lib.files_of(source):
        status = path.stat()
        size += status.st_size
        # The time of the last change represents the contents, which take minutes to hash.
        changed = max(changed, status.st_mtime_ns)
    plan = {
        'format': FORMAT,
        'source': str(source.resolve()),
        'bytes': size,
        'changed': changed,
        'strict': strict,
        'passage_words': passage_words,
        'fields': dict(fields or {}),
    }
    plan_path = staging / 'plan.json'
    if (staging / 'corpus').is_dir():
        shards.check_or_write_plan(plan_path, plan)
        return
    # A plan without a corpus is of a source that was refused; it may have been corrected since.
    plan_path.unlink(missing_ok=True)
    shards.check_or_write_plan(plan_path, plan)
    # Renamed when complete, like the whole index.
    unfinished = staging / '.corpus'
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    written = corpus_lib.write(source, unfinished, strict, passage_words, fields)
    summary = json.dumps(written | {'source': source.name})
    (unfinished / 'about.json').write_text(summary, encoding='utf-8')
    os.replace(unfinished, staging / 'corpus')


def _encode_stage(
    staging: pathlib.Path, encoder: Encoder, shard_rows: int, host: int, hosts: int
) -> None:
    """Encodes the passages and writes those shards of this host that are not there yet (see `shards.encode`)."""
    corpus = corpus_lib.Corpus(staging / 'corpus')
    # The shards store the hash of the corpus, so that those of another corpus are refused.
    summary = _corpus_summary(staging)

    def texts(rows: range) -> Iterator[str]:
        return (corpus.record(row).contents for row in rows)

    shards.encode(
        encoder, texts, len(corpus), staging / 'shards', summary['sha256'], shard_rows, host, hosts
    )


def _index_stage(
    staging: pathlib.Path,
    kind: str,
    encoder: Encoder | None,
    parameters: Mapping[str, Any],
    dtype: str,
) -> None:
    """Trains the index; writes its files and, last, the manifest."""
    corpus = corpus_lib.Corpus(staging / 'corpus')
    trained = staging / kind
    # An interrupted stage starts again from the beginning.
    shutil.rmtree(trained, ignore_errors=True)
    index: AnyIndex
    # Both compare words, which they recognise by the spaces between them.
    if encoder is None or encoder.settings['kind'] == 'lexical':
        warn_of_missing_spaces(corpus, 'BM25' if encoder is None else 'the encoder lexical')
    if encoder is None:
        with progress.clock('index'):
            index = Bm25Index(corpus)
    else:
        index = _dense_index(staging, kind, encoder, corpus, parameters, dtype)
    if isinstance(index, ScannIndex | Bm25Index):
        trained.mkdir()
        index.save(trained)
    files = [staging / 'vectors.npy']
    files.extend((staging / 'corpus').rglob('*'))
    files.extend(trained.rglob('*'))
    with progress.clock('checksums'):
        # Files are named relative to the folder, so that it can be copied to another machine.
        descriptions = {}
        for path in sorted(files):
            # `rglob` also returns folders, and an index of bm25 has no vectors.npy.
            if path.is_file():
                descriptions[path.relative_to(staging).as_posix()] = describe(path)
    manifest = {
        'format': FORMAT,
        'kind': kind,
        'parameters': index.parameters,
        'encoder': None if encoder is None else encoder.settings,
        'encoder_folder': str(getattr(encoder, 'folder', '')),
        'corpus': _corpus_summary(staging),
        # Files of ScaNN and bm25s are only readable by the same version.
        'versions': {name: importlib.metadata.version(name) for name in _LIBRARIES},
        'files': descriptions,
    }
    write_manifest(staging, manifest)


def _dense_index(
    staging: pathlib.Path,
    kind: str,
    encoder: Encoder,
    corpus: corpus_lib.Corpus,
    parameters: Mapping[str, Any],
    dtype: str,
) -> ExactIndex:
    """Writes `vectors.npy` from the shards and returns the index of these vectors.

    Raises:
      RetrievalError: a shard is missing, or another encoder made the shards.
    """
    shard_folder = staging / 'shards'
    plan_path = shard_folder / 'plan.json'
    if not plan_path.exists():
        raise RetrievalError(f'{staging}: nothing is encoded yet; run the stage encode first')
    plan = json_text.load_object(plan_path, 'remove the folder and build again')
    # The encoder of this command must be the one that made the shards.
    _check_encoder(plan['encoder'], encoder.settings, staging)
    with progress.clock('assemble vectors'):
        shards.assemble(shard_folder, staging / 'vectors.npy', dtype)
    vectors = np.load(staging / 'vectors.npy', mmap_mode='r')
    if kind == 'exact':
        return ExactIndex(encoder, corpus, vectors)
    with progress.clock('index'):
        # ScaNN needs the vectors in memory.
        return ScannIndex(encoder, corpus, np.array(vectors), **parameters)


def open_index(
    folder: str | pathlib.Path, encoder: Encoder | None = None, encoder_folder: str | None = None
) -> AnyIndex:
    """Returns the index in a folder; of a large one it checks sizes and sampled blocks (`verify` reads all bytes).

    Args:
      folder: an index folder that `build` wrote.
      encoder: encodes the queries; None: the encoder of the manifest is opened.
      encoder_folder: checkpoint folder of that encoder, or 'minilm'; None: the one of the build.

    Raises:
      RetrievalError: damage, another version of the library that reads the index, or an encoder of other settings.
    """
    folder = pathlib.Path(folder)
    # Reading all bytes of a large one would take minutes; the samples find truncated and interchanged files.
    manifest = verify(folder, everything=False)
    kind = manifest['kind']
    _check_version(manifest, folder)
    corpus = corpus_lib.Corpus(folder / 'corpus')
    if len(corpus) != manifest['corpus']['passages']:
        raise RetrievalError(
            f'{folder}: {len(corpus)} passages, the manifest says {manifest["corpus"]["passages"]}; '
            'copy or build it again'
        )
    if kind == 'bm25':
        index = Bm25Index(corpus, saved=folder / 'bm25')
        # Queries must have the words of the passages.
        differences = shards.differences(manifest['parameters'], index.parameters)
        if differences:
            raise RetrievalError(
                f'{folder}: this version has other settings of BM25 ({differences}); build the index again'
            )
        return index
    if encoder is None:
        encoder = _open_encoder(manifest, encoder_folder)
    # Vectors of different encoders cannot be compared.
    _check_encoder(manifest['encoder'], encoder.settings, folder)
    vectors = np.load(folder / 'vectors.npy', mmap_mode='r')
    if kind == 'exact':
        return ExactIndex(encoder, corpus, vectors)
    # The manifest lacks these settings if the corpus was too small for ScaNN.
    parameters = {}
    for name in SCANN_PARAMETERS:
        if name in manifest['parameters']:
            parameters[name] = manifest['parameters'][name]
    return ScannIndex(encoder, corpus, vectors, **parameters, saved=folder / 'scann')


def check_encoder_flag(folder: pathlib.Path, encoder_folder: str | None) -> None:
    """Raises RetrievalError for a folder without an index, or for --encoder where its index reads no checkpoint."""
    manifest = read_manifest(folder)
    if encoder_folder and not manifest['encoder_folder']:
        raise RetrievalError(
            f'--encoder {encoder_folder}: the index in {folder} reads no checkpoint; take the flag away'
        )


def _check_version(manifest: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Raises RetrievalError if the installed version of the index's library is not the one that built it."""
    # The vectors of an exact index are a plain NumPy file, which any version reads. The parameters have the kind that
    # was trained: a corpus too small for ScaNN gets an exact index.
    library = _LIBRARY_OF_KIND.get(manifest['parameters']['kind'])
    if library is None:
        return
    recorded = manifest['versions'][library]
    installed = 'none'
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version(library)
    if installed != recorded:
        raise RetrievalError(
            f'{folder}: built with {library} {recorded}, installed is {installed}; '
            'install that version or build the index again'
        )


def _open_encoder(manifest: Mapping[str, Any], folder: str | None) -> Encoder:
    """Returns the encoder with the settings in a manifest.

    Args:
      manifest: of a dense index.
      folder: folder of the encoder's checkpoint, if it has moved; None: the one of the build.
    """
    settings = manifest['encoder']
    if settings['kind'] == 'lexical':
        return LexicalEncoder(settings['dimension'])
    # Imported here, because it imports TensorFlow, which other indexes do not need.
    from .encoder import TextEncoder

    return TextEncoder(
        folder or manifest['encoder_folder'],
        query_prefix=settings['query_prefix'],
        passage_prefix=settings['passage_prefix'],
        max_tokens=settings['max_tokens'],
        dtype=settings['dtype'],
    )


def _check_encoder(
    built: Mapping[str, Any], current: Mapping[str, Any], folder: pathlib.Path
) -> None:
    """Raises RetrievalError if an encoder has other settings than the one that the index in a folder was built with."""
    differences = shards.differences(built, current)
    if differences:
        raise RetrievalError(
            f'{folder}: the encoder differs from that of the index ({differences}); give the same'
        )


def _corpus_summary(folder: pathlib.Path) -> dict[str, Any]:
    """Returns {'sha256', 'passages', 'skipped', 'source'} of the corpus in an index folder, see `_corpus_stage`."""
    path = folder / 'corpus' / 'about.json'
    return json_text.load_object(path, 'remove the folder and build again')


# Version of the folder's layout.
FORMAT = 2
# Name of the file with the hash of the manifest, as `sha256sum --check` reads it.
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
        if checksum_path.read_bytes() != _checksum_line(content):
            raise ValueError(f'its bytes do not fit {CHECKSUM}, copy the folder again')
    except (OSError, ValueError) as error:
        fix = f'build it with zeroplay index{similar_path(folder)}'
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


def fingerprint(folder: str | pathlib.Path) -> str:
    """Returns the identity of an index: the SHA-256 of its manifest, which holds the hashes of all other files."""
    return hashlib.sha256(pathlib.Path(folder, 'manifest.json').read_bytes()).hexdigest()


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


# Languages that write no spaces between words, which an index of words cannot find: Thai and Lao, Burmese, Khmer,
# Japanese syllables, Chinese characters (also those of Japanese).
_WITHOUT_SPACES = re.compile(
    '[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]'
)
# Passages that are judged, and characters of each: enough for a share, and read in a moment from any corpus.
_PASSAGES = 1_000
_CHARACTERS = 1_000
# Single names in their own script are no reason to warn.
_LEAST_SHARE = 0.02


def share_without_spaces(corpus: Corpus) -> float:
    """Returns the share of passages, of a sample, whose letters are mostly of such a language."""
    rows = np.unique(np.linspace(0, len(corpus) - 1, _PASSAGES).astype(np.int64))
    count = 0
    for row in rows:
        text = corpus.record(int(row)).contents[:_CHARACTERS]
        letters = sum(map(str.isalpha, text))
        # Vowel signs of Thai and its relatives are no letters.
        count += 2 * len(_WITHOUT_SPACES.findall(text)) > letters
    return count / len(rows)


def warn_of_missing_spaces(corpus: Corpus, kind: str) -> None:
    """Logs a warning if an index of words is built over texts without spaces.

    Args:
      kind: name of the index or encoder in the warning.
    """
    share = share_without_spaces(corpus)
    if share < _LEAST_SHARE:
        return
    logging.warning(
        'warning: %.0f %% of the passages are in languages without spaces between words (Chinese, Japanese, Thai, …): '
        '%s compares whole words and finds almost none of them; build the index with --encoder and a BERT checkpoint '
        'of these languages',
        100 * share,
        kind,
    )
