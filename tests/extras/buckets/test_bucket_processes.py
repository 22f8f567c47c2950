"""Runs of two processes whose workdirs are in a bucket; each process has local folders of its own, as on two hosts."""

import json
import os

import pytest
from bucket_emulator import needs_emulator, run_emulator
from host_processes import RUN, finish, join_flags, processes

from benchmarks.kills import Run, differences
from zeroplay_jax.extras.buckets.copies import local_run
from zeroplay_jax.extras.buckets.workdir import RemoteWorkdir
from zeroplay_jax.run import branch

# The last argument is the folder of what this process caches.
START = """
import os, runpy, sys
os.environ['XDG_CACHE_HOME'] = sys.argv.pop()
runpy.run_module('zeroplay_jax.main', run_name='__main__', alter_sys=True)
"""
COMMAND = ['-c', START, *RUN, '--config.progress=False', '--config.checkpoint.every=100']


def train(folder, workdir, *flags):
    """Trains with two processes whose caches are in a folder; returns what they print."""

    def joined(port, index):
        return [*join_flags(port, index), str(folder / f'host_{index}')]

    programs = f'--config.compilation.cache={os.environ["JAX_COMPILATION_CACHE_DIR"]}'
    return finish(processes([*COMMAND, programs, f'--workdir={workdir}', *flags], 2, joined))


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """A bucket with a finished run; what this process caches of it lies in a folder of its own."""
    with run_emulator(monkeypatch) as emulated:
        monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'copies'))
        train(tmp_path / 'old', 'gs://bucket/old')
        yield emulated


@needs_emulator
@pytest.mark.long
def test_two_hosts_continue_a_run_of_a_bucket_as_if_it_had_been_longer(bucket, tmp_path):
    flags = ('--config.schedule.iterations=2',)
    out = train(tmp_path / 'new', 'gs://bucket/old', *flags)
    assert 'resumes at step' in out[0]
    whole = tmp_path / 'whole'
    train(tmp_path / 'whole_hosts', whole, *flags)
    longer = local_run('gs://bucket/old', 'checkpoints')
    assert differences(Run('ssp', whole, 2), Run('ssp', longer, 1)) == []


@needs_emulator
@pytest.mark.long
def test_two_hosts_begin_with_a_run_of_a_bucket_and_need_it_no_more(bucket, tmp_path):
    flags = ('--from=gs://bucket/old', '--config.solver.learning_rate=1e-5')
    out = train(tmp_path / 'new', 'gs://bucket/anew', *flags)
    assert 'begins with checkpoint' in out[0]
    record = json.loads((local_run('gs://bucket/anew') / branch.FILE_NAME).read_text())
    newest = max(RemoteWorkdir.open('gs://bucket/old').manifests())
    assert (record['workdir'], record['step']) == ('gs://bucket/old', newest)
    for entry in bucket.list('old/'):
        bucket.delete(entry.name)
    out = train(tmp_path / 'others', 'gs://bucket/anew', *flags)
    assert 'resumes at step' in out[0]
