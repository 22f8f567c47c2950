"""Texts of calls: arguments as JSON, and calls in the form of a Python function call."""

from __future__ import annotations

import json
import re
from typing import Any

# A call in the form of a Python function call, and what separates its keyword arguments.
_FUNCTION_CALL = re.compile(r'\s*([\w-]+)\((.*)\)\s*', re.DOTALL)
_SPACE = re.compile(r'\s*')
_SEPARATOR = re.compile(r'\s*(,|$)')
# Begins what may be a tag, within a text of an argument.
_TAG_START = re.compile(r'<(?=[/A-Za-z_])')


def as_json(value: Any) -> str:
    """Returns a JSON value as one line, with letters of all languages as they are."""
    # Escapes such as \u00e9 would cost several tokens per letter.
    return json.dumps(value, ensure_ascii=False)


def arguments_as_json(value: Any) -> str:
    """Returns an argument as JSON in which no text looks like a tag, which could end the call."""
    return _TAG_START.sub(r'\\u003c', as_json(value))


def read_function_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Returns (name, arguments) of 'name(argument=JSON, …)'; None for any other text."""
    call = _FUNCTION_CALL.fullmatch(text)
    if call is None:
        return None
    arguments = _keyword_arguments(call[2])
    return None if arguments is None else (call[1], arguments)


def _keyword_arguments(text: str) -> dict[str, Any] | None:
    """Returns the arguments of 'name=JSON, name=JSON' as a dict; None for any other text."""
    # Values are read by a JSON decoder and never evaluated as Python, because the text comes from a model.
    # strict=False accepts line feeds in texts.
    decoder = json.JSONDecoder(strict=False)
    arguments: dict[str, Any] = {}
    position = 0
    while text.strip():
        equals = text.find('=', position)
        # Names are those of a schema, which need not be names of Python.
        name = text[position : max(equals, position)].strip()
        if not name or name in arguments:
            return None
        try:
            begin = _SPACE.match(text, equals + 1).end()  # type: ignore[union-attr]
            value, position = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return None
        arguments[name] = value
        separator = _SEPARATOR.match(text, position)
        if separator is None:
            return None
        if not separator[1]:
            break
        position = separator.end()
    return arguments
