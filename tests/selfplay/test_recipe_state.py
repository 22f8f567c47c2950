"""The state of a recipe: which step sees which, what a checkpoint brings back, and what is refused."""

import asyncio
import copy

import pytest
from test_ahead import FILTERED, PAYS, played_steps
from test_engine import Game, assert_equal_states, make, policy, snapshot  # noqa: F401

from zeroplay_jax.selfplay.recipe import Recipe, state_of, with_state
from zeroplay_jax.selfplay.schedule import all_steps
from zeroplay_jax.types import UserError


class Counted(Game):
    """Rewards grow with the number of steps that its state counts."""

    def __init__(self, config, pays):
        super().__init__(config, pays)
        self.steps, self.rewards, self.seen = 0, 0.0, []

    def state(self):
        return {'steps': self.steps, 'rewards': self.rewards}

    def restore(self, state):
        self.steps, self.rewards = state['steps'], state['rewards']

    def after_step(self, step, outcomes):
        self.steps += 1
        self.rewards += sum(row.reward for outcome in outcomes for row in outcome.rows)

    def tasks(self, step, pool, cursor):
        self.seen.append((step.number, self.steps))
        return super().tasks(step, pool, cursor)

    async def episode(self, context, step, task):
        outcome = await super().episode(context, step, task)
        # Ends in the next step where that begins early.
        await asyncio.sleep(0.002 * task.identity[1])
        for row in outcome.rows:
            row.reward *= 1 + self.steps
            row.info.details['steps'] = self.steps
        return outcome


@pytest.fixture(scope='module', params=[0, 1], ids=['ahead=0', 'ahead=1'])
def played(request, policy):  # noqa: F811
    engine, game = make(policy, PAYS, request.param, **FILTERED)
    game.__class__ = Counted
    Counted.__init__(game, game.config, PAYS)
    return request.param, engine, game, snapshot(engine)


def play(engine, first=0, last=None):
    schedule = all_steps(engine.recipe.phases())
    records = []
    for _, rows in played_steps(engine, schedule, first, last):
        seen = {row.info.details['steps'] for row in rows}
        rollouts = [(row.trajectory.identity, row.reward, row.advantage) for row in rows]
        records.append((seen, rollouts, engine.task_log))
    return records


def test_all_rounds_and_episodes_of_a_step_see_the_state_before_it_was_drawn(played):
    ahead, engine, game, start = played
    engine.restore(*copy.deepcopy(start))
    game.seen.clear()
    records = play(engine)
    expected = [0, 0, 1, 2] if ahead else [0, 1, 2, 3]
    assert [seen for seen, *_ in records] == [{steps} for steps in expected]
    assert {steps for number, steps in game.seen if number == 3} == {expected[3]}
    # Further rounds were drawn, too.
    assert len(game.seen) > len(records) + 1
    assert state_of(game)['steps'] == 4 and game.rewards > 0


@pytest.mark.parametrize('last', [1, 2, 3])
def test_a_resumed_run_has_the_same_state_and_the_same_bits(played, last):
    ahead, engine, game, start = played
    engine.restore(*copy.deepcopy(start))
    play(engine, 0, last)
    saved = snapshot(engine)
    assert saved[1]['recipe']['steps'] == last
    if ahead:
        assert saved[1]['ahead']['recipe_state']['steps'] == last - 1
    expected, whole = play(engine, last), snapshot(engine)
    # A new process has the attributes of the constructor.
    engine.close()
    Counted.__init__(game, game.config, PAYS)
    engine.restore(*copy.deepcopy(saved))
    assert_equal_states(snapshot(engine), saved)
    assert play(engine, last) == expected
    assert_equal_states(snapshot(engine), whole)


def test_what_changes_the_state_elsewhere_is_refused(played, monkeypatch):
    _, engine, _, start = played
    engine.restore(*copy.deepcopy(start))
    episode = Counted.episode

    async def counts(self, context, step, task):
        self.steps += 1
        return await episode(self, context, step, task)

    monkeypatch.setattr(Counted, 'episode', counts)
    with pytest.raises(UserError, match='changed while a step ran; change it in Recipe'):
        play(engine)


# ---- without an engine ---------------------------------------------------------------------------


class Mean(Recipe):
    """Values that `restore` changes in place."""

    def __init__(self, value):
        super().__init__({}, None)
        self.value = value

    def state(self):
        return {'value': self.value}

    def restore(self, state):
        self.value.clear()
        self.value.update(state['value'])


@pytest.mark.parametrize('value', [{1: 'a'}, (1, 2), float('nan')], ids=repr)
def test_a_state_that_is_no_json_is_refused_in_one_line(value):
    with pytest.raises(UserError, match='Recipe.state returns no JSON'):
        state_of(Mean(value))


def test_a_state_that_is_changed_in_place_is_refused():
    with pytest.raises(UserError, match='set every attribute of the state anew'):
        with_state(Mean({'a': 1}), {'value': {'a': 2}})
