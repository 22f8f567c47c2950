"""Corpora: files of passages and folders of texts, read as a stream and validated."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping

from .json_text import Unusable
from .plain_text import read_text
from .records import Record, contents, record_of, split
from .rows import rows, suffix_of
from .splitting import split_record, split_text
from .suggestions import similar_path
from .titles import split_title, without_front_matter
from .types import RetrievalError, short

# Words of a passage that is cut from a longer text, as in Wikipedia-18.
WORDS = 100
# Bad lines that are logged one by one; the total is logged at the end.
_LOGGED_LINES = 10

_TEXT_SUFFIXES = ('.txt', '.md')
_PASSAGE_SUFFIXES = ('.jsonl', '.json', '.tsv', '.parquet')
# Formats that hold texts → a program that writes them as plain text.
_CONVERTERS = {
    '.pdf': 'pdftotext',
    '.html': 'pandoc -t plain',
    '.htm': 'pandoc -t plain',
    '.docx': 'pandoc -t plain',
    '.odt': 'pandoc -t plain',
    '.epub': 'pandoc -t plain',
    '.rst': 'pandoc -t plain',
    '.tex': 'pandoc -t plain',
}


class BadLines:
    """Counts the bad lines of a source, or its unusable files if it is a folder of texts.

    Args:
      source: the file or folder, for messages.
      strict: True: the first bad line raises an error. False: the first ten are logged and all are counted.
      fix: end of the error line: what the user of the command can do.
    """

    def __init__(self, source: pathlib.Path, strict: bool, fix: str = 'correct the line'):
        self.source = source
        self.strict = strict
        self.fix = fix
        self.count = 0

    def add(self, number: int, reason: str) -> None:
        """Counts a bad line (or file) and logs it or raises an error, as the constructor says.

        Args:
          number: number of the line, from 1.
          reason: why it is bad.

        Raises:
          RetrievalError: `strict` is set.
        """
        self.count += 1
        if self.strict:
            raise RetrievalError(f'{self.source}:{number}: {reason}; {self.fix}')
        if self.count <= _LOGGED_LINES:
            logging.warning('%s:%d: %s; skipped', self.source, number, reason)


def read(
    source: pathlib.Path,
    skipped: BadLines | None = None,
    passage_words: int = 0,
    fields: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, Record]]:
    """Yields (line number from 1, passage) of a corpus file, in order.

    A file of passages has JSON lines, a TSV with headings (as Wikipedia-18, Karpukhin et al. 2020, arXiv:2004.04906) or
    Parquet, read by `rows.rows`; `records.record_of` says which of their fields are a passage.

    In a folder, all .txt and .md files are read in the order of their paths, without YAML front matter, and the number
    counts files instead of lines. Without `passage_words` the first line of each is its title and the remainder is cut
    into passages of 100 words; with it see `titles.split_title`. A single .txt or .md file is read as a folder with one
    file.

    Args:
      source: a file (.jsonl, .json, .tsv or .parquet, texts also .gz, .zst, .bz2 and .xz) or a folder.
      skipped: receives the bad lines, which are then skipped unless it is strict; None makes the first one an error.
      passage_words: long passages and texts are cut into passages of whole sentences with this many words at most
        (see `splitting`); 0: passages are as they are in a file, and 100 words of a text.
      fields: names of the fields of a passage, see `records.record_of`.

    Raises:
      RetrievalError: a bad line (if `skipped` is None or strict), or a file that cannot be read.
    """
    if skipped is None:
        skipped = BadLines(source, strict=True)
    # The suffix of a folder does not matter, so folders are handled before the suffix is read.
    if holds_texts(source) or not source.exists():
        if fields and source.exists():
            raise RetrievalError(f'{source}: texts have no fields; take --fields away')
        yield from _read_texts(source, skipped, passage_words)
        return
    if suffix_of(source) not in _PASSAGE_SUFFIXES:
        raise RetrievalError(
            f'{source}: unknown format; name the file .jsonl, .tsv or .parquet, texts followed by .gz or .zst if '
            f'compressed{conversion([suffix_of(source)])}'
        )
    for number, row in rows(source):
        try:
            if isinstance(row, Unusable):
                raise row
            record = _validated(record_of(row, fields or {}))
        except Unusable as error:
            skipped.add(number, str(error))
            continue
        for passage in split_record(record, passage_words):
            yield number, passage


def conversion(suffixes: Iterable[str]) -> str:
    """Returns '; convert … with …' for suffixes of formats that hold texts; '' without any."""
    programs = [
        f'{suffix} with {_CONVERTERS[suffix]}' for suffix in suffixes if suffix in _CONVERTERS
    ]
    return f'; convert {", ".join(programs)}' if programs else ''


def holds_texts(source: pathlib.Path) -> bool:
    """Returns whether a source is a folder of texts, or one text."""
    return source.is_dir() or source.suffix.lower() in _TEXT_SUFFIXES


def files_of(source: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that `read` opens: the source itself, or the texts in a folder."""
    if not source.is_dir():
        return [source]
    return [path for path in visible_files(source) if path.suffix.lower() in _TEXT_SUFFIXES]


