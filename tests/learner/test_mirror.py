"""Checkpoints in a bucket: what makes a step complete, what is brought down, and what happens to damage and errors."""

import json
import os
import shutil
import threading
import time

import pytest
from memory_bucket import MemoryBucket, outage
from run_records import change_record
from saved_runs import bring_down, names, save, save_checkpoints, wait

from zeroplay_jax.learner.checkpoint import saved_steps
from zeroplay_jax.retrieval.objects import Unavailable
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.remote_workdir import Lease, RemoteWorkdir
from zeroplay_jax.training.mirror import Mirror
from zeroplay_jax.types import UserError


@pytest.fixture
def remote():
    return RemoteWorkdir(MemoryBucket(), 'runs/a')


@pytest.fixture(scope='module')
def steps(tmp_path_factory):
    """A local folder with the checkpoints 2, 4 and 6, which tests link into their own."""
    return save_checkpoints(tmp_path_factory.mktemp('steps'))


def upload(remote, folder, keep=2, seconds=30.0):
    """Uploads the newest step as a run does at its end."""
    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, folder, lease, remote.manifests(), keep, seconds)
    try:
        wait(mirror)
    finally:
        mirror.close()
        lease.release()


def object_of(remote, step, path):
    return remote.name(remote.manifests()[step][path].object)


def test_a_step_is_complete_last_and_another_machine_gets_it_with_its_logs(remote, steps, tmp_path):
    here, there = tmp_path / 'here', tmp_path / 'there'
    save(steps, here, 2)
    upload(remote, here)
    writes = [name for action, name in remote.bucket.log if action == 'write']
    uploads = [name for name in writes if not name.endswith('lease.json')]
    assert uploads[-1] == 'runs/a/steps/00000002.json'
    first_file = next(i for i, name in enumerate(uploads) if '/checkpoints/' in name)
    assert uploads.index(object_of(remote, 2, 'metrics.jsonl')) < first_file
    assert uploads.index('runs/a/run.json') < first_file
    assert bring_down(remote, there, remote.manifests()) == []
    for path in here.rglob('*'):
        if path.is_file():
            assert (there / path.relative_to(here)).read_bytes() == path.read_bytes()


def test_a_step_without_its_last_object_does_not_exist(remote, steps, tmp_path):
    here, there = tmp_path / 'here', tmp_path / 'there'
    for step in (2, 4):
        save(steps, here, step)
        upload(remote, here)
    remote.delete_manifest(4)
    assert bring_down(remote, there, remote.manifests()) == []
    assert saved_steps(there / 'checkpoints') == [2]
    assert len((there / 'metrics.jsonl').read_text().splitlines()) == 2
    # The machine that has step 4 goes on with it, and uploads it again, without what the first attempt left behind.
    remote.bucket.contents['runs/a/checkpoints/4/odd'] = (b'x', 1)
    assert bring_down(remote, here, remote.manifests()) == []
    upload(remote, here)
    assert list(remote.manifests()) == [2, 4] and 'runs/a/checkpoints/4/odd' not in names(remote)


def test_old_steps_are_removed_with_all_their_objects(remote, steps, tmp_path):
    for step in (2, 4, 6):
        save(steps, tmp_path, step)
        upload(remote, tmp_path)
    assert list(remote.manifests()) == [4, 6]
    assert names(remote, 'checkpoints/6-') and names(remote, 'logs/6-')
    assert not names(remote, 'checkpoints/2-') and not names(remote, 'logs/2-')
    removed = [name for action, name in remote.bucket.log if action == 'delete']
    removed = [name for name in removed if not name.endswith('lease.json')]
    assert removed[0] == 'runs/a/steps/00000002.json'
    assert 'runs/a/run.json' in names(remote)


