"""How policies write calls, and what they read of the results: every syntax, and every way to get it wrong."""

import json

import numpy as np
import pytest
from observations import SEARCH, TOOLS, added_ids, observation

from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.call_syntax import SYNTAXES, syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.foreign_text import Untrusted
from zeroplay_jax.tools.base import ToolResult
from zeroplay_jax.tools.search import SearchTool


def parsed(syntax, text):
    """(queries, error) of a turn."""
    call = syntax_of(syntax).parse(text, TOOLS)
    assert call.is_valid == (call.error is None) and bool(call.text) == (call.error is not None)
    return tuple(call.arguments['query_list']) if call.is_valid else (), call.error


@pytest.mark.parametrize(
    'text,want',
    [
        ('<think>x</think><search> the end </search>', (('the end',), None)),
        ('<search></search>', ((), 'empty_query')),
        ('no opening</search>', ((), 'malformed')),
        ('<search>a<search>b</search>', ((), 'malformed')),
    ],
)
def test_search_r1_calls(text, want):
    assert parsed('search_r1', text) == want
    assert parsed('r_search', text) == want


@pytest.mark.parametrize(
    'call,want',
    [
        ({'name': 'search', 'arguments': {'query_list': ['a', ' b ']}}, (('a', 'b'), None)),
        ({'name': 'search', 'arguments': {'query_list': []}}, ((), 'empty_query')),
        ({'name': 'search', 'arguments': {'query_list': ['a', ' ']}}, ((), 'empty_query')),
        ({'name': 'search', 'arguments': {'query_list': 'a'}}, ((), 'invalid_arguments')),
        ({'name': 'search', 'arguments': {'query_list': [1]}}, ((), 'invalid_arguments')),
        ({'name': 'search', 'arguments': None}, ((), 'malformed')),
        ({'name': 'shell', 'arguments': {'query_list': ['a']}}, ((), 'unknown_tool')),
        ([], ((), 'malformed')),
    ],
)
def test_qwen_calls(call, want):
    assert parsed('qwen', f'<tool_call>\n{json.dumps(call)}\n</tool_call>') == want


@pytest.mark.parametrize(
    'call,want',
    [
        ('search(query="who built the bridge")', (('who built the bridge',), None)),
        (' search( query = "a \\"b\\"" ) ', (('a "b"',), None)),
        ('search(query="  ")', ((), 'empty_query')),
        ('shell(query="rm")', ((), 'unknown_tool')),
        ('search("a")', ((), 'malformed')),
        ('search(query="a", k=3)', ((), 'malformed')),
        ('search(query="a" + "b")', ((), 'malformed')),
        ('search(query="a",)', ((), 'malformed')),
        ('search(query="a", query="b")', ((), 'malformed')),
        ('search(query_list=["a", "b"])', ((), 'malformed')),
        ('search(query=' + '[' * 9999 + ')', ((), 'malformed')),
        ('search(query="a\nb")', (('a\nb',), None)),
        ("search(query='a')", ((), 'malformed')),
        ('', ((), 'malformed')),
    ],
)
def test_olmo_calls(call, want):
    assert parsed('olmo', f'<think>x</think><function_calls>{call}</function_calls>') == want
    nested = f'<function_calls><function_calls>{call}</function_calls>'
    assert parsed('olmo', nested) == ((), 'malformed')


def test_r_search_answers_between_its_own_tags(codec):
    ids = observation(codec, 'r_search', [[{'title': 'ab', 'text': 'cd'}]], 400)
    text = codec.decode(ids).strip()
    assert text.startswith('<observation>') and text.endswith('</observation>')
    assert '<observation>' in ''.join(syntax_of('r_search').explain(TOOLS))


# What a run with search alone says to its policy, literally: checkpoints were trained on these texts.
EXPLAINED = {
    'search_r1': 'To search, write <search>what to look for</search>; the passages found come back between '
    '<information> and </information>.',
    'r_search': 'To search, write <search>what to look for</search>; the passages found come back between '
    '<observation> and </observation>.',
    'qwen': 'To search, write <tool_call>{"name": "search", "arguments": {"query_list": ["what to look for"]}}'
    '</tool_call>; one call may hold several queries. The passages found come back as a tool response.',
    'olmo': 'To search, write <function_calls>search(query="what to look for")</function_calls>. The passages found '
    'come back as a message of the environment.',
}
CALLS = {
    'search_r1': '<search>a "b" é</search>',
    'r_search': '<search>a "b" é</search>',
    'qwen': '<tool_call>\n{"name": "search", "arguments": {"query_list": ["a \\"b\\" é"]}}\n</tool_call>',
    'olmo': '<function_calls>search(query="a \\"b\\" é")</function_calls>',
}
R1_PASSAGES = 'Doc 1(Title: ab) cd\nDoc 2(Title: e) f "g"\n---\nNo passage found.'
VERL_PASSAGES = 'Doc 1 (Title: ab)\ncd\nDoc 2 (Title: e)\nf "g"\n---\nNo passage found.'
PASSAGES = dict(search_r1=R1_PASSAGES, r_search=R1_PASSAGES, qwen=VERL_PASSAGES, olmo=R1_PASSAGES)
ERRORS = {
    'malformed': 'The call could not be read. Write it again in the required form.',
    'invalid_arguments': 'The call could not be read. Write it again in the required form.',
    'unknown_tool': 'There is no such tool. Only search is available.',
    'empty_query': 'The query was empty. Name what to look for.',
    'failed': 'The search failed. Try again or answer from what is known.',
    'timeout': 'The search took too long. Try again or answer from what is known.',
}


