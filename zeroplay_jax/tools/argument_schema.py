"""JSON schemas of tool arguments: which ones can be used, and the check of arguments against them.

Schemas come from servers of others. Nothing in them is fetched, and every check ends soon: patterns are matched by
an engine whose time is linear in the text, and the number of references that one check follows is limited.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import re
import threading
import urllib.parse
import warnings
from collections.abc import Callable, Iterable, Iterator
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
        patterns = list(subschema.get('patternProperties', ()))
        if 'pattern' in subschema:
            patterns.append(subschema['pattern'])
        for pattern in patterns:
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
    visited = set()
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


# ---- arguments in words ----------------------------------------------------------------------------
#
# For the prompt: names, types, allowed values and descriptions.


_MAX_DESCRIBED_DEPTH = 3  # of objects within objects that are described
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
    entries = []
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
    if depth > _MAX_DESCRIBED_DEPTH:
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
    for _ in range(_MAX_DESCRIBED_DEPTH):
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


# ---- examples of patterns --------------------------------------------------------------------------


# The parser of Python's regular expressions; it has no public name.
_parser: Any = importlib.import_module('re._parser')
# Characters that are tried for 'any' and 'none of these'.
_CHARACTERS = 'a1A_- .,/:@#x2é'
_OF_CATEGORY = {
    'CATEGORY_DIGIT': '1234567890',
    'CATEGORY_SPACE': ' ',
    'CATEGORY_WORD': 'abcdefghijkl',
    'CATEGORY_NOT_DIGIT': 'a',
    'CATEGORY_NOT_SPACE': 'a',
    'CATEGORY_NOT_WORD': '-',
}
_MAX_REPEATS = 200


def samples(pattern: str) -> Iterator[str]:
    """Yields texts in which a pattern may occur: with few repeats first. They must be checked.

    None at all for patterns that Python does not read.
    """
    # JSON schemas write named groups as JavaScript does.
    in_python = re.sub(r'\(\?<(?=[A-Za-z_])', '(?P<', pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            tree = _parser.parse(in_python)
    except (re.error, RecursionError, OverflowError):
        return
    for further_repeats in (0, 1, 3, 7):
        yield _Sample(further_repeats, 0).text(tree)
    for variant in range(1, 12):
        yield _Sample(0, variant).text(tree)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """The choices of one sample.

    Attributes:
      further_repeats: how much more often repeats occur than they must.
      variant: which characters and alternatives are taken, counted around.
    """

    further_repeats: int
    variant: int

    def text(self, tree: Any) -> str:
        """Returns the text of a parsed pattern."""
        return ''.join(self._part(str(operation), value) for operation, value in tree)

    def _part(self, operation: str, value: Any) -> str:
        """Returns the text of one operation; '' for those that match a place, such as '^'."""
        if operation == 'LITERAL':
            return chr(value)
        if operation == 'ANY':
            return _CHARACTERS[0]
        if operation == 'NOT_LITERAL':
            return _other_character([('LITERAL', value)])
        if operation == 'IN':
            return self._character(value)
        if operation == 'BRANCH':
            return self.text(self._one_of(value[1]))
        if operation == 'SUBPATTERN':
            return self.text(value[-1])
        if operation == 'ATOMIC_GROUP':
            return self.text(value)
        if operation in ('MAX_REPEAT', 'MIN_REPEAT', 'POSSESSIVE_REPEAT'):
            fewest, most, repeated = value
            count = min(fewest + self.further_repeats, int(most), _MAX_REPEATS)
            return self.text(repeated) * count
        return ''

    def _character(self, choices: Any) -> str:
        """Returns a character of a set in brackets."""
        if str(choices[0][0]) == 'NEGATE':
            return _other_character(choices[1:])
        operation, value = self._one_of(choices)
        if str(operation) == 'RANGE':
            return chr(value[0] + self.variant % (value[1] - value[0] + 1))
        if str(operation) == 'CATEGORY':
            return self._one_of(_OF_CATEGORY.get(str(value), 'a'))
        return chr(value)

    def _one_of(self, choices: Any) -> Any:
        return choices[self.variant % len(choices)]


def _other_character(choices: Any) -> str:
    for character in _CHARACTERS:
        if not any(_holds(str(operation), value, character) for operation, value in choices):
            return character
    return ''


def _holds(operation: str, value: Any, character: str) -> bool:
    """Returns whether an entry of a set in brackets has this character."""
    if operation == 'RANGE':
        return value[0] <= ord(character) <= value[1]
    if operation == 'LITERAL':
        return value == ord(character)
    name = str(value)
    by_kind = {
        'DIGIT': character.isdigit(),
        'SPACE': character.isspace(),
        'WORD': character.isalnum() or character == '_',
    }
    is_of_kind = by_kind.get(name.rpartition('_')[2], False)
    return is_of_kind != ('_NOT_' in name)
