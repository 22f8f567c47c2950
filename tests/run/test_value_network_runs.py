"""Runs with a value network (PPO): what they log, another run that goes on, and two processes."""

import re

import host_processes
import killed_runs
import pytest
import run_library
from run_files import final_states, lines, without_clock

from zeroplay_jax.learner.checkpoint import VALUE_NETWORK_PREFIX
from zeroplay_jax.run import branch

NETWORK = VALUE_NETWORK_PREFIX + 'solver'


@pytest.fixture
def whole(tmp_path_factory):
    return run_library.whole('ppo', tmp_path_factory)


def test_the_value_network_is_no_policy(whole):
    arrays, _ = final_states(whole)
    assert set(arrays) == {'solver', NETWORK}
    assert branch.policy_names(branch.newest_checkpoint(whole)) == ['solver']
    assert [path.name for path in (whole / 'policy').iterdir()] == ['solver']


def test_a_run_from_one_without_a_value_network_begins_it_anew(
    tmp_path, tmp_path_factory, monkeypatch
):
    source = str(run_library.whole('dspo', tmp_path_factory))
    workdir = tmp_path / 'next'
    killed_runs.run_until(None, monkeypatch, run_library.config_of('ppo', workdir), workdir, source)
    arrays, _ = final_states(workdir)
    # With an output of 0.
    assert not arrays[NETWORK]['params']['value']['kernel'].any()


def test_steps_log_values_and_rollouts_have_no_advantage_of_their_own(whole):
    rows = [row for row in lines(whole, 'trajectories.jsonl') if row['phase'] == 'solver']
    assert rows and all(row['advantage'] is None for row in rows if row['drop'] is None)
    solver = [record for record in lines(whole) if record['phase'] == 'solver']
    assert len(solver) == 3
    assert all(line['solver/value_network/gradient_norm'] > 0 for line in solver)
    values = [line['solver/value_network/value'] for line in solver]
    assert values[0] == 0 != values[-1]
    absent = {'informative_share', 'singleton_groups', 'group_size'}
    names = {name.split('/')[-1] for record in lines(whole) for name in record}
    assert not names & absent


@pytest.mark.long
def test_two_processes_learn_what_one_learns(tmp_path, monkeypatch):
    changes = ['solver.batch=4', 'solver.samples=2', 'inputs.world_questions=16', 'eval.hops=(1,)']
    changes += ['value_network.learning_rate=1e-3', 'solver.learning_rate=1e-3']
    command = ['--config=configs/ablations.py:dspo/search_r1_ppo:mini']
    ssp_alone = re.compile('recipe|advantage|proposer|ssp|judge|reader')
    command += [flag for flag in host_processes.RUN[1:] if not ssp_alone.search(flag)]
    monkeypatch.setattr(
        host_processes, 'RUN', command + [f'--config.{change}' for change in changes]
    )
    records = {}
    for count in (1, 2):
        workdir = tmp_path / str(count)
        host_processes.finish(host_processes.play(workdir, count))
        records[count] = without_clock(lines(workdir))
    rollouts = [(tmp_path / name / 'trajectories.jsonl').read_text() for name in '12']
    assert rollouts[0] == rollouts[1]
    for one, two in zip(records[1], records[2], strict=True):
        for name, value in one.items():
            if not isinstance(value, str):
                assert two[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert records[1][-2]['solver/value_network/value'] != 0