def visible_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files below a folder but hidden ones, such as those in `.git` and `.venv`."""
    paths = []
    for path in folder.rglob('*'):
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith('.') for part in parts)
        if not is_hidden and path.is_file():
            paths.append(path)
    # `rglob` has no fixed order, but row numbers must be reproducible.
    return sorted(paths)


def text_name(source: pathlib.Path, path: pathlib.Path) -> str:
    """Returns the name of a text file: its path relative to the source folder. Ids of passages begin with it."""
    name = path.name
    if path != source:
        name = path.relative_to(source).as_posix()
    # Linux allows any bytes in names; ids are UTF-8 without line feeds.
    return os.fsencode(name).decode('utf-8', 'replace').replace('\n', ' ')


def _read_texts(
    source: pathlib.Path, skipped: BadLines, passage_words: int
) -> Iterator[tuple[int, Record]]:
    """Yields (file number from 1, passage) of a folder of texts or of one text; see `read`."""
    files = files_of(source)
    if not source.exists():
        raise RetrievalError(
            f'{source}: cannot be read (no such file); give passages, a text or a folder{similar_path(source)}'
        )
    if not files:
        suffixes = sorted({path.suffix.lower() for path in visible_files(source)})
        raise RetrievalError(
            f'{source}: no .txt or .md file in it; give a folder of texts{conversion(suffixes)}'
        )
    for number, path in enumerate(files, 1):
        try:
            whole_text = read_text(path)
        except (OSError, Unusable) as error:
            skipped.add(number, f'{path} cannot be read as a text ({error})')
            continue
        name = text_name(source, path)
        if passage_words:
            title, text = split_title(whole_text, name)
            passage_texts = split_text(text, passage_words)
            if not passage_texts:
                skipped.add(number, f'{path}: the file is empty')
        else:
            first_line, _, text = without_front_matter(whole_text).strip().partition('\n')
            # Markdown headings start with '#'.
            title = first_line.lstrip('# ').strip()
            passage_texts = _blocks_of_words(text)
        for passage_number, passage_text in enumerate(passage_texts):
            passage_id = f'{name}#{passage_number}'
            record = Record(passage_id, contents(title, passage_text), document=name)
            try:
                yield number, _validated(record)
            except Unusable as error:
                skipped.add(number, f'{path}: {error}')


def _blocks_of_words(text: str) -> list[str]:
    """Returns a text in blocks of `WORDS` words; a text without words is one empty block."""
    words = text.split()
    blocks = []
    for start in range(0, max(len(words), 1), WORDS):
        blocks.append(' '.join(words[start : start + WORDS]))
    return blocks


def _validated(record: Record) -> Record:
    """Returns a passage with the line feeds and composed characters that queries have; Unusable if it is bad."""
    # The line feed separates id and contents on disk.
    if not record.id or '\n' in record.id:
        raise Unusable(f'the id {short(record.id)} is empty or has a line feed')
    original = body = record.contents
    if '\r' in body:
        body = body.replace('\r\n', '\n').replace('\r', '\n')
    # Most tokenizers compose what a policy reads and writes: a word with accents of their own would never be found.
    if not unicodedata.is_normalized('NFC', body):
        body = unicodedata.normalize('NFC', body)
    title, text = split(body)
    # An empty text has no meaningful embedding.
    if not title.strip() and not text.strip():
        raise Unusable('a passage with neither title nor text')
    return record if body is original else dataclasses.replace(record, contents=body)
