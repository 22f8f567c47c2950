"""Passages: read from JSON lines or TSV as a stream, kept on disk, read back by number without being in memory.

Wire form of a passage ('contents', as Search-R1 and verl have it): its title in double quotes on the first line, the
text after it. On disk a corpus is two files: `passages.bin`, the records one after another ('id', a line feed,
'contents', UTF-8), and `offsets.npy`, uint64 [N + 1], where each starts. Both are memory-mapped: 21 million
passages take 168 MB of offsets and whatever the operating system caches.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import hashlib
import io
import json
import logging
import pathlib
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import zstandard

from . import progress
from .types import Passage, RetrievalError, short

# A longer line is no passage but a file of another kind; it bounds the memory that a bad file can take.
LONGEST_LINE = 1 << 24
# Words of a passage that is cut from a longer text, as in Wikipedia-18.
WORDS = 100


@dataclasses.dataclass(frozen=True)
class Record:
    """One passage as a file states it."""

    id: str
    contents: str


def contents(title: str, text: str) -> str:
    """The wire form of a passage."""
    return f'"{title}"\n{text}'


def split(contents: str) -> tuple[str, str]:
    """(title, text) of a passage in wire form; no title where the first line is not in quotes."""
    head, _, text = contents.partition('\n')
    if len(head) >= 2 and head[0] == head[-1] == '"':
        return head[1:-1], text
    return '', contents


class MemoryCorpus:
    """Passages in memory; the place of each is its id."""

    def __init__(self, titles: Sequence[str], texts: Sequence[str]):
        if not len(titles) or len(titles) != len(texts):
            raise RetrievalError(
                f'corpus: {len(titles)} titles and {len(texts)} texts; give at least one passage'
            )
        self._titles, self._texts = list(titles), list(texts)

    def __len__(self) -> int:
        return len(self._titles)

    def record(self, number: int) -> Record:
        """The passage in wire form."""
        return Record(str(number), contents(self._titles[number], self._texts[number]))

    def passage(self, number: int) -> Passage:
        """{'id': number, 'title', 'text'}."""
        return {'id': number, 'title': self._titles[number], 'text': self._texts[number]}


class Corpus:
    """Passages on disk, opened from the folder that `write` made."""

    def __init__(self, folder: pathlib.Path):
        try:
            self._offsets = np.load(folder / 'offsets.npy', mmap_mode='r')
            self._bytes = np.memmap(folder / 'passages.bin', np.uint8, 'r')
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f'{folder}: no corpus can be read there ({error}); build the index again'
            ) from error
        if (
            self._offsets.ndim != 1
            or len(self._offsets) < 2
            or self._offsets[-1] != len(self._bytes)
        ):
            raise RetrievalError(
                f'{folder}: offsets.npy does not fit passages.bin; build the index again'
            )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def record(self, number: int) -> Record:
        """The passage in wire form, with the id its source gave it."""
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        name, _, body = self._bytes[start:end].tobytes().decode('utf-8').partition('\n')
        return Record(name, body)

    def passage(self, number: int) -> Passage:
        """{'id': number, 'title', 'text'}."""
        title, text = split(self.record(number).contents)
        return {'id': number, 'title': title, 'text': text}


@dataclasses.dataclass(frozen=True)
class Written:
    """What `write` did: passages kept, lines skipped, SHA-256 over all records in order."""

    passages: int
    skipped: int
    sha256: str


def write(source: pathlib.Path, folder: pathlib.Path, strict: bool = True) -> Written:
    """Validates a corpus file as a stream and writes it for random access; 21 million passages never are in memory.

    Args:
      source: `.jsonl` or `.tsv`, also `.gz` and `.zst`, or a folder of texts (see `read`).
      folder: exists; gets the two files.
      strict: stop at the first bad line (False: skip it, say so in the log, and count it).

    Raises:
      RetrievalError: a bad line (strict), an id given twice, no passage at all, a file that cannot be read.
    """
    # 8 bytes of a hash per id find the ids given twice; two of 21 million differ by chance once in 80,000 corpora.
    names, ends = _Column(np.uint64), _Column(np.uint64)
    digest, skipped = hashlib.sha256(), _Skipped(source, strict)
    with (folder / 'passages.bin').open('wb') as out, progress.bar(None, 'passages', 'read') as bar:
        ends.append(0)
        for _, record in read(source, skipped):
            line = f'{record.id}\n{record.contents}'.encode()
            digest.update(len(line).to_bytes(8, 'little') + line)
            names.append(
                int.from_bytes(
                    hashlib.blake2b(record.id.encode(), digest_size=8).digest(), 'little'
                )
            )
            ends.append(out.tell() + len(line))
            out.write(line)
            bar.update()
    offsets, hashes = ends.array(), names.array()
    if not len(hashes):
        raise RetrievalError(
            f'{source}: no passage in it ({skipped.count} lines skipped); give a corpus with some'
        )
    np.save(folder / 'offsets.npy', offsets)
    _refuse_twins(source, Corpus(folder), hashes)
    if skipped.count:
        logging.warning(
            '%s: skipped %d bad lines, kept %d passages', source, skipped.count, len(hashes)
        )
    return Written(len(hashes), skipped.count, digest.hexdigest())


def read(source: pathlib.Path, skipped: _Skipped | None = None) -> Iterator[tuple[int, Record]]:
    """(line number from 1, passage) of a corpus file, in order.

    JSON lines hold {"id": string or whole number, "contents": '"Title"\\ntext'}; other keys are ignored. A TSV is that
    of Wikipedia-18 (Karpukhin et al. 2020, arXiv:2004.04906): columns id, text, title, with one line of headings.
    A folder stands for its .txt and .md files by name: the first line of each is its title, the rest is cut into
    passages of 100 words; instead of lines they are counted by file.

    Raises:
      RetrievalError: a bad line, named with its number, where `skipped` is None or strict.
    """
    skipped = skipped or _Skipped(source, strict=True)
    if source.is_dir():
        yield from _texts(source, skipped)
        return
    kind = ''.join(suffix for suffix in source.suffixes if suffix not in ('.gz', '.zst'))
    parse = _tsv if kind.endswith('.tsv') else _json if kind.endswith(('.jsonl', '.json')) else None
    if parse is None:
        raise RetrievalError(
            f'{source}: of what form is it? name it .jsonl or .tsv, with .gz or .zst where compressed'
        )
    try:
        with contextlib.closing(_lines(source)) as lines:
            for number, line in enumerate(lines, 1):
                if parse is _tsv and number == 1:
                    if line.rstrip(b'\r\n') != b'id\ttext\ttitle':
                        raise RetrievalError(
                            f'{source}:1: the headings of a TSV are id, text, title in this order'
                        )
                    continue
                record = _parsed(parse, line)
                if isinstance(record, Record):
                    yield number, record
                else:
                    skipped.add(number, record)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        reason = getattr(error, 'strerror', None) or str(error)
        raise RetrievalError(
            f'{source}: cannot be read ({reason}); give a whole, readable file'
        ) from error


def files_of(source: pathlib.Path) -> list[pathlib.Path]:
    """The files that are read of a source: itself, or the texts in a folder."""
    if not source.is_dir():
        return [source]
    return sorted(
        path
        for path in source.rglob('*')
        if path.suffix.lower() in ('.txt', '.md') and path.is_file()
    )


def _texts(source: pathlib.Path, skipped: _Skipped) -> Iterator[tuple[int, Record]]:
    """(file number from 1, passage) of a folder of texts."""
    files = files_of(source)
    if not files:
        raise RetrievalError(f'{source}: no .txt or .md file in it; give a folder of texts')
    for number, path in enumerate(files, 1):
        try:
            title, _, text = path.read_text(encoding='utf-8-sig').strip().partition('\n')
        except (OSError, UnicodeDecodeError) as error:
            skipped.add(
                number, f'{path} cannot be read as UTF-8 text ({getattr(error, "reason", error)})'
            )
            continue
        words, name = text.split(), path.relative_to(source).as_posix()
        for part, at in enumerate(range(0, max(len(words), 1), WORDS)):
            passage = contents(title.lstrip('# ').strip(), ' '.join(words[at : at + WORDS]))
            record = _checked(Record(f'{name}#{part}', passage))
            if isinstance(record, Record):
                yield number, record
            else:
                skipped.add(number, f'{path}: {record}')


class _Skipped:
    """Bad lines: the first one is an error where `strict`, else they are counted and the first ten are logged."""

    def __init__(self, source: pathlib.Path, strict: bool):
        self.source, self.strict, self.count = source, strict, 0

    def add(self, number: int, reason: str) -> None:
        self.count += 1
        if self.strict:
            raise RetrievalError(
                f'{self.source}:{number}: {reason}; mend the line or pass --skip-bad-lines'
            )
        if self.count <= 10:
            logging.warning('%s:%d: %s; skipped', self.source, number, reason)


def _parsed(parse, line: bytes) -> Record | str:
    """The passage of a line, or what is wrong with it."""
    if len(line) > LONGEST_LINE:
        return f'longer than {LONGEST_LINE >> 20} MiB'
    try:
        record = parse(line.decode('utf-8'))
    except UnicodeDecodeError as error:
        return f'not UTF-8 (byte {error.start})'
    return record if isinstance(record, str) else _checked(record)


def _checked(record: Record) -> Record | str:
    """The passage, or what is wrong with it."""
    if not record.id or '\n' in record.id:
        return f'the id {short(record.id)} is empty or has a line feed'
    try:
        f'{record.id}{record.contents}'.encode()
    except UnicodeEncodeError:
        return 'a lone surrogate (half a character)'
    title, text = split(record.contents)
    return record if title.strip() or text.strip() else 'a passage with neither title nor text'


def _json(line: str) -> Record | str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f'not JSON ({str(error)[:60]})'
    if not isinstance(fields, dict) or 'id' not in fields or 'contents' not in fields:
        return 'not an object with "id" and "contents"'
    name, body = fields['id'], fields['contents']
    if isinstance(name, bool) or not isinstance(name, (str, int)) or not isinstance(body, str):
        return f'"id" is {type(name).__name__} and "contents" {type(body).__name__}; both must be strings'
    return Record(str(name), body)


def _tsv(line: str) -> Record | str:
    try:
        row = next(csv.reader([line.rstrip('\r\n')], delimiter='\t', strict=True))
    except (csv.Error, StopIteration) as error:
        return f'not a row of a TSV ({error})'
    if len(row) != 3:
        return f'{len(row)} columns where id, text and title belong'
    return Record(row[0], contents(row[2], row[1]))


def _lines(source: pathlib.Path) -> Generator[bytes, None, None]:
    """Lines of a file, unpacked by its last suffix; a line that is too long comes cut (and is refused for it)."""
    with contextlib.ExitStack() as stack:
        stream: Any = stack.enter_context(source.open('rb'))
        if source.suffix == '.gz':
            stream = stack.enter_context(gzip.open(stream))
        elif source.suffix == '.zst':
            reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
            stream = stack.enter_context(io.BufferedReader(reader, 1 << 20))
        while line := stream.readline(LONGEST_LINE + 1):
            yield line
            while len(line) > LONGEST_LINE and not line.endswith(b'\n'):
                line = stream.readline(LONGEST_LINE + 1)


class _Column:
    """Numbers that come one by one, kept in 8 bytes each."""

    def __init__(self, dtype):
        self._done, self._last, self._dtype = [], [], dtype

    def append(self, value: int) -> None:
        self._last.append(value)
        if len(self._last) == 1 << 16:
            self._done.append(np.array(self._last, self._dtype))
            self._last = []

    def array(self) -> np.ndarray:
        """All of them, [n]."""
        return np.concatenate([*self._done, np.array(self._last, self._dtype)])


def _refuse_twins(source: pathlib.Path, corpus: Corpus, hashes: np.ndarray) -> None:
    order = np.argsort(hashes, kind='stable')
    twins = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    if twins.size:
        first, second = order[twins[0]], order[twins[0] + 1]
        name = corpus.record(int(first)).id
        raise RetrievalError(
            f'{source}: passages {first} and {second} (counted from 0) have the same id {short(name)}, and '
            f'{twins.size - 1} more are given twice; give every passage an id of its own'
        )


def texts(corpus: Corpus | MemoryCorpus, rows: Iterable[int]) -> tuple[list[str], list[str]]:
    """Titles and texts of some passages."""
    found = [corpus.passage(row) for row in rows]
    return [p['title'] for p in found], [p['text'] for p in found]


csv.field_size_limit(sys.maxsize)  # a long passage is no error; LONGEST_LINE bounds it
