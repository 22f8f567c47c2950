"""Buckets in memory, and of an emulator; checkpoints to upload."""

import pytest
from host_processes import free_port
from memory_bucket import MemoryBucket
from saved_runs import save_checkpoints


@pytest.fixture
def remote(monkeypatch):
    """A workdir in a bucket, where attempts follow each other at once."""
    from zeroplay_jax.extras.buckets.workdir import RemoteWorkdir

    monkeypatch.setattr('zeroplay_jax.extras.buckets.mirror._FIRST_PAUSE', 0.01)
    return RemoteWorkdir(MemoryBucket(), 'runs/a')


@pytest.fixture(scope='module')
def steps(tmp_path_factory):
    """A local folder with the checkpoints 2, 4 and 6, which tests link into their own."""
    return save_checkpoints(tmp_path_factory.mktemp('steps'))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of local copies, one for each test."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache' / 'zeroplay_jax'


@pytest.fixture
def bucket(monkeypatch):
    """The only bucket there is, in memory."""
    memory = MemoryBucket()
    monkeypatch.setattr('zeroplay_jax.extras.buckets.objects.open_bucket', lambda name: memory)
    return memory


@pytest.fixture
def emulator(monkeypatch):
    """The empty bucket of an emulator of Google Cloud Storage, also for commands that are started."""
    pytest.importorskip('google.cloud.storage')
    emulation = pytest.importorskip('gcp_storage_emulator.server')
    from zeroplay_jax.extras.buckets import objects

    port = free_port()
    server = emulation.create_server('localhost', port, in_memory=True, default_bucket='bucket')
    server.start()
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://localhost:{port}')
    yield objects.open_bucket('bucket')
    # Its thread is no daemon: pytest would wait for it at the end.
    server.stop()
