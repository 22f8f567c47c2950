"""JSON schemas of tool arguments: which ones can be used, and the check of arguments against them.

Schemas come from servers of others. Nothing in them is fetched, and every check ends soon: patterns are matched by
an engine whose time is linear in the text, and the number of references that one check follows is limited.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jsonschema
import pydantic
import pydantic_core
import referencing

from zeroplay_jax.types import Json

_MAX_MESSAGE = 160  # characters of a validation message that a policy reads
_MAX_CHARACTERS = 200_000  # of a schema as JSON; every prompt names its arguments
_MAX_DEPTH = 60  # of schemas within schemas
_MAX_REFERENCES = 10_000  # followed by one check; nested choices of references grow exponentially

# Where a schema holds further schemas: under names of its author, in a list, or alone.
_NAMED = ('properties', 'patternProperties', '$defs', 'definitions', 'dependentSchemas', 'dependencies')  # fmt: skip
_LISTED = ('allOf', 'anyOf', 'oneOf', 'prefixItems', 'items')
_SINGLE = ('items', 'additionalItems', 'contains', 'additionalProperties', 'propertyNames', 'not', 'if', 'then',
           'else', 'unevaluatedItems', 'unevaluatedProperties')  # fmt: skip
_DRAFTS = (
    jsonschema.Draft202012Validator,
    jsonschema.Draft201909Validator,
    jsonschema.Draft7Validator,
    jsonschema.Draft6Validator,
    jsonschema.Draft4Validator,
)
# Read differently by the linear engine: operations on sets within brackets.
_SET_OPERATION = re.compile(r'&&|--|~~|\[(?:\\.|[^\]\\])*\[')


class UnusableSchema(ValueError):
    """The schema of a tool cannot be used; the message is a phrase about 'its JSON schema'."""


class _TooCostly(Exception):
    """One check would follow too many references."""


def check_schema(schema: Any) -> list[str]:
    """Checks that arguments can be checked against a schema.

    Returns:
      What the schema asks for and the check leaves out, one phrase each: patterns beyond the linear engine.

    Raises:
      UnusableSchema: it is not a JSON schema of an object, is too large, or refers to another document.
    """
    if not isinstance(schema, dict):
        raise UnusableSchema(f'is {str(schema)[:40]}; it must be an object with "properties"')
    try:
        characters = len(json.dumps(schema))
        draft = _draft(schema)
        # Formats are annotations. That of patterns would demand Python's dialect of them.
        draft.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
    except jsonschema.SchemaError as error:
        path = '/'.join(str(part) for part in error.absolute_path)
        at = f' at {path}' if path else ''
        raise UnusableSchema(f'is not valid{at} ({error.message[:_MAX_MESSAGE]})') from None
    except RecursionError:
        raise UnusableSchema('is nested too deeply') from None
    except (TypeError, ValueError) as error:
        raise UnusableSchema(f'is no JSON ({error})') from None
    if characters > _MAX_CHARACTERS:
        raise UnusableSchema(f'has {characters:,} characters, more than {_MAX_CHARACTERS:,}')
    kinds = schema.get('type', 'object')
    if kinds != 'object' and 'object' not in kinds:
        raise UnusableSchema(f'has the type {str(kinds)[:40]}; arguments are an object')
    notes = []
    for path, subschema in _subschemas(schema):
        _check_references(schema, path, subschema)
        for pattern in _patterns(subschema):
            if matcher(pattern) is None:
                notes.append(f'the pattern {pattern[:60]!r} at {path or "its top"}')
    return notes


def _check_references(root: Json, path: str, schema: Json) -> None:
    """Raises UnusableSchema for what would need another document."""
    for keyword in ('$dynamicRef', '$recursiveRef'):
        if keyword in schema:
            raise UnusableSchema(
                f'has {keyword} at {path or "its top"}; write references as "$ref": "#/$defs/…"'
            )
    if path and '$id' in schema:
        raise UnusableSchema(f'holds another document ($id) at {path}; write it in one piece')
    if 'unevaluatedProperties' in schema and 'patternProperties' in json.dumps(root):
        raise UnusableSchema('has unevaluatedProperties beside patternProperties; leave one out')
    if '$ref' in schema:
        referenced(root, schema['$ref'])


def referenced(root: Json, reference: str) -> Any:
    """Returns the schema that a reference within a schema names.

    Args:
      root: the whole schema.
      reference: '#' or a JSON pointer such as '#/$defs/name'.

    Raises:
      UnusableSchema: it names another document, an anchor, or nothing.
    """
    if reference != '#' and not reference.startswith('#/'):
        problem = f'refers to {reference[:80]!r}; write it in one piece, with "$ref": "#/$defs/…"'
        raise UnusableSchema(problem)
    value: Any = root
    for part in urllib.parse.unquote(reference).split('/')[1:]:
        name = part.replace('~1', '/').replace('~0', '~')
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            raise UnusableSchema(f'refers to {reference[:80]!r}, which it does not define')
    if not isinstance(value, dict | bool):
        raise UnusableSchema(f'refers to {reference[:80]!r}, which is no schema')
    return value


def _subschemas(root: Json) -> Iterator[tuple[str, Json]]:
    """Yields the schema and all schemas within it or referred to by it, with their paths; truth values are left out."""
    pending: list[tuple[str, Any, int]] = [('', root, 0)]
    visited: set[int] = set()
    while pending:
        path, schema, depth = pending.pop()
        if not isinstance(schema, dict) or id(schema) in visited:
            continue
        if depth > _MAX_DEPTH:
            raise UnusableSchema('is nested too deeply')
        visited.add(id(schema))
        yield path, schema
        for keyword, name, child in _children(root, schema):
            child_path = '/'.join(part for part in (path, keyword, name) if part)
            pending.append((child_path, child, depth + 1))


def _children(root: Json, schema: Json) -> Iterator[tuple[str, str, Any]]:
    """Yields (keyword, name or place, schema) of the schemas directly within one."""
    for keyword in _NAMED:
        value = schema.get(keyword)
        if isinstance(value, dict):
            for name, child in value.items():
                yield keyword, name, child
    for keyword in _LISTED:
        value = schema.get(keyword)
        if isinstance(value, list):
            for place, child in enumerate(value):
                yield keyword, str(place), child
    for keyword in _SINGLE:
        yield keyword, '', schema.get(keyword)
    if isinstance(schema.get('$ref'), str):
        yield '$ref', '', referenced(root, schema['$ref'])


def _patterns(schema: Json) -> list[str]:
    patterns = list(schema.get('patternProperties', {}))
    if 'pattern' in schema:
        patterns.append(schema['pattern'])
    return patterns


@functools.cache
def matcher(pattern: str) -> Callable[[str], bool] | None:
    """Returns a function text → whether the pattern occurs in it, whose time is linear in the text.

    None for patterns that no engine can match in linear time (look-around, back-references), that the engine reads
    otherwise than JSON schemas do, or that are written for JavaScript alone.
    """
    # Pydantic matches patterns by finite automata (the regex crate of Rust). Python's engine backtracks: on some
    # patterns one short text takes it hours.
    adapter: pydantic.TypeAdapter | None = None
    with contextlib.suppress(pydantic_core.SchemaError):
        text_type = Annotated[str, pydantic.StringConstraints(pattern=pattern)]
        adapter = pydantic.TypeAdapter(text_type)
    if adapter is None or _SET_OPERATION.search(pattern):
        return None

    def occurs(text: str) -> bool:
        try:
            adapter.validate_python(text)
        except pydantic.ValidationError:
            return False
        return True

    return occurs


def _occurs(pattern: str, text: str) -> bool:
    occurs = matcher(pattern)
    # What cannot be checked in bounded time is left to the tool itself; `check_schema` has said so.
    return occurs is None or occurs(text)


# Functions of keywords, in the form of jsonschema: (validator, value of the keyword, instance, schema) → errors.
def _pattern(validator, pattern, instance, schema):
    if validator.is_type(instance, 'string') and not _occurs(pattern, instance):
        yield jsonschema.ValidationError(f'{instance!r} does not match {pattern!r}')


def _pattern_properties(validator, schemas, instance, schema):
    if not validator.is_type(instance, 'object'):
        return
    for pattern, subschema in schemas.items():
        for name, value in instance.items():
            if _occurs(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(original):
    def check(validator, additional, instance, schema):
        patterns = schema.get('patternProperties', {})
        if not validator.is_type(instance, 'object') or not patterns:
            yield from original(validator, additional, instance, schema)
            return
        remaining = {}
        for name, value in instance.items():
            if not any(_occurs(pattern, name) for pattern in patterns):
                remaining[name] = value
        without_patterns = {key: schema[key] for key in schema if key != 'patternProperties'}
        yield from original(validator, additional, remaining, without_patterns)

    return check


_followed = threading.local()


def _reference(original):
    def check(validator, reference, instance, schema):
        _followed.count += 1
        if _followed.count > _MAX_REFERENCES:
            raise _TooCostly
        yield from original(validator, reference, instance, schema)

    return check


def _draft(schema: Json) -> Any:
    """Returns the validator class of the draft that a schema names; that of 2020-12 for unknown ones."""
    draft = jsonschema.validators.validator_for(schema, default=_DRAFTS[0])
    return draft if draft in _DRAFTS else _DRAFTS[0]


@functools.cache
def _bounded_draft(draft: Any) -> Any:
    """Returns a draft's validator class with keywords whose checks end soon."""
    keywords = {
        'pattern': _pattern,
        'patternProperties': _pattern_properties,
        'additionalProperties': _additional_properties(draft.VALIDATORS['additionalProperties']),
        '$ref': _reference(draft.VALIDATORS['$ref']),
    }
    return jsonschema.validators.extend(draft, keywords)


