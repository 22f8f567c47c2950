"""The lease on a run in a bucket: one process has it, and it passes on when that process is gone."""

import json
import os
import subprocess
import sys
import time

import pytest
from memory_bucket import MemoryBucket, outage
from saved_runs import wait_for

from zeroplay_jax.extras.buckets import lease as leases
from zeroplay_jax.extras.buckets.lease import Lease
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.runtime.workdir import WorkdirError

NAME = 'run/lease.json'


def left_behind(bucket, **fields):
    """The object of a process that was killed."""
    holder = {'host': 'tpu-7', 'machine': 'x', 'process': 12} | fields
    bucket.write(NAME, json.dumps(holder).encode())


def test_a_lease_that_is_renewed_is_refused_with_its_holder_and_how_to_break_it(monkeypatch):
    bucket = MemoryBucket()
    first = Lease(bucket, NAME, seconds=0.4)
    monkeypatch.setattr(leases, '_has_ended_here', lambda _: False)
    with pytest.raises(WorkdirError, match=f'in use by process {os.getpid()} on ') as error:
        Lease(bucket, NAME, seconds=0.4)
    assert 'gcloud storage rm gs://bucket/run/lease.json' in str(error.value)
    assert first.renew() and not first.lost
    first.release()
    assert bucket.read(NAME) is None
    Lease(bucket, NAME).release()  # at once


def test_a_lease_that_was_left_behind_is_waited_for_by_ones_own_clock(capsys):
    bucket = MemoryBucket()
    left_behind(bucket)
    started = time.monotonic()
    lease = Lease(bucket, NAME, seconds=0.3)
    assert 0.3 <= time.monotonic() - started < 5
    assert 'waits up to 0 s for the lease of process 12 on tpu-7' in capsys.readouterr().err
    lease.release()


def test_a_process_of_this_machine_that_is_gone_holds_nothing():
    bucket = MemoryBucket()
    ended = subprocess.Popen([sys.executable, '-c', ''])
    ended.wait()
    here = {'host': leases.socket.gethostname(), 'machine': leases._machine()}
    assert here['machine']
    left_behind(bucket, **here, process=ended.pid)
    Lease(bucket, NAME, seconds=1000).release()
    left_behind(bucket, **here, process=os.getppid())
    assert not leases._has_ended_here(bucket.read(NAME)[0])


def test_whoever_loses_the_lease_notices_and_leaves_the_other_one_alone():
    bucket = MemoryBucket()
    lease = Lease(bucket, NAME, seconds=0.2)
    left_behind(bucket)
    wait_for(lambda: lease.lost)
    assert 'was taken by process 12 on tpu-7' in lease.lost and not lease.renew()
    lease.release()
    assert json.loads(bucket.read(NAME)[0])['process'] == 12


def test_a_renewal_whose_answer_was_lost_is_no_conflict():
    bucket = MemoryBucket()
    lease = Lease(bucket, NAME, seconds=1000)
    # It arrived, and the client sends it again.
    bucket.write(NAME, bucket.read(NAME)[0])
    assert lease.renew() and lease.renew()
    bucket.failures['write'] = outage(1)
    with pytest.raises(leases.Unavailable):
        lease.renew()
    assert lease.renew()
    lease.release()


def test_rights_that_are_taken_away_end_the_run_with_a_line():
    bucket = MemoryBucket()
    lease = Lease(bucket, NAME, seconds=0.1)
    for method in ('write', 'delete'):
        refusal = RetrievalError('gs://bucket/run/lease.json: not allowed')
        bucket.failures[method] = [refusal]
    wait_for(lambda: lease.lost)
    assert lease.lost == 'gs://bucket/run/lease.json: not allowed' and not lease.renew()
    lease.release()


def test_a_process_of_another_container_may_be_alive_though_it_is_not_seen_here(monkeypatch):
    """With the network of the machine, containers have its name."""
    bucket = MemoryBucket()
    readlink = os.readlink
    monkeypatch.setattr(leases.os, 'readlink', lambda path: f'another {readlink(path)}')
    lease = Lease(bucket, NAME)
    monkeypatch.undo()
    assert not leases._has_ended_here(bucket.read(NAME)[0])
    lease.release()
