"""Local copies of a run in a bucket, from which another run begins."""

import hashlib

import pytest
from memory_bucket import MemoryBucket
from saved_runs import save_checkpoints

from zeroplay_jax.extras.buckets import objects
from zeroplay_jax.extras.buckets.copies import local_source
from zeroplay_jax.extras.buckets.workdir import (
    RemoteFile,
    RemoteWorkdir,
    manifest_text,
)
from zeroplay_jax.learner import checkpoint
from zeroplay_jax.run import branch
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.types import UserError

ADDRESS = 'gs://bucket/old'


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A run in a bucket with the steps 4 and 6, and 4 as the best of them."""
    bucket = MemoryBucket()
    monkeypatch.setattr(objects, 'open_bucket', lambda name: bucket)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    steps = save_checkpoints(tmp_path / 'steps') / 'checkpoints'
    remote = RemoteWorkdir(bucket, 'old')
    for step in (4, 6):
        manifest = {}
        for path in filter(lambda path: path.is_file(), steps.rglob('*')):
            name = path.relative_to(steps).as_posix()
            for copied, folder in ((step, 'checkpoints'), (4, 'best')):
                if name.startswith(f'{copied}/'):
                    content = path.read_bytes()
                    bucket.write(remote.name(f'{folder}/{name}'), content)
                    digest = hashlib.sha256(content).hexdigest()
                    file = RemoteFile(f'{folder}/{name}', len(content), digest)
                    manifest[f'{folder}/{name}'] = file
        bucket.write(remote.manifest_name(step), manifest_text(step, manifest))
    return remote


def test_the_newest_step_is_copied_alone_and_of_best_the_best_one(remote):
    for newest in (6, 4):
        folder = local_source(ADDRESS) / 'checkpoints'
        assert [path.name for path in folder.iterdir()] == [str(newest)]
        assert (local_source(f'{ADDRESS}/best') / '4').is_dir()
        remote.bucket.delete(remote.manifest_name(newest))
    with pytest.raises(UserError, match='gs://bucket/none: holds no run that has saved a step'):
        local_source('gs://bucket/none')


@pytest.mark.parametrize('folder', ['checkpoints/6', 'best/4'])
def test_a_damaged_copy_is_downloaded_again_and_a_damaged_step_is_refused(remote, tmp_path, folder):
    address = f'{ADDRESS}/best' if folder == 'best/4' else ADDRESS

    def find():
        with branch.found(Hosts(), Place(tmp_path / 'new'), address) as source:
            assert checkpoint.find_damage(source.folder) == ''
            return source

    source = find()
    copy = source.workdir if address != ADDRESS else source.workdir / 'checkpoints'
    file = copy / str(source.step) / 'loop' / 'metadata'
    # Of the same size, with a mark that says that it is the object of the bucket.
    content = file.read_bytes()
    file.write_bytes(content[::-1])
    assert find() == source and not source.folder.exists()
    file.write_bytes(content[::-1])
    remote.bucket.write(remote.name(f'{folder}/loop/metadata'), content[::-1])
    line = 'its checkpoints are damaged: loop/metadata differs from its checksum; name'
    with pytest.raises(UserError, match=line):
        find()
