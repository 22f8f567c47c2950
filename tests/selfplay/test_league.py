"""Roles that play with snapshots of weights, and a recipe with a state: killed, they end with the same bits."""

import json

import ahead_runs
import host_processes
import killed_runs
import league_recipe
import numpy as np
import pytest
from python_process import config_flags
from run_files import check_same_run, final_states, lines

from zeroplay_jax.configuration.fields import fit_to_recipe
from zeroplay_jax.configuration.rules import check
from zeroplay_jax.run import branch, loop
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.types import UserError


def make_config(rank=0, **fields):
    config = ahead_runs.make_config(
        solver__steps=2,
        solver__fill_rounds=1,
        schedule__iterations=2,
        eval__questions=2,
        eval__every=2,
        checkpoint__every=1,
        checkpoint__best='em/mean',
        world__train=(0, 4),
        world__evaluation=(0, 2),
        inputs__world_questions=16,
        **fields,
    )
    config.eval.hops = (1,)
    config.policy.adapters.rank = rank
    config.stop_after_empty_steps = 0
    config.recipe = 'league_recipe'
    fit_to_recipe(config)
    check(config)
    return config


@pytest.fixture(
    scope='module', params=[0, pytest.param(4, marks=pytest.mark.long)], ids=['whole', 'adapters']
)
def played(request, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('league') / 'whole'
    config = make_config(request.param)
    loop.run(config, workdir)
    return config, workdir


def test_snapshots_stay_as_they_were_and_the_state_grows(played):
    config, workdir = played
    steps = [row['step'] for row in lines(workdir) if row['phase'] == 'solver']
    logged = [row for row in lines(workdir, 'trajectories.jsonl') if row['phase'] == 'solver']
    versions = {row['step']: row['info']['versions']['solver@1'] for row in logged}
    # The first iteration plays against the start, the second against the end of the first.
    assert [versions[step] for step in steps] == [0, 0, 1, 1]
    baselines = {row['step']: row['info']['baselines'] for row in logged}
    # Steps that begin early see one outcome less; the first of an iteration does not begin early.
    assert baselines[steps[0]] == baselines[steps[1]] == {}
    assert baselines[steps[2]] == baselines[steps[3]] != {}
    states, saved = final_states(workdir)
    assert saved['engine']['recipe']['baselines'] != baselines[steps[3]]
    assert saved['engine']['versions']['solver@1'] == 1
    solver = states['solver']
    trained, past = (
        np.concatenate([x.ravel() for x in leaves(solver[n])]) for n in ('params', 'solver@1')
    )
    assert trained.shape == past.shape and not np.array_equal(trained, past)


def leaves(tree):
    if isinstance(tree, dict):
        return [x for name in sorted(tree) for x in leaves(tree[name])]
    return [np.asarray(tree, np.float32)]


@pytest.mark.long
@pytest.mark.parametrize('step', [3, 5])
def test_a_killed_run_ends_with_the_same_bits(played, tmp_path, monkeypatch, step):
    config, whole = played
    killed = tmp_path / 'killed'
    killed_runs.run_until(step, monkeypatch, config, killed)
    loop.run(config, killed)
    check_same_run(whole, killed)


@pytest.mark.long
def test_another_run_begins_with_the_weights_as_snapshots(played, tmp_path, monkeypatch):
    config, whole = played
    config = make_config(config.policy.adapters.rank, solver__learning_rate=1e-5)
    killed_runs.run_until(None, monkeypatch, config, tmp_path / 'next', str(whole))
    source = branch.newest_checkpoint(tmp_path / 'next')
    states, saved = final_states(tmp_path / 'next')
    assert source.step == 0 and saved['engine']['recipe']['baselines'] == {}
    for name in ('solver@1', 'solver@best'):
        for ours, start in zip(leaves(states['solver'][name]), leaves(states['solver']['params'])):
            np.testing.assert_array_equal(ours, start)


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
def test_a_snapshot_that_cannot_be_is_refused_in_one_line(name, monkeypatch):
    roles = (RoleSpec('solver', 'solver'), RoleSpec('past', 'solver', weights_from=name))
    config = make_config()
    monkeypatch.setattr(league_recipe.Recipe, 'roles', classmethod(lambda cls, config: roles))
    with pytest.raises(
        UserError,
        match=rf'takes its weights from \'{name}\'; name one of solver, initial, or of the',
    ):
        check(config)


def test_the_best_one_needs_a_metric():
    config = make_config()
    config.checkpoint.best = ''
    with pytest.raises(
        UserError, match='role best plays with the weights of the best evaluation; name its metric'
    ):
        check(config)
