"""The arguments of a tool in words, for the prompt: names, types, allowed values and descriptions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from zeroplay_jax.tools.argument_schema import UnusableSchema, referenced
from zeroplay_jax.types import Json

_MAX_DEPTH = 3  # of objects within objects that are described
_MAX_CHOICES = 40  # allowed values that are named
_MAX_TYPE = 600  # characters about the type of one argument
_MAX_DESCRIPTION = 200  # characters
_MAX_TEXT = 6_000  # characters about all arguments
# Keyword → words in front of its value.
_BOUNDS = (
    ('minimum', 'at least'),
    ('exclusiveMinimum', 'above'),
    ('maximum', 'at most'),
    ('exclusiveMaximum', 'below'),
    ('multipleOf', 'a multiple of'),
    ('minLength', 'characters at least'),
    ('maxLength', 'characters at most'),
    ('minItems', 'entries at least'),
    ('maxItems', 'entries at most'),
    ('pattern', 'matching'),
    ('format', 'format'),
)


def explain_arguments(schema: Json) -> str:
    """Returns what a prompt says about the arguments; '' if there are none.

    Args:
      schema: JSON schema of an object that passed `argument_schema.check_schema`.
    """
    explained = _entries(schema, schema, 0, '; ')
    if not explained:
        return ''
    return f' Arguments: {_cut(explained, _MAX_TEXT)}.'


def _entries(root: Json, schema: Json, depth: int, separator: str) -> str:
    """Returns the entries of an object in words."""
    required = schema.get('required', [])
    entries: list[str] = []
    length = 0
    for name, child in schema.get('properties', {}).items():
        entry = f'{name}: {_cut(_type(root, child, depth), _MAX_TYPE)}'
        if not isinstance(required, list) or name not in required:
            entry += ', optional'
        description = child.get('description') if isinstance(child, dict) else None
        if isinstance(description, str) and description.strip():
            line = ' '.join(description.split()).rstrip('.')
            entry += f' ({_cut(line, _MAX_DESCRIPTION)})'
        entries.append(entry)
        length += len(entry)
        # The rest would be cut anyway.
        if length > _MAX_TEXT:
            break
    return separator.join(entries)


def _type(root: Json, schema: Any, depth: int) -> str:
    """Returns the type of a value in words."""
    if not isinstance(schema, dict):
        return 'any value' if schema else 'not allowed'
    if 'const' in schema:
        return _as_json(schema['const'])
    if 'enum' in schema:
        return _one_of(_as_json(value) for value in schema['enum'])
    if depth > _MAX_DEPTH:
        return _bare_type(root, schema)
    if '$ref' in schema:
        return _type(root, _target(root, schema['$ref']), depth + 1)
    for keyword, word in (('anyOf', ' or '), ('oneOf', ' or '), ('allOf', ' and ')):
        if keyword in schema:
            choices = [_type(root, choice, depth + 1) for choice in schema[keyword][:_MAX_CHOICES]]
            return word.join(dict.fromkeys(choices))
    kinds = schema.get('type', 'object' if 'properties' in schema else 'any value')
    kinds = kinds if isinstance(kinds, list) else [kinds]
    words = ' or '.join(_kind(root, schema, kind, depth) for kind in kinds)
    bounds = []
    for keyword, phrase in _BOUNDS:
        if keyword in schema and not isinstance(schema[keyword], bool):
            bounds.append(f'{phrase} {schema[keyword]}')
    return ', '.join([words, *bounds])


def _bare_type(root: Json, schema: Json) -> str:
    """Returns the type of a value without that of its entries."""
    for _ in range(_MAX_DEPTH):
        if '$ref' not in schema:
            break
        schema = _target(root, schema['$ref'])
        if not isinstance(schema, dict):
            return 'any value'
    kinds = schema.get('type', 'object' if 'properties' in schema else 'any value')
    return ' or '.join(kinds) if isinstance(kinds, list) else kinds


def _kind(root: Json, schema: Json, kind: str, depth: int) -> str:
    """Returns a type with that of its entries."""
    if kind == 'array' and isinstance(schema.get('items'), dict):
        return f'list of ({_type(root, schema["items"], depth + 1)})'
    if kind == 'array' and isinstance(schema.get('prefixItems'), list):
        return f'[{", ".join(_type(root, child, depth + 1) for child in schema["prefixItems"])}]'
    if kind == 'array':
        return 'list'
    if kind == 'object' and schema.get('properties'):
        return f'{{{_entries(root, schema, depth + 1, ", ")}}}'
    if kind == 'object' and isinstance(schema.get('additionalProperties'), dict):
        return f'object of ({_type(root, schema["additionalProperties"], depth + 1)})'
    return kind


def _target(root: Json, reference: str) -> Any:
    try:
        return referenced(root, reference)
    except UnusableSchema:
        return True


def _one_of(values: Iterable[str]) -> str:
    named = list(values)
    if len(named) > _MAX_CHOICES:
        named = [*named[:_MAX_CHOICES], f'… ({len(named)} values)']
    return 'one of ' + ', '.join(named)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + '…'
