"""Whole runs whose steps begin early: killed and continued, or played by two processes, they are the same run."""

import random

import host_processes
import numpy as np
import pytest
import test_hosts
import test_run
from run_files import lines

AHEAD = ['--config.rollout.ahead=1', '--config.checkpoint.every=1']
for role in ('proposer', 'solver'):
    AHEAD += [f'--config.{role}.old_logp=trainer', f'--config.{role}.tis_cap=2.0']

pytestmark = pytest.mark.long


def test_a_kill_changes_nothing(tmp_path, monkeypatch):
    start = test_run.start
    monkeypatch.setattr(test_run, 'start', lambda workdir: start(workdir, *AHEAD))
    test_run.finish(test_run.start(tmp_path / 'whole'))
    records = lines(tmp_path / 'whole')
    # Two steps of the proposer and five of the solver, twice.
    ages = [record['staleness'] for record in records if 'staleness' in record]
    assert ages == 2 * [0, 1, 0, 1, 1, 1, 1]
    test_run._kill_and_compare(tmp_path / 'whole', tmp_path / 'killed', 4, random.Random(0))


def test_two_processes_play_what_one_plays(tmp_path):
    # Proposals of later rounds, and passages that episodes of both steps wait for.
    flags = [*AHEAD, '--config.ssp.fill=resample', '--config.sampler.slots=8']
    for count in (1, 2):
        host_processes.finish(host_processes.play(tmp_path / str(count), count, *flags))
    one, two = tmp_path / '1', tmp_path / '2'
    read, name = test_hosts.read, 'trajectories.jsonl'
    assert read(one, name) == read(two, name) and read(one, 'tasks.jsonl') == read(
        two, 'tasks.jsonl'
    )
    for (_, ours), (_, theirs) in zip(
        test_hosts.moments(two), test_hosts.moments(one), strict=True
    ):
        for (name, a), (_, b) in zip(ours, theirs, strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), name
