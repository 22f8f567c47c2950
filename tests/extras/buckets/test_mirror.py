"""Checkpoints in a bucket: what makes a step complete, what is brought down, and what happens to damage and errors."""

import shutil
import threading

import pytest
from memory_bucket import outage
from saved_runs import names, save, upload, uploading, wait, wait_for

from zeroplay_jax.extras.buckets.objects import Unavailable
from zeroplay_jax.extras.buckets.run import bring_down
from zeroplay_jax.learner.checkpoint import saved_steps
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.types import UserError


@pytest.fixture
def here(tmp_path):
    return tmp_path / 'here'


@pytest.fixture
def there(tmp_path):
    """The folder of another machine."""
    return tmp_path / 'there'


def object_of(remote, step, path):
    return remote.name(remote.manifests()[step][path].object)


def bring_all(remote, folder):
    """Brings down what is in the bucket; returns the lines about damage."""
    return bring_down(Hosts(), remote, folder, remote.manifests())


def count_metrics(folder):
    return len((folder / 'metrics.jsonl').read_text().splitlines())


def test_a_step_is_complete_last_and_another_machine_gets_it_with_its_logs(
    remote, steps, here, there
):
    upload(remote, here, steps, 2)
    writes = [name for action, name in remote.bucket.log if action == 'write']
    uploads = [name for name in writes if not name.endswith('lease.json')]
    assert uploads[-1] == 'runs/a/steps/00000002.json'
    first_file = next(i for i, name in enumerate(uploads) if '/checkpoints/' in name)
    assert uploads.index(object_of(remote, 2, 'metrics.jsonl')) < first_file
    assert uploads.index('runs/a/run.json') < first_file
    assert bring_all(remote, there) == []
    for path in here.rglob('*'):
        if path.is_file():
            assert (there / path.relative_to(here)).read_bytes() == path.read_bytes()


def test_a_step_without_its_last_object_does_not_exist(remote, steps, here, there):
    upload(remote, here, steps, 2, 4)
    remote.bucket.delete(remote.manifest_name(4))
    assert bring_all(remote, there) == []
    assert saved_steps(there / 'checkpoints') == [2] and count_metrics(there) == 2
    # The machine that has step 4 goes on with it, and uploads it again, without what the first attempt left behind.
    remote.bucket.contents['runs/a/checkpoints/4/odd'] = (b'x', 1)
    assert bring_all(remote, here) == []
    upload(remote, here)
    assert list(remote.manifests()) == [2, 4] and 'runs/a/checkpoints/4/odd' not in names(remote)


def test_old_steps_are_removed_with_all_their_objects(remote, steps, here):
    upload(remote, here, steps, 2, 4, 6)
    assert list(remote.manifests()) == [4, 6]
    assert names(remote, 'checkpoints/6-') and names(remote, 'logs/6-')
    assert not names(remote, 'checkpoints/2-') and not names(remote, 'logs/2-')
    removed = [name for action, name in remote.bucket.log if action == 'delete']
    removed = [name for name in removed if not name.endswith('lease.json')]
    assert removed[0] == 'runs/a/steps/00000002.json'
    assert 'runs/a/run.json' in names(remote)


@pytest.mark.parametrize('kind', ['checkpoint', 'log', 'missing'])
def test_a_damaged_step_gives_the_one_before_with_a_line(
    remote, steps, here, there, tmp_path, kind
):
    upload(remote, here, steps, 2, 4)
    file = 'metrics.jsonl' if kind == 'log' else 'checkpoints/4/loop/metadata'
    spoil = remote.bucket.delete if kind == 'missing' else remote.bucket.damage
    spoil(object_of(remote, 4, file))
    manifests = remote.manifests()
    (line,) = bring_down(Hosts(), remote, there, manifests)
    assert 'checkpoint 4 of gs://bucket/runs/a is damaged' in line and 'resumes from 2' in line
    assert saved_steps(there / 'checkpoints') == [2]
    # It does not take the place of a good one among those that are kept.
    assert list(manifests) == list(remote.manifests()) == [2]
    # The machine that has the step whole still goes on with it.
    assert bring_all(remote, here) == []
    remote.bucket.damage(object_of(remote, 2, 'checkpoints/2/loop/metadata'))
    with pytest.raises(UserError, match='all checkpoints are damaged'):
        bring_all(remote, tmp_path / 'third')


@pytest.mark.parametrize('kind', ['damage', 'outage'])
def test_nothing_is_left_of_a_failed_download(remote, steps, here, there, kind):
    upload(remote, here, steps, 2, 4)
    if kind == 'damage':
        for step in (2, 4):
            remote.bucket.damage(object_of(remote, step, 'metrics.jsonl'))
    else:
        remote.bucket.failures['download'] = outage(1)
    with pytest.raises(UserError):
        bring_all(remote, there)
    assert not list(there.iterdir())


