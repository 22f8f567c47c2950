"""Every alarm provoked on one small engine: real updates of a tiny policy, rollouts as the test wants them."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest
import scripted
from test_engine import make, play, policy, spoil_gradient  # noqa: F401

from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.training.outcome import FIGURES, STOP, Alarms, Stop, current_stop, stop_after
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


def only(name, level):
    """Levels of which one alone is on: this alarm stops at once."""
    return dict.fromkeys(FIGURES, (0.0, 0.0, 1)) | {name: (0.0, level, 1)}


def first_stop(engine, name, level):
    """Plays two steps with one alarm on; returns the number of the step that stops, or None, and the stop."""
    one = engine[0]
    alarms = Alarms(only(name, level))
    one.config.stop_after_empty_steps = 0
    for index in range(2):
        metrics, _ = play(one, index)
        step = Step(Phase('solver', 99, ('solver',)), index, index)
        found = alarms.check(step, metrics)
        stop = stop_after(one.config, one, step, found)
        if stop is not None:
            return index, stop
    return None, None


def test_a_healthy_step_reaches_no_level_but_that_of_random_log_probs(engine, player):
    one = engine[0]
    defaults = Alarms(one.config.alarms)
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
def test_it_stops_within_two_steps(engine, player, monkeypatch, name, level, changes):
    vars(player).update(changes)
    if name == 'entropy':
        # Logits a thousand times as large leave one token.
        scale_weights(engine[0], 1000)
    if name == 'nonfinite' and not changes:
        spoil_gradient(engine[0], monkeypatch)
    index, stop = first_stop(engine, name, level)
    assert index is not None and index <= 1
    assert stop.cause == name and stop.line.startswith(f'stopped: step {index} (solver')
    assert f'the stop level of config.alarms.{name}=(0, {level:g}, 1)' in stop.line


def test_rollouts_that_explode_stop_it(engine, player, monkeypatch):
    alarms = Alarms(only('length', 2.0))
    stops = []
    for index in range(5):
        if index == 3:
            monkeypatch.setattr(
                'zeroplay_jax.types.Trajectory.policy_tokens', property(lambda self: 10_000)
            )
        metrics, _ = play(engine[0], index)
        found = alarms.check(Step(Phase('solver', 99, ('solver',)), index, index), metrics)
        stops.append([alarm.name for alarm in found])
    assert stops[:3] == [[]] * 3 and stops[3] == ['length']


def test_old_rollouts_stop_it(engine, player, monkeypatch):
    one = engine[0]
    one.weights.newest['solver'] = 5
    # `play` would set the version of the game's rows to the newest.
    step = Step(Phase('solver', 99, ('solver',)), 0, 0)
    monkeypatch.setattr(player._game, 'version', 0)
    metrics, _ = one.run_step(step, lambda: None)
    found = Alarms(only('staleness', 5.0)).check(step, metrics)
    assert [(alarm.name, alarm.level) for alarm in found] == [('staleness', STOP)]


def test_empty_steps_are_the_reason_before_an_alarm_and_a_stop_can_be_switched_off(engine, player):
    one = engine[0]
    one.config.stop_after_empty_steps = 1
    player.rewards = (1.0, 1.0)
    step = Step(Phase('solver', 99, ('solver',)), 0, 0)
    play(one, 0)
    stop = stop_after(one.config, one, step, [])
    assert stop.cause == 'empty_steps'
    stored = dataclasses.asdict(Stop('no_call', 'stopped: …'))
    config = one.config.copy_and_resolve_references()
    assert current_stop(config, stored) is None
    config.alarms.no_call = (0.8, 0.9, 3)
    assert current_stop(config, stored) == stored
    assert current_stop(config, None) is None