class ArgumentCheck:
    """The check of arguments against one schema that passed `check_schema`.

    Args:
      schema: JSON schema of an object.
    """

    def __init__(self, schema: Json):
        # An empty registry resolves references within the schema only; the default one downloads the others.
        registry: referencing.Registry = referencing.Registry()
        self._validator = _bounded_draft(_draft(schema))(schema, registry=registry)

    def problem(self, value: Any, schema: Any = None) -> str:
        """Returns the first problem of a value; '' if it is valid.

        Args:
          schema: a schema within that of the constructor; None: that one.
        """
        validator = self._validator if schema is None else self._validator.evolve(schema=schema)
        _followed.count = 0
        # Only the first problem is reported: a policy corrects one at a time. The schema fixes their order.
        try:
            error = next(iter(validator.iter_errors(value)), None)
        except (_TooCostly, RecursionError):
            return 'they cannot be checked, because the schema refers to itself too often'
        except (ArithmeticError, ValueError):
            # Numbers beyond those of floats, with "multipleOf".
            return 'a number is too large'
        return '' if error is None else error.message[:_MAX_MESSAGE]


def has_only_finite_numbers(value: Any) -> bool:
    """Returns whether a JSON value has no NaN and no infinity, which Python's JSON reads and other readers refuse."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(has_only_finite_numbers(item) for item in value.values())
    if isinstance(value, list):
        return all(has_only_finite_numbers(item) for item in value)
    return True
