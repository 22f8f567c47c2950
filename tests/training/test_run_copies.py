"""Local copies of a run in a bucket, from which another run begins."""

import hashlib
import pathlib

import pytest
from memory_bucket import MemoryBucket
from saved_runs import save_checkpoints

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.retrieval import objects
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.remote_workdir import (
    RemoteFile,
    RemoteWorkdir,
    StepRemoved,
    local_source,
    newest_step,
)
from zeroplay_jax.training import branch
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
        remote.write_manifest(step, manifest)
    return remote


def test_a_step_is_copied_by_its_number_also_if_there_is_a_newer_one(remote):
    assert newest_step(ADDRESS) == newest_step(f'{ADDRESS}/best') == 6
    for step, other in ((4, 6), (6, 4)):
        folder = pathlib.Path(local_source(ADDRESS, step)) / 'checkpoints'
        assert (folder / str(step)).is_dir() and not (folder / str(other)).exists()
    remote.delete_manifest(4)
    with pytest.raises(StepRemoved, match=f'{ADDRESS}: step 4 was removed'):
        local_source(ADDRESS, 4)
    with pytest.raises(UserError, match='gs://bucket/none: holds no run that has saved a step'):
        newest_step('gs://bucket/none')


@pytest.mark.parametrize('folder', ['checkpoints/6', 'best/4'])
def test_a_damaged_copy_is_downloaded_again_and_a_damaged_step_is_refused(remote, tmp_path, folder):
    address = f'{ADDRESS}/best' if folder == 'best/4' else ADDRESS

    def find():
        return branch.find(Hosts(), tmp_path / 'new', address, is_resumed=False)

    source = find()
    file = source.folder / 'loop' / 'metadata'
    # Of the same size, with a mark that says that it is the object of the bucket.
    content = file.read_bytes()
    file.write_bytes(content[::-1])
    assert find() == source and checkpoint.find_damage(source.folder) == ''
    file.write_bytes(content[::-1])
    remote.bucket.write(remote.name(f'{folder}/loop/metadata'), content[::-1])
    line = (
        f'--from={address}: was downloaded again. .*: loop/metadata differs from its checksum; name'
    )
    with pytest.raises(UserError, match=line):
        find()
