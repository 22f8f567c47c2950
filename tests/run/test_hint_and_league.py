"""The examples with a role that writes hints and with snapshots: they train; killed, they end with the same bits."""

import example_runs
import killed_runs
import numpy as np
import pytest
from run_files import check_same_run, final_states, lines

from zeroplay_jax.run import loop


def make_config(example):
    roles = ['hinter'] if example == 'hint' else []
    return example_runs.make_config(example, *roles)


# Snapshots of weights: selfplay/test_league.py plays them with every test.
@pytest.fixture(scope='module', params=['hint', pytest.param('league', marks=pytest.mark.long)])
def whole(request, tmp_path_factory):
    workdir = tmp_path_factory.mktemp(request.param) / 'whole'
    loop.run(make_config(request.param), workdir)
    return request.param, workdir


def test_both_roles_and_the_state_learn(whole):
    example, workdir = whole
    steps = [record for record in lines(workdir) if record['phase'] == 'solver']
    trained = {'hint': 'hinter', 'league': 'solver'}[example]
    assert any(step.get(f'{trained}/gradient_norm', 0.0) > 0 for step in steps)
    if example == 'hint':
        assert all(step['scored_tokens'] > 0 for step in steps)
        deltas = [step['hinter/reward/delta'] for step in steps]
        assert np.isfinite(deltas).all() and any(deltas)
        return
    assert len(steps) == 4
    _, saved = final_states(workdir)
    baselines = saved['engine']['recipe']['baselines']
    assert set(baselines) <= {'1', '2', '3', '4'} and any(baselines.values())


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path, monkeypatch):
    example, workdir = whole
    killed = tmp_path / 'killed'
    killed_runs.run_until(2, monkeypatch, make_config(example), killed)
    loop.run(make_config(example), killed)
    check_same_run(workdir, killed)
