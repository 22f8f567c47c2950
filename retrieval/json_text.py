"""Reads JSON that others wrote, or that a crash cut off. What cannot be used is named as what it is, in one line."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from .types import RetrievalError

# Deeper values would exceed the limits of other libraries and of the pages that show them.
MAX_DEPTH = 200
# What to do about a list, or an object over several lines.
ONE_PER_LINE = "write one object per line (jq -c . FILE, or jq -c '.[]' FILE for a list)"

# What to do about a file of another kind.
CONVERT = 'convert or unpack it to UTF-8 text'
# First bytes of a file, in small letters → what it is.
_SIGNATURES = {
    b'\xff\xfe': 'UTF-16 or UTF-32',
    b'\xfe\xff': 'UTF-16 or UTF-32',
    b'\0\0\xfe\xff': 'UTF-16 or UTF-32',
    b'\x1f\x8b': 'gzip',
    b'\x28\xb5\x2f\xfd': 'zstd',
    b'bzh': 'bzip2',
    b'\xfd7zxz\0': 'xz',
    b'par1': 'Parquet',
    b'pk\x03\x04': 'a zip archive or office document',
    b'%pdf': 'PDF',
    b'<!doctype html': 'HTML',
    b'<html': 'HTML',
    b'<doc id="': 'output of wikiextractor without --json',
    b'{\\rtf': 'RTF',
    b'.\\"': 'a manual page in roff',
    b'\'\\"': 'a manual page in roff',
    b'.th ': 'a manual page in roff',
    b'warc/1.0\r\n': 'a web archive (WARC)',
    b'warc/1.1\r\n': 'a web archive (WARC)',
}
_UTF8_MARK = b'\xef\xbb\xbf'
_TOO_DEEP = f'its brackets are nested too deeply (over {MAX_DEPTH} levels)'
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
    # A mistake at the end of a line is not one of the next line.
    text = text.rstrip()
    try:
        value = _decoder(not_finite or _refuse_number).decode(text)
    except json.JSONDecodeError as error:
        refuse_foreign(text[:100].encode('utf-8', 'replace'))
        # A line of a file has its number already.
        line = f'line {error.lineno}, ' if '\n' in text else ''
        raise Unusable(f'not JSON: {error.msg}: {line}column {error.colno}') from None
    except RecursionError:
        raise Unusable(_TOO_DEEP) from None
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
        refuse_foreign(data)
        reason = f'not UTF-8 at byte {error.start}, probably Latin-1 or binary; save it as UTF-8'
        raise Unusable(reason, 'not UTF-8') from None
    # UTF-16 without a mark is valid UTF-8 with a NUL at every second byte.
    if data[:2].count(0) == 1:
        raise Unusable(f'it is UTF-16; {CONVERT}', 'UTF-16')
    return text


def refuse_foreign(data: bytes) -> None:
    """Raises Unusable, which says what a file is, if its first bytes are known and no text."""
    beginning = data[:1000].removeprefix(_UTF8_MARK).lstrip().lower()
    for signature, kind in _SIGNATURES.items():
        if beginning.startswith(signature):
            raise Unusable(f'it is {kind}; {CONVERT}', kind)


def type_name(value: Any) -> str:
    """Returns what error texts call the type of a value."""
    return _TYPES.get(type(value), type(value).__name__)


@functools.lru_cache(maxsize=8)
def _decoder(not_finite: Callable[[str], Any]) -> json.JSONDecoder:
    """Returns the decoder of `parse`, kept because making one takes longer than decoding a line."""

    def finite(read: Callable[[str], Any], digits: str) -> Any:
        return read(digits) if math.isfinite(float(digits)) else not_finite(digits)

    return json.JSONDecoder(
        parse_int=functools.partial(finite, int),
        parse_float=functools.partial(finite, float),
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
    raise Unusable(f'{digits[:20]} is no number that JSON or a float can hold')


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
    raise Unusable(_TOO_DEEP)
