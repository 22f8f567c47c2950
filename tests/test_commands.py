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

from zeroplay_jax.retrieval import progress

ROOT = pathlib.Path(__file__).parents[1]
COMMANDS = sorted(
    '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__main__')
    for folder in ('zeroplay_jax', 'zeroplay_jax/retrieval', 'benchmarks', 'tools')
    for path in (ROOT / folder).rglob('*.py')
    if "__name__ == '__main__'" in path.read_text(encoding='utf-8')
    # Scripts for the environments of other engines.
    if 'peers' not in path.parts
)


# Runs a command as `python -m` does; arguments that its --help says nothing about are named on stderr.
WATCHED = """import argparse, runpy, sys
shown = argparse.ArgumentParser.parse_known_args

def arguments(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action._choices_actions
            for below in action.choices.values():
                yield from arguments(below)
        else:
            yield action

def parse(parser, *given):
    for action in arguments(parser):
        if not action.help:
            print('no help for', action.option_strings or action.dest, file=sys.stderr)
    return shown(parser, *given)

argparse.ArgumentParser.parse_known_args = parse
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
"""


@pytest.mark.parametrize('module', COMMANDS)
def test_help_says_how_to_give_the_command_and_what_every_argument_is(module):
    command = [sys.executable, '-c', WATCHED, module, '--help']
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    examples = [
        line
        for line in shown.stdout.split('\n')
        if f'python -m {module}' in line and 'usage:' not in line
    ]
    assert shown.returncode == 0 and examples and 'Traceback' not in shown.stderr
    assert 'no help for' not in shown.stderr, shown.stderr


def test_ctrl_c_is_one_line(tmp_path):
    # Also where the tests themselves run in the background, whose children begin deaf to it.
    command = ['env', '--default-signal=INT', sys.executable, '-m', 'zeroplay_jax.main']
    command += ['--config=configs/quickstart.py', f'--workdir={tmp_path}/run']
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
    assert (
        'Traceback' not in err and 'the same command resumes the run' in err.strip().split('\n')[-1]
    )


@pytest.mark.parametrize(
    ('command', 'module'),
    [
        ('main', 'absl'),
        pytest.param('main', 'pydantic', marks=pytest.mark.long),
        ('main', 'jax'),
        ('evaluate', 'ml_collections'),
        pytest.param('evaluate', 'transformers', marks=pytest.mark.long),
        ('ask', 'ml_collections'),
        ('inputs', 'numpy'),
        pytest.param('report', 'numpy', marks=pytest.mark.long),
    ],
)
def test_ctrl_c_while_libraries_load_is_one_line(tmp_path, command, module):
    """The signal comes as soon as a library is imported; the trace of imports says when."""
    flags = {
        'main': ['--config=configs/quickstart.py', f'--workdir={tmp_path}/run'],
        'evaluate': ['--config=configs/quickstart.py'],
        'ask': ['Who?'],
        'inputs': ['answers', '--corpus', str(tmp_path), '--out', str(tmp_path / 'out')],
        'report': [str(tmp_path)],
    }
    arguments = ['env', '--default-signal=INT', sys.executable, '-X', 'importtime']
    arguments += ['-m', f'zeroplay_jax.{command}', *flags[command]]
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = subprocess.Popen(arguments, cwd=ROOT, env=environment, **pipes)
    for line in running.stderr:
        name = line.rpartition('|')[2].strip()
        if line.startswith('import time:') and name.partition('.')[0] == module:
            running.send_signal(signal.SIGINT)
            break
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130, err[-2000:]
    said = [line for line in err.splitlines() if line and 'import time:' not in line]
    assert said == ['zeroplay_jax: stopped before it began']


SWALLOWS = """import sys, time
from zeroplay_jax import main
from zeroplay_jax.configuration import command_line
from zeroplay_jax.training import build

def build_forever(*_, **__):
    print('loads', flush=True)
    while True:
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass

build.build = build_forever
command_line.run_command('zeroplay_jax', main.main)
"""


