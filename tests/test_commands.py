"""What commands have in common: flags as on the pages, Ctrl-C, progress for people alone."""

import functools
import re
import shlex
import signal
import sys
import time
import tomllib

from page_commands import as_module, commands
from python_process import ROOT, finish, run_python, start, start_python, wait_for
from test_run import SMALL

from zeroplay_jax.commands import to_copy
from zeroplay_jax.configuration import command_line

PAGES = ('*.md', '[b-r]*/*.md', 'examples/*/*.md', 'benchmarks/peers/*.md')


@functools.cache
def help_of(*words):
    """What -h of a command prints."""
    done = run_python('-m', *words, '-h')
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout.replace('--[no]', '--')


def commands_of_pages():
    """(page, module, words) of every command of the package on a page, or in the list of the papers' tables."""
    for page in [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]:
        for command in commands(page):
            # What another command writes in the place of flags is checked where that one is tested.
            plain = as_module(re.sub(r'\$\([^)]*\)|\$\w+', '', command))
            ours = r'python -m ((?:zeroplay_jax|benchmarks|tools)[\w.]*)([^|&>]*)'
            for module, words in re.findall(ours, plain):
                yield page, module, shlex.split(words)
    papers = tomllib.loads((ROOT / 'docs' / 'papers.toml').read_text(encoding='utf-8'))
    for place, row in papers.items():
        if 'command' in row:
            _, _, module, *words = shlex.split(as_module(row['command']))
            yield place, module, words


def test_commands_of_pages_have_flags_and_fields_that_exist():
    checked = 0
    for page, module, words in commands_of_pages():
        # One command has kinds, each with flags of its own.
        kind = words[: module.endswith('.inputs')]
        fields = [word for word in words if word.startswith('--config.')]
        for word in set(words) - set(fields):
            name = word.partition('=')[0]
            is_known = name in help_of(module, *kind)
            assert is_known or not name.startswith('--'), (page, module, name)
        # That of a page's own recipe is played by tests/world/test_readme.py.
        if fields and '--config.recipe=' not in ' '.join(fields):
            (config,) = [word for word in words if word.startswith('--config=')] or ['']
            command_line.load(config.removeprefix('--config=') or 'configs/quickstart.py', fields)
        checked += 1
    assert checked > 60


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


def start_run(folder, *options):
    """A run that ends by Ctrl-C also where the tests themselves are in the background, deaf to it."""
    python = ['env', '--default-signal=INT', sys.executable, *options]
    words = ['-m', 'zeroplay_jax.main', '--config=configs/quickstart.py', *SMALL]
    return start([*python, *words, f'--workdir={folder}/run'])


def interrupted(run):
    """The lines that it says."""
    run.send_signal(signal.SIGINT)
    _, err = finish(run, 130)
    return [line for line in err.splitlines() if line and 'import time:' not in line]


def test_ctrl_c_is_one_line(tmp_path):
    run = start_run(tmp_path)
    wait_for((tmp_path / 'run' / 'run.json').exists, run)
    time.sleep(1)
    said = interrupted(run)
    assert 'Traceback' not in ' '.join(said) and 'the same command resumes the run' in said[-1]


def test_ctrl_c_while_libraries_load_is_one_line(tmp_path):
    # The trace of imports says when.
    run = start_run(tmp_path, '-X', 'importtime')
    while not run.stderr.readline().split('|')[-1].strip().startswith('jax.'):
        assert run.poll() is None
    assert interrupted(run) == ['zeroplay_jax: stopped before it began']


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
