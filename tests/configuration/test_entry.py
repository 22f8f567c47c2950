"""The end of a command: what the user can correct is one line, and a crash keeps its traceback."""

import errno
import logging
import os
import threading

import pytest

from zeroplay_jax.configuration import command_line
from zeroplay_jax.learner import checkpoint


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


@pytest.mark.fault('new-ulimit', 'ulimit -f, lowered while a run saves')
def test_a_checkpoint_beyond_a_limit_of_the_shell_is_one_line():
    text = f'OUT_OF_RANGE: Failed writing: {os.strerror(errno.EFBIG)} [os_error_code=27]'
    error = ValueError(text)
    record = logging.LogRecord(
        'absl', logging.ERROR, '', 0, 'raised', (), (type(error), error, None)
    )
    assert not checkpoint._is_unexpected(record)
    other = ValueError('other')
    record.exc_info = (type(other), other, None)
    assert checkpoint._is_unexpected(record)
    line = command_line._disk_problem(error)
    assert line.startswith('File too large (ulimit -f) while a checkpoint was written')


def test_an_event_loop_that_has_ended_prints_nothing_from_threads_of_libraries(capsys):
    def late(text):
        error = RuntimeError(text)
        command_line._print_unless_late(type(error), error, None)

    for text in ('Event loop is closed', 'another error'):
        thread = threading.Thread(target=late, args=(text,))
        thread.start()
        thread.join()
    assert capsys.readouterr().err == 'RuntimeError: another error\n'
