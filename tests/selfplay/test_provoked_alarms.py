"""Alarms provoked on one small engine: real updates of a tiny policy, which a test spoils."""

import jax
import numpy as np
import pytest
from test_engine import make, play, policy  # noqa: F401

from zeroplay_jax.run import outcome as alarms_module
from zeroplay_jax.run.outcome import FIGURES, Alarms, Stop, current_stop, stop_after
from zeroplay_jax.selfplay.schedule import Phase, Step

STEP = Step(Phase('solver', 99, ('solver',)), 0, 0)


@pytest.fixture(scope='module')
def made(policy):  # noqa: F811
    engine, game = make(policy, lambda item: (1, 0))
    return engine, game, engine.device_state(), engine.host_state()


@pytest.fixture
def engine(made):
    """The engine in the state of its start."""
    engine, game, device_state, host_state = made
    engine.restore(jax.tree.map(np.asarray, device_state), host_state)
    game.pays = lambda item: (1, 0)
    vars(game).pop('end', None)
    return engine


def scale_weights(engine, factor):
    learner = engine.learners['solver']
    params = jax.tree.map(lambda x: factor * x if x.ndim > 1 else x, learner.state['params'])
    learner.state = learner.state | {'params': params}


def loses_judgements(engine):
    def end(rollout, context):
        context.judge.stats.update(asked=16, unread=4, failed=4)
        return rollout

    engine.recipe.end = end


@pytest.mark.parametrize(
    ('name', 'level', 'spoil'),
    [
        # The log-probs of the test's rollouts are not those of any policy.
        ('sampler_gap', 0.01, lambda *_: None),
        # Logits a thousand times as large leave one token.
        ('entropy', 0.001, lambda engine: scale_weights(engine, 1000)),
        ('judge_lost', 0.5, loses_judgements),
        ('nonfinite', 0.5, lambda engine: scale_weights(engine, np.float32('nan'))),
    ],
)
def test_a_step_that_is_spoilt_stops(engine, monkeypatch, name, level, spoil):
    figure = FIGURES[name]
    levels = figure.levels._replace(warn=level, stop=level, steps=1)
    monkeypatch.setattr(alarms_module, 'FIGURES', {name: figure._replace(levels=levels)})
    spoil(engine)
    metrics, _ = play(engine, 0)
    engine.config.stop_after_empty_steps = 0
    stop = stop_after(engine.config, engine, STEP, Alarms().check(STEP, metrics))
    assert stop.cause == name and stop.line.startswith('stopped: step 0 (solver')
    assert f'{level:g} (stop); ' in stop.line


def test_empty_steps_are_the_reason_before_an_alarm_and_a_stop_can_be_switched_off(engine):
    engine.config.stop_after_empty_steps = 1
    engine.recipe.pays = lambda item: (1.0, 1.0)
    play(engine, 0)
    stop = stop_after(engine.config, engine, STEP, [])
    assert stop.cause == 'empty_steps'
    stored = Stop('no_call', 'stopped: …')
    config = engine.config.copy_and_resolve_references()
    assert current_stop(config, stored) == stored
    config.stop_at_alarms = False
    assert current_stop(config, stored) is None
    assert current_stop(config, None) is None
