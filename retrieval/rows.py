"""Files of records read row by row: JSON lines, TSV with headings and Parquet; texts also compressed."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import json_text
from .command import similar_path
from .json_text import Unusable, type_name
from .types import Record, RetrievalError, contents, first_line, split

# No line is longer; the limit bounds the memory that a file of another kind can take. Questions of BrowseComp-Plus with
# all their documents have up to 16 MiB.
LONGEST_LINE = 1 << 25
# No file that is one list is longer; that of the training questions of HotpotQA has 0.5 GiB.
LONGEST_LIST = 1 << 30
COMPRESSED = ('.gz', '.zst', '.bz2', '.xz')
# What databases and pandas write into a cell for a missing value; JSON and Parquet have null.
MISSING = ('NULL', r'\N', 'nan', 'NaN', '<NA>')
# What a conversion leaves in a text: references of HTML; UTF-8 read as Latin-1 or as something else.
DAMAGE = r'&(?:[a-z]{2,8}|#\d+|#x[0-9a-f]+);|[ÂÃ][\x80-\xbf]|â€|\ufffd'
# Names that public corpora and search servers give the fields of a passage, in the order in which they are looked for.
# `contents` has the wire form; the others are plain.
FIELD_NAMES = {
    # Of passages of MS MARCO v2, `docid` names the document.
    'id': ('id', '_id', 'pid', 'docid', 'doc_id', 'passage_id'),
    'text': ('contents', 'text', 'passage', 'content', 'body', 'page_content', 'snippet'),
    'title': ('title',),
}
_WIRE = 'contents'
# Bytes in which the first mark of a file is looked for.
_HEAD = 1024
# Names of fields that an error lists.
_LISTED_FIELDS = 8
# Rows of a Parquet file that are held in memory.
_BATCH_ROWS = 1024
# Characters, at least, of a 32-bit number that is written with the digits of a 64-bit one.
_DIGITS_OF_32_BITS = 14
# How files of other forms become lines of JSON, in an error.
ONE_PER_LINE = (
    "write one object per line (jq -c . FILE, jq -c '.[]' FILE for a list, to_json(FILE, orient='records', lines=True) "
    'in pandas)'
)
# An escape of one half of a character.
_SURROGATE = re.compile(rb'\\u[dD][89a-fA-F]')

csv.field_size_limit(sys.maxsize)  # LONGEST_LINE is the limit

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
      RetrievalError: the file cannot be read, or has two columns of one name.
    """
    suffix = suffix_of(source)
    if suffix == '.csv':
        raise RetrievalError(
            f'{source}: CSV is not read; save it as .tsv, with tabs between the columns and their names in line 1'
        )
    try:
        if suffix == '.parquet':
            yield from _parquet_rows(source)
        elif suffix == '.tsv':
            yield from _tsv_rows(source)
        else:
            with opened(source) as stream:
                is_list = stream.read(_HEAD).removeprefix(b'\xef\xbb\xbf').lstrip()[:1] == b'['
            yield from _listed_rows(source) if is_list else _rows_of_lines(source)
    except ImportError:
        raise RetrievalError(
            f'{source}: Parquet and .zst are read by the package pyarrow; pip install pyarrow, or write JSON lines'
        ) from None
    except RetrievalError:
        raise
    # pyarrow raises ValueError for a text that is no UTF-8, and for two fields of one name inside a column.
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        # Errors of the operating system have a short text; those of libraries do not.
        reason = getattr(error, 'strerror', None) or first_line(error)
        raise RetrievalError(
            f'{source}: cannot be read ({reason}); give a whole, readable file{similar_path(source)}'
        ) from error


def _lines(source: pathlib.Path) -> Iterator[tuple[int, bytes | Unusable]]:
    """Yields (number from 1, line) of a file but blank lines; an `Unusable` for one longer than `LONGEST_LINE`."""
    number = 0
    with opened(source) as stream:
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            # It is told before decoding and parsing, which take several times the memory.
            is_long = len(line) > LONGEST_LINE
            # The remainder of a line that was cut is skipped.
            while len(line) > LONGEST_LINE and not line.endswith(b'\n'):
                line = stream.readline(LONGEST_LINE + 1)
            if is_long:
                yield number, Unusable(f'longer than {LONGEST_LINE >> 20} MiB')
            elif line.strip():
                yield number, line


def opened(source: pathlib.Path) -> Any:
    """Returns the stream of the bytes of a file, unpacked."""
    openers: dict[str, Any] = {
        '.gz': gzip.open,
        '.bz2': bz2.open,
        '.xz': lzma.open,
        '.zst': _open_zstd,
    }
    return openers.get(source.suffix.lower(), open)(source, 'rb')


def _rows_of_lines(source: pathlib.Path) -> Iterator[tuple[int, Row]]:
    """Yields (line number, row) of JSON lines."""
    for number, line in _lines(source):
        yield number, _json_row(line)


