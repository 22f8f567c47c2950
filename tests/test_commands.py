"""What every command has in common: a help with an example, and progress for people alone."""

import argparse
import ctypes
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import termios
import time

import pytest
from forked_commands import load_libraries, run_in_fork
from python_process import ROOT, finish, run_python, start, start_python, wait_for

COMMANDS = sorted(
    '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__main__')
    for folder in ('zeroplay_jax', 'zeroplay_jax/retrieval', 'benchmarks', 'tools')
    for path in (ROOT / folder).rglob('*.py')
    if "__name__ == '__main__'" in path.read_text(encoding='utf-8')
    # Scripts for the environments of other engines, and one that only the package starts.
    if 'peers' not in path.parts and path.name != 'template_process.py'
)


def arguments(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action._choices_actions
            for below in action.choices.values():
                yield from arguments(below)
        else:
            yield action


def parse_watched(parser, *given):
    """Parses; arguments that --help says nothing about are named."""
    for action in arguments(parser):
        if not action.help:
            print('no help for', action.option_strings or action.dest)
    return parse(parser, *given)


parse = argparse.ArgumentParser.parse_known_args


def print_helps(output):
    """Prints what --help of every command prints, by processes that this one forks after loading libraries."""
    load_libraries()
    argparse.ArgumentParser.parse_known_args = parse_watched
    texts = {}
    for module in COMMANDS:
        texts[module] = run_in_fork(module, ['--help'], pathlib.Path(output))
    print(json.dumps(texts))


@pytest.fixture(scope='module')
def helps(tmp_path_factory):
    output = tmp_path_factory.mktemp('helps') / 'output'
    code = f'import test_commands; test_commands.print_helps({str(output)!r})'
    printed = run_python('-c', code, PYTHONPATH=f'{ROOT}:{ROOT / "tests"}')
    assert printed.returncode == 0, printed.stderr[-2000:]
    return json.loads(printed.stdout.splitlines()[-1])


@pytest.mark.parametrize('module', COMMANDS)
def test_help_says_how_to_give_the_command_and_what_every_argument_is(helps, module):
    status, text = helps[module]
    lines = [line for line in text.split('\n') if 'usage:' not in line]
    assert status == 0 and any(f'python -m {module}' in line for line in lines), text[-2000:]
    assert 'Traceback' not in text and 'no help for' not in text


def start_interruptible(*words):
    """Also where the tests themselves run in the background, whose children begin deaf to Ctrl-C."""
    return start(['env', '--default-signal=INT', sys.executable, *words])


def test_ctrl_c_is_one_line(tmp_path):
    # Of the size of another test's run, whose programs may be in the cache. Here, because `helps` loads this file.
    from test_run import SMALL

    words = ['-m', 'zeroplay_jax.main', '--config=configs/quickstart.py', *SMALL]
    running = start_interruptible(*words, f'--workdir={tmp_path}/run')
    wait_for((tmp_path / 'run' / 'run.json').exists, running)
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    _, err = finish(running, 130)
    assert 'Traceback' not in err
    assert 'the same command resumes the run' in err.strip().split('\n')[-1]


@pytest.mark.parametrize(
    ('command', 'module'),
    [
        ('main --config=configs/quickstart.py --workdir=FOLDER/run', 'absl'),
        ('main --config=configs/quickstart.py --workdir=FOLDER/run', 'jax'),
        ('evaluate --config=configs/quickstart.py', 'ml_collections'),
        ('ask Who?', 'ml_collections'),
        ('extras.inputs answers --corpus FOLDER --out FOLDER/out', 'numpy'),
        pytest.param('report FOLDER', 'numpy', marks=pytest.mark.long),
    ],
)
def test_ctrl_c_while_libraries_load_is_one_line(tmp_path, command, module):
    """The signal comes as soon as a library is imported; the trace of imports says when."""
    words = f'-X importtime -m zeroplay_jax.{command}'.replace('FOLDER', str(tmp_path)).split()
    running = start_interruptible(*words)
    for line in running.stderr:
        name = line.rpartition('|')[2].strip()
        if line.startswith('import time:') and name.partition('.')[0] == module:
            running.send_signal(signal.SIGINT)
            break
    _, err = finish(running, 130)
    said = [line for line in err.splitlines() if line and 'import time:' not in line]
    assert said == ['zeroplay_jax: stopped before it began']


SWALLOWS = """import sys, time
from zeroplay_jax import main
from zeroplay_jax.configuration import command_line
from zeroplay_jax.run import build

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
    flags = ['--config=configs/quickstart.py', f'--workdir={tmp_path}/run']
    running = start_interruptible('-c', SWALLOWS, *flags)
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
from zeroplay_jax.retrieval import command
from zeroplay_jax.runtime import signals
signal.signal(signal.SIGINT, signal.default_int_handler)
signals.exit_while_loading()
with command.quiet():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
"""
    done = run_python('-c', code)
    assert done.returncode == 130
    assert done.stderr.strip() == 'zeroplay_jax: stopped before it began'
    raised = code.replace('with command', 'signals.raise_again()\nwith command')
    done = run_python('-c', raised)
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
    # A notebook that has used JAX keeps the devices that it has.
    used = code.replace('command_line.connect', 'import jax; jax.devices(); command_line.connect')
    five = '--xla_force_host_platform_device_count=5'
    for program, flags, devices in ((code, '', '3'), (code, five, '5'), (used, '', '1')):
        done = run_python('-c', program, XLA_FLAGS=flags)
        assert done.stdout.strip() == devices, done.stderr


def test_temporaries_of_a_divided_cpu_stay_in_memory():
    code = """import resource
from zeroplay_jax.runtime.devices import divide_cpu
divide_cpu(DEVICES)
import itertools, jax, jax.numpy as jnp
cumulate = jax.jit(lambda x: jnp.cumsum(jnp.sin(x[:, None] + jnp.arange(4096.0)), 0) @ jnp.ones(4096))
faults = []
for _ in range(8):
    jax.block_until_ready(cumulate(jnp.ones(4096)))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(min(after - before for before, after in itertools.pairwise(faults)))
"""
    if not hasattr(ctypes.CDLL(None), 'mallopt'):
        pytest.skip('this C library has no mallopt')
    faults = []
    for devices in (2, 1):
        done = run_python('-c', code.replace('DEVICES', str(devices)), XLA_FLAGS='')
        faults.append(int(done.stdout))
    # 64 MiB, only while the heap grows or in every call. How many faults that are depends on the size of pages.
    divided, whole = faults
    assert divided < whole / 4


def on_a_terminal(code):
    """What a program draws on a terminal of 24 lines and 80 columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, '-c', code]
    drawn = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs)
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
    code = """import os, sys, time
from zeroplay_jax.retrieval import progress
progress._LOOK_SECONDS = 0.01
with progress.Bar(9, 'steps', leave=True) as steps, progress.Bar(None, 'episodes', 'play [1]') as episodes:
    steps.update(2)
    episodes.update(5)
    time.sleep(2.2)
    print('a', 'notice', file=sys.stderr)
    print('result')
    if os.isatty(2): os._exit(0)
"""
    assert finish(start_python('-c', code)) == ('result\n', 'a notice\n')
    shown = on_a_terminal(code)
    # The time goes on.
    assert re.search(r'2/9 steps, 0:00:0[1-9]; play \[1\]: 5 episodes, 0:00:0', shown)
    # Above the bar, which has one line: of two, what a library prints between them would be erased.
    assert '\x1b[2Ka notice\r\n' in shown and '\x1b[1A' not in shown
    # An early end does not lose the cursor, because it is never hidden.
    assert '\x1b[?25' not in shown
