"""Output streams whose reader is gone or that were closed, and limits of the shell."""

import os
import subprocess
import sys

import pytest
from config_checks import ROOT
from python_process import PIPES

PROLOGUE = """import os, sys
from zeroplay_jax.configuration import command_line
from zeroplay_jax.runtime import signals
"""
# Stands for a run: it writes more than a pipe holds to both streams, then a file.
WRITES = """
def main(argv):
    for stream in (sys.stdout, sys.stderr):
        for _ in range(2000):
            print('a line of a run' * 10, file=stream)
    open(os.environ['RESULT'], 'w').write('complete')
command_line.app.run = lambda main, flags_parser: main([])
command_line.run_command('zeroplay_jax', main)
"""


def shell(tmp_path, code, redirection='', before='true'):
    """(exit status, lines of the output but those of a run, the result) of a program that a shell starts."""
    script, result = tmp_path / 'run.py', tmp_path / 'result'
    script.write_text(PROLOGUE + code)
    command = f'{before}; set -o pipefail; {sys.executable} -B {script} {redirection}'
    environment = os.environ | {'RESULT': str(result), 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(['bash', '-c', command], cwd=ROOT, env=environment, timeout=60, **PIPES)
    lines = (done.stdout + done.stderr).splitlines()
    text = result.read_text() if result.exists() else ''
    return done.returncode, [line for line in lines if 'a line of a run' not in line], text


def sent(shell_text, line, key='new-pipe'):
    """A case that the table of faults shows by what the shell was given."""
    return pytest.param(shell_text, line, marks=pytest.mark.fault(key, shell_text))


@pytest.mark.parametrize(
    ('redirection', 'gone'),
    [
        sent('| head -1', 'standard output'),
        sent('2> >(head -1) >&1', 'standard error'),
        sent('2>&1 | head -1', ''),
        sent('>&-', ''),
        sent('2>&-', ''),
        sent('<&- >&- 2>&-', ''),
    ],
)
def test_a_command_outlives_the_readers_of_its_output(tmp_path, redirection, gone):
    status, lines, result = shell(tmp_path, WRITES, redirection)
    assert (status, result) == (0, 'complete')
    expected = [f'zeroplay_jax: {gone} has no reader any more; the command continues without it']
    assert lines == (expected if gone else [])


@pytest.mark.parametrize(
    ('command', '_'),
    [
        sent('-m zeroplay_jax | true', ''),
        sent('-m zeroplay_jax.extras.figures list | true', ''),
        sent('-m zeroplay_jax.main --help | true', ''),
        sent('-mzeroplay_jax.extras.figures list | true', ''),
        sent('-c "import zeroplay_jax.__main__ as z; z.main()" | true', ''),
    ],
)
def test_a_command_that_prints_ends_silently_with_its_reader(command, _):
    script = f'set -o pipefail; {sys.executable} {command}'
    done = subprocess.run(['bash', '-c', script], cwd=ROOT, timeout=60, **PIPES)
    assert (done.returncode, done.stdout + done.stderr) == (141, '')


def test_a_package_that_imports_this_one_is_not_cut_off(tmp_path):
    (tmp_path / 'package').mkdir()
    (tmp_path / 'package' / '__init__.py').write_text('import zeroplay_jax\n')
    code = "import sys\ntry:\n    print('line', flush=True)\nfinally:\n    open('ended', 'w')\n"
    (tmp_path / 'package' / 'program.py').write_text(code)
    script = f'set -o pipefail; (sleep 1; {sys.executable} -m package.program zeroplay_jax/mini/base) | true'
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    subprocess.run(['bash', '-c', script], cwd=tmp_path, env=environment, timeout=60, **PIPES)
    assert (tmp_path / 'ended').exists()


@pytest.mark.fault('new-pipe', 'python -u into a pipe')
def test_an_unbuffered_stream_stays_so():
    code = (
        'import os; from zeroplay_jax.runtime import signals; signals.outlive_readers(); '
        'print("at once", end=""); os._exit(0)'
    )
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'}
    for flags, expected in (['-u'], b'at once'), ([], b''):
        command = [sys.executable, *flags, '-c', code]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        assert done.stdout == expected


@pytest.mark.fault('new-pipe', 'python -m … 2>&-')
def test_a_command_begins_without_standard_error():
    """The package itself is imported first, which prepares the line of Ctrl-C."""
    command = f'{sys.executable} -m zeroplay_jax.main --config=nowhere.py 2>&-'
    done = subprocess.run(['bash', '-c', command], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 2


def test_no_file_of_a_run_gets_the_number_of_a_closed_stream(tmp_path):
    code = """
signals.open_closed()
with open(os.environ['RESULT'], 'w') as file:
    assert file.fileno() > 2
    os.write(2, b'a message of a library')
    print('a message', file=sys.stderr)
    file.write('complete')
"""
    assert shell(tmp_path, code, '<&- >&- 2>&-')[::2] == (0, 'complete')


@pytest.mark.parametrize(
    ('limit', 'begins'),
    [
        sent('ulimit -n 24', 'the shell allows 24 open files', 'new-ulimit'),
        sent('ulimit -f 100', 'the shell allows files of 102400 bytes', 'new-ulimit'),
        sent('ulimit -Sn 24', '', 'new-ulimit'),
    ],
)
def test_limits_of_the_shell_are_one_line_before_anything_is_loaded(tmp_path, limit, begins):
    status, lines, _ = shell(tmp_path, LIMITED, before=limit)
    if begins:
        (line,) = lines
        assert status == 2 and line.startswith(f'zeroplay_jax: {begins}')
    else:
        assert (status, lines) == (0, [])


LIMITED = """
def main(argv):
    import resource
    command_line.check_limits()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 128
command_line.app.run = lambda main, flags_parser: main([])
command_line.run_command('zeroplay_jax', main)
"""
