"""What long work shows where no terminal is attached, and the lines of a run; bars on a terminal: test_commands.py."""

import io
import pathlib
import subprocess
import sys
import time

from refused_calls import check_table

from zeroplay_jax.retrieval import progress
from zeroplay_jax.run import hooks
from zeroplay_jax.selfplay.schedule import Phase, Step


def test_the_lines():
    step = Step(Phase('evaluation', 1, iteration=1), 0, 30)
    names = vars(hooks) | {'EVALUATION': step}
    check_table(pathlib.Path(__file__).parent / 'terminal.txt', names)


def test_without_a_terminal_a_line_is_printed_from_time_to_time(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress.sys, 'stderr', log)
    monkeypatch.setattr(progress, '_LINE_SECONDS', 0.0)
    monkeypatch.setattr(progress, '_LOOK_SECONDS', 0.01)

    def wait_for(text):
        deadline = time.monotonic() + 30
        while text not in log.getvalue():
            assert time.monotonic() < deadline, log.getvalue()
            time.sleep(0.01)

    with progress.clock('loading'):
        wait_for('loading: 0:00:')
    with progress.Bar(4, 'steps', initial=1) as bar:
        bar.note = 'reward 0.53'
        # The speed is known after two updates; what was done before does not count.
        for count in (2, 3):
            bar.update()
            wait_for(f'{count}/4 steps, 0:00:0')
        with progress.Bar(None, 'episodes', 'solver [1]') as episodes:
            episodes.update(8)
            wait_for(', 0:00:01 left, reward 0.53; solver [1]: 8 episodes, 0:00:0')
    time.sleep(0.05)
    before = log.getvalue()
    assert '\x1b' not in before
    with progress.Bar(5, 'files', 'read', shown=False), progress.clock('silent', shown=False):
        time.sleep(0.05)
    assert log.getvalue() == before


_HIDDEN_WORK = """
import time
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.command import quiet
progress._LINE_SECONDS = progress._LOOK_SECONDS = 0.01
with progress.clock('build'), quiet():
    time.sleep(0.5)
"""


def test_lines_are_printed_while_messages_of_libraries_are_hidden():
    command = [sys.executable, '-c', _HIDDEN_WORK]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert result.stderr.startswith('build: 0:00:00\n')
