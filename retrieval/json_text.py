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
    """Content that cannot be used; the message says what it is, without the name of the file."""


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
    """Returns a UTF-8 text without the byte order mark that some editors write; Unusable if it is none."""
    try:
        return data.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        raise Unusable(f'not UTF-8 at byte {error.start}; save it as UTF-8') from None


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
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = inner
    if level:
        raise Unusable(_TOO_DEEP)