def _listed_rows(source: pathlib.Path) -> Iterator[tuple[int, Row]]:
    """Yields (number from 1, row) of a file that is one list, as HotpotQA."""
    with opened(source) as stream:
        content = stream.read(LONGEST_LIST + 1)
    try:
        if len(content) > LONGEST_LIST:
            raise Unusable(f'a list longer than {LONGEST_LIST >> 20} MiB')
        items = json_text.parse(content)
    except Unusable as error:
        raise RetrievalError(f'{source}: {error}; {ONE_PER_LINE}') from None
    for number, item in enumerate(items, 1):
        yield number, _json_row(json.dumps(item).encode())


def _open_zstd(source: pathlib.Path, mode: str) -> io.BufferedReader:
    # Imported here: an optional package that only this form and Parquet need.
    import pyarrow

    # It reads several frames, as parallel compressors write them, and refuses one without its end.
    packed = pyarrow.CompressedInputStream(pyarrow.OSFile(str(source), mode), 'zstd')
    return io.BufferedReader(packed, 1 << 20)


def _json_row(line: bytes | Unusable) -> Row:
    """Returns the object of a line of JSON."""
    if isinstance(line, Unusable):
        return line
    try:
        value = json_text.parse(line)
        if not isinstance(value, dict):
            raise Unusable(f'a JSON {type_name(value)}, not an object')
        if _SURROGATE.search(line):
            # Neither a prompt nor a log could be written with half of a pair.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Unusable('it has an escape \\ud… without its other half')
    except Unusable as error:
        # A line that does not begin an object, or only begins it, is part of a file of another form.
        if re.match(rb'(\xef\xbb\xbf)?\s*{\s*\S', line):
            return error
        return Unusable(f'{error}; {ONE_PER_LINE}')
    return value


def _tsv_rows(source: pathlib.Path) -> Iterator[tuple[int, Row]]:
    """Yields the rows of a TSV: of lines, so that a quote without end takes no further ones."""
    headings: list[str] | None = None
    for number, line in _lines(source):
        try:
            cells = _cells(line)
            if headings is None:
                # Spreadsheets write empty columns behind the last one.
                json_text.refuse_repeated([name for name in cells if name.strip()], 'column')
                headings = cells
                continue
            if len(cells) != len(headings):
                raise Unusable(f'{len(cells)} columns instead of {len(headings)}, as in line 1')
            present = ['' if cell.strip() in MISSING else cell for cell in cells]
            yield number, dict(zip(headings, present))
        except Unusable as error:
            # Without headings no row can be read.
            if headings is None:
                raise RetrievalError(
                    f'{source}:{number}: {error}; correct the names of the columns'
                ) from None
            yield number, error


def _cells(line: bytes | Unusable) -> list[str]:
    """Returns the cells of a line of a TSV."""
    if isinstance(line, Unusable):
        raise line
    text = json_text.decode(line).rstrip('\r\n')
    try:
        (cells,) = csv.reader([text], delimiter='\t', strict=True)
    except csv.Error as error:
        raise Unusable(
            f'not a row of a TSV ({error}); a cell has one line, with quotes doubled inside of quotes'
        ) from None
    return cells


def _parquet_rows(source: pathlib.Path) -> Iterator[tuple[int, Row]]:
    """Yields (row number, row) of a Parquet file."""
    import pyarrow.parquet

    number = 0
    with source.open('rb') as stream, pyarrow.parquet.ParquetFile(stream) as file:
        json_text.refuse_repeated(file.schema_arrow.names, 'column')
        for batch in file.iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def shortest(value: float) -> float:
    """Returns 2.3 for 2.299999952316284, which a column of 32-bit numbers has in its place; others as they are."""
    if len(repr(value)) < _DIGITS_OF_32_BITS or abs(value) > np.finfo(np.float32).max:
        return value
    single = np.float32(value)
    # A number of so many digits equals one of 32 bits by no accident.
    return float(str(single)) if float(single) == value else value


def record_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> Record:
    """Returns the passage in a row of a corpus file, or in the reply of a search server.

    The id is a text or whole number under one of the names in `FIELD_NAMES`. The text is under `contents`, in wire
    form, or else under another of these names; `title` may be missing, or in an object `metadata` as LangChain has it.
    A `document_name` separates documents of the same title. Of several names the first with a value is read. Other
    fields are ignored.

    Args:
      row: the fields by name.
      fields: names of the fields for any of 'id', 'text' and 'title', instead of those above.

    Raises:
      Unusable: a field is missing or of another type.
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
        if own_title or not title:
            return Record(str(record_id), text, document)
        # Some files repeat the title as a first line without quotes.
        text = body.removeprefix(f'{title}\n')
    # Without a title a text stands alone, unless its own first line would be taken for one.
    heading = title or split(text)[0]
    return Record(str(record_id), contents(title, text) if heading else text, document)


def title_like(row: Mapping[str, Any]) -> str:
    """Returns the name of a field of a row that may be a title under another name; '' without one."""
    for name, value in row.items():
        is_named_so = name.lower() in ('title', 'headline') or name.lower().endswith('_title')
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
