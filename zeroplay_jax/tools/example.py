"""Example arguments of a tool, made from its JSON schema: what the call in a prompt shows."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from zeroplay_jax.tools.argument_schema import (
    ArgumentCheck,
    UnusableSchema,
    has_only_finite_numbers,
    matcher,
    referenced,
    samples,
)
from zeroplay_jax.types import Json

_MAX_DEPTH = 12  # of values within values
_MAX_STEPS = (
    3_000  # schemas that are opened for one example; choices within choices grow exponentially
)
_MAX_CANDIDATES = 40  # of one value
_MAX_ENTRIES = 32  # of a list or an object
_MAX_HINT = 80  # characters of a description that stands for a text
# Such as: (e.g., 'America/New_York').
_QUOTED_EXAMPLE = re.compile(
    r"""(?:e\.g\.|such as|for example)[,:]? (['"`])(.+?)\1""", re.IGNORECASE
)
# Further texts for patterns from which no sample can be made.
_PLAIN_TEXTS = ('a', '1', 'A', 'abc', 'text')
_OF_FORMAT = {
    'date': '2026-01-31',
    'date-time': '2026-01-31T12:00:00Z',
    'time': '12:00:00Z',
    'duration': 'P1D',
    'email': 'name@example.com',
    'hostname': 'example.com',
    'ipv4': '192.0.2.1',
    'ipv6': '2001:db8::1',
    'uri': 'https://example.com',
    'url': 'https://example.com',
    'uuid': '123e4567-e89b-42d3-a456-426614174000',
}
# Keywords that combine schemas; `_Example._merged` resolves them.
_COMBINING = ('$ref', 'allOf', 'anyOf', 'oneOf', 'if', 'then', 'else')
_KIND_OF_KEYWORD = {
    'properties': 'object',
    'required': 'object',
    'minProperties': 'object',
    'additionalProperties': 'object',
    'items': 'array',
    'prefixItems': 'array',
    'minItems': 'array',
    'contains': 'array',
    'minimum': 'number',
    'maximum': 'number',
    'exclusiveMinimum': 'number',
    'exclusiveMaximum': 'number',
    'multipleOf': 'number',
}
_LARGEST = ('minimum', 'minLength', 'minItems', 'minProperties', 'exclusiveMinimum')
_SMALLEST = ('maximum', 'maxLength', 'maxItems', 'maxProperties', 'exclusiveMaximum')


def example_arguments(schema: Json, check: ArgumentCheck, hint: str = '') -> dict[str, Any]:
    """Returns valid arguments: the required ones, with their description, an example in it, or their name as a text.

    Args:
      schema: JSON schema of an object that passed `argument_schema.check_schema`.
      check: of the same schema.
      hint: stands for a text without a description.

    Raises:
      UnusableSchema: no valid arguments could be made.
    """
    return _Example(schema, check, hint).arguments()


class _Example:
    """One search for valid arguments. Candidates are tried until one passes the check, in a fixed order."""

    def __init__(self, root: Json, check: ArgumentCheck, hint: str):
        self._root = root
        self._check = check
        self._hint = hint
        self._steps = 0
        self._failed_at = ''

    def arguments(self) -> dict[str, Any]:
        """Returns valid arguments; raises UnusableSchema if none were found."""
        problem = ''
        root = {**self._root, 'type': 'object'}
        for candidate in itertools.islice(self._candidates(root, '', ''), _MAX_CANDIDATES):
            candidate_problem = self._check.problem(candidate)
            if not candidate_problem:
                return candidate
            problem = problem or candidate_problem
        reason = f' ({problem})' if problem else ''
        if self._failed_at:
            reason = f' for {self._failed_at}{reason}'
        raise UnusableSchema(
            f'has no example that could be made{reason}; give "examples" or "default" there'
        )

    def _valid(self, schema: Any, hint: str, path: str) -> Iterator[Any]:
        """Yields valid values of a schema; records the path if there is none."""
        has_value = False
        for candidate in itertools.islice(self._candidates(schema, hint, path), _MAX_CANDIDATES):
            if has_only_finite_numbers(candidate) and not self._check.problem(candidate, schema):
                has_value = True
                yield candidate
        if not has_value and not self._failed_at:
            self._failed_at = path

    def _candidates(self, schema: Any, hint: str, path: str) -> Iterator[Any]:
        """Yields values that may be valid."""
        if schema is True:
            yield hint
        if not isinstance(schema, dict) or path.count('/') > _MAX_DEPTH:
            return
        for merged in self._merged(schema, 0):
            if 'const' in merged:
                yield merged['const']
            yield from merged.get('enum', ())
            examples = merged.get('examples')
            if isinstance(examples, list):
                yield from examples
            # An empty default says nothing about the form of a value, so others go first.
            if merged.get('default'):
                yield merged['default']
            for kind in _kinds(merged):
                yield from self._of_kind(kind, merged, _hint(merged, hint), path)
            if 'default' in merged:
                yield merged['default']

    def _merged(self, schema: Any, depth: int) -> Iterator[Json]:
        """Yields schemas without references and choices; a value of any of them may be one of `schema`."""
        self._steps += 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            if schema is True:
                yield {}
            return
        plain = {key: value for key, value in schema.items() if key not in _COMBINING}
        choices: list[list[Any]] = []
        if '$ref' in schema:
            choices.append([referenced(self._root, schema['$ref'])])
        choices += [[part] for part in schema.get('allOf', ())]
        for keyword in ('anyOf', 'oneOf'):
            if keyword in schema:
                choices.append(schema[keyword])
        if 'if' in schema:
            choices.append([True, *(schema[key] for key in ('then', 'else') if key in schema)])
        for chosen in itertools.product(*choices):
            alternatives = [list(self._merged(part, depth + 1)) for part in chosen]
            for parts in itertools.product(*alternatives):
                merged: Json = plain
                for part in parts:
                    merged = _merge(merged, part)
                yield merged
            if self._steps > _MAX_STEPS:
                return

    def _of_kind(self, kind: str, schema: Json, hint: str, path: str) -> Iterator[Any]:
        if kind == 'object':
            yield from self._objects(schema, path)
        elif kind == 'array':
            yield from self._arrays(schema, hint, path)
        elif kind in ('integer', 'number'):
            yield from _numbers(kind, schema)
        elif kind == 'boolean':
            yield from (True, False)
        elif kind == 'null':
            yield None
        else:
            yield from _texts(schema, hint)

    def _objects(self, schema: Json, path: str) -> Iterator[Any]:
        """Yields objects: with the required entries, with as many as are needed, with all."""
        properties = schema.get('properties', {})
        required = schema.get('required', [])
        # Draft 4 had a truth value here.
        required = required if isinstance(required, list) else []
        entries = {}
        for name in required:
            child = _entry_schema(schema, name)
            # At the top, the hint stands for whatever text is required.
            value_hint = self._hint if self._hint and not path else name
            value = next(self._valid(child, value_hint, f'{path}/{name}'), _NOTHING)
            if value is _NOTHING:
                return
            entries[name] = value
        yield dict(entries)
        fewest = min(schema.get('minProperties', 0), _MAX_ENTRIES)
        further_names = [name for name in properties if name not in entries]
        if 'propertyNames' in schema:
            names = self._valid(schema['propertyNames'], 'name', f'{path}/propertyNames')
            further_names += list(itertools.islice(names, _MAX_ENTRIES))
        further_names += [f'name{number}' for number in range(1, fewest + 1)]
        for name in further_names:
            if name not in properties and len(entries) >= fewest:
                break
            child = _entry_schema(schema, str(name))
            value = next(self._valid(child, str(name), f'{path}/{name}'), _NOTHING)
            if value is not _NOTHING:
                entries[str(name)] = value
                yield dict(entries)

    def _arrays(self, schema: Json, hint: str, path: str) -> Iterator[Any]:
        """Yields lists: with one entry, or as many as are needed."""
        items = schema.get('items', True)
        leading = schema.get('prefixItems', items if isinstance(items, list) else [])
        if isinstance(items, list):
            items = schema.get('additionalItems', True)
        fewest = min(schema.get('minItems', 0), _MAX_ENTRIES)
        # Trees end early, because an example should be short.
        if path.count('/') > 3 and fewest == 0:
            yield []
        entries = []
        for place, child in enumerate(leading):
            entries.append(next(self._valid(child, hint, f'{path}/{place}'), None))
        if 'contains' in schema:
            wanted = self._valid(schema['contains'], hint, f'{path}/contains')
            entries += itertools.islice(wanted, schema.get('minContains', 1))
        missing = max(fewest, 1) - len(entries)
        values: list[Any] = []
        if missing > 0:
            candidates = self._valid(items, hint, f'{path}/items')
            if schema.get('uniqueItems'):
                candidates = _without_repeats(candidates)
            values = list(itertools.islice(candidates, missing))
        if schema.get('uniqueItems') and 0 < len(values) < missing:
            yield entries + _distinct(values[0], missing)
        if values and not schema.get('uniqueItems'):
            yield entries + list(itertools.islice(itertools.cycle(values[:1]), missing))
        yield entries + values
        yield entries
        yield []


def _without_repeats(values: Iterator[Any]) -> Iterator[Any]:
    seen: list[Any] = []
    for value in values:
        if value not in seen:
            seen.append(value)
            yield value


def _distinct(value: Any, count: int) -> list[Any]:
    """Returns values like one that differ from each other, as far as they can be made; they may be invalid."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return [value]
    if isinstance(value, str):
        return [value, *(f'{value} {number}' for number in range(2, count + 1))]
    return [value + step for step in range(count)]


_NOTHING = object()


def _entry_schema(schema: Json, name: str) -> Any:
    """Returns the schema of an object's entry."""
    properties = schema.get('properties', {})
    if name in properties:
        return properties[name]
    for pattern, child in schema.get('patternProperties', {}).items():
        occurs = matcher(pattern)
        if occurs is None or occurs(name):
            return child
    return schema.get('additionalProperties', True)


def _hint(schema: Json, hint: str) -> str:
    """Returns what stands for a text: an example in its description, that if it is short, or else `hint`."""
    description = schema.get('description')
    quoted = _QUOTED_EXAMPLE.search(str(description))
    # A bracket could begin or end a tag of a call, and the arguments are explained beside the example.
    for text in (quoted and quoted[2], description, hint):
        if isinstance(text, str) and 0 < len(text) <= _MAX_HINT and not set(text) & set('<>\n\r'):
            return text
    return 'text'


def _kinds(schema: Json) -> list[str]:
    """Returns the types that a value may have, null last; without a type that of the keywords, or text."""
    kinds = schema.get('type')
    if isinstance(kinds, str):
        return [kinds]
    if isinstance(kinds, list):
        return sorted(kinds, key=lambda kind: kind == 'null')
    for keyword, kind in _KIND_OF_KEYWORD.items():
        if keyword in schema:
            return [kind, 'string']
    return ['string', 'number', 'object', 'array', 'boolean', 'null']


def _merge(first: Json, second: Mapping[str, Any]) -> Json:
    """Returns a schema whose values fit both, for the keywords from which examples are made."""
    merged = {**second, **first}
    for keyword in first.keys() & second.keys():
        here, there = first[keyword], second[keyword]
        if keyword in ('properties', 'patternProperties'):
            both = {
                name: {'allOf': [here[name], there[name]]} for name in here.keys() & there.keys()
            }
            merged[keyword] = {**there, **here, **both}
        elif keyword == 'required' and isinstance(here, list) and isinstance(there, list):
            merged[keyword] = list(dict.fromkeys((*here, *there)))
        elif keyword == 'enum':
            merged[keyword] = [value for value in here if value in there]
        elif keyword == 'type':
            merged[keyword] = _common_kinds(here, there)
        elif keyword in ('items', 'additionalProperties', 'propertyNames', 'contains'):
            merged[keyword] = {'allOf': [here, there]}
        elif keyword in _LARGEST and not isinstance(here, bool):
            merged[keyword] = max(here, there)
        elif keyword in _SMALLEST and not isinstance(here, bool):
            merged[keyword] = min(here, there)
    return merged


def _common_kinds(here: Any, there: Any) -> list[str]:
    here = here if isinstance(here, list) else [here]
    there = there if isinstance(there, list) else [there]
    kinds = [kind for kind in here if kind in there]
    if 'integer' in (*here, *there) and 'number' in (*here, *there) and 'integer' not in kinds:
        kinds.append('integer')
    return kinds


def _texts(schema: Json, hint: str) -> Iterator[str]:
    shortest = min(schema.get('minLength', 0), 10_000)
    longest = min(schema.get('maxLength', 10_000), 10_000)
    candidates = [hint]
    if schema.get('format') in _OF_FORMAT:
        candidates.insert(0, _OF_FORMAT[schema['format']])
    if isinstance(schema.get('pattern'), str):
        candidates += samples(schema['pattern'])
    candidates += _PLAIN_TEXTS
    # Further texts, for lists without repetitions.
    candidates += [f'{hint} {number}' for number in range(2, 12)]
    for text in candidates:
        yield text
        if len(text) > longest:
            yield text[:longest].rstrip() or text[:longest]
        if 0 < len(text) < shortest:
            yield (text * math.ceil(shortest / len(text)))[:shortest]


def _numbers(kind: str, schema: Json) -> Iterator[int | float]:
    """Yields numbers at and beside the bounds of a schema; 1 first."""
    candidates: list[int | float] = [1 if kind == 'integer' else 1.0]
    bounds = []
    for keyword in ('minimum', 'exclusiveMinimum', 'maximum', 'exclusiveMaximum'):
        value = schema.get(keyword)
        # Draft 4 had a truth value here.
        if isinstance(value, int | float) and not isinstance(value, bool):
            bounds.append(value)
    for bound in bounds:
        candidates += [bound, bound + 1, bound - 1]
    if len(bounds) > 1:
        candidates.append(min(bounds) / 2 + max(bounds) / 2)
    step = schema.get('multipleOf')
    if isinstance(step, int | float) and step > 0:
        # Numbers beyond those of floats have no multiples.
        with contextlib.suppress(OverflowError):
            for start in (0, 1, *bounds):
                multiple = math.floor(start / step)
                candidates += [(multiple + further) * step for further in (-1, 0, 1, 2)]
    candidates += range(0, 12)
    for candidate in candidates:
        if isinstance(candidate, float) and not math.isfinite(candidate):
            continue
        if kind == 'integer' and isinstance(candidate, float) and not candidate.is_integer():
            yield math.floor(candidate)
            yield math.ceil(candidate)
        elif kind == 'integer':
            yield int(candidate)
        else:
            yield candidate
