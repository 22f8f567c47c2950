"""Runs with a value network (PPO): killed, continued, and of two processes they learn what a whole run learns."""

import re

import host_processes
import jax
import killed_runs
import numpy as np
import orbax.checkpoint as ocp
import pytest
from run_files import lines, without_clock

from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration.rules import check
from zeroplay_jax.learner import value_network
from zeroplay_jax.learner.checkpoint import VALUE_NETWORK_PREFIX
from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.decoder import ModelConfig
from zeroplay_jax.run import branch, build, loop

NETWORK = VALUE_NETWORK_PREFIX + 'solver'


def make_config(**fields):
    config = ablations.get_config('dspo/search_r1_ppo:mini')
    config.progress = False
    config.world.train, config.world.evaluation = (0, 4), (0, 2)
    config.eval.questions, config.eval.hops = 1, (1,)
    config.sampler.slots, config.micro.rows = 16, 2
    config.inputs.world_questions = 16
    config.solver.update(steps=3, batch=4, samples=2, minibatches=2, learning_rate=1e-3)
    config.value_network.learning_rate = 1e-3
    config.update(fields)
    check(config)
    return config


def states(workdir):
    source = branch.newest_checkpoint(workdir)
    arrays = ocp.StandardCheckpointer().restore((source.folder / 'states').resolve())
    return source, jax.tree.map(np.asarray, arrays)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('ppo') / 'whole'
    loop.run(make_config(), workdir)
    return workdir


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path, monkeypatch):
    killed_runs.run_until(2, monkeypatch, make_config(), tmp_path / 'killed')
    _, at_step_2 = states(tmp_path / 'killed')
    loop.run(make_config(), tmp_path / 'killed')
    (ours, first), (theirs, second) = states(whole), states(tmp_path / 'killed')
    assert ours.step == theirs.step
    jax.tree.map(np.testing.assert_array_equal, first, second)
    # The value network was saved, and went on learning.
    outputs = [state[NETWORK]['params']['value']['kernel'] for state in (at_step_2, first)]
    assert outputs[0].any() and not np.array_equal(*outputs)


def test_the_value_network_is_no_policy(whole):
    source, arrays = states(whole)
    assert set(arrays) == {'solver', NETWORK}
    assert branch.policy_names(source) == ['solver']
    assert [path.name for path in (whole / 'policy').iterdir()] == ['solver']


@pytest.mark.parametrize('has_value_network', [True, pytest.param(False, marks=pytest.mark.long)])
def test_another_run_goes_on_with_the_value_network_if_there_is_one(
    whole, tmp_path, monkeypatch, has_value_network
):
    source = whole
    if not has_value_network:
        config = make_config()
        config.solver.update(baseline='mean', scale='std')
        config.value_network.learning_rate = 0.0
        check(config)
        source = tmp_path / 'grpo'
        killed_runs.run_until(2, monkeypatch, config, source)
    # The next run is stopped when it has saved its first state.
    killed_runs.run_until(None, monkeypatch, make_config(seed=1), tmp_path / 'next', str(source))
    (_, before), (_, after) = states(source), states(tmp_path / 'next')
    jax.tree.map(
        np.testing.assert_array_equal, before['solver']['params'], after['solver']['params']
    )
    if has_value_network:
        jax.tree.map(np.testing.assert_array_equal, before[NETWORK], after[NETWORK])
    else:
        # It begins anew, with an output of 0.
        assert not after[NETWORK]['params']['value']['kernel'].any()


@pytest.mark.parametrize('rate, expected', [(0.0, 1e-2), (3e-4, 3e-4)])
def test_a_value_network_has_ten_times_the_rate_of_the_policy(rate, expected, monkeypatch):
    made = []
    monkeypatch.setattr(
        value_network, 'ValueNetwork', lambda model, mesh, settings, *_, **__: made.append(settings)
    )
    config = make_config()
    config.value_network.learning_rate = rate
    model = ModelConfig('qwen3', 8, 8, 8, 1, 1, 1, 8)
    networks = build.build_value_networks(config, model, sharding.make_mesh(), {})
    assert list(networks) == ['solver']
    assert made[0].learning_rate == pytest.approx(expected)
    # The config of the run stays as it was given.
    assert config.value_network.learning_rate == rate


def test_logged_rollouts_have_no_advantage_of_their_own(whole):
    rows = lines(whole, 'trajectories.jsonl')
    solver = [row for row in rows if row['phase'] == 'solver']
    assert solver and all(row['advantage'] is None for row in solver if row['drop'] is None)
    for record in lines(whole):
        absent = {'informative_share', 'singleton_groups', 'group_size'}
        assert not [name for name in record if name.split('/')[-1] in absent]


def test_every_step_logs_values(whole):
    solver = [record for record in lines(whole) if record['phase'] == 'solver']
    assert len(solver) == 3 and all(
        line['solver/value_network/gradient_norm'] > 0 for line in solver
    )
    assert (
        solver[0]['solver/value_network/value'] == 0
        and solver[-1]['solver/value_network/value'] != 0
    )


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
