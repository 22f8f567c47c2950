"""Example arguments of a tool, from what its JSON schema says plainly: what the call in a prompt shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroplay_jax.tools.argument_schema import ArgumentCheck, resolver_of
from zeroplay_jax.types import Json

_MAX_STEPS = 10_000  # schemas that are opened for one example; they may refer to themselves
_MAX_TEXT = 80  # characters of a description that stands for a text


def example_arguments(schema: Json, check: ArgumentCheck, hint: str = '') -> Json | None:
    """Returns valid arguments, the required ones; None if the plainest values are not valid.

    Args:
      schema: JSON schema of an object.
      check: of the same schema.
      hint: stands for texts without a short description; '': the names of their arguments do.
    """
    resolver = resolver_of(schema)

    def lookup(reference: str) -> Any:
        return resolver.lookup(reference).contents

    try:
        example = _example(schema, lookup, '', _MAX_STEPS, hint)
    # Keywords that the check does not need may have any form.
    except Exception:
        return None
    return example if isinstance(example, dict) and not check.problem(example) else None


def _example(
    schema: Any, lookup: Callable[[str], Any], text: str, steps: int, hint: str = ''
) -> Any:
    """Returns the value that a schema shows itself, or the plainest of its type; it may be invalid.

    Args:
      schema: of any value.
      lookup: reference → the schema that it names.
      text: stands for a text without a short description.
      steps: limit of schemas that are opened.
      hint: `text` of the entries of an object, in place of their names.
    """
    if not isinstance(schema, dict) or steps == 0:
        return text
    if 'const' in schema:
        return schema['const']
    for keyword in ('enum', 'examples'):
        if schema.get(keyword):
            return schema[keyword][0]
    # An empty default says nothing about the form of a value.
    if schema.get('default'):
        return schema['default']
    for keyword in ('$ref', 'allOf', 'anyOf', 'oneOf'):
        if keyword in schema:
            plain = {name: value for name, value in schema.items() if name != keyword}
            part = lookup(schema['$ref']) if keyword == '$ref' else schema[keyword][0]
            return _example({**plain, **part}, lookup, text, steps // 2, hint)
    description = schema.get('description', '')
    if 0 < len(description) <= _MAX_TEXT:
        text = description
    kinds = schema.get('type', 'object' if 'properties' in schema else 'string')
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == 'object':
        required = schema.get('required', [])
        steps //= len(required) + 1
        entries = {}
        for name in required if steps else ():
            entry = schema.get('properties', {}).get(name)
            entries[name] = _example(entry, lookup, hint or name, steps)
        return entries
    if kind == 'array':
        return [_example(schema.get('items'), lookup, text, steps // 2)]
    if kind in ('integer', 'number'):
        least = max(schema.get('minimum', 1), 1)
        return min(least, schema.get('maximum', least))
    return {'boolean': True, 'null': None}.get(kind, text)
