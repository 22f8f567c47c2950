"""The end of a command: what the user can correct is one line, and a crash keeps its traceback."""

import errno
import os

import pytest

from zeroplay_jax.configuration import command_line


def ended(monkeypatch, capsys, error):
    """(exit status, lines on stderr) of a command that raises."""

    def run(main, flags_parser):
        raise error

    monkeypatch.setattr(command_line.app, 'run', run)
    with pytest.raises(SystemExit) as stopped:
        command_line.run_command('zeroplay_jax', lambda argv: None)
    return stopped.value.code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    'number', [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EMFILE]
)
@pytest.mark.parametrize('wrapped', [False, True])
def test_a_disk_that_takes_no_more_is_one_line(monkeypatch, capsys, number, wrapped):
    error = OSError(number, os.strerror(number), 'runs/a/metrics.jsonl')
    if wrapped:
        cause = error
        error = RuntimeError('a library could not save')
        error.__cause__ = cause
    status, lines = ended(monkeypatch, capsys, error)
    assert status == 2 and len(lines) == 1
    assert lines[0].startswith(f'zeroplay_jax: runs/a/metrics.jsonl: {os.strerror(number)}')
    assert '; correct this' in lines[0]


def test_any_other_failure_keeps_its_traceback(monkeypatch, capsys):
    status, lines = ended(monkeypatch, capsys, OSError(errno.EIO, 'Input/output error'))
    assert status == 1 and lines[0].startswith('Traceback')
