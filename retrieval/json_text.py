"""Reads JSON that others wrote, or that a crash cut off. What cannot be used is named as what it is, in a few words."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from .types import RetrievalError

# Deeper values would exceed the limits of other libraries and of the pages that show them.
MAX_DEPTH = 200
# What to do about a list, or an object over several lines.
ONE_PER_LINE = "write one object per line (jq -c . FILE, or jq -c '.[]' FILE for a list)"
# The largest float has 309 digits.
_MAX_DIGITS = 308

_SAVE = 'save it as UTF-8'
# First bytes of a file → (what it is, what to do).
_SIGNATURES = {
    b'\xff\xfe\0\0': ('UTF-32', _SAVE),
    b'\0\0\xfe\xff': ('UTF-32', _SAVE),
    b'\xff\xfe': ('UTF-16', _SAVE),
    b'\xfe\xff': ('UTF-16', _SAVE),
    b'\x1f\x8b': ('gzip', 'end its name with .gz'),
    b'\x28\xb5\x2f\xfd': ('zstd', 'end its name with .zst'),
    b'BZh': ('bzip2', 'end its name with .bz2'),
    b'\xfd7zXZ\0': ('xz', 'end its name with .xz'),
    b'PAR1': ('Parquet', 'end its name with .parquet'),
    b'PK\x03\x04': ('a zip archive or office document', 'unpack or convert it'),
    b'%PDF': ('PDF', 'convert it, for example with pdftotext'),
    b'<doc id="': (
        'output of wikiextractor',
        'run it with --json and join its files to one .jsonl',
    ),
    b'{\\rtf': ('RTF', 'convert it, for example with pandoc -t plain'),
}
_HTML_STARTS = (b'<!doctype html', b'<html')
_HTML = ('HTML', 'convert it, for example with pandoc -t plain')
_ROFF_START = re.compile(rb"""[.']\\"|[.'](?:TH|SH|Dd|so)\s""")
_ROFF = ('a manual page in roff', 'convert it, for example with pandoc -f man -t plain')
_WARC_START = re.compile(rb'WARC/1\.\d\r?\n')
_WARC = ('a web archive (WARC)', 'extract its texts, each into a file of its own')
_UTF8_MARK = b'\xef\xbb\xbf'
_TYPES = {
    dict: 'object',
    list: 'list',
    str: 'text',
    int: 'number',
    float: 'number',
    bool: 'truth value',
    type(None): 'null',
}


class Unusable(ValueError):
    """Content that cannot be used; the message says what it is, without the name of the file.

    Attributes:
      kind: what it is in a word or two.
    """

    def __init__(self, reason: str, kind: str = 'not JSON'):
        super().__init__(reason)
        self.kind = kind


def parse(content: str | bytes, not_finite: Callable[[str], Any] | None = None) -> Any:
    """Returns the value of a JSON text.

    Args:
      content: the text; bytes are decoded by `decode`.
      not_finite: returns the value of NaN, of an infinity and of a number beyond the range of floats, given its text;
        None refuses them.

    Raises:
      Unusable: not JSON, not UTF-8, nested deeper than `MAX_DEPTH`, a number as above, or a key that occurs twice.
    """
    text = content if isinstance(content, str) else decode(content)
    try:
        value = _decoder(not_finite or _refuse_number).decode(text)
    except json.JSONDecodeError as error:
        raise _syntax_error(text, error) from None
    except RecursionError:
        raise Unusable(_too_deep()) from None
    # Few brackets cannot nest deeply, so most texts are done here.
    if text.count('[') + text.count('{') > MAX_DEPTH:
        _check_depth(value)
    return value


def parse_object(content: str | bytes, not_finite: Callable[[str], Any] | None = None) -> dict:
    """Returns the object of a JSON text; as `parse`, and Unusable for any other value."""
    value = parse(content, not_finite)
    if not isinstance(value, dict):
        raise Unusable(f'a JSON {type_name(value)}, not an object')
    return value


def read_object(path: pathlib.Path, not_finite: Callable[[str], Any] | None = None) -> dict:
    """Returns the object in a JSON file; OSError if it cannot be read, otherwise as `parse_object`."""
    return parse_object(path.read_bytes(), not_finite)


def load_object(
    path: pathlib.Path, fix: str, not_finite: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    """Returns the object in a JSON file as `read_object`; all its errors are a RetrievalError that ends with `fix`."""
    try:
        return read_object(path, not_finite)
    except (OSError, Unusable) as error:
        reason = getattr(error, 'strerror', None) or error
        raise RetrievalError(f'{path}: cannot be read ({reason}); {fix}') from None


def null(_: str) -> None:
    """Returns None for a number that is not finite; for `not_finite`, where browsers read the values again."""
    return None


def decode(data: bytes) -> str:
    """Returns a UTF-8 text without the byte order mark that some editors write.

    Raises:
      Unusable: the bytes are no text, or in another encoding, which is named.
    """
    try:
        text = data.removeprefix(_UTF8_MARK).decode('utf-8')
    except UnicodeDecodeError as error:
        raise _not_utf8(data, error) from None
    # UTF-16 without a mark is valid UTF-8 with a NUL at every second byte.
    if data[:2].count(0) == 1:
        raise _foreign('UTF-16', _SAVE)
    return text


def kind_of(data: bytes) -> tuple[str, str]:
    """Returns (what a file is by its first bytes, what to do about it); ('', '') for text and for unknown kinds."""
    for signature, kind in _SIGNATURES.items():
        if data.startswith(signature):
            return kind
    beginning = data[:1000].removeprefix(_UTF8_MARK).lstrip()
    if beginning.lower().startswith(_HTML_STARTS):
        return _HTML
    if _ROFF_START.match(beginning):
        return _ROFF
    if _WARC_START.match(beginning):
        return _WARC
    return '', ''


def type_name(value: Any) -> str:
    """Returns what error texts call the type of a value."""
    return _TYPES.get(type(value), type(value).__name__)


@functools.lru_cache(maxsize=8)
def _decoder(not_finite: Callable[[str], Any]) -> json.JSONDecoder:
    """Returns the decoder of `parse`, kept because making one takes longer than decoding a line."""

    def whole(digits: str) -> Any:
        return int(digits) if len(digits) <= _MAX_DIGITS else not_finite(digits)

    def real(digits: str) -> Any:
        number = float(digits)
        return number if math.isfinite(number) else not_finite(digits)

    return json.JSONDecoder(
        parse_int=whole,
        parse_float=real,
        parse_constant=not_finite,
        object_pairs_hook=_object,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of its pairs; Unusable if a key occurs twice, of which only the last would count."""
    refuse_repeated([key for key, _ in pairs], 'key')
    return dict(pairs)


