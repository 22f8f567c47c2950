"""What a run shows on the terminal: a bar of 80 columns, notices, and rollouts whose texts do no harm."""

import io
import logging
import pathlib
import re
import subprocess
import sys
import threading
import time

import numpy as np
from absl import logging as absl_logging
from refused_calls import check_table
from rich.cells import cell_len
from trajectories import make_trajectory

from zeroplay_jax.evaluation import render
from zeroplay_jax.retrieval import progress
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.training import screen
from zeroplay_jax.training.screen import ProgressBar, TimeLeft
from zeroplay_jax.types import Question, Row, RowInfo, ToolCall, Turn

METRICS = {
    'tokens_per_second': 812.3,
    'dropped_share': 0.75,
    'proposer/reward_mean': 0.53,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def use_terminal(monkeypatch):
    """Stderr becomes a terminal; called in the test, because pytest sets stderr anew after fixtures."""
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, 'stderr', terminal)
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setenv('LINES', '24')
    return terminal


def make_steps(name='proposer', count=134):
    phase = Phase(name, count, (name,), iteration=11)
    return [Step(phase, number, number) for number in range(count)]


def bar_of(steps, first=0, is_shown=True):
    return ProgressBar(is_shown, steps, first, lambda phase: 8)


def drawn_lines(terminal):
    text = re.sub(r'\x1b\[[A-Z]', '', terminal.getvalue())
    return [line for line in re.split(r'[\r\n]', text) if line.strip()]


def test_the_bar_shows_speed_drops_and_time_left_in_80_columns(monkeypatch):
    terminal = use_terminal(monkeypatch)
    steps = make_steps()
    with bar_of(steps) as bar:
        bar.begin_step(steps[0])
        bar.end_step(steps[0], {'em/mean': 0.24})
        bar.begin_step(steps[1])
        for _ in range(128):
            bar.end_episode()
        bar.end_step(steps[1], METRICS)
        bar._bar.refresh()
        line = drawn_lines(terminal)[-1]
    assert cell_len(line) <= 80
    assert re.search(
        r'^2/134 \|.+\| \d\d:\d\d left, proposer 12.2, 812 tok/s, drop 75%, reward 0.53', line
    )
    assert all(cell_len(line) <= 80 for line in drawn_lines(terminal))


def test_a_step_of_several_roles_shows_the_reward_of_each_in_80_columns(monkeypatch):
    terminal = use_terminal(monkeypatch)
    rewards = {'proposer/reward_mean': 0.05, 'solver/reward_mean': 0.31}
    steps = make_steps('selfplay')
    with bar_of(steps) as bar:
        for step in steps[:2]:
            bar.begin_step(step)
            bar.end_step(step, METRICS | rewards)
        bar._bar.refresh()
    line = drawn_lines(terminal)[-1]
    assert line.endswith('812 tok/s, drop 75%, p 0.05 s 0.31') and cell_len(line) <= 80


def test_what_bars_and_lines_show(monkeypatch):
    terminal = use_terminal(monkeypatch)

    def after_time():
        return drawn_lines(terminal)[-1].partition('left, ')[2].rstrip()

    def shown(*played):
        """The bar at the begin and at the end of every step of a phase with these metrics."""
        trained = {'proposer': ('proposer',), 'selfplay': ('proposer', 'solver')}
        phases = [Phase(name, 1, trained.get(name, ())) for name, _ in played]
        steps = [Step(phase, 0, number) for number, phase in enumerate(phases)]
        lines = []
        with bar_of(steps) as bar:
            for step, (_, metrics) in zip(steps, played):
                bar.begin_step(step)
                lines.append(after_time())
                bar.end_step(step, metrics)
                lines.append(f'    {after_time()}')
        return '\n'.join(lines)

    step = Step(Phase('evaluation', 1, iteration=1), 0, 30)
    functions = vars(render) | vars(screen)
    names = functions | globals() | {'shown': shown, 'EVALUATION': step}
    check_table(pathlib.Path(__file__).parent / 'terminal.txt', names)


def test_notices_are_printed_with_and_without_a_terminal(monkeypatch):
    terminal = use_terminal(monkeypatch)
    notice = 'step 3 (proposer 1.1) trained nothing: ' + 'prompt_too_long 97 %, ' * 5
    steps = make_steps(count=2)
    with bar_of(steps) as bar:
        bar.write_wrapped(notice)
    lines = [line for line in drawn_lines(terminal) if 'too_long' in line]
    assert len(lines) == 2 and all(len(line) <= 80 for line in lines)
    quiet = io.StringIO()
    monkeypatch.setattr(progress.sys, 'stderr', quiet)
    with bar_of(steps, is_shown=False) as bar:
        bar.begin_step(steps[0])
        bar.end_step(steps[0], METRICS)
        bar.write_wrapped(notice)
    assert quiet.getvalue().startswith('step 3') and quiet.getvalue().count('\n') == 2