@pytest.mark.parametrize('kind', ['checkpoint', 'log', 'missing'])
def test_a_damaged_step_gives_the_one_before_with_a_line(remote, steps, tmp_path, kind):
    here = tmp_path / 'here'
    for step in (2, 4):
        save(steps, here, step)
        upload(remote, here)
    file = 'metrics.jsonl' if kind == 'log' else 'checkpoints/4/loop/metadata'
    if kind == 'missing':
        remote.bucket.delete(object_of(remote, 4, file))
    else:
        remote.bucket.damage(object_of(remote, 4, file))
    manifests = remote.manifests()
    (line,) = bring_down(remote, tmp_path / 'there', manifests)
    assert 'checkpoint 4 of gs://bucket/runs/a is damaged' in line and 'resumes from 2' in line
    assert saved_steps(tmp_path / 'there' / 'checkpoints') == [2]
    # It does not take the place of a good one among those that are kept.
    assert list(manifests) == list(remote.manifests()) == [2]
    # The machine that has the step whole still goes on with it.
    assert bring_down(remote, here, remote.manifests()) == []
    remote.bucket.damage(object_of(remote, 2, 'checkpoints/2/loop/metadata'))
    with pytest.raises(UserError, match='all checkpoints are damaged'):
        bring_down(remote, tmp_path / 'third', remote.manifests())


@pytest.mark.parametrize('kind', ['damage', 'outage'])
def test_nothing_is_left_of_a_failed_download(remote, steps, tmp_path, kind):
    here, there = tmp_path / 'here', tmp_path / 'there'
    for step in (2, 4):
        save(steps, here, step)
        upload(remote, here)
    if kind == 'damage':
        remote.bucket.damage(object_of(remote, 4, 'metrics.jsonl'))
        remote.bucket.damage(object_of(remote, 2, 'metrics.jsonl'))
        with pytest.raises(UserError, match='all checkpoints are damaged'):
            bring_down(remote, there, remote.manifests())
    else:
        remote.bucket.failures['download'] = outage(1)
        with pytest.raises(UserError, match='503'):
            bring_down(remote, there, remote.manifests())
    assert not list(there.iterdir())
    # Nor does a machine that was switched off meanwhile upload it.
    (here / '.download').mkdir()
    (here / '.download' / 'config.json').write_text('{}')
    (here / 'summary.json').write_text('{}')
    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, here, lease, remote.manifests(), 2, 30.0)
    mirror.upload_results()
    mirror.close()
    lease.release()
    assert names(remote, 'summary.json') and not names(remote, '.download')


def test_results_are_collected_while_the_thread_removes_what_it_has_uploaded(
    remote, tmp_path, monkeypatch
):
    (tmp_path / '.upload' / 'checkpoints').mkdir(parents=True)
    (tmp_path / 'policy' / 'solver').mkdir(parents=True)
    (tmp_path / 'policy' / 'solver' / 'config.json').write_text('{}')
    scandir = os.scandir

    def removed(path):
        if '.upload' in str(path):
            raise FileNotFoundError(path)
        return scandir(path)

    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, tmp_path, lease, {}, 2, 30.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, 'scandir', removed)
        mirror.upload_results()
    mirror.close()
    lease.release()
    assert names(remote) == ['runs/a/policy/solver/config.json']


def test_another_machine_knows_that_the_report_was_written(remote, steps, tmp_path):
    here, there = tmp_path / 'here', tmp_path / 'there'
    save(steps, here, 2)
    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, here, lease, {}, 2, 30.0)
    wait(mirror)
    change_record(here, reported=2)
    mirror.upload_results()
    mirror.close()
    lease.release()
    # Also one that has the record as it was at the step.
    there.mkdir()
    (there / 'run.json').write_text('{}')
    assert bring_down(remote, there, remote.manifests()) == []
    assert json.loads((there / 'run.json').read_text()) == {'reported': 2}


def test_damage_in_the_local_folder_is_made_good_from_the_bucket(remote, steps, tmp_path):
    save(steps, tmp_path, 2)
    upload(remote, tmp_path)
    path = tmp_path / 'checkpoints' / '2' / 'loop' / 'metadata'
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b' ')
    (line,) = bring_down(remote, tmp_path, remote.manifests())
    assert line.startswith('checkpoint 2 is damaged: loop/metadata differs')
    assert path.read_bytes() == content
    assert (tmp_path / 'damaged' / '2' / 'loop' / 'metadata').exists()


def test_a_step_that_another_machine_ran_anew_replaces_the_local_one(remote, steps, tmp_path):
    here, there = tmp_path / 'here', tmp_path / 'there'
    save(steps, here, 2)
    upload(remote, here)
    bring_down(remote, there, remote.manifests())
    seal = there / 'checkpoints' / '2' / 'checksums.sha256'
    seal.write_text(seal.read_text().replace('a', 'b'))
    bring_down(remote, there, remote.manifests())
    assert seal.read_bytes() == (here / 'checkpoints' / '2' / 'checksums.sha256').read_bytes()


