"""Every alarm provoked on one small engine: real updates of a tiny policy, rollouts as the test wants them."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest
import scripted
from test_engine import make, play, policy, spoil_gradient  # noqa: F401

from zeroplay_jax.run import outcome as alarms_module
from zeroplay_jax.run.outcome import FIGURES, Alarms, Stop, current_stop, stop_after
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.types import Question, RowInfo, ToolCall, Turn

FOUND = Turn('s', scripted.search_call(['q'], (({'title': 'Mimi', 'text': 'Founder: Lomi.'},),)))
FAILED = Turn('s', ToolCall('search', None, 'unknown', error='malformed'))
ANSWER = Turn('<answer>Lomi</answer>')
QUESTION = Question('Who founded Mimi?', ('Lomi',))


class Player:
    """Turns rows of the game into answers or proposals; the attributes are what a test spoils."""

    def __init__(self, game):
        self._game = game
        self._episode = game.episode
        self.turns = (FOUND, ANSWER)
        self.question = QUESTION
        self.proposes = False
        self.parts = {}
        self.rewards = None
        self.judged = {}

    async def episode(self, context, step, task):
        outcome = await self._episode(context, step, task)
        for name, number in self.judged.items():
            context.judge.stats[name] += number
        for number, row in enumerate(outcome.rows):
            row.trajectory = dataclasses.replace(
                row.trajectory,
                turns=self.turns,
                finish='answer',
                identity=(*task.identity, number),
            )
            row.info = RowInfo(question=self.question, answer='Lomi', score=1.0)
            if self.proposes:
                row.info = RowInfo(question=self.question, valid=True)
            row.parts = self.parts
            if self.rewards is not None:
                row.reward = self.rewards[number]
        return outcome


@pytest.fixture(scope='module')
def engine(policy):  # noqa: F811
    # Eight tasks of two rollouts, so that the shares rest on enough rows.
    engine, game = make(policy, lambda item: (1, 0), batch=8, filter_groups=True, fill_rounds=1)
    environment = types.SimpleNamespace(tools={'search': None})
    engine.context.roles['solver'] = types.SimpleNamespace(env=environment)
    return engine, game, engine.device_state(), engine.host_state()


@pytest.fixture
def player(engine, monkeypatch):
    """The engine in the state of its start, and a new player."""
    one, game, device_state, host_state = engine
    one.restore(jax.tree.map(np.asarray, device_state), host_state)
    player = Player(game)
    monkeypatch.setattr(game, 'episode', player.episode)
    return player


@pytest.fixture
def first_stop(engine, monkeypatch):
    """A function: plays two steps with one alarm on, which stops at once; returns the step that stops, and the stop."""

    def play_with(name, level):
        one = engine[0]
        figure = FIGURES[name]
        levels = figure.levels._replace(warn=level, stop=level, steps=1)
        monkeypatch.setattr(alarms_module, 'FIGURES', {name: figure._replace(levels=levels)})
        alarms = Alarms()
        one.config.stop_after_empty_steps = 0
        for index in range(2):
            metrics, _ = play(one, index)
            step = Step(Phase('solver', 99, ('solver',)), index, index)
            found = alarms.check(step, metrics)
            stop = stop_after(one.config, one, step, found)
            if stop is not None:
                return index, stop
        return None, None

    return play_with


def test_a_healthy_step_reaches_no_level_but_that_of_random_log_probs(engine, player):
    one = engine[0]
    defaults = Alarms()
    metrics, _ = play(one, 0)
    wanted = {'call_error_share': 0.0, 'no_call_share': 0.0, 'no_evidence_share': 0.0}
    wanted |= {'solver/nonfinite_updates': 0.0, 'solver/nonfinite_weights': 0.0}
    assert {name: metrics[name] for name in wanted} == wanted
    step = Step(Phase('solver', 99, ('solver',)), 0, 0)
    defaults.check(step, metrics)
    defaults.check(step, metrics)
    # The log-probs of the test's rollouts are not those of any policy.
    assert {alarm.name for alarm in defaults.check(step, metrics)} == {'sampler_gap'}


def scale_weights(one, factor):
    learner = one.learners['solver']
    params = jax.tree.map(lambda x: factor * x if x.ndim > 1 else x, learner.state['params'])
    learner.state = learner.state | {'params': params}


OTHER = scripted.search_call(['q'], (({'title': 'Duvo', 'text': 'Lomina is a river.'},),))
JUDGED = {'parts': {'judged_correct': 1.0}, 'question': Question('Who founded Mimi?', ('Duvo',))}

# Name of the alarm, its level, and what the player does.
CASES = [
    ('sampler_gap', 0.01, {}),
    ('entropy', 0.001, {}),
    ('tool_errors', 0.9, {'turns': (FAILED, ANSWER)}),
    ('no_call', 0.9, {'turns': (ANSWER,)}),
    ('no_evidence', 0.9, {'turns': (Turn('s', OTHER), ANSWER)}),
    ('duplicates', 0.9, {'proposes': True}),
    ('judge_agreement', 0.1, JUDGED),
    ('judge_lost', 0.5, {'judged': {'asked': 4, 'unread': 1, 'failed': 1}}),
    ('nonfinite', 0.5, {'rewards': (math.nan, 1.0)}),
    ('nonfinite', 0.5, {}),
]


def test_weights_that_are_lost_are_measured(engine, player):
    scale_weights(engine[0], np.float32('nan'))
    metrics, _ = play(engine[0], 0)
    assert metrics['solver/nonfinite_weights'] == 1


@pytest.mark.parametrize(('name', 'level', 'changes'), CASES)
def test_it_stops_within_two_steps(engine, player, first_stop, monkeypatch, name, level, changes):
    vars(player).update(changes)
    if name == 'entropy':
        # Logits a thousand times as large leave one token.
        scale_weights(engine[0], 1000)
    if name == 'nonfinite' and not changes:
        spoil_gradient(engine[0], monkeypatch)
    index, stop = first_stop(name, level)
    assert index is not None and index <= 1
    assert stop.cause == name and stop.line.startswith(f'stopped: step {index} (solver')
    assert f'{level:g} (stop); ' in stop.line


def test_empty_steps_are_the_reason_before_an_alarm_and_a_stop_can_be_switched_off(engine, player):
    one = engine[0]
    one.config.stop_after_empty_steps = 1
    player.rewards = (1.0, 1.0)
    step = Step(Phase('solver', 99, ('solver',)), 0, 0)
    play(one, 0)
    stop = stop_after(one.config, one, step, [])
    assert stop.cause == 'empty_steps'
    stored = Stop('no_call', 'stopped: …')
    config = one.config.copy_and_resolve_references()
    assert current_stop(config, stored) == stored
    config.stop_at_alarms = False
    assert current_stop(config, stored) is None
    assert current_stop(config, None) is None
