"""`zeroplay ask` from a user's view: one question, questions in a pipe, a terminal with Ctrl-C."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

from ask_cases import (
    ATTACK,
    BASE,
    ENVIRONMENT,
    NAME,
    ONE,
    ROOT,
    START,
    TWO,
    labels,
    main,
)
from python_process import run_python

from zeroplay_jax import ask


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
        assert prompt['source'] == 'prompt' and record['question'] in prompt['text']
        assert {s['source'] for s in policy} == {'policy'} and {s['source'] for s in env} == {'env'}
        assert [s['text'] for s in policy] == [turn['text'] for turn in record['turns']]
        for segment, turn in zip(env, record['turns']):
            call = turn['call']
            assert call['tool'] == 'search' and call['error'] is None
            assert call['text'] in segment['text']
            assert all(passage['title'] in segment['text'] for passage in call['documents'][0])
        assert all(len(s['tokens']) and s['text'] for s in record['segments'])


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


class Terminal:
    """The command on a pseudo-terminal that controls it, so that Ctrl-C is a key."""

    def __init__(self, *arguments):
        take = 'import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)'
        run = 'runpy.run_module("zeroplay_jax.ask", run_name="__main__", alter_sys=True)'
        words = [sys.executable, '-c', f'{take}; {run}', *map(str, arguments)]
        self.keys, inside = pty.openpty()
        ends = dict(stdin=inside, stdout=inside, stderr=inside)
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=ENVIRONMENT, start_new_session=True, **ends
        )
        os.close(inside)
        self.seen = ''

    def type(self, text):
        os.write(self.keys, text.encode())

    def until(self, text):
        """What was shown since the last call, up to `text`."""
        deadline = time.monotonic() + 240
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.keys], [], [], 1)[0]:
                with contextlib.suppress(OSError):  # Linux says so when the other end is closed
                    data = os.read(self.keys, 1 << 16)
                    self.seen += data.decode(errors='replace')
                    continue
                assert text in self.seen, self.seen
        at = self.seen.index(text) + len(text)
        shown, self.seen = self.seen[:at], self.seen[at:]
        return shown


def test_a_session_at_a_terminal(server):
    address, go, came = server
    terminal = Terminal('--policy', BASE, '--index', address)
    try:
        greeting = terminal.until('ask> ')
        assert str(BASE) in greeting and address in greeting
        terminal.type(ONE['question'] + '\n')
        assert came.wait(240)
        terminal.type('\x03')
        stopped = terminal.until('ask> ')
        assert f'\x1b[1;36m{"search":10}{NAME}\x1b[0m' in stopped  # coloured
        before, has_stopped, _ = stopped.partition('stopped')
        assert has_stopped and 'Traceback' not in stopped and 'answer' not in before
        go.set()
        terminal.type('x' * 600 + '\n')
        assert 'the question is too long' in terminal.until('ask> ')
        terminal.type('nonsense\x15' + ONE['question'] + '\n')  # Ctrl-U: the line is edited
        answered = terminal.until('ask> ')
        assert f'\x1b[1;32m{"answer":10}{ONE["answers"][0]}\x1b[0m' in answered
        assert answered.count('\x1b[1;36msearch') == 1
        terminal.type('\x04')
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.keys)


def test_ctrl_c_at_the_prompt_ends(monkeypatch, capsys):
    class Session:
        def greet(self):
            print('hello')

    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr('builtins.input', interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert ask._run_prompt([Session()]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ('hello\n\n', '')