def test_ctrl_c_while_a_model_loads_is_not_lost_where_a_library_ignores_it(tmp_path):
    """As garbage collection does, whose callbacks ignore exceptions."""
    command = ['env', '--default-signal=INT', sys.executable, '-c', SWALLOWS]
    command += ['--config=configs/quickstart.py', f'--workdir={tmp_path}/run']
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    assert running.stdout.readline() == 'loads\n', running.communicate()[1][-2000:]
    running.send_signal(signal.SIGINT)
    try:
        _, err = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130
    assert err.splitlines()[-1] == 'zeroplay_jax: stopped before it began'


def test_the_line_is_seen_also_where_libraries_are_silenced():
    code = """import os, signal, time
from zeroplay_jax.retrieval.command import quiet
from zeroplay_jax.runtime import signals
signal.signal(signal.SIGINT, signal.default_int_handler)
signals.exit_while_loading()
with quiet():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr.strip() == 'zeroplay_jax: stopped before it began'
    raised = code.replace('with quiet', 'signals.raise_again()\nwith quiet')
    done = subprocess.run([sys.executable, '-c', raised], cwd=ROOT, capture_output=True, text=True)
    assert 'KeyboardInterrupt' in done.stderr


def test_a_cpu_is_divided_into_devices():
    code = """import ml_collections
from zeroplay_jax.configuration import command_line
from zeroplay_jax.settings import schema
config = ml_collections.ConfigDict(schema.Run().model_dump())
config.cpu_devices = 3
command_line.connect(config)
import jax
print(jax.device_count())
"""
    environment = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == '3', done.stderr
    environment['XLA_FLAGS'] = '--xla_force_host_platform_device_count=5'
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == '5', done.stderr
    # A notebook that has used JAX keeps the devices that it has.
    environment['XLA_FLAGS'] = ''
    command[2] = code.replace(
        'command_line.connect', 'import jax; jax.devices(); command_line.connect'
    )
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == '1', done.stderr


def on_a_terminal(code):
    """What a program draws on a terminal of 24 lines and 80 columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    environment = os.environ | {'XLA_FLAGS': ''}  # compiled as slowly as everywhere
    drawn = subprocess.Popen(
        [sys.executable, '-c', code], cwd=ROOT, env=environment, stdout=theirs, stderr=theirs
    )
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
    assert drawn.wait() == 0, shown.decode()
    return shown.decode()


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else():
    lines = (
        'from zeroplay_jax.retrieval import progress',
        'with progress.bar(3, "steps", "count") as bar: bar.update(3)',
    )
    code = '\n'.join(lines)
    silent = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True)
    assert silent.returncode == 0 and not silent.stdout and not silent.stderr
    shown = on_a_terminal(code)
    assert 'count' in shown and '/3' in shown and 'compiling' not in shown


def test_a_bar_says_when_xla_compiles():
    code = """import jax, jax.numpy as jnp
from zeroplay_jax.retrieval import progress
def slow(x):
    for i in range(60):
        x = jnp.sin(x @ x.T) @ x + jnp.tanh(x) * i
    return x
with progress.bar(1, 'steps') as bar:
    jax.jit(slow)(jnp.ones((20, 20))).block_until_ready()
    bar.update()
    bar.refresh()
"""
    frames = on_a_terminal(code).split('\r')
    waiting = [frame for frame in frames if '0/1' in frame and 'compiling' in frame]
    assert len(waiting) > 1 and len(set(waiting)) > 1, 'its clock goes on'
    assert any('1/1' in frame and 'compiling' not in frame for frame in frames)


def test_work_without_a_measure_counts_its_seconds_even_where_libraries_are_silenced():
    code = """import time
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.command import quiet
with progress.clock('index'), quiet():
    time.sleep(1.5)
"""
    shown = on_a_terminal(code)
    assert 'index: 00:00' in shown and 'index: 00:01' in shown
    silent = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True)
    assert silent.returncode == 0 and not silent.stdout and not silent.stderr


def test_a_bar_that_is_not_wanted_says_nothing(capsys):
    with progress.bar(2, 'steps', shown=False) as bar:
        bar.update(2)
    assert capsys.readouterr().err == ''
