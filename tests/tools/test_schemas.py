"""Schemas of others: the call that a prompt shows is valid and is read as shown; hostile schemas end soon."""

import copy
import json
import logging
import pathlib
import urllib.request

import jsonschema
import pytest
from schemas import Schemas

from zeroplay_jax.rollout.call_syntax import SYNTAXES, syntax_of
from zeroplay_jax.tools.base import InvalidArguments, Tool, ToolResult


class Foreign(Tool):
    """A tool with a schema of others."""

    name = 'lookup'
    description = 'something of others'

    def __init__(self, parameters):
        self.parameters = parameters

    def run(self, calls):
        return [ToolResult(text='x') for _ in calls]


def checked(parameters):
    tool = Foreign(parameters)
    tool.check()
    return tool


def of_value(schema, **root):
    return {'type': 'object', 'properties': {'value': schema}, 'required': ['value'], **root}


CASES = json.loads((pathlib.Path(__file__).parent / 'foreign_schemas.json').read_text())


def shown_call(syntax, tools):
    """The text of the example in the prompt, with the tags around it."""
    parts = syntax_of(syntax).explain_call(*tools.values())
    return ''.join(parts[:3])


def check_round_trip(parameters):
    """The example is valid under the reference's check, and every syntax reads it as it shows it."""
    tool = checked(copy.deepcopy(parameters))
    reference = jsonschema.validators.validator_for(
        parameters, default=jsonschema.Draft202012Validator
    )
    reference(parameters).validate(tool.example_arguments)
    tools = {'lookup': tool}
    for name, syntax in SYNTAXES.items():
        syntax.check_examples(tools)
        example = tool.example_arguments
        for text in (shown_call(name, tools), syntax.write_call(tool, example)):
            call = syntax.parse(f'I think. {text.removesuffix(". ")}', tools)
            assert (call.error, call.arguments) == (None, example), (name, text, call.text)
    return tool


@pytest.mark.parametrize('seed', range(25))
def test_examples_of_random_schemas_are_valid_and_read_as_shown(seed):
    for number in range(12):
        check_round_trip(Schemas(f'{seed} {number}').arguments())


@pytest.mark.parametrize(('schema', 'root', 'in_prompt'), CASES['allowed'])
@pytest.mark.fault('third-13', 'schemas with enum, $ref, pattern, bounds, const, anyOf, nested')
def test_what_is_allowed_reaches_the_prompt_and_its_example(schema, root, in_prompt, user_reads):
    tool = check_round_trip(of_value(schema, **root))
    explained = ''.join(syntax_of('qwen').explain({'lookup': tool}))
    assert in_prompt in explained and 'Arguments: value: ' in explained
    user_reads(f'right: example {json.dumps(tool.example_arguments)}')


@pytest.mark.fault('F1', 'a tool with one text argument under the tag syntaxes')
def test_a_single_text_is_shown_as_the_tag_is_read(user_reads):
    schema = {'type': 'object', 'properties': {'path': {'type': 'string'}}, 'required': ['path']}
    tool = check_round_trip(schema)
    shown = shown_call('search_r1', {'lookup': tool})
    assert shown == '<lookup>path</lookup>; '
    user_reads(f'right: {shown}')


@pytest.mark.fault('F3', 'nested objects in the example')
def test_a_description_becomes_the_example_only_if_it_is_short(user_reads):
    long = of_value({'type': 'string', 'description': 'The path of a file. ' * 20})
    assert check_round_trip(long).example_arguments == {'value': 'value'}
    short = of_value({'type': 'string', 'description': 'what to look for'})
    assert check_round_trip(short).example_arguments == {'value': 'what to look for'}
    zone = "IANA timezone name (e.g., 'America/New_York', 'Europe/London'). Use 'UTC' as local timezone."
    quoted = of_value({'type': 'string', 'description': zone})
    assert check_round_trip(quoted).example_arguments == {'value': 'America/New_York'}
    user_reads('right: the name or a short description')


EXPLODING = {f'a{n}': {'allOf': [{'$ref': f'#/$defs/a{n - 1}'}] * 2} for n in range(1, 20)}
EXPLODING['a0'] = {'type': 'string'}


# Larger than what a person would write.
LARGE = [
    (of_value({'$ref': '#/$defs/a19'}, **{'$defs': EXPLODING}), 'example'),
    (of_value({'type': 'string'}, note='x' * 300_000), 'characters, more than'),
]


