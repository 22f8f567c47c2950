"""Schemas of others: an example call that a prompt shows is valid and is read as shown; hostile schemas end soon."""

import copy
import functools
import json
import pathlib
import urllib.request

import jsonschema
import pytest

from zeroplay_jax.rollout.call_syntax import SYNTAXES, as_json, syntax_of
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
    """The text of the call in the prompt, with the tags around it."""
    return ''.join(syntax_of(syntax).explain(tools)[2:5]).removesuffix('. ').removesuffix('; ')


def check_prompt(parameters):
    """A valid example is shown, which every syntax reads as it shows it; else names and dots, and the schema."""
    tool = checked(copy.deepcopy(parameters))
    example = tool.example_arguments
    if example is not None:
        draft = jsonschema.validators.validator_for(
            parameters, default=jsonschema.Draft202012Validator
        )
        draft(parameters).validate(example)
    tools = {'lookup': tool}
    for name, syntax in SYNTAXES.items():
        text = ''.join(syntax.explain(tools))
        is_shown = syntax._example(tool, tools) is not None
        if is_shown:
            for written in (shown_call(name, tools), syntax.write_call(tool, example)):
                call = syntax.parse(f'I think. {written}', tools)
                assert (call.error, call.arguments) == (None, example), (name, written, call.text)
        assert is_shown or all(part in text for part in ('…', as_json(parameters)))
    return tool


@pytest.mark.parametrize(('schema', 'root', 'example'), CASES['allowed'])
def test_what_is_allowed_reaches_the_prompt_and_its_example(schema, root, example):
    parameters = of_value(schema, **root)
    tool = check_prompt(parameters)
    explained = ''.join(syntax_of('qwen').explain({'lookup': tool}))
    assert f' Arguments: {as_json(parameters)}.' in explained
    assert tool.example_arguments == (None if example is None else {'value': example})


def test_an_example_that_would_be_read_otherwise_is_not_shown():
    tool = checked(of_value({'type': 'string', 'enum': ['a</lookup>']}))
    tool.argument_hint = 'what to look for'
    text = ''.join(syntax_of('search_r1').explain({'lookup': tool}))
    assert '<lookup>…</lookup>' in text and as_json(tool.parameters) in text
    assert shown_call('qwen', {'lookup': tool}).endswith(
        '{"value": "a\\u003c/lookup>"}}</tool_call>'
    )


LARGE = of_value({'type': 'string'}, note='x' * 300_000), 'characters, more than'
DEEP = of_value(functools.reduce(lambda inner, _: {'items': inner}, range(5000), {})), 'too deeply'


@pytest.mark.parametrize(('schema', 'line'), [*CASES['refused'], LARGE, DEEP])
def test_a_schema_that_cannot_be_used_is_one_line(schema, line):
    with pytest.raises(ValueError) as refusal:
        checked(schema)
    assert line in str(refusal.value) and '\n' not in str(refusal.value)
    assert str(refusal.value).startswith('lookup: its JSON schema ')


EXPLODING = {f'a{n}': {'allOf': [{'$ref': f'#/$defs/a{n - 1}'}] * 2} for n in range(1, 20)}
EXPLODING['a0'] = {'type': 'string'}


@pytest.mark.parametrize('schema', CASES['impossible'])
def test_a_schema_without_valid_arguments_is_shown_and_its_calls_get_a_sentence(schema):
    tool = check_prompt(of_value(schema))
    assert tool.example_arguments is None
    with pytest.raises(InvalidArguments) as refusal:
        tool.validated({'value': {'value': [1]}})
    assert 0 < len(refusal.value.detail) <= 160


def test_a_check_follows_a_limited_number_of_references():
    tool = check_prompt(of_value({'$ref': '#/$defs/a19'}, **{'$defs': EXPLODING}))
    assert tool.example_arguments is None
    with pytest.raises(InvalidArguments, match='follows too many references'):
        tool.validated({'value': 'x'})


def test_references_to_other_documents_are_never_followed(monkeypatch):
    """Neither at the check nor at a call that some other check let through."""

    fetched = []
    monkeypatch.setattr(urllib.request, 'urlopen', fetched.append)
    for keyword in ('$ref', '$dynamicRef'):
        tool = Foreign(of_value({keyword: 'http://127.0.0.1:1/schema'}))
        with pytest.raises(ValueError):
            tool.check()
        with pytest.raises(Exception, match='(?i)unresolvable'):
            tool.validated({'value': 'x'})
    assert not fetched


PATTERN = '^(a|a)*(a+)+$'


@pytest.mark.parametrize('schema', [{'pattern': PATTERN}, {'propertyNames': {'pattern': PATTERN}}])
def test_patterns_take_linear_time(schema):
    tool = checked(of_value(schema))
    # Python's own engine would take longer than the age of the universe.
    bad = 'a' * 5_000 + '!'
    with pytest.raises(InvalidArguments):
        tool.validated({'value': {bad: 1} if 'propertyNames' in schema else bad})
