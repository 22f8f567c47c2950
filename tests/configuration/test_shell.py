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


@pytest.mark.parametrize(
    ('redirection', 'gone'),
    [
        ('| head -1', 'standard output'),
        ('2> >(head -1) >&1', 'standard error'),
        ('2>&1 | head -1', ''),
        ('<&- >&- 2>&-', ''),
    ],
)
def test_a_command_outlives_the_readers_of_its_output(tmp_path, redirection, gone):
    status, lines, result = shell(tmp_path, WRITES, redirection)
    assert (status, result) == (0, 'complete')
    expected = [f'zeroplay_jax: {gone} has no reader any more; the command continues without it']
    assert lines == (expected if gone else [])


def test_a_command_that_prints_ends_silently_with_its_reader():
    script = f'set -o pipefail; {sys.executable} -m zeroplay_jax.main --help | true'
    done = subprocess.run(['bash', '-c', script], cwd=ROOT, timeout=60, **PIPES)
    assert (done.returncode, done.stdout + done.stderr) == (141, '')


LIMITED = """
def main(argv):
    import resource
    command_line.check_limits()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 128
command_line.app.run = lambda main, flags_parser: main([])
command_line.run_command('zeroplay_jax', main)
"""


@pytest.mark.parametrize(
    ('limit', 'status', 'begins'),
    [
        ('ulimit -n 24', 2, 'zeroplay_jax: the shell allows 24 open files'),
        ('ulimit -f 100', 2, 'zeroplay_jax: the shell allows files of 102400 bytes'),
        ('ulimit -Sn 24', 0, ''),
    ],
)
def test_limits_of_the_shell_are_one_line(tmp_path, limit, status, begins):
    ended, lines, _ = shell(tmp_path, LIMITED, before=limit)
    assert ended == status and len(lines) <= 1 and ''.join(lines).startswith(begins)