def refuse_repeated(names: Sequence[str], kind: str) -> None:
    """Raises Unusable if a name occurs twice: only the value of the last would count."""
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise Unusable(f'the {kind} {repeated[:60]!r} occurs twice')


def _refuse_number(digits: str) -> Any:
    if len(digits) > 20:
        raise Unusable('it has a number with too many digits')
    raise Unusable(f'{digits} is no number that JSON or a float can hold')


def _syntax_error(text: str, error: json.JSONDecodeError) -> Unusable:
    """Returns where a text stops being JSON, and why if the reason is a common one."""
    kind, fix = kind_of(text[:1000].encode('utf-8', 'replace'))
    if kind:
        return _foreign(kind, fix)
    place = f'character {error.colno}'
    end = len(text.rstrip())
    if error.pos >= end and '\n' not in text.strip():
        # Behind the line feed that ends a line the parser counts another line.
        place = f'character {end + 1}'
    if '\n' in text.strip():
        place = f'line {error.lineno}, {place}'
    reason = f'not JSON: {error.msg.removesuffix(" at")} at {place}'
    if text.strip() in ('{', '[') or error.msg == 'Extra data' and '\n' in text.strip():
        reason += f'; {ONE_PER_LINE}'
    if '\r' in text.strip().replace('\r\n', ''):
        reason += '; its lines end with carriage returns alone, save it with line feeds'
    return Unusable(reason)


def _too_deep() -> str:
    return f'its brackets are nested too deeply (over {MAX_DEPTH} levels)'


def _check_depth(value: Any) -> None:
    """Raises Unusable if lists and objects are nested deeper than `MAX_DEPTH`."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            inner.extend(child for child in children if isinstance(child, dict | list))
        level = inner
        if not level:
            return
    raise Unusable(_too_deep())


def _not_utf8(data: bytes, error: UnicodeDecodeError) -> Unusable:
    """Returns what bytes are that cannot be decoded."""
    kind, fix = kind_of(data)
    if kind:
        return _foreign(kind, fix)
    if b'\0' in data:
        return _foreign('binary', 'name a text')
    reason = f'not UTF-8 at byte {error.start}, probably Latin-1 or Windows-1252; {_SAVE}'
    return Unusable(reason, 'not UTF-8')


def _foreign(kind: str, fix: str) -> Unusable:
    return Unusable(f'it is {kind}, not UTF-8 text; {fix}', kind)