def test_lines_of_libraries_do_not_break_the_bar(monkeypatch):
    terminal = use_terminal(monkeypatch)
    handler = absl_logging.get_absl_handler().python_handler
    monkeypatch.setattr(handler, 'stream', terminal)
    steps = make_steps(count=2)
    with bar_of(steps) as bar:
        bar.begin_step(steps[0])
        # As Orbax does; a logger without a handler; a warning; and a print that ends no line.
        handler.emit(logging.LogRecord('absl', logging.WARNING, '', 1, 'from Orbax', (), None))
        record = logging.LogRecord('nobody', logging.WARNING, '', 1, 'from a library', (), None)
        logging.lastResort.emit(record)
        print('a warning', file=sys.stderr)
        print('half a line', end='', file=sys.stderr)
        bar.end_step(steps[0], METRICS)
    assert sys.stderr is terminal and handler.stream is terminal
    lines = drawn_lines(terminal)
    for text in ('from Orbax', 'from a library', 'a warning', 'half a line'):
        (line,) = [line for line in lines if text in line]
        assert '|' not in line and 'proposer' not in line


def test_only_the_main_thread_computes_the_estimate(monkeypatch):
    threads = set()
    predict = TimeLeft.predict

    def noted(self, next_step):
        threads.add(threading.current_thread())
        return predict(self, next_step)

    monkeypatch.setattr(TimeLeft, 'predict', noted)
    use_terminal(monkeypatch)
    steps = make_steps(count=3)
    texts = []
    with bar_of(steps) as bar:
        bar.begin_step(steps[0])
        bar.end_step(steps[0], METRICS)
        redraw = threading.Thread(target=lambda: texts.append(bar._time_left_text()))
        redraw.start()
        redraw.join()
    assert texts == ['00:00 left']
    assert threads == {threading.main_thread()}


HOSTILE = 'Gumu\x1b[31m red\x1b]0;title\x07 \x1b[2J\u202edlo\u200b\x00\x9b5A\nnext\tword'


def make_row(**info):
    documents = (({'id': '1', 'title': 'Lomi ' + HOSTILE, 'text': 'long'},),)
    call = ToolCall('search', {'query': 'where is Gumu'}, documents=documents)
    turns = (Turn('<search>…</search>', call), Turn('<answer>Lomi</answer>'))
    trajectory = make_trajectory(*turns, identity=(1, 0, 0))
    question = Question('Where is Gumu? ' * 30, ('Lomi', 'Lomi City'))
    return Row('solver', trajectory, 0.5, 0, info=RowInfo(question=question, **info))


def test_a_rollout_shows_question_searches_answer_and_reward():
    step = Step(Phase('solver', 3), 0, 10)
    text = screen.rollout_text(step, make_row(answer='Lomi'))
    labels = [line.split()[0] for line in text.split('\n') if not line.startswith(' ')]
    assert labels == ['──', 'question', 'search', 'answer', 'reward']
    assert 'where is Gumu → Lomi Gumu' in text and 'expected: Lomi | Lomi City' in text
    assert '0.50' in text and '\x1b' not in text and '\u202e' not in text
    assert all(cell_len(line) <= 80 for line in text.split('\n'))


def test_a_rollout_shows_what_its_turns_earned():
    step = Step(Phase('solver', 3), 0, 10)
    row = make_row(answer='Lomi')
    row.turn_rewards = np.array([0.25, np.nan])
    assert screen.rollout_text(step, row).split('\n')[-1].split() == ['per', 'turn', '0.25,', '–']


def test_a_proposal_shows_its_question_after_its_searches():
    step = Step(Phase('proposer', 3), 0, 10)
    text = screen.rollout_text(step, make_row(valid=False, rejected='leaks_answer'))
    assert text.index('search ') < text.index('question ') < text.index('answer ')
    assert '(leaks_answer)' in text


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

    steps = make_steps(count=4)
    with progress.clock('loading'):
        wait_for('loading: 00:')
        # The newest one is shown.
        with bar_of(steps, first=1) as bar:
            bar.begin_step(steps[1])
            bar.end_step(steps[1], METRICS)
            wait_for('2/4 steps, 00:0')
            text = ' left, proposer 12.2, 812 tok/s, drop 75%, reward 0.53\n'
            assert text in log.getvalue()
    time.sleep(0.05)
    before = log.getvalue()
    with progress.bar(5, 'files', 'read', shown=False), progress.clock('silent', shown=False):
        time.sleep(0.05)
    assert log.getvalue() == before


_HIDDEN_WORK = """
import time
from zeroplay_jax.evaluation.render import one_line
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.command import quiet
progress._LINE_SECONDS = progress._LOOK_SECONDS = 0.01
with progress.clock('build'), quiet():
    time.sleep(0.5)
"""


def test_lines_are_printed_while_messages_of_libraries_are_hidden():
    command = [sys.executable, '-c', _HIDDEN_WORK]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert result.stderr.startswith('build: 00:00\n')
