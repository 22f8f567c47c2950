"""What every command has in common: a help with an example, and progress for people alone."""

import os
import pathlib
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest

from zeroplay_jax import progress

ROOT = pathlib.Path(__file__).parents[1]
COMMANDS = sorted(
    '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    for folder in ('zeroplay_jax', 'retrieval', 'benchmarks')
    for path in (ROOT / folder).rglob('*.py')
    if "__name__ == '__main__'" in path.read_text(encoding='utf-8')
)


@pytest.mark.parametrize('module', COMMANDS)
def test_help_says_how_to_give_the_command(module):
    shown = subprocess.run([sys.executable, '-m', module, '--help'], cwd=ROOT, capture_output=True, text=True)
    examples = [line for line in shown.stdout.split('\n') if f'python -m {module}' in line and 'usage:' not in line]
    assert shown.returncode == 0 and examples and 'Traceback' not in shown.stderr


def test_ctrl_c_is_one_line(tmp_path):
    command = [sys.executable, '-m', 'zeroplay_jax.main', '--config=configs/quickstart.py', f'--workdir={tmp_path}/run']
    environment = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    deadline = time.monotonic() + 120
    while not (tmp_path / 'run' / 'config.json').exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert 'Traceback' not in err and 'goes on with the same command' in err.strip().split('\n')[-1]


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else():
    code = 'from zeroplay_jax import progress\nwith progress.bar(3, "steps", "count") as bar:\n    bar.update(3)'
    silent = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True)
    assert silent.returncode == 0 and not silent.stdout and not silent.stderr
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    drawn = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b''
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert drawn.wait() == 0 and b'count' in shown and b'/3' in shown


def test_a_bar_that_is_not_wanted_says_nothing(capsys):
    with progress.bar(2, 'steps', shown=False) as bar:
        bar.update(2)
    assert capsys.readouterr().err == ''
