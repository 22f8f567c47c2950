"""Corpus files: JSON lines, the TSV of Wikipedia-18, and folders of texts, read as a stream and validated."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import zstandard

from .records import Record, contents, split
from .splitting import split_record, split_text
from .suggestions import similar_path
from .titles import split_title, without_front_matter
from .types import RetrievalError, short

# No passage is longer; the limit bounds the memory that a file of another kind can take.
LONGEST_LINE = 1 << 24
# Words of a passage that is cut from a longer text, as in Wikipedia-18.
WORDS = 100
# Bad lines that are logged one by one; the total is logged at the end.
_LOGGED_LINES = 10

_TSV_HEADINGS = b'id\ttext\ttitle'
_TEXT_SUFFIXES = ('.txt', '.md')

csv.field_size_limit(sys.maxsize)  # LONGEST_LINE is the limit


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
    source: pathlib.Path, skipped: BadLines | None = None, passage_words: int = 0
) -> Iterator[tuple[int, Record]]:
    """Yields (line number from 1, passage) of a corpus file, in order.

    JSON lines hold {"id": string or whole number, "contents": '"Title"\\ntext'} and may hold "document_name", which
    separates documents of the same title; other keys are ignored. A TSV is that of Wikipedia-18 (Karpukhin et al. 2020,
    arXiv:2004.04906): columns id, text, title, with one line of headings.

    In a folder, all .txt and .md files are read in the order of their paths, without YAML front matter, and the number
    counts files instead of lines. Without `passage_words` the first line of each is its title and the remainder is cut
    into passages of 100 words; with it see `titles.split_title`. A single .txt or .md file is read as a folder with one
    file.

    Args:
      source: a file (.jsonl, .json or .tsv, also .gz and .zst) or a folder.
      skipped: receives the bad lines, which are then skipped unless it is strict; None makes the first one an error.
      passage_words: long passages and texts are cut into passages of whole sentences with this many words at most
        (see `splitting`); 0: passages are as they are in a file, and 100 words of a text.

    Raises:
      RetrievalError: a bad line (if `skipped` is None or strict), or a file that cannot be read.
    """
    if skipped is None:
        skipped = BadLines(source, strict=True)
    # The suffix of a folder does not matter, so folders are handled before the suffix is read.
    if holds_texts(source):
        yield from _read_texts(source, skipped, passage_words)
        return
    is_tsv, parse = _parser_of(source)
    try:
        # Closes the file also if the caller stops early.
        with contextlib.closing(_lines(source)) as lines:
            for number, line in enumerate(lines, 1):
                if is_tsv and number == 1:
                    _check_headings(source, line)
                    continue
                record = _parse_line(parse, line)
                if not isinstance(record, Record):
                    skipped.add(number, record)
                    continue
                for passage in split_record(record, passage_words):
                    yield number, passage
    except (OSError, EOFError, zstandard.ZstdError) as error:
        # Errors of the operating system have a short text; those of decompressors do not.
        reason = getattr(error, 'strerror', None) or str(error)
        raise RetrievalError(
            f'{source}: cannot be read ({reason}); give a whole, readable file{similar_path(source)}'
        ) from error


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
            f'{source}: cannot be read (no such file); give a text or a folder{similar_path(source)}'
        )
    if not files:
        raise RetrievalError(f'{source}: no .txt or .md file in it; give a folder of texts')
    for number, path in enumerate(files, 1):
        try:
            # 'utf-8-sig' drops the byte order mark that some editors write.
            whole_text = path.read_text(encoding='utf-8-sig')
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, 'reason', error)
            skipped.add(number, f'{path} cannot be read as UTF-8 text ({reason})')
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
            record = _validated(Record(passage_id, contents(title, passage_text), document=name))
            if isinstance(record, Record):
                yield number, record
            else:
                skipped.add(number, f'{path}: {record}')


def _blocks_of_words(text: str) -> list[str]:
    """Returns a text in blocks of `WORDS` words; a text without words is one empty block."""
    words = text.split()
    blocks = []
    for start in range(0, max(len(words), 1), WORDS):
        blocks.append(' '.join(words[start : start + WORDS]))
    return blocks


def _parser_of(source: pathlib.Path) -> tuple[bool, Callable[[str], Record | str]]:
    """Returns (whether the file is a TSV, function that parses one of its lines); RetrievalError for other formats."""
    # A name such as 'wiki.v2.jsonl.gz' has further suffixes in front.
    suffixes = [suffix for suffix in source.suffixes if suffix not in ('.gz', '.zst')]
    kind = ''.join(suffixes)
    if kind.endswith('.tsv'):
        return True, _parse_tsv
    if kind.endswith(('.jsonl', '.json')):
        return False, _parse_json
    raise RetrievalError(
        f'{source}: unknown format; name the file .jsonl or .tsv, followed by .gz or .zst if compressed'
    )


def _check_headings(source: pathlib.Path, line: bytes) -> None:
    """Raises RetrievalError unless the first line of a TSV has the headings of Wikipedia-18."""
    if line.rstrip(b'\r\n') != _TSV_HEADINGS:
        raise RetrievalError(f'{source}:1: the headings of a TSV are id, text, title in this order')


def _parse_line(parse: Callable[[str], Record | str], line: bytes) -> Record | str:
    """Returns the passage of a line, or the reason why the line is bad."""
    # Checked before decoding and parsing, which take several times the memory.
    if len(line) > LONGEST_LINE:
        return f'longer than {LONGEST_LINE >> 20} MiB'
    try:
        record = parse(line.decode('utf-8'))
    except UnicodeDecodeError as error:
        return f'not UTF-8 (byte {error.start})'
    if isinstance(record, str):
        return record
    return _validated(record)


def _validated(record: Record) -> Record | str:
    """Returns the passage, or the reason why it is bad."""
    # The line feed separates id and contents on disk.
    if not record.id or '\n' in record.id:
        return f'the id {short(record.id)} is empty or has a line feed'
    try:
        # JSON escapes can write half of a surrogate pair, which UTF-8 cannot represent.
        f'{record.id}{record.contents}{record.document}'.encode()
    except UnicodeEncodeError:
        return 'a lone surrogate (half a character)'
    title, text = split(record.contents)
    # An empty text has no meaningful embedding.
    if not title.strip() and not text.strip():
        return 'a passage with neither title nor text'
    return record


def _parse_json(line: str) -> Record | str:
    """Returns the passage of a JSON line, or the reason why the line is bad."""
    try:
        # Deep nesting raises RecursionError.
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f'not JSON ({str(error)[:60]})'
    if not isinstance(fields, dict) or 'id' not in fields or 'contents' not in fields:
        return 'not an object with "id" and "contents"'
    record_id = fields['id']
    body = fields['contents']
    # In Python a bool is an int, but `true` is not an id.
    valid_id = isinstance(record_id, str | int) and not isinstance(record_id, bool)
    if not valid_id or not isinstance(body, str):
        types = f'"id" is {type(record_id).__name__} and "contents" {type(body).__name__}'
        return f'{types}; give a string or whole number as "id", a string as "contents"'
    document = fields.get('document_name', '')
    if not isinstance(document, str):
        return f'"document_name" is {type(document).__name__}; it must be a string'
    return Record(str(record_id), body, document)


def _parse_tsv(line: str) -> Record | str:
    """Returns the passage of a TSV row, or the reason why the row is bad."""
    try:
        # csv handles the doubled quotes inside of a cell.
        row = next(csv.reader([line.rstrip('\r\n')], delimiter='\t', strict=True))
    except (csv.Error, StopIteration) as error:
        return f'not a row of a TSV ({error})'
    if len(row) != 3:
        return f'{len(row)} columns instead of id, text and title'
    record_id, text, title = row
    return Record(record_id, contents(title, text))


def _lines(source: pathlib.Path) -> Generator[bytes, None, None]:
    """Yields the lines of a file, decompressed by its last suffix.

    A line of more than `LONGEST_LINE` bytes is cut to `LONGEST_LINE` + 1 bytes, by which `_parse_line` recognises it as
    too long.
    """
    with contextlib.ExitStack() as stack:
        stream: Any = stack.enter_context(source.open('rb'))
        # Only the last suffix names the compression; `_parser_of` reads the suffixes before it.
        if source.suffix == '.gz':
            stream = stack.enter_context(gzip.open(stream))
        elif source.suffix == '.zst':
            # Parallel compressors write several frames.
            reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
            stream = stack.enter_context(io.BufferedReader(reader, 1 << 20))
        line = stream.readline(LONGEST_LINE + 1)
        while line:
            yield line
            # The remainder of a line that was cut is skipped.
            while len(line) > LONGEST_LINE and not line.endswith(b'\n'):
                line = stream.readline(LONGEST_LINE + 1)
            line = stream.readline(LONGEST_LINE + 1)
