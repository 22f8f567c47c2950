"""The local folder of a run in a bucket: who has it, and what is said if it cannot be used."""

import concurrent.futures
import errno
import socket

import pytest
from memory_bucket import MemoryBucket

from zeroplay_jax.configs import quickstart
from zeroplay_jax.retrieval import objects
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.workdir import WorkdirError
from zeroplay_jax.training import bucket_run
from zeroplay_jax.types import UserError

ADDRESS = 'gs://bucket/runs/a'


@pytest.fixture
def config(tmp_path, monkeypatch):
    memory = MemoryBucket()
    monkeypatch.setattr(objects, 'open_bucket', lambda name: memory)
    monkeypatch.setattr(bucket_run, '_LOCK_SECONDS', 0.01)
    config = quickstart.get_config()
    config.bucket.spool = str(tmp_path / 'spool')
    return config


def begin(config):
    """Opens the run as training does; writes its config, so that it has begun."""
    with bucket_run.opened(Hosts(), ADDRESS, config) as place:
        place.workdir.mkdir(parents=True, exist_ok=True)
        (place.workdir / 'run.json').write_text('{}')
        return place.workdir


def test_a_folder_that_stays_in_use_is_one_line_with_run_folder_and_machine(
    config, monkeypatch, capsys
):
    folder = begin(config).parent
    config.distributed.heartbeat = 1
    monkeypatch.setattr(bucket_run, '_STOP_SECONDS', -0.9)
    place = f'local folder {folder} on {socket.gethostname()}'
    with run_workdir.locked(folder):
        with pytest.raises(WorkdirError, match=f'^{ADDRESS}: another process has the {place}; end'):
            begin(config)
    assert capsys.readouterr().err == f'waits up to 0 s for the process that has the {place}\n'


def test_a_run_waits_for_a_process_of_an_earlier_start_that_ends(config, capsys):
    folder = begin(config).parent
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        with run_workdir.locked(folder):
            run = thread.submit(begin, config)
            with pytest.raises(concurrent.futures.TimeoutError):
                run.result(0.3)
        assert run.result(20).parent == folder
    assert capsys.readouterr().err.startswith('waits up to 110 s for the process that has the')


def test_a_folder_that_cannot_be_created_is_one_line(config, tmp_path):
    config.bucket.spool = str(tmp_path / 'file')
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='cannot be written .* set config.bucket.spool to another'):
        begin(config)


def test_a_file_system_without_locks_is_named_and_nothing_is_left(config, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(run_workdir.fcntl, 'flock', refuse)
    with pytest.raises(UserError, match='cannot be written .*No locks available.*bucket.spool'):
        begin(config)
    workdir = tmp_path / 'runs' / 'a'
    line = f'^workdir {workdir} cannot be locked .No locks available.; choose one on another'
    with pytest.raises(WorkdirError, match=line), run_workdir.claim(workdir, {}):
        pass
    assert not any(tmp_path.iterdir())