@pytest.mark.parametrize(('schema', 'line'), [*CASES['refused'], *LARGE])
@pytest.mark.fault('new-schema', 'schemas that fetch, contradict themselves or are not valid')
def test_a_schema_that_cannot_be_used_is_one_line(schema, line, user_reads):
    with pytest.raises(ValueError) as refusal:
        checked(schema)
    assert line in str(refusal.value) and '\n' not in str(refusal.value)
    assert str(refusal.value).startswith('lookup: its JSON schema ')
    user_reads(refusal.value)


def test_a_deeply_nested_schema_is_one_line():
    schema = {'type': 'string'}
    for _ in range(5000):
        schema = {'items': schema}
    with pytest.raises(ValueError, match='nested too deeply'):
        checked(of_value(schema))


def test_references_to_other_documents_are_never_followed(monkeypatch):
    """Neither at the check nor at a call that some other check let through."""

    def fetch(*arguments, **settings):
        raise AssertionError('something was fetched')

    monkeypatch.setattr(urllib.request, 'urlopen', fetch)
    for keyword in ('$ref', '$dynamicRef'):
        tool = Foreign(of_value({keyword: 'http://127.0.0.1:1/schema'}))
        with pytest.raises(ValueError):
            tool.check()
        with pytest.raises(Exception, match='(?i)unresolvable|NoSuchResource|not of'):
            tool.validated({'value': 'x'})


@pytest.mark.fault('new-pattern', 'a catastrophic pattern')
@pytest.mark.parametrize('keyword', ['pattern', 'patternProperties', 'propertyNames'])
def test_patterns_take_linear_time(keyword, user_reads):
    pattern = '^(a|a)*(a+)+$'
    schema = {
        'pattern': {'type': 'string', 'pattern': pattern},
        'patternProperties': {'patternProperties': {pattern: {}}, 'additionalProperties': False},
        'propertyNames': {'propertyNames': {'pattern': pattern}},
    }[keyword]
    tool = checked(of_value(schema))
    text = 'a' * 5_000 + '!'
    # Python's own engine would take longer than the age of the universe.
    with pytest.raises(InvalidArguments):
        tool.validated({'value': text if keyword == 'pattern' else {text: 1}})
    good = 'a' * 5_000
    assert tool.validated({'value': good if keyword == 'pattern' else {good: 1}})
    user_reads('right: matched by finite automata')


@pytest.mark.parametrize('pattern', [r'^[\w-\.]+@([\w-]+\.)+[\w-]{2,4}$', r'^[\w-.]+$'])
@pytest.mark.fault('new-pattern', 'patterns that JavaScript alone reads')
def test_a_pattern_for_javascript_alone_is_left_to_the_tool(caplog, pattern, user_reads):
    with caplog.at_level(logging.WARNING):
        tool = checked(of_value({'type': 'string', 'pattern': pattern}))
    assert tool.example_arguments and repr(pattern) in caplog.text
    user_reads('said: ' + caplog.records[0].getMessage())


def test_a_pattern_beyond_the_linear_engine_is_named_and_left_to_the_tool(caplog):
    with caplog.at_level(logging.WARNING):
        tool = checked(of_value({'type': 'string', 'pattern': '^(?=(a+)+$)b|c'}))
    assert '(?=(a+)+$)' in caplog.text and 'not checked' in caplog.text
    assert tool.validated({'value': 'a' * 5_000})


@pytest.mark.parametrize('number', [float('nan'), float('inf'), [float('-inf')]])
def test_numbers_that_are_no_json_are_refused(number):
    tool = checked(of_value({}))
    with pytest.raises(InvalidArguments, match='not finite'):
        tool.validated({'value': number})


def test_a_pattern_in_the_dialect_of_javascript_is_read():
    tool = checked(of_value({'type': 'string', 'pattern': '^(?<year>\\d{4})$'}))
    assert tool.validated(tool.example_arguments) == {'value': '1111'}
    words = checked(of_value({'type': 'string', 'pattern': '^\\p{L}+$'}))
    assert words.validated({'value': 'Straße'})
    with pytest.raises(InvalidArguments):
        words.validated({'value': '12'})


def test_names_of_arguments_are_no_keywords():
    names = ('$ref', '$id', '$dynamicRef', 'pattern', 'items')
    schema = {
        'type': 'object',
        'properties': {name: {'type': 'string'} for name in names},
        'required': list(names),
    }
    check_round_trip(schema)
