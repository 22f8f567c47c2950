"""A bucket in memory, with checkpoints to upload."""

import pytest
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
