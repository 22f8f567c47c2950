"""Files of records read row by row: JSON lines, TSV with headings and Parquet; texts also compressed."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import pathlib
import re
import sys
from collections.abc import Generator, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import zstandard

from . import json_text
from .command import similar_path
from .json_text import Unusable, type_name
from .types import Record, RetrievalError, contents, first_line, split

# No line is longer; the limit bounds the memory that a file of another kind can take. Questions of BrowseComp-Plus with
# all their documents have up to 16 MiB.
LONGEST_LINE = 1 << 25
COMPRESSED = ('.gz', '.zst', '.bz2', '.xz')
# Bytes of a zstd file that are decompressed at a time: at most 128 MiB, of zeros.
_ZSTD_BYTES = 1 << 12
# Rows of a Parquet file that are held in memory.
_BATCH_ROWS = 1024
# Characters, at least, of a 32-bit number that is written with the digits of a 64-bit one.
_DIGITS_OF_32_BITS = 14

csv.field_size_limit(sys.maxsize)  # LONGEST_LINE is the limit

# An escape of one half of a character.
_SURROGATE = re.compile(rb'\\u[dD][89a-fA-F]')
# The fields of a row by name, or why it has none.
Row = dict[str, Any] | Unusable


def suffix_of(source: pathlib.Path) -> str:
    """Returns the suffix that names the form of a file, in small letters, without one of a compression behind it."""
    # A name such as 'wiki.v2.jsonl.gz' has further suffixes in front.
    suffixes = [suffix.lower() for suffix in source.suffixes]
    names = [suffix for suffix in suffixes if suffix not in COMPRESSED]
    return names[-1] if names else ''


def rows(source: pathlib.Path) -> Iterator[tuple[int, Row]]:
    """Yields (number from 1, row) of a file in order; blank lines are left out.

    The number is that of the line, or of the row of a Parquet file. A file whose name ends with .tsv or .parquet, apart
    from a suffix of `COMPRESSED`, is one; any other has JSON lines.

    Raises:
      RetrievalError: the file cannot be read, begins like a file of another kind, or has two columns of one name.
    """
    if suffix_of(source) == '.csv':
        raise RetrievalError(
            f'{source}: CSV is not read; save it as .tsv, with tabs between the columns and their names in line 1'
        )
    try:
        if suffix_of(source) == '.parquet':
            yield from _parquet_rows(source)
        else:
            yield from _text_rows(source)
    except (OSError, EOFError, zstandard.ZstdError, lzma.LZMAError) as error:
        # Errors of the operating system have a short text; those of decompressors do not.
        reason = getattr(error, 'strerror', None) or str(error)
        raise RetrievalError(
            f'{source}: cannot be read ({reason}); give a whole, readable file{similar_path(source)}'
        ) from error


def _text_rows(source: pathlib.Path) -> Iterator[tuple[int, Row]]:
    """Yields (line number, row) of JSON lines or a TSV; errors are those of `rows` and of decompressors."""
    headings: list[str] | None = None
    # Closes the file also if the caller stops early.
    with contextlib.closing(_lines(source)) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                try:
                    json_text.refuse_foreign(line)
                except Unusable as error:
                    raise RetrievalError(f'{source}: {error}') from None
            if not line.strip():
                continue
            try:
                # Checked before decoding and parsing, which take several times the memory.
                if len(line) > LONGEST_LINE:
                    raise Unusable(f'longer than {LONGEST_LINE >> 20} MiB')
                if suffix_of(source) != '.tsv':
                    yield number, _json_row(line)
                elif headings is None:
                    headings = _headings(source, number, line)
                else:
                    cells = _cells(line)
                    if len(cells) != len(headings):
                        problem = f'{len(cells)} columns instead of {len(headings)}, as in line 1'
                        raise Unusable(problem)
                    yield number, dict(zip(headings, cells))
            except Unusable as error:
                yield number, error


def _json_row(line: bytes) -> dict[str, Any]:
    """Returns the object of a line of JSON."""
    value = json_text.parse(line)
    if _SURROGATE.search(line):
        # Neither a prompt nor a log could be written with half of a pair.
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Unusable('it has an escape \\ud… without its other half') from None
    if isinstance(value, list):
        raise Unusable(f'a JSON list; {json_text.ONE_PER_LINE}')
    if not isinstance(value, dict):
        raise Unusable(f'a JSON {type_name(value)}, not an object')
    return value


def _cells(line: bytes) -> list[str]:
    """Returns the cells of a line of a TSV."""
    try:
        # csv handles the doubled quotes inside of a cell.
        return next(
            csv.reader([json_text.decode(line).rstrip('\r\n')], delimiter='\t', strict=True)
        )
    except (csv.Error, StopIteration) as error:
        reason = str(error)
        if reason == 'unexpected end of data':
            reason = 'a quote is not closed in its line; a cell has one line, with quotes doubled inside of quotes'
        raise Unusable(f'not a row of a TSV ({reason})') from None


def _headings(source: pathlib.Path, number: int, line: bytes) -> list[str]:
    """Returns the names of the columns of a TSV; RetrievalError if no row could be read with them."""
    try:
        headings = _cells(line)
        # Spreadsheets write empty columns behind the last one.
        named = [heading for heading in headings if heading.strip()]
        json_text.refuse_repeated(named, 'column')
    except Unusable as error:
        raise RetrievalError(
            f'{source}:{number}: {error}; give every column a name of its own in the first line'
        ) from None
    return headings


def _parquet_rows(source: pathlib.Path) -> Iterator[tuple[int, Row]]:
    """Yields (row number, row) of a Parquet file."""
    try:
        # Imported here: an optional package that only this form needs.
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise RetrievalError(
            f'{source}: Parquet is read by the package pyarrow; pip install pyarrow, or write JSON lines'
        ) from None
    try:
        number = 0
        with source.open('rb') as stream, ParquetFile(stream) as file:
            json_text.refuse_repeated(file.schema_arrow.names, 'column')
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, ValueError) as error:
        # pyarrow raises ValueError for a text that is no UTF-8, and for two fields of one name inside a column.
        raise RetrievalError(
            f'{source}: cannot be read as Parquet ({first_line(error)}); write it again without that, or write JSON '
            'lines'
        ) from None


def shortest(value: float) -> float:
    """Returns 2.3 for 2.299999952316284, which a column of 32-bit numbers has in its place; others as they are."""
    if len(repr(value)) < _DIGITS_OF_32_BITS or abs(value) > np.finfo(np.float32).max:
        return value
    single = np.float32(value)
    # A number of so many digits equals one of 32 bits by no accident.
    return float(str(single)) if float(single) == value else value


def _lines(source: pathlib.Path) -> Generator[bytes, None, None]:
    """Yields the lines of a file, decompressed by its last suffix.

    A line of more than `LONGEST_LINE` bytes is cut to `LONGEST_LINE` + 1 bytes, by which it is recognised as too long.
    """
    with contextlib.ExitStack() as stack:
        stream: BinaryIO | Any = stack.enter_context(source.open('rb'))
        opened = _decompressed(stream, source.suffix.lower())
        if opened is not stream:
            stream = stack.enter_context(opened)
        line = stream.readline(LONGEST_LINE + 1)
        while line:
            yield line
            # The remainder of a line that was cut is skipped.
            while len(line) > LONGEST_LINE and not line.endswith(b'\n'):
                line = stream.readline(LONGEST_LINE + 1)
            line = stream.readline(LONGEST_LINE + 1)


def _decompressed(stream: BinaryIO, suffix: str) -> Any:
    """Returns a stream of the content of a file with this last suffix; the stream itself without compression."""
    if suffix == '.gz':
        return gzip.open(stream)
    if suffix == '.bz2':
        return bz2.open(stream)
    if suffix == '.xz':
        return lzma.open(stream)
    if suffix == '.zst':
        return io.BufferedReader(_Pieces(_zstd_pieces(stream)), 1 << 20)
    return stream


def _zstd_pieces(stream: BinaryIO) -> Iterator[bytes]:
    """Yields the content of a zstd file; EOFError if its last frame has no end, which `stream_reader` reads over."""
    # Of `zstd --long=31`, the most that it writes.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = decompressor.decompressobj()
    is_begun = False
    # Parallel compressors write several frames.
    while packed := frame.unused_data or stream.read(_ZSTD_BYTES):
        if frame.eof:
            frame = decompressor.decompressobj()
        is_begun = True
        yield frame.decompress(packed)
    if is_begun and not frame.eof:
        raise EOFError('its last zstd frame has no end')


class _Pieces(io.RawIOBase):
    """A stream of bytes that come in pieces."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces = pieces
        self._rest = memoryview(b'')

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # An empty piece does not end the stream.
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


