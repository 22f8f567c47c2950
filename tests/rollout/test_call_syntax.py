"""How policies write calls, and what they read of the results: every syntax, and every way to get it wrong."""

import functools
import json
import pathlib

import numpy as np
import pytest
from observations import SEARCH, TOOLS, added_ids, observation
from refused_calls import check_values

from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.call_syntax import MAX_RESULT_CHARACTERS, SYNTAXES, syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.foreign_text import Untrusted, without_tags
from zeroplay_jax.tools.base import ToolResult
from zeroplay_jax.tools.search import SearchTool


def parsed(syntax, text):
    """(queries, error) of a turn."""
    call = syntax_of(syntax).parse(text, TOOLS)
    assert call.is_valid == (call.error is None) and bool(call.text) == (call.error is not None)
    return tuple(call.arguments['query_list']) if call.is_valid else (), call.error


def qwen(call):
    return parsed('qwen', f'<tool_call>\n{json.dumps(call)}\n</tool_call>')


def olmo(call):
    nested = f'<function_calls><function_calls>{call}</function_calls>'
    assert parsed('olmo', nested) == ((), 'malformed')
    return parsed('olmo', f'<think>x</think><function_calls>{call}</function_calls>')


def reply_to(codec, syntax, turn, error=None):
    """(error, text) of a wrong turn, or of a call whose tool gave this error; the observation has this text."""
    env = Environment(codec, syntax_of(syntax), Limits(4, 64, 400), TOOLS)
    call = env.read_turn(turn).call
    if error:
        call = env.with_result(call, ToolResult(error=error))
    assert env.observation(call).tolist() == wrapped(codec, syntax, call.text)
    return call.error, call.text


def test_calls_are_read_and_answered_as_the_table_says(codec):
    names = dict(
        parsed=parsed,
        qwen=qwen,
        limited=limited,
        olmo=olmo,
        reply_to=functools.partial(reply_to, codec),
        CALLS=CALLS,
        without_tags=without_tags,
    )
    check_values(pathlib.Path(__file__).with_name('calls.txt'), names)


@pytest.mark.parametrize('name', SYNTAXES)
def test_a_result_of_any_length_is_cut_before_it_is_encoded(name):
    long = ToolResult(text='x' * (MAX_RESULT_CHARACTERS + 1))
    assert len(syntax_of(name).result_text(SEARCH, long)) == MAX_RESULT_CHARACTERS == 100_000


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
    'qwen': '<tool_call>{"name": "search", "arguments": {"query_list": ["a \\"b\\" é"]}}</tool_call>',
    'olmo': '<function_calls>search(query="a \\"b\\" é")</function_calls>',
}
R1_PASSAGES = 'Doc 1(Title: ab) cd\nDoc 2(Title: e) f "g"\n---\nNo passage found.'
VERL_PASSAGES = 'Doc 1 (Title: ab)\ncd\nDoc 2 (Title: e)\nf "g"\n---\nNo passage found.'
PASSAGES = dict(search_r1=R1_PASSAGES, r_search=R1_PASSAGES, qwen=VERL_PASSAGES, olmo=R1_PASSAGES)


def wrapped(codec, syntax, text):
    """Ids of an observation, written out."""
    if syntax in ('search_r1', 'r_search'):
        tag = {'search_r1': 'information', 'r_search': 'observation'}[syntax]
        head, tail = codec.encode(f'\n\n<{tag}>'), codec.encode(f'</{tag}>\n\n')
        return [*head, *codec.encode_plain(text), *tail]
    content = json.dumps({'result': text}, ensure_ascii=False) if syntax == 'qwen' else text
    head, tail = '<|im_end|>\n<|im_start|>user\n<tool_response>\n', '\n</tool_response><|im_end|>\n'
    return codec.encode_spans([head, Untrusted(content), tail + '<|im_start|>assistant\n'])


@pytest.mark.parametrize('syntax', SYNTAXES)
def test_search_alone_is_explained_called_and_answered_as_ever(codec, syntax):
    calls = syntax_of(syntax)
    for template in ('{tools}', 'a {tools} b', prompts.select('full')['solver'].user):
        fields = dict(question='q') if 'question' in template else {}
        chat = prompts.fill(prompts.Prompt(template), calls.explain(TOOLS), **fields)
        trusted = template.replace('{question}', 'q').replace('{tools}', EXPLAINED[syntax])
        want = codec.render([{'role': 'user', 'content': trusted}])
        assert codec.render(chat).tolist() == want.tolist()
    assert calls.write_call(SEARCH, {'query_list': ['a "b" é']}) == CALLS[syntax]
    assert parsed(syntax, CALLS[syntax]) == (('a "b" é',), None)
    found = [{'id': '7', 'title': 'ab', 'text': 'cd'}, {'id': '8', 'title': 'e', 'text': 'f "g"'}]
    ids = observation(codec, syntax, [found, []], 400)
    assert ids.dtype == np.int32 and ids.tolist() == wrapped(codec, syntax, PASSAGES[syntax])


def limited(queries):
    """(queries that are run, error) of a call of a tool that runs three at most."""
    tool = SearchTool(search=None)
    text = syntax_of('qwen').write_call(tool, {'query_list': queries})
    call = syntax_of('qwen').parse(text, {'search': tool})
    return call.is_valid and call.arguments['query_list'], call.error


@pytest.mark.parametrize('syntax', SYNTAXES)
@pytest.mark.parametrize('limit', [40, 90])
def test_a_long_observation_keeps_its_end_tags(codec, syntax, limit):
    documents = [[{'title': 'ab', 'text': 'fade "cab" ' * 30}]]
    whole = observation(codec, syntax, documents, 10_000)
    cut = observation(codec, syntax, documents, limit)
    assert len(cut) <= max(limit, 45) < len(whole)
    control = [int(i) for i in whole if int(i) in added_ids(codec)]
    assert [int(i) for i in cut if int(i) in added_ids(codec)] == control
