"""Roles that play with snapshots of weights, and a recipe with a state."""

import json

import host_processes
import jax
import killed_runs
import numpy as np
import pytest
import run_library
from python_process import config_flags
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
    killed_runs.run_until(None, monkeypatch, config, workdir, str(whole))
    states, saved = final_states(workdir)
    assert branch.newest_checkpoint(workdir).step == 0
    assert saved['engine']['recipe']['baselines'] == {}
    for name in ('solver@1', 'solver@best'):
        jax.tree.map(
            np.testing.assert_array_equal, states['solver'][name], states['solver']['params']
        )


FLAGS = """
    recipe=tests.selfplay.league_recipe mesh.replica=2 micro.rows=2 world.train=(0,4) world.evaluation=(0,2)
    eval.questions=2 eval.hops=(1,) eval.every=2 checkpoint.every=1 checkpoint.best=em/mean log_trajectories=1000
    log.writers=() schedule.iterations=2 solver.steps=2 solver.batch=3 solver.samples=4 solver.minibatches=1
    solver.fill_rounds=1 solver.learning_rate=3e-4 solver.surplus=drop solver.old_logp=trainer solver.tis_cap=2.0
    solver.tis_level=sequence
    rollout.ahead=1 sampler.slots=8 inputs.world_questions=16
"""


@pytest.mark.long
def test_two_processes_have_the_state_of_one(tmp_path, monkeypatch):
    command = ['--config=configs/dspo.py:mini', *config_flags(FLAGS)]
    monkeypatch.setattr(host_processes, 'RUN', command)
    for count in (1, 2):
        host_processes.finish(host_processes.play(tmp_path / str(count), count))
    rollouts = [(tmp_path / name / 'trajectories.jsonl').read_text() for name in '12']
    assert rollouts[0] == rollouts[1]
    states = []
    for name in '12':
        folder = branch.newest_checkpoint(tmp_path / name).folder
        states.append(json.loads((folder / 'loop' / 'metadata').read_text())['engine'])
    for name in ('recipe', 'versions'):
        assert states[0][name] == states[1][name]
    assert any(states[0]['recipe']['baselines'].values())


@pytest.mark.parametrize('name', ['solver@', 'solver@0', 'solver@last', 'initial@2', 'past@1'])
def test_a_snapshot_that_cannot_be_is_refused(name, monkeypatch):
    roles = (RoleSpec('solver', 'solver'), RoleSpec('past', 'solver', weights_from=name))
    monkeypatch.setattr(league_recipe.Recipe, 'roles', classmethod(lambda cls, config: roles))
    line = rf"takes its weights from '{name}'; name one of solver, initial, or of the"
    with pytest.raises(UserError, match=line):
        check(run_library.league_config())


def test_the_best_one_needs_a_metric():
    config = run_library.league_config()
    config.checkpoint.best = ''
    with pytest.raises(UserError, match='role best samples .* best evaluation; name its metric'):
        check(config)
