"""What commands have in common: a list, flags as on the pages, Ctrl-C, progress for people alone."""

import argparse
import json
import os
import pathlib
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import time
import tomllib

import pytest
from forked_commands import load_libraries, run_in_fork
from page_commands import PYTHON, as_module, commands
from python_process import ROOT, finish, run_python, start, start_python, wait_for
from removed_extras import REMOVED, has_left, says_so
from run_files import count_steps

from zeroplay_jax import __main__ as package
from zeroplay_jax.commands import COMMANDS as NAMES
from zeroplay_jax.commands import to_copy
from zeroplay_jax.configuration import command_line
from zeroplay_jax.extras import EXTRAS

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
    """Parses; all flags are printed, those of kinds of a command as well."""
    for action in arguments(parser):
        print(*action.option_strings)
    return parse(parser, *given)


parse = argparse.ArgumentParser.parse_known_args


def print_helps(output):
    """Prints what -h of every command prints, by processes that this one forks after loading libraries."""
    load_libraries()
    argparse.ArgumentParser.parse_known_args = parse_watched
    texts = {}
    for module in COMMANDS:
        texts[module] = run_in_fork(module, ['-h'], pathlib.Path(output))
    print(json.dumps(texts))


@pytest.fixture(scope='module')
def helps(tmp_path_factory):
    output = tmp_path_factory.mktemp('helps') / 'output'
    code = f'import test_commands; test_commands.print_helps({str(output)!r})'
    printed = run_python('-c', code, PYTHONPATH=f'{ROOT}:{ROOT / "tests"}')
    assert printed.returncode == 0, printed.stderr[-2000:]
    return json.loads(printed.stdout.splitlines()[-1])


def commands_of_pages():
    """(page, module, words) of every command of the package on a page, or in the list of the papers' tables."""
    pages = ('*.md', '[b-r]*/*.md', 'examples/*/*.md', 'benchmarks/peers/*.md')
    for page in [path for pattern in pages for path in sorted(ROOT.glob(pattern))]:
        for command in commands(page):
            by_module = re.findall(r'-m zeroplay_jax\.([\w.]+)', command)
            assert not {*by_module} & {*NAMES.values()}, (page, command)
            # What another command writes in the place of flags is checked where that one is tested.
            plain = as_module(re.sub(r'\$\([^)]*\)|\$\w+', '', command))
            for python, module, words in re.findall(r'(\S*python) -m ([\w.]+)([^|&>]*)', plain):
                is_ours = module.startswith(('zeroplay_jax', 'benchmarks', 'tools'))
                if is_ours:
                    assert f'{python} ' == PYTHON, (page, command)
                    yield page, module, shlex.split(words)
    papers = tomllib.loads((ROOT / 'docs' / 'papers.toml').read_text(encoding='utf-8'))
    for place, row in papers.items():
        if 'command' in row:
            _, _, module, *words = shlex.split(as_module(row['command']))
            yield place, module, words


def test_commands_of_pages_have_flags_and_fields_that_exist(helps):
    checked = 0
    for page, module, words in commands_of_pages():
        if has_left(module.replace('.', '/')) or says_so(helps[module][1]):
            continue
        fields = [word for word in words if word.startswith('--config.')]
        names = {word.partition('=')[0] for word in words if word.startswith('--')}
        for name in names - {field.partition('=')[0] for field in fields}:
            assert name in helps[module][1].replace('--[no]', '--'), (page, module, name)
        # That of a page's own recipe is played by tests/world/test_readme.py.
        if fields and '--config.recipe=' not in ' '.join(fields):
            (config,) = [word for word in words if word.startswith('--config=')] or ['']
            command_line.load(config.removeprefix('--config=') or 'configs/quickstart.py', fields)
        checked += 1
    assert checked > 60


def test_the_package_lists_its_commands_and_each_has_a_help(helps, capsys):
    assert package.main([]) == 0
    for command, line in zip(NAMES, capsys.readouterr().out.splitlines()):
        assert line.startswith(f'zeroplay {command} ') and line.endswith('.')
    runnable = {name.removeprefix('zeroplay_jax.') for name in COMMANDS}
    # What trains the checkpoints that come with the package is for its developers.
    of_users = {name for name in runnable if re.fullmatch(r'\w+|retrieval\.\w+|mini\.sample', name)}
    of_extras = {f'extras.{name}' for name, extra in EXTRAS.items() if extra.is_command}
    removed = {f'extras.{name}' for name in REMOVED}
    assert of_users - {'zeroplay_jax'} | of_extras == set(NAMES.values()) - removed
    assert package.main(['evalute']) == 2
    assert 'did you mean evaluate?' in capsys.readouterr().err
    for module, (status, text) in helps.items():
        assert says_so(text) or (status == 0 and 'Traceback' not in text), module


