"""JSON schemas of tool arguments: which ones can be used, and the check of arguments against them.

Schemas come from servers of others. Nothing in them is fetched, and every check ends soon: patterns are matched by
an engine whose time is linear in the text, and the number of references that one check follows is limited.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from typing import Any

import jsonschema
import pydantic_core
import referencing
import referencing.jsonschema

from zeroplay_jax.types import Json

_MAX_MESSAGE = 160  # characters of a validation message that a policy reads
_MAX_CHARACTERS = 200_000  # of a schema as JSON; prompts show it
_MAX_REFERENCES = 10_000  # followed by one check; nested choices of references grow exponentially
_REFERENCES = ('$ref', '$dynamicRef', '$recursiveRef')
# Read differently by the linear engine: operations on sets within brackets.
_SET_OPERATION = re.compile(r'&&|--|~~|\[(?:\\.|[^\]\\])*\[')


class UnusableSchema(ValueError):
    """The schema of a tool cannot be used; the message is a phrase about 'its JSON schema'."""


def check_schema(schema: Any) -> list[str]:
    """Checks that arguments can be checked against a schema.

    Returns:
      The patterns that the check leaves out, because the linear engine cannot match them.

    Raises:
      UnusableSchema: it is not a JSON schema of an object, is too large, or refers to another document.
    """
    if not isinstance(schema, dict):
        raise UnusableSchema(f'is {str(schema)[:40]}; it must be an object with "properties"')
    try:
        text = json.dumps(schema)
        # Formats are annotations. That of patterns would demand Python's dialect of them.
        formats = jsonschema.FormatChecker(formats=())
        _draft(schema).check_schema(schema, format_checker=formats)
    except jsonschema.SchemaError as error:
        message = error.message[:_MAX_MESSAGE]
        raise UnusableSchema(f'is not valid at {error.json_path} ({message})') from None
    except RecursionError:
        raise UnusableSchema('is nested too deeply') from None
    except (AttributeError, TypeError, ValueError) as error:
        raise UnusableSchema(f'is no JSON ({error})') from None
    if len(text) > _MAX_CHARACTERS:
        raise UnusableSchema(f'has {len(text):,} characters, more than {_MAX_CHARACTERS:,}')
    kinds = schema.get('type', 'object')
    if kinds != 'object' and 'object' not in kinds:
        raise UnusableSchema(f'has the type {str(kinds)[:40]}; arguments are an object')
    # jsonschema would match the patterns by Python's engine.
    if '"unevaluatedProperties"' in text and '"patternProperties"' in text:
        raise UnusableSchema('has unevaluatedProperties beside patternProperties; leave one out')
    unchecked = []
    for part in _parts(schema):
        patterns = [*part.get('patternProperties', ()), part.get('pattern', '')]
        unchecked += [pattern for pattern in patterns if _matcher(pattern) is None]
    return unchecked


def _parts(schema: Json) -> list[Json]:
    """Returns the schema and all within it or referred to by it; raises UnusableSchema for what it does not hold."""
    parts: list[Json] = []
    seen = set()
    pending: list[tuple[Any, Any]] = [(schema, resolver_of(schema))]
    specification = _specification(schema)
    while pending:
        part, resolver = pending.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        parts.append(part)
        for child in specification.create_resource(part).subresources():
            pending.append((child.contents, resolver.in_subresource(child)))
        for keyword in _REFERENCES:
            reference = part.get(keyword)
            if reference is None:
                continue
            try:
                target = resolver.lookup(reference)
                if not isinstance(target.contents, dict | bool):
                    raise TypeError('no schema')
            # ValueError, TypeError and AttributeError: pointers to what is no schema.
            except (referencing.exceptions.Unresolvable, ValueError, TypeError, AttributeError):
                problem = f'refers to {reference[:80]!r}, which is no part of it'
                raise UnusableSchema(f'{problem}; write it in one piece') from None
            pending.append((target.contents, target.resolver))
    return parts


def resolver_of(schema: Json) -> Any:
    """Returns an object whose `lookup(reference).contents` is what a reference within a schema names."""
    # The registry is empty: nothing is fetched.
    resource = _specification(schema).create_resource(schema)
    return referencing.Registry().resolver_with_root(resource)


def _specification(schema: Json) -> Any:
    """Returns the rules by which a schema holds others."""
    return referencing.jsonschema.specification_with(_draft(schema).META_SCHEMA['$schema'])


def _draft(schema: Json) -> Any:
    """Returns the validator class of the draft that a schema names; that of 2020-12 for unknown ones."""
    newest = jsonschema.Draft202012Validator
    draft = jsonschema.validators.validator_for(schema, default=newest)
    # Draft 3 writes "required" otherwise.
    return newest if draft is jsonschema.Draft3Validator else draft


@functools.cache
def _matcher(pattern: str) -> pydantic_core.SchemaValidator | None:
    """Returns a validator of texts in which a pattern occurs, whose time is linear in the text.

    None for patterns that no engine can match in linear time (look-around, back-references), that the engine reads
    otherwise than JSON schemas do, or that are written for JavaScript alone.
    """
    # Pydantic matches patterns by finite automata (the regex crate of Rust). Python's engine backtracks: on some
    # patterns one short text takes it hours.
    if not _SET_OPERATION.search(pattern):
        with contextlib.suppress(pydantic_core.SchemaError):
            text_type = pydantic_core.core_schema.str_schema(pattern=pattern)
            return pydantic_core.SchemaValidator(text_type)
    return None


def _occurs(pattern: str, text: str) -> bool:
    matcher = _matcher(pattern)
    # What cannot be checked in bounded time is left to the tool itself; `check_schema` has said so.
    return matcher is None or matcher.isinstance_python(text)


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
                yield from validator.descend(value, subschema)


def _additional_properties(original):
    def check(validator, additional, instance, schema):
        patterns = schema.get('patternProperties')
        if patterns and validator.is_type(instance, 'object'):
            schema = {key: value for key, value in schema.items() if key != 'patternProperties'}
            remaining = dict(instance)
            for name in instance:
                if any(_occurs(pattern, name) for pattern in patterns):
                    del remaining[name]
            instance = remaining
        yield from original(validator, additional, instance, schema)

    return check


_followed = threading.local()


def _reference(original):
    def check(validator, reference, instance, schema):
        _followed.count += 1
        if _followed.count > _MAX_REFERENCES:
            raise RecursionError('their schema follows too many references')
        yield from original(validator, reference, instance, schema)

    return check


@functools.cache
def _bounded_draft(draft: Any) -> Any:
    """Returns a draft's validator class with keywords whose checks end soon."""
    keywords = {
        'pattern': _pattern,
        'patternProperties': _pattern_properties,
        'additionalProperties': _additional_properties(draft.VALIDATORS['additionalProperties']),
    }
    for name in draft.VALIDATORS.keys() & {*_REFERENCES}:
        keywords[name] = _reference(draft.VALIDATORS[name])
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

    def problem(self, arguments: Any) -> str:
        """Returns the first problem of arguments; '' if they are valid."""
        _followed.count = 0
        try:
            # Python's JSON reads NaN and infinity, which other readers refuse.
            json.dumps(arguments, allow_nan=False)
            # Only the first problem is reported: a policy corrects one at a time. The schema fixes their order.
            error = next(self._validator.iter_errors(arguments), None)
        # ArithmeticError: numbers beyond those of floats, with "multipleOf".
        except (RecursionError, ArithmeticError, ValueError) as problem:
            return f'they cannot be checked ({problem})'[:_MAX_MESSAGE]
        return '' if error is None else error.message[:_MAX_MESSAGE]
