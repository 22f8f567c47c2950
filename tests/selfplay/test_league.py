"""Roles that play with snapshots of weights, and a recipe with a state."""

import jax
import killed_runs
import numpy as np
import pytest
import run_library
from run_files import final_states, lines

from tests.selfplay import league_recipe
from zeroplay_jax.configuration.rules import check
from zeroplay_jax.run import branch
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.types import UserError


@pytest.fixture
def whole(tmp_path_factory):
    return run_library.whole('league', tmp_path_factory)


def test_snapshots_stay_as_they_were_and_the_state_grows(whole):
    steps = [row['step'] for row in lines(whole) if row['phase'] == 'solver']
    logged = [row for row in lines(whole, 'trajectories.jsonl') if row['phase'] == 'solver']
    versions = {row['step']: row['info']['versions']['solver@1'] for row in logged}
    # The first iteration plays against the start, the second against the end of the first.
    assert [versions[step] for step in steps] == [0, 0, 1, 1]
    baselines = {row['step']: row['info']['baselines'] for row in logged}
    # Steps that begin early see one outcome less; the first of an iteration does not begin early.
    assert baselines[steps[0]] == baselines[steps[1]] == {}
    assert baselines[steps[2]] == baselines[steps[3]] != {}
    states, saved = final_states(whole)
    assert saved['engine']['recipe']['baselines'] != baselines[steps[3]]
    assert saved['engine']['versions']['solver@1'] == 1
    trained, past = (jax.tree.leaves(states['solver'][name]) for name in ('params', 'solver@1'))
    assert len(trained) == len(past) and not all(map(np.array_equal, trained, past))


def test_another_run_begins_with_the_weights_as_snapshots(whole, tmp_path, monkeypatch):
    workdir = tmp_path / 'next'
    config = run_library.config_of('league', workdir)
    config.solver.learning_rate = 1e-5
    killed_runs.run_to_first_checkpoint(monkeypatch, config, workdir, str(whole))
    states, saved = final_states(workdir)
    assert branch.newest_checkpoint(workdir).step == 0
    assert saved['engine']['recipe']['baselines'] == {}
    for name in ('solver@1', 'solver@best'):
        jax.tree.map(
            np.testing.assert_array_equal, states['solver'][name], states['solver']['params']
        )


@pytest.mark.parametrize('name', ['solver@', 'solver@0', 'solver@last', 'initial@2', 'past@1'])
def test_a_snapshot_that_cannot_be_is_refused(name, monkeypatch):
    roles = (RoleSpec('solver', 'solver'), RoleSpec('past', 'solver', weights_from=name))
    monkeypatch.setattr(league_recipe.Recipe, 'roles', classmethod(lambda cls, config: roles))
    line = rf"takes its weights from '{name}'; name one of solver, initial, or of the"
    with pytest.raises(UserError, match=line):
        check(run_library.league_config())