# ---- passages --------------------------------------------------------------------------------------


# Names that public corpora and search servers give the fields of a passage, in the order in which they are looked for.
# `contents` has the wire form; the others are plain.
FIELD_NAMES = {
    # Of passages of MS MARCO v2, `docid` names the document.
    'id': ('id', '_id', 'pid', 'docid', 'doc_id', 'passage_id'),
    'text': ('contents', 'text', 'passage', 'content', 'body', 'page_content', 'snippet'),
    'title': ('title',),
}
_WIRE = 'contents'
_CONTRADICTORY = 'contradict each other; leave one of them out'
# Names of fields that an error lists.
_LISTED_FIELDS = 8


def record_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> Record:
    """Returns the passage in a row of a corpus file.

    The id is a text or whole number under `id`, `_id`, `pid`, `docid`, `doc_id` or `passage_id`. The text is under
    `contents`, in wire form, or else under another name of `FIELD_NAMES`; `title` may be missing, or in an object
    `metadata` as LangChain has it. A `document_name` separates documents of the same title. Of several names the first
    in this order with a value is read. Other fields are ignored.

    Args:
      row: the fields by name.
      fields: names of the fields for any of 'id', 'text' and 'title', instead of those above.

    Raises:
      Unusable: a field is missing or of another type; or two fields contradict each other, where neither contains the
        other.
    """
    id_name = _name_of('id', row, fields)
    text_name = _name_of('text', row, fields)
    title_name = _name_of('title', row, fields)
    record_id = row[id_name]
    # In Python a bool is an int, but `true` is not an id.
    if not isinstance(record_id, str | int) or isinstance(record_id, bool):
        raise Unusable(
            f'"{id_name}" is a JSON {type_name(record_id)}; give a text or a whole number'
        )
    other_id = row.get('_id')
    # MongoDB writes an object.
    if (
        id_name == 'id'
        and isinstance(other_id, str | int)
        and str(other_id) not in (str(record_id), '')
    ):
        raise Unusable(f'"id" and "_id" {_CONTRADICTORY}')
    if row[text_name] is None:
        raise Unusable(f'"{text_name}" is null; give a text')
    text = _text_in(row, text_name)
    # Blanks and line feeds of a title would break its line.
    title = ' '.join(_text_in(row, title_name).split())
    metadata = row.get('metadata')
    if not title and text_name != _WIRE and 'title' not in fields and isinstance(metadata, Mapping):
        # LangChain's titles; metadata of others may have anything there.
        inner_title = metadata.get('title')
        title = ' '.join(inner_title.split()) if isinstance(inner_title, str) else ''
    document = _text_in(row, 'document_name')
    if text_name == _WIRE:
        own_title, body = split(text)
        _refuse_contradiction('title', title, own_title)
        if 'text' in row:
            _refuse_contradiction('text', _text_in(row, 'text'), body)
        if own_title or not title:
            return Record(str(record_id), text, document)
        # Some files repeat the title as a first line without quotes.
        text = body.removeprefix(f'{title}\n')
    # Without a title a text stands alone, unless its own first line would be taken for one.
    has_title = bool(title or split(text)[0])
    return Record(str(record_id), contents(title, text) if has_title else text, document)