def test_errors_that_pass_are_tried_again_and_others_end_the_run(
    remote, steps, tmp_path, monkeypatch
):
    monkeypatch.setattr('zeroplay_jax.training.uploads._FIRST_PAUSE', 0.01)
    save(steps, tmp_path, 2)
    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, tmp_path, lease, {}, 2, 30.0)
    remote.bucket.errors += outage(3)
    wait(mirror)
    assert mirror.newest == 2
    for error, text in (
        (outage(1000), 'tried for 0 s, config.bucket.seconds'),
        ([RetrievalError('gs://bucket/x: not allowed')] * 9, 'not allowed'),
    ):
        failing = Mirror(remote, tmp_path, lease, {}, 2, 0.05)
        remote.bucket.errors += error
        with pytest.raises(UserError, match=text) as caught:
            while True:
                wait(failing)
                time.sleep(0.01)
        assert f'everything is saved in {tmp_path}' in str(caught.value)
        assert '\n' not in str(caught.value)
        remote.bucket.errors.clear()
        failing.close()
    mirror.close()
    lease.release()


@pytest.mark.parametrize('is_removed', [False, True])
def test_a_step_whose_last_write_arrived_but_seemed_to_fail_stays_whole(
    remote, steps, tmp_path, monkeypatch, is_removed
):
    """Meanwhile the run logs the next step, or saves it and removes this one."""
    monkeypatch.setattr('zeroplay_jax.training.uploads._FIRST_PAUSE', 0.01)
    here = tmp_path / 'here'
    save(steps, here, 2)
    write = remote.bucket.write
    copies = []

    def arrive_and_fail(name, content, generation=None):
        is_last = name.startswith(remote.name('steps/'))
        if is_last and copies:
            # What another machine gets before the next attempt is complete.
            bring_down(remote, copies[0], {2: remote.manifests()[2]})
        generation = write(name, content, generation)
        if is_last and not copies:
            copies.append(tmp_path / 'copy')
            with (here / 'metrics.jsonl').open('a') as file:
                file.write('{"step": 2}\n')
            if is_removed:
                save(steps, here, 4)
                shutil.rmtree(here / 'checkpoints' / '2')
            raise Unavailable(f'gs://bucket/{name}: 503')
        return generation

    remote.bucket.write = arrive_and_fail
    upload(remote, here)
    assert saved_steps(copies[0] / 'checkpoints') == [2]
    assert len((copies[0] / 'metrics.jsonl').read_text().splitlines()) == 2
    for step, manifest in remote.manifests().items():
        assert bring_down(remote, tmp_path / str(step), {step: manifest}) == []
    assert list(remote.manifests()) == ([2, 4] if is_removed else [2])


def test_the_time_for_further_attempts_begins_when_nothing_arrives_any_more(
    remote, steps, tmp_path, monkeypatch
):
    monkeypatch.setattr('zeroplay_jax.training.uploads._FIRST_PAUSE', 0.01)
    monkeypatch.setattr('zeroplay_jax.training.uploads.THREADS', 1)
    save(steps, tmp_path, 2)
    upload_object = remote.bucket.upload
    names_tried = []

    def slow_upload(name, path):
        time.sleep(0.03)
        # Each object fails once.
        if name not in names_tried:
            names_tried.append(name)
            raise Unavailable('gs://bucket/x: 503')
        upload_object(name, path)

    remote.bucket.upload = slow_upload
    upload(remote, tmp_path, seconds=0.1)
    assert len(names_tried) > 5 and list(remote.manifests()) == [2]


def test_a_newest_step_without_one_of_its_files_ends_the_run(remote, steps, tmp_path):
    save(steps, tmp_path, 2)
    (tmp_path / 'checkpoints' / '2' / 'loop' / 'metadata').unlink()
    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, tmp_path, lease, {}, 2, 30.0)
    deadline = time.monotonic() + 5
    with pytest.raises(UserError, match='checkpoints/2 is damaged: .*loop/metadata is missing'):
        while time.monotonic() < deadline:
            mirror.raise_if_failed()
            time.sleep(0.01)
    mirror.close()
    lease.release()


