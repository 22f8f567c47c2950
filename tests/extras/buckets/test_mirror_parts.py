"""Checkpoints of several processes in a bucket, each of which has a folder of its own."""

import json
import time

import pytest
from memory_bucket import outage
from saved_runs import names, save, wait, wait_for

from zeroplay_jax.extras.buckets.lease import Lease
from zeroplay_jax.extras.buckets.mirror import Mirror
from zeroplay_jax.extras.buckets.run import bring_down
from zeroplay_jax.learner import checkpoint
from zeroplay_jax.runtime.hosts import Hosts


def save_part(steps, folder, step):
    """What the second process leaves in its folder: the files of the first one, with other contents, and a shard."""

    def change(saved):
        (saved / 'states' / 'w').mkdir()
        (saved / 'states' / 'w' / '1').write_text(f'shard of step {step}')
        (saved / 'loop' / 'metadata').write_text('{"seconds": 1}')
        checkpoint.write(saved)

    save(steps, folder, step, change)


class Two:
    """The uploads of two processes, whose folders are `a` and `b`; those of the second one begin with `second()`."""

    def __init__(self, remote, tmp_path):
        self.remote, self.a, self.b = remote, tmp_path / 'a', tmp_path / 'a.process_1'
        self.lease = Lease(remote.bucket, remote.name('lease.json'))
        self.first = Mirror(remote, self.a, self.lease.id, self.lease, {}, 2, 30.0, 0, 2)
        self.mirrors = [self.first]

    def second(self):
        self.mirrors.append(Mirror(self.remote, self.b, self.lease.id, None, {}, 2, 30.0, 1, 2))

    def complete(self, *steps):
        """Waits until the first process has nothing to upload, when these steps are complete."""
        wait(self.first)
        assert list(self.remote.manifests()) == list(steps)


@pytest.fixture
def two(remote, tmp_path, monkeypatch):
    monkeypatch.setattr('zeroplay_jax.extras.buckets.mirror._PARTS_SECONDS', 0.02)
    started = Two(remote, tmp_path)
    yield started
    for mirror in reversed(started.mirrors):
        mirror.close()
    started.lease.release()


def test_a_step_is_complete_when_all_processes_have_uploaded_their_files(
    remote, steps, two, tmp_path
):
    save(steps, two.a, 2)
    two.second()
    wait_for(lambda: len(names(remote, 'checkpoints/2-')) == count_files(two.a) - 1)
    time.sleep(0.1)
    assert not object_names(remote, 'checkpoints/2-', 'checksums.sha256')
    # All that the first process has is there except the checksums, which are those of all processes. The other one has
    # not saved the step yet.
    assert two.first.is_pending() and not remote.manifests()
    save_part(steps, two.b, 2)
    wait(two.first)
    manifest = remote.manifests()[2]
    shard = manifest['checkpoints/2/states/w/1'].object
    assert shard.startswith('checkpoints/2-') and shard.endswith('/states/w/1')
    wait_for(lambda: not names(remote, 'parts/'))
    # A copy of the folder is whole, and the state of the loop is that of the first process.
    assert bring_down(Hosts(), remote, tmp_path / 'there', remote.manifests()) == []
    there = tmp_path / 'there' / 'checkpoints' / '2'
    assert checkpoint.find_damage(there) == ''
    assert (there / 'states' / 'w' / '1').read_text() == 'shard of step 2'
    assert json.loads((there / 'loop' / 'metadata').read_text()) == {'cursor': 2}
    # The files of the run are as they were.
    assert checkpoint.find_damage(two.a / 'checkpoints' / '2') == ''


def count_files(folder):
    return sum(path.is_file() for path in (folder / 'checkpoints').rglob('*'))


def object_names(remote, prefix, end):
    return [name for name in names(remote, prefix) if name.endswith(end)]


def test_a_step_that_another_process_has_removed_is_skipped(remote, steps, two):
    save(steps, two.a, 2)
    wait_for(lambda: names(remote, 'parts/'))
    # The second process was slow, and has removed step 2 for step 4 meanwhile.
    save_part(steps, two.b, 4)
    two.second()
    time.sleep(0.2)
    assert not remote.manifests()
    save(steps, two.a, 4)
    two.complete(4)
    assert 'checkpoints/4/states/w/1' in remote.manifests()[4]
    wait_for(lambda: not names(remote, 'checkpoints/2-') and not names(remote, 'parts/'))


def test_outages_of_one_process_delay_the_step(remote, steps, two):
    save_part(steps, two.b, 2)
    save(steps, two.a, 2)
    remote.bucket.failures = {'list': outage(3), 'read': outage(3)}
    two.second()
    two.complete(2)
    assert not any(remote.bucket.failures.values())
