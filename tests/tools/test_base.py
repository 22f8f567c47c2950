"""The tool interface: schemas, error texts, what a tag's text fills."""

import pytest

from zeroplay_jax.rollout.call_syntax import SYNTAXES, syntax_of
from zeroplay_jax.tools.base import ERROR_TEXTS, InvalidArguments, Tool, string_parameter
from zeroplay_jax.tools.calculator import CalculatorTool
from zeroplay_jax.tools.search import OpenTool, SearchTool


class Weather(Tool):
    name = 'weather'
    description = 'the weather of a place'
    parameters = {
        'type': 'object',
        'properties': {
            'place': {'type': 'string', 'minLength': 1},
            'days': {'type': 'integer', 'minimum': 1},
            'units': {'enum': ['C', 'F']},
        },
        'required': ['place', 'days'],
        'additionalProperties': False,
    }
    errors = {'timeout': 'Too late, {tool}.', 'storm': 'A storm: {detail}.'}

    def run(self, calls):
        return []


@pytest.mark.parametrize(
    ('arguments', 'detail'),
    [
        ({'place': 'x'}, "'days' is a required property"),
        ({'place': '', 'days': 1}, 'should be non-empty'),
        ({'place': 'x', 'days': 0}, 'less than the minimum'),
        ({'place': 'x', 'days': True}, 'True is not of type'),
        ({'place': 'x', 'days': 1, 'units': 'K'}, 'is not one of'),
        ({'place': 'x', 'days': 1, 'to': 2}, "'to' was unexpected"),
        ('x', "is not of type 'object'"),
        (None, "is not of type 'object'"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments, detail):
    with pytest.raises(InvalidArguments) as caught:
        Weather().validated(arguments)
    assert caught.value.code == 'invalid_arguments' and detail in caught.value.detail


def test_a_long_explanation_is_cut():
    with pytest.raises(InvalidArguments) as caught:
        Weather().validated({'place': ['x' * 9999], 'days': 1})
    assert len(caught.value.detail) <= 160


def test_error_texts_name_the_tool_and_can_be_its_own():
    tool = Weather()
    assert tool.error_text('failed') == (
        'The call of weather failed. Try again or answer from what is known.'
    )
    assert tool.error_text('timeout') == 'Too late, weather.'
    assert tool.error_text('storm', 'north {tool}') == 'A storm: north {tool}.'
    assert tool.error_text('never heard of') == tool.error_text('failed')
    assert tool.error_text('malformed') == ERROR_TEXTS['malformed']
    assert tool.error_text('invalid_arguments', 'x') == 'The arguments of weather are not valid: x.'


def test_the_text_of_a_tag_fills_the_only_required_text():
    assert SearchTool(None).tag_parameter == 'query_list'
    assert OpenTool(None).tag_parameter == 'document'
    assert CalculatorTool().tag_parameter == 'expression'
    assert Weather().tag_parameter is None


def test_examples_fit_their_own_schema():
    for tool in (SearchTool(None), OpenTool(None), CalculatorTool(), Weather()):
        assert tool.validated(tool.example_arguments)
    assert Weather().example_arguments == {'place': 'place', 'days': 1}
    assert string_parameter('a', 'b')['required'] == ['a']


@pytest.mark.parametrize('syntax', SYNTAXES)
def test_several_arguments_can_be_written_in_every_syntax(syntax):
    tools = {tool.name: tool for tool in (SearchTool(None), OpenTool(None), Weather())}
    calls = syntax_of(syntax)
    for tool, arguments in (
        ('weather', {'place': 'a "b" {é}', 'days': 3}),
        ('open', {'document': '{7}', 'page': 2}),
        ('open', {'document': 'x, page=3)'}),
        ('search', {'query_list': ['{"query_list": ["x"]}']}),
    ):
        call = calls.parse('so ' + calls.write_call(tools[tool], arguments), tools)
        assert (call.tool, call.arguments, call.error) == (tool, arguments, None)


@pytest.mark.parametrize('syntax', SYNTAXES)
def test_refused_arguments_are_an_observation_that_explains(syntax):
    tools = {'weather': Weather()}
    text = syntax_of(syntax).write_call(tools['weather'], {'place': 'x', 'days': 0})
    call = syntax_of(syntax).parse(text, tools)
    assert not call.is_valid and (call.tool, call.error) == ('weather', 'invalid_arguments')
    detail = 'The arguments of weather are not valid: 0 is less than the minimum of 1.'
    assert call.text == detail


@pytest.mark.parametrize(
    'body', ['', 'x', '{"place": "x"', '[1]', '{' * 5000, '[' * 5000, '{"place": ' + '[' * 5000]
)
def test_a_tag_that_needs_json_and_has_none_is_malformed(body):
    tools = {'weather': Weather()}
    call = syntax_of('search_r1').parse(f'<weather>{body}</weather>', tools)
    assert (call.arguments, call.error) == (None, 'malformed')
    assert call.text == ERROR_TEXTS['malformed']