def test_lists_and_deletions_are_tried_again(remote, steps, tmp_path, monkeypatch):
    monkeypatch.setattr('zeroplay_jax.training.uploads._FIRST_PAUSE', 0.01)
    save(steps, tmp_path, 2)
    upload(remote, tmp_path)
    save(steps, tmp_path, 4)
    manifests = remote.manifests()
    lease = Lease(remote.bucket, remote.name('lease.json'))
    remote.bucket.failures = {'list': outage(2), 'delete': outage(2)}
    mirror = Mirror(remote, tmp_path, lease, manifests, 1, 30.0)
    deadline = time.monotonic() + 5
    while 'checkpoints/2-' in str(list(remote.bucket.contents)) and time.monotonic() < deadline:
        time.sleep(0.01)
    mirror.close()
    lease.release()
    assert list(remote.manifests()) == [4] and not names(remote, 'checkpoints/2-')
    assert not any(remote.bucket.failures.values())


def test_a_run_that_lost_its_lease_completes_no_step(remote, steps, tmp_path):
    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, tmp_path, lease, {}, 2, 30.0)
    remote.bucket.write(remote.name('lease.json'), json.dumps({'host': 'b', 'process': 7}).encode())
    save(steps, tmp_path, 2)
    (tmp_path / 'summary.json').write_text('{}')
    with pytest.raises(UserError, match='the lease of this run was taken by process 7 on b'):
        mirror.upload_results()
    assert not names(remote, 'summary.json')
    with pytest.raises(UserError, match='the lease of this run was taken by process 7 on b'):
        wait(mirror)
    mirror.close()
    lease.release()
    assert not remote.manifests()
    assert remote.bucket.read(remote.name('lease.json')) is not None  # that of the other one


@pytest.mark.parametrize('knows', [True, False])
def test_a_process_that_lost_its_lease_leaves_the_files_of_the_next_one_alone(
    remote, steps, tmp_path, knows
):
    """It was cut off while it uploaded; the next process completes the same step."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    save(steps, first, 2)
    save(steps, second, 2)
    (first / 'metrics.jsonl').write_text('another time\n')
    is_back, is_cut_off = threading.Event(), threading.Event()
    uploads = []
    upload_object = remote.bucket.upload

    def cut_off(name, path):
        uploads.append(name)
        if first in path.parents:
            is_cut_off.set()
            is_back.wait(20)
        upload_object(name, path)

    remote.bucket.upload = cut_off
    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, first, lease, {}, 2, 30.0)
    is_cut_off.wait(20)
    remote.bucket.delete(remote.name('lease.json'))  # it expired
    upload(remote, second)
    count = len(uploads)
    remote.bucket.write(remote.name('lease.json'), b'{}')
    if knows:
        lease.renew()
    is_back.set()
    with pytest.raises(UserError, match='was taken by'):
        wait(mirror)
    mirror.close()
    lease.release()
    if knows:
        assert len(uploads) == count
    assert bring_down(remote, tmp_path / 'third', remote.manifests()) == []
    assert (tmp_path / 'third' / 'metrics.jsonl').read_text().startswith('{"step": 0}')


def test_a_step_that_the_run_removes_meanwhile_is_uploaded_whole(remote, steps, tmp_path):
    """The upload of a large checkpoint may take longer than two further steps."""
    save(steps, tmp_path, 2)
    release = threading.Event()
    upload_object = remote.bucket.upload

    def slow_upload(name, path):
        release.wait(20)
        upload_object(name, path)

    remote.bucket.upload = slow_upload
    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, tmp_path, lease, {}, 2, 30.0)
    while not (tmp_path / '.upload' / 'metrics.jsonl').exists():
        time.sleep(0.01)
    time.sleep(0.1)
    save(steps, tmp_path, 4)
    for path in sorted((tmp_path / 'checkpoints' / '2').rglob('*'), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    release.set()
    wait(mirror)
    mirror.close()
    lease.release()
    assert list(remote.manifests()) == [2, 4]
    bring_down(remote, tmp_path / 'there', {2: remote.manifests()[2]})
    assert saved_steps(tmp_path / 'there' / 'checkpoints') == [2]