def wrapped(codec, syntax, text):
    """Ids of an observation, written out."""
    if syntax in ('search_r1', 'r_search'):
        tag = {'search_r1': 'information', 'r_search': 'observation'}[syntax]
        head, tail = codec.encode(f'\n\n<{tag}>'), codec.encode(f'</{tag}>\n\n')
        return [*head, *codec.encode_plain(text), *tail]
    content = json.dumps({'result': text}, ensure_ascii=False) if syntax == 'qwen' else text
    head, tail = '<|im_end|>\n<|im_start|>user\n<tool_response>\n', '\n</tool_response><|im_end|>\n'
    return codec._encode([head, Untrusted(content), tail + '<|im_start|>assistant\n'])


@pytest.mark.parametrize('syntax', SYNTAXES)
def test_search_alone_is_explained_called_and_answered_as_ever(codec, syntax):
    calls = syntax_of(syntax)
    for template in ('{tools}', 'a {tools} b', prompts.select('paper')['solver']):
        fields = dict(question='q') if 'question' in template else {}
        chat = prompts.fill(template, calls.explain(TOOLS), **fields)
        trusted = template.replace('{question}', 'q').replace('{tools}', EXPLAINED[syntax])
        want = codec.render([{'role': 'user', 'content': trusted}])
        assert codec.render(chat).tolist() == want.tolist()
    assert calls.write_call(SEARCH, {'query_list': ['a "b" é']}) == CALLS[syntax]
    assert parsed(syntax, CALLS[syntax]) == (('a "b" é',), None)
    found = [{'id': '7', 'title': 'ab', 'text': 'cd'}, {'id': '8', 'title': 'e', 'text': 'f "g"'}]
    ids = observation(codec, syntax, [found, []], 400)
    assert ids.dtype == np.int32 and ids.tolist() == wrapped(codec, syntax, PASSAGES[syntax])


@pytest.mark.parametrize('syntax', SYNTAXES)
@pytest.mark.parametrize('code', ERRORS)
def test_errors_of_search_read_as_ever(codec, syntax, code):
    bad = {
        'malformed': {name: '' for name in SYNTAXES},
        'empty_query': {
            'qwen': '{"name": "search", "arguments": {"query_list": [" "]}}',
            'olmo': 'search(query=" ")',
        },
        'unknown_tool': {
            'qwen': '{"name": "shell", "arguments": {"query_list": ["a"]}}',
            'olmo': 'shell(query="a")',
        },
        'invalid_arguments': {
            'qwen': '{"name": "search", "arguments": {"query_list": [1]}}',
            'olmo': 'search(query=1)',
        },
    }
    calls = syntax_of(syntax)
    env = Environment(codec, calls, Limits(4, 64, 400), TOOLS)
    if code in ('failed', 'timeout'):
        call = calls.parse(CALLS[syntax], TOOLS)
        call = env.with_result(call, ToolResult(error=code))
    else:
        if syntax in ('search_r1', 'r_search'):
            turn = {'malformed': '</search>', 'empty_query': '<search> \n </search>'}.get(code)
        else:
            tag = {'qwen': 'tool_call', 'olmo': 'function_calls'}[syntax]
            turn = f'<{tag}>{bad[code][syntax]}</{tag}>'
        if turn is None:
            pytest.skip('cannot be written as a tag')
        call = env.end_turn(turn).call
    assert (call.error, call.text) == (code, ERRORS[code])
    assert env.observation(call).tolist() == wrapped(codec, syntax, ERRORS[code])


def test_of_many_queries_the_first_are_run():
    tool = SearchTool(search=None)
    call = syntax_of('qwen').write_call(tool, {'query_list': ['a', 'b', 'c', 'd']})
    found = syntax_of('qwen').parse(call, {'search': tool})
    assert found.arguments == {'query_list': ['a', 'b', 'c']}
    # An empty one beyond them still makes the call an empty query, as it always did.
    call = syntax_of('qwen').write_call(tool, {'query_list': ['a', 'b', 'c', ' ']})
    assert syntax_of('qwen').parse(call, {'search': tool}).error == 'empty_query'


def test_qwen_call_that_is_no_json():
    assert parsed('qwen', '<tool_call>{"name": search}</tool_call>') == ((), 'malformed')
    assert parsed('qwen', '<tool_call>' + '[' * 9999 + '</tool_call>') == ((), 'malformed')


@pytest.mark.parametrize('syntax', SYNTAXES)
@pytest.mark.parametrize('limit', [40, 60, 90])
def test_a_long_observation_keeps_its_end_tags(codec, syntax, limit):
    documents = [[{'title': 'ab', 'text': 'fade "cab" ' * 30}]]
    whole = observation(codec, syntax, documents, 10_000)
    cut = observation(codec, syntax, documents, limit)
    assert len(cut) <= max(limit, 45) < len(whole)
    control = [int(i) for i in whole if int(i) in added_ids(codec)]
    assert [int(i) for i in cut if int(i) in added_ids(codec)] == control


@pytest.mark.parametrize('syntax', SYNTAXES)
def test_calls_survive_their_own_parser(syntax):
    text = syntax_of(syntax).write_call(SEARCH, {'query_list': ['the "end" é']})
    assert parsed(syntax, 'x ' + text) == (('the "end" é',), None)


def test_an_unknown_syntax_names_the_known():
    with pytest.raises(ValueError, match='search_r1, r_search, qwen, olmo'):
        syntax_of('hermes')
