"""The example with rewards per turn: it learns from them, and a killed run ends with the same bits."""

import example_runs
import killed_runs
import numpy as np
import pytest
from run_files import check_same_run, lines

from examples.turn_credit import recipe
from zeroplay_jax.run import loop
from zeroplay_jax.types import ToolCall, Trajectory, Turn


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('turns') / 'whole'
    loop.run(example_runs.make_config('turn_credit'), workdir)
    return workdir


def solver_rows(workdir):
    return [row for row in lines(workdir, 'trajectories.jsonl') if row['phase'] == 'solver']


# test_hosts.py plays advantages per turn with every test.
@pytest.mark.long
def test_turns_are_logged_with_reward_and_advantage(whole):
    rows = solver_rows(whole)
    assert len({row['step'] for row in rows}) == 3
    for row in rows:
        assert len(row['turn_rewards']) == len(row['advantage']) == len(row['turns'])
        # A search that found something, and only those, has a reward.
        for call, reward in zip(row['turns'], row['turn_rewards'], strict=True):
            assert (reward is not None) == bool(call and call['documents'])
    # Searches that found the answer stand out of their group, also where no answer was right.
    assert any(row['advantage'][0] > 0 and not row['reward'] for row in rows)
    steps = [record for record in lines(whole) if record['phase'] == 'solver']
    assert any(record['solver/gradient_norm'] > 0 for record in steps)
    assert all('solver/turn_rewards' in record for record in steps)


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path, monkeypatch):
    killed = tmp_path / 'killed'
    killed_runs.run_until(2, monkeypatch, example_runs.make_config('turn_credit'), killed)
    loop.run(example_runs.make_config('turn_credit'), killed)
    check_same_run(whole, killed)


def test_a_search_earns_what_it_adds():
    def search(*texts):
        passages = tuple({'title': 't', 'text': text} for text in texts)
        return Turn('s', ToolCall('search', {'query': 'q'}, documents=(passages,)))

    refused = Turn('s', ToolCall('search', None, error='malformed'))
    turns = (search('nothing'), refused, search('none', 'in Lomi.'), search('Lomi'), Turn('Lomi'))
    empty = np.zeros(0)
    rollout = Trajectory(empty, empty, empty, turns, 'answer', 'w', 0, (0,))
    gains = recipe.evidence_gains(rollout, ('Lomi', 'Lomi City'))
    np.testing.assert_array_equal(gains, [0, np.nan, 1, 0, np.nan])
