"""`zeroplay ask` from a user's view: one question, questions in a pipe, Ctrl-C."""

import io
import json
import re

from ask_cases import ATTACK, BASE, ONE, START, TWO, labels, main
from python_process import run_python


def test_an_answer_is_shown_with_what_was_searched_in_an_index_of_ones_own(index, capsys):
    assert main(['--policy', BASE, '--index', index, TWO['question']]) == 0
    out = capsys.readouterr().out
    assert labels(out) == ['think', 'search', 'think', 'search', 'think', 'answer']
    assert out.splitlines()[-1].split() == ['answer', *TWO['answers']]
    assert f'  [1]     {START}: ' in out
    # The page's control characters are shown, not obeyed.
    assert ascii(ATTACK)[1:-1] in out and not re.search(r'[^\n\x20-\x7e]', out)


def test_out_of_the_box_questions_from_a_pipe_become_json_lines(monkeypatch, capsys):
    typed = f'\ufeff{ONE["question"]}\n\n{TWO["question"]}\r\n'
    monkeypatch.setattr('sys.stdin', io.StringIO(typed))
    assert main(['--json']) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record['question'] for record in records] == [ONE['question'], TWO['question']]
    assert records[0]['policy'] == str(BASE) and records[0]['finish'] == 'answer'
    assert records[0]['answer'] in ONE['answers']
    for record in records:
        prompt, *others = record['segments']
        policy, env = others[::2], others[1::2]
        assert record['question'] in prompt['text']
        assert [part['text'] for part in policy] == [turn['text'] for turn in record['turns']]
        for segment, turn in zip(env, record['turns']):
            (passages,) = turn['call']['documents']
            assert all(passage['title'] in segment['text'] for passage in passages)


INTERRUPTED = """
import os, signal, sys, time, types
from zeroplay_jax import ask
def answer(text, stoppable):
    print('search', flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
ask._load = lambda *_: [types.SimpleNamespace(as_json=True, answer=answer)]
sys.exit(ask.main(['q']))
"""


def test_ctrl_c_ends_a_single_answer_without_a_traceback():
    done = run_python('-c', INTERRUPTED)
    # What came before is there.
    assert (done.returncode, done.stdout, done.stderr) == (130, 'search\n', '')