def _refuse_contradiction(name: str, value: str, part: str) -> None:
    """Raises Unusable if a field and the part of the contents that it stands for do not contain one another."""
    # Nearly all are equal or empty.
    if value in part:
        return
    words = ' '.join(value.casefold().split())
    part_words = ' '.join(part.casefold().split())
    if words not in part_words and part_words not in words:
        raise Unusable(f'"{name}" and "{_WIRE}" {_CONTRADICTORY}')


def title_like(row: Mapping[str, Any]) -> str:
    """Returns the name of a field of a row that may be a title under another name; '' without one."""
    for name, value in row.items():
        lower_name = name.lower()
        is_named_so = lower_name in ('title', 'headline') or lower_name.endswith('_title')
        if is_named_so and isinstance(value, str) and value.strip():
            return name
    return ''


def listed_fields(row: Mapping[str, Any]) -> str:
    """Returns the names of the first fields of a row, for an error."""
    return ', '.join(f'"{name}"' for name in list(row)[:_LISTED_FIELDS])[:200]


def _name_of(field: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """Returns the name under which a row has a field; '' for a missing title."""
    names = (fields[field],) if field in fields else FIELD_NAMES[field]
    stated = [name for name in names if name in row]
    if stated:
        # Some files have empty fields beside the one in use.
        return next((name for name in stated if row[name] not in (None, '')), stated[0])
    if field == 'title' and field not in fields:
        return ''
    # pandas writes its index without a name.
    unnamed = ''
    if field == 'id' and '' in row:
        unnamed = ' (in line 1 give the column "" the name id if it is that)'
    raise Unusable(
        f'no {field}: none of {", ".join(names)} among its fields {listed_fields(row)}; name it with --fields '
        f'{field}=NAME{unnamed}'
    )


def _text_in(row: Mapping[str, Any], name: str) -> str:
    """Returns the text under a name; '' for a missing one or null."""
    value = row.get(name)
    if value is None:
        return ''
    if not isinstance(value, str):
        raise Unusable(f'"{name}" is a JSON {type_name(value)}; give a text')
    return value