def test_a_printed_command_runs_where_it_is_copied(tmp_path, monkeypatch):
    programs, others = tmp_path / 'bin', tmp_path / 'others'
    monkeypatch.setattr(sys, 'executable', f'{programs}/python')
    monkeypatch.chdir(tmp_path)
    assert to_copy('index') == ['bin/python', '-m', 'zeroplay_jax.retrieval.build']
    # Another project may have a program of this name.
    for folder in (programs, others):
        folder.mkdir()
        (folder / 'zeroplay').touch(mode=0o755)
    for path, program in {others: 'bin/zeroplay', programs: 'zeroplay'}.items():
        monkeypatch.setenv('PATH', str(path))
        assert to_copy('index') == [program, 'index']


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


@pytest.mark.long
@pytest.mark.fault('nov29-C1', 'Ctrl-C at moments after steps, each with a checkpoint')
def test_ctrl_c_while_a_step_is_saved_is_one_line(tmp_path):
    from test_run import SMALL

    words = ['-m', 'zeroplay_jax.main', '--config=configs/quickstart.py', *SMALL]
    words += [f'--workdir={tmp_path}/run', '--config.checkpoint.every=1']
    for moment in range(6):
        steps = count_steps(tmp_path / 'run')
        running = start_interruptible(*words)
        wait_for(lambda steps=steps: count_steps(tmp_path / 'run') > steps, running)
        time.sleep(0.03 * moment)
        running.send_signal(signal.SIGINT)
        # A save that was interrupted half-way took five minutes to end.
        _, err = running.communicate(timeout=120)
        assert running.returncode == 130 and 'Traceback' not in err
        assert 'the same command resumes the run' in err.strip().split('\n')[-1]


@pytest.mark.parametrize(
    ('command', 'module'),
    [
        ('main --config=configs/quickstart.py --workdir=FOLDER/run', 'jax'),
        ('ask Who?', 'ml_collections'),
        ('extras.inputs answers --corpus FOLDER --out FOLDER/out', 'numpy'),
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


def on_a_terminal(code):
    """What a program draws on a terminal of 24 lines and 80 columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, '-c', code]
    drawn = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b''
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # Linux says so when the other end is closed
        os.close(ours)
    assert drawn.wait() == 0, shown.decode()
    return shown.decode()


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else():
    code = """import os, sys, time
from zeroplay_jax.retrieval import progress
progress._LOOK_SECONDS = 0.01
with progress.Bar(9, 'steps', leave=True) as steps, progress.Bar(None, 'rollouts', 'play [1]') as rollouts:
    steps.update(2)
    rollouts.update(5)
    time.sleep(2.2)
    print('a', 'notice', file=sys.stderr)
    print('result')
    if os.isatty(2): os._exit(0)
"""
    assert finish(start_python('-c', code)) == ('result\n', 'a notice\n')
    shown = on_a_terminal(code)
    # The time goes on.
    assert re.search(r'2/9 steps, 0:00:0[1-9]; play \[1\]: 5 rollouts, 0:00:0', shown)
    # Above the bar, which has one line: of two, what a library prints between them would be erased.
    assert '\x1b[2Ka notice\r\n' in shown and '\x1b[1A' not in shown
    # An early end does not lose the cursor, because it is never hidden.
    assert '\x1b[?25' not in shown


def test_where_no_terminal_is_a_line_is_printed_from_time_to_time():
    code = """import time
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.command import quiet
progress._LINE_SECONDS = progress._LOOK_SECONDS = 0.01
with progress.clock('build'), quiet():
    time.sleep(0.1)
with progress.Bar(4, 'steps', initial=1) as bar:
    bar.note = 'reward 0.53'
    for _ in range(2):
        time.sleep(0.5)
        bar.update()
    time.sleep(0.1)
with progress.Bar(5, 'files', shown=False), progress.clock('silent', shown=False):
    time.sleep(0.1)
"""
    _, printed = finish(start_python('-c', code))
    assert printed.startswith('build: 0:00:00\n') and '\x1b' not in printed
    # Messages of libraries are hidden, and what was done before does not count for the speed.
    assert re.search(r'3/4 steps, 0:00:01, 0:00:0\d left, reward 0.53\n', printed)
    assert 'files' not in printed and 'silent' not in printed
