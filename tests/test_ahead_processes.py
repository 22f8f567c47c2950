"""Whole runs whose steps begin early: killed and continued, or played by two processes, they are the same run."""

import random

import host_processes
import pytest
import test_hosts
import test_run
from python_process import config_flags
from run_files import lines

AHEAD = config_flags("""
    rollout.ahead=1 checkpoint.every=1 proposer.old_logp=trainer proposer.tis_cap=2.0 solver.old_logp=trainer
    solver.tis_cap=2.0
""")

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
    flags = [*AHEAD, *config_flags('ssp.fill=resample sampler.slots=8')]
    for count in (1, 2):
        host_processes.finish(host_processes.play(tmp_path / str(count), count, *flags))
    one, two = tmp_path / '1', tmp_path / '2'
    for name in ('trajectories.jsonl', 'tasks.jsonl'):
        assert lines(one, name) == lines(two, name)
    test_hosts.check_same_moments(two, one)