def test_policies_of_iterations_come_with_steps_and_those_of_an_earlier_end_leave(
    remote, steps, here
):
    for name in ('iteration1', 'policy'):
        for policy in ('solver', '.solver.draft'):
            (here / name / policy).mkdir(parents=True)
            (here / name / policy / 'config.json').write_text('{}')
    with uploading(remote, here) as mirror:
        mirror.upload_results()
        assert names(remote, 'p') == ['runs/a/policy/solver/config.json']
        save(steps, here, 2)
        wait(mirror)
        assert names(remote, 'i') == ['runs/a/iteration1/solver/config.json']
        assert not names(remote, 'p')


def test_damage_in_the_local_folder_is_made_good_from_the_bucket(remote, steps, here):
    upload(remote, here, steps, 2)
    path = here / 'checkpoints' / '2' / 'loop' / 'metadata'
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b' ')
    (line,) = bring_all(remote, here)
    assert line.startswith('checkpoint 2 is damaged: loop/metadata differs')
    assert path.read_bytes() == content
    assert (here / 'damaged' / '2' / 'loop' / 'metadata').exists()


def test_a_step_that_another_machine_ran_anew_replaces_the_local_one(remote, steps, here, there):
    upload(remote, here, steps, 2)
    bring_all(remote, there)
    seal = there / 'checkpoints' / '2' / 'checksums.sha256'
    seal.write_text(seal.read_text().replace('a', 'b'))
    bring_all(remote, there)
    assert seal.read_bytes() == (here / 'checkpoints' / '2' / 'checksums.sha256').read_bytes()


def test_errors_that_pass_are_tried_again_and_others_end_the_run(remote, steps, here):
    save(steps, here, 2)
    with uploading(remote, here, keep=1) as mirror:
        remote.bucket.failures = {'write': outage(3)}
        wait(mirror)
        remote.bucket.failures = {'list': outage(2), 'delete': outage(2)}
        save(steps, here, 4)
        wait_for(lambda: 'checkpoints/2-' not in str(list(remote.bucket.contents)))
        assert list(remote.manifests()) == [4] and not any(remote.bucket.failures.values())
    refused = [RetrievalError('gs://bucket/x: not allowed')] * 9
    expected = {'tried for 0 s, config.bucket.seconds': outage(1000), 'not allowed': refused}
    for text, errors in expected.items():
        remote.bucket.delete(remote.manifest_name(4))
        with uploading(remote, here, seconds=0.05) as failing:
            remote.bucket.failures['write'] = errors
            with pytest.raises(UserError, match=text) as caught:
                wait(failing)
            remote.bucket.failures.clear()
        assert f'everything is saved in {here}' in str(caught.value)
        upload(remote, here)


def test_a_step_whose_last_write_arrived_but_seemed_to_fail_stays_whole(
    remote, steps, here, tmp_path
):
    """Meanwhile the run logs, saves the next step and removes this one."""
    write = remote.bucket.write
    copies = []

    def arrive_and_fail(name, content, generation=None):
        is_last = name.startswith(remote.name('steps/'))
        if is_last and copies:
            # What another machine gets before the next attempt is complete.
            bring_down(Hosts(), remote, copies[0], {2: remote.manifests()[2]})
        generation = write(name, content, generation)
        if is_last and not copies:
            copies.append(tmp_path / 'copy')
            with (here / 'metrics.jsonl').open('a') as file:
                file.write('{"step": 2}\n')
            save(steps, here, 4)
            shutil.rmtree(here / 'checkpoints' / '2')
            raise Unavailable(f'gs://bucket/{name}: 503')
        return generation

    remote.bucket.write = arrive_and_fail
    upload(remote, here, steps, 2)
    assert saved_steps(copies[0] / 'checkpoints') == [2] and count_metrics(copies[0]) == 2
    for step, manifest in remote.manifests().items():
        assert bring_down(Hosts(), remote, tmp_path / str(step), {step: manifest}) == []
    assert list(remote.manifests()) == [2, 4]


@pytest.mark.parametrize('knows', [True, False])
def test_a_process_that_lost_its_lease_leaves_the_files_of_the_next_one_alone(
    remote, steps, tmp_path, knows
):
    """It was cut off while it uploaded; the next process completes the same step."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    save(steps, first, 2)
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
    with uploading(remote, first) as mirror:
        is_cut_off.wait(20)
        remote.bucket.delete(remote.name('lease.json'))  # it expired
        upload(remote, second, steps, 2)
        count = len(uploads)
        remote.bucket.write(remote.name('lease.json'), b'{}')
        if knows:
            mirror._lease.renew()
        is_back.set()
        for attempt in (mirror.upload_results, lambda: wait(mirror)):
            with pytest.raises(UserError, match='was taken by'):
                attempt()
    if knows:
        assert len(uploads) == count
    assert bring_all(remote, tmp_path / 'third') == []
    assert (tmp_path / 'third' / 'metrics.jsonl').read_text().startswith('{"step": 0}')


def test_a_newest_step_without_one_of_its_files_ends_the_run(remote, steps, here):
    save(steps, here, 2, lambda saved: (saved / 'loop' / 'metadata').unlink())
    with (
        uploading(remote, here) as mirror,
        pytest.raises(UserError, match='checkpoints/2 is damaged: .*loop/metadata is missing'),
    ):
        wait(mirror)
