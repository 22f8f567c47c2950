"""Local copies of a run in a bucket, from which another run begins."""

import shutil

import pytest
from saved_runs import upload

from zeroplay_jax.extras.buckets.copies import local_source
from zeroplay_jax.extras.buckets.workdir import RemoteWorkdir
from zeroplay_jax.learner import checkpoint
from zeroplay_jax.run import branch
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.types import UserError

ADDRESS = 'gs://bucket/old'


@pytest.fixture
def remote(bucket, cache, steps, tmp_path):
    """A run in a bucket with the steps 4 and 6, and 4 as the best of them."""
    here = tmp_path / 'here'
    shutil.copytree(steps / 'checkpoints' / '4', here / 'best' / '4')
    uploaded = RemoteWorkdir(bucket, 'old')
    upload(uploaded, here, steps, 4, 6)
    bucket.write(uploaded.name('run.json'), b'{"config": {}}')
    return uploaded


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
    stored = remote.manifests()[6][f'{folder}/loop/metadata'].object
    remote.bucket.write(remote.name(stored), content[::-1])
    line = 'its checkpoints are damaged: loop/metadata differs from its checksum; name'
    with pytest.raises(UserError, match=line):
        find()
