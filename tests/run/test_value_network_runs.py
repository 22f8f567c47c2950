"""Runs with a value network (PPO): what they log, and another run that goes on."""

import killed_runs
import pytest
import run_library
from run_files import final_states, lines

from zeroplay_jax.learner.checkpoint import VALUE_NETWORK_PREFIX
from zeroplay_jax.run import branch

NETWORK = VALUE_NETWORK_PREFIX + 'solver'


@pytest.fixture
def whole(tmp_path_factory):
    return run_library.whole('ppo', tmp_path_factory)


def test_the_value_network_is_no_policy_and_learns(whole):
    assert branch.policy_names(branch.newest_checkpoint(whole)) == ['solver']
    assert [path.name for path in (whole / 'policy').iterdir()] == ['solver']
    rows = [row for row in lines(whole, 'trajectories.jsonl') if row['phase'] == 'solver']
    assert rows and all(row['advantage'] is None for row in rows if row['drop'] is None)
    solver = [record for record in lines(whole) if record['phase'] == 'solver']
    assert all(line['solver/value_network/gradient_norm'] > 0 for line in solver)
    values = [line['solver/value_network/value'] for line in solver]
    assert values[0] == 0 != values[-1]


def test_a_run_from_one_without_a_value_network_begins_it_anew(
    tmp_path, tmp_path_factory, monkeypatch
):
    source = str(run_library.whole('dspo', tmp_path_factory))
    workdir = tmp_path / 'next'
    config = run_library.config_of('ppo', workdir)
    killed_runs.run_to_first_checkpoint(monkeypatch, config, workdir, source)
    arrays, _ = final_states(workdir)
    # With an output of 0.
    assert not arrays[NETWORK]['params']['value']['kernel'].any()
