"""Runs in a bucket: what is refused in one line, what is copied, and a killed run on another machine."""

import concurrent.futures
import json
import pathlib
import shutil

import pytest
from python_process import run_python
from run_records import write_record
from saved_runs import upload

from zeroplay_jax import report
from zeroplay_jax.configs import quickstart
from zeroplay_jax.configuration import fields
from zeroplay_jax.configuration.command_line import policy_of_iteration
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.extras.buckets import copies, mirror
from zeroplay_jax.extras.buckets.workdir import RemoteWorkdir
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.run import branch, run_folder
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.workdir import WorkdirError
from zeroplay_jax.types import Preempted, UserError

ADDRESS = 'gs://bucket/runs/a'
pytestmark = pytest.mark.usefixtures('cache')


@pytest.fixture
def config():
    config = quickstart.get_config()
    config.progress = False
    return config


def begin(config, action=None):
    """Opens the run as training does, writes its config, and calls `action` with its place."""
    with run_folder.opened(Hosts(), ADDRESS, frozen(config)) as place:
        write_record(place.workdir, config)
        return action(place) if action else place


def test_a_run_that_does_not_begin_leaves_nothing(bucket, config, cache):
    with pytest.raises(UserError), run_folder.opened(Hosts(), ADDRESS, frozen(config)):
        raise UserError('the mesh does not fit')
    assert not bucket.contents and not cache.exists()


def test_another_config_is_refused_by_its_address_before_the_run(bucket, config, cache):
    begin(config, lambda place: place.at_end())
    shutil.rmtree(cache)
    fields.check(ADDRESS, config)
    config.seed = 7
    with pytest.raises(WorkdirError, match=f'workdir {ADDRESS} belongs to another config: seed'):
        fields.check(ADDRESS, config)


def test_a_resumed_run_reads_the_one_that_it_began_from_no_more(bucket, tmp_path, monkeypatch):
    source = downloads.cache_folder() / 'gs' / 'bucket' / 'runs' / 'old'
    origin = {'workdir': downloads.address_of(str(source)), 'step': 2}
    assert origin['workdir'] == 'gs://bucket/runs/old'
    write_record(tmp_path / 'new', {}, origin=origin)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another'))

    def begins(source, is_resumed):
        other = run_folder.other_run(tmp_path / 'new', source, is_resumed)
        if other is not None:
            with branch.found(Hosts(), Place(tmp_path / 'new'), other) as found:
                return found

    # The bucket does not have it.
    assert begins('gs://bucket/runs/old/', is_resumed=True) is None
    with pytest.raises(UserError, match='the run began with --from=gs://bucket/runs/old; give'):
        begins('gs://bucket/runs/other', is_resumed=True)
    with pytest.raises(UserError, match='gs://bucket/runs/old: holds no run'):
        begins('gs://bucket/runs/old', is_resumed=False)


def test_two_commands_do_not_copy_a_run_at_the_same_time(bucket, config):
    begin(config, lambda place: place.at_end())
    root = copies.local_run(ADDRESS).parents[1]
    bucket.write('runs/a/run.json', b'{"x": 1}')
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        with copies.locked(root):
            copied = thread.submit(copies.local_run, ADDRESS)
            with pytest.raises(concurrent.futures.TimeoutError):
                copied.result(0.2)
        assert (copied.result() / 'run.json').read_bytes() == b'{"x": 1}'


def test_sigterm_keeps_its_status_if_the_upload_fails(bucket, config, monkeypatch):
    def fail(self):
        raise UserError('gs://bucket/x: 503')

    def preempt(place):
        raise Preempted('saved')

    monkeypatch.setattr(mirror.Mirror, 'is_pending', fail)
    with pytest.raises(Preempted, match='saved. gs://bucket/x: 503'):
        begin(config, preempt)
    assert 'runs/a/lease.json' not in bucket.contents


def test_reports_and_comparisons_read_a_bucket(bucket, steps, tmp_path):
    here = tmp_path / 'here'
    upload(RemoteWorkdir(bucket, 'runs/a'), here, steps, 2)
    assert report.main([ADDRESS, '--out', str(tmp_path / 'a.html')]) == 0
    copied = copies.local_run(ADDRESS) / 'metrics.jsonl'
    assert copied.read_bytes() == (here / 'metrics.jsonl').read_bytes()


def test_a_folder_of_other_objects_is_refused(bucket, config):
    bucket.write('runs/a/thesis.tex', b'x')
    for start in (begin, lambda config: fields.check(ADDRESS, config)):
        with pytest.raises(UserError, match="holds 'runs/a/thesis.tex' but no id.json"):
            start(config)


def test_the_policy_of_an_iteration_is_fetched_with_the_config_of_the_run(bucket, config):
    bucket.write('runs/a/run.json', json.dumps({'config': config.to_dict()}).encode())
    bucket.write('runs/a/iteration2/solver/config.json', b'{}')
    address = policy_of_iteration(f'{ADDRESS}/@iteration2')
    assert address == f'{ADDRESS}/iteration2/solver'
    shutil.rmtree(downloads.cache_folder())
    folder = pathlib.Path(downloads.fetch(address))
    assert (folder / 'config.json').is_file() and (folder.parents[1] / 'run.json').is_file()
    with pytest.raises(RetrievalError, match='iteration3/solver: no such file or folder'):
        downloads.fetch(policy_of_iteration(f'{ADDRESS}@iteration3'))


@pytest.mark.long
@pytest.mark.parametrize('processes', [1, 2])
def test_killed_runs_are_resumed_by_other_machines_bit_for_bit(emulator, tmp_path, processes):
    """kill -9 and, with one process, SIGTERM, each followed by a start without the local folders."""
    flags = f'--bucket gs://bucket/kills --recipes ssp --kills 1 --folder {tmp_path}/kills'
    flags += f' --sigterms {2 - processes} --processes {processes}'
    done = run_python('-m', 'benchmarks.kills', *flags.split(), timeout=None)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result['problems'] == [] and result['arrays'] > 10 and result['kill'] == 1
