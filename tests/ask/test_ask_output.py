"""What `zeroplay ask` shows of a rollout, whatever its tools and its text."""

import json
import re

from ask_cases import ATTACK, NAME

from zeroplay_jax.evaluation import render
from zeroplay_jax.types import ToolCall


def test_a_turn_is_split_at_its_tags():
    tags = {'search': 'search', 'tool_call': ''}
    text = 'so <think>a < b </thin> c</think> <answer>x<search>y</answer>'
    parts = [('text', 'so'), ('think', 'a < b </thin> c'), ('answer', 'x'), ('search', 'y')]
    assert render.sections(text, tags) == parts
    assert render.sections('<think>half a tho', tags) == [('think', 'half a tho')]


def test_control_characters_reach_no_terminal(capsys):
    printer = render.Printer(True)
    passages = ({'title': 'T' + ATTACK, 'text': 'a\u202eb\rc'},)
    call = ToolCall('search', {'query_list': [ATTACK]}, documents=(passages,))
    printer.result(call)
    printer.turn(f'<think>{ATTACK}', call, {})
    printer.turn('', ToolCall('x' + ATTACK, {'a': ATTACK, 'b': 1}), {})
    for error in (None, 'failed'):
        printer.result(ToolCall('open', {'document': ATTACK}, text=ATTACK, error=error))
    printer.turn(f'<tool_call>{ATTACK}', None, {'tool_call': ''})
    out = capsys.readouterr().out
    assert set(re.findall(r'\x1b\[([\d;]*m|.)', out)) == {'0m', '34m', '2m', '31m', '1;36m'}
    assert not re.search('[\x00-\x09\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e]', out)
    text = ATTACK + '\u202e\nü'
    page = render.one_line_json({'text': text})
    assert not re.search('[\x00-\x1f\x7f-\x9f\u202e]', page) and json.loads(page)['text'] == text


def test_every_tool_is_called_and_its_result_is_printed(ask_scripted, index):
    turns = [
        f'<think>look</think><search>{NAME}</search>',
        f'<open>{NAME}</open>',
        '<open>nowhere</open>',
        '<calculator>(1998 - 1934) / 4</calculator>',
        '<calculator>import os</calculator>',
        '<answer>16</answer>',
    ]
    tools = '--tools=search, open,examples.calculator.tool:Calculator'
    lines = ask_scripted(
        turns, f'--index={index}', tools, '--config.rollout.max_turns=6', '--config.tools.top_k=1'
    ).splitlines()
    assert lines[:2] == ['think     look', f'search    {NAME}']
    assert lines[2].startswith(f'  [1]     {NAME}: ')
    assert lines[3:5] == [f'open      {NAME}', f'          {NAME} (page 1 of 1)']
    assert lines[5].startswith(f'          {NAME} ') and lines[6] == 'open      nowhere'
    assert lines[7].startswith('error     There is no such document.')
    assert lines[8:11] == [
        'calculator (1998 - 1934) / 4',
        '          16',
        'calculator import os',
    ]
    assert lines[11].startswith('error     The expression has no value')
    assert lines[12:] == ['answer    16']
