"""Steps that train nothing are counted, with their reasons, by the policy that learnt nothing."""

import collections
import json
import types

import pytest
from test_engine import make, play, policy  # noqa: F401 - a fixture

from zeroplay_jax.selfplay.records import LearningRecord
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.selfplay.update import RolePlan
from zeroplay_jax.types import Outcome, Row


@pytest.mark.parametrize('has_token_advantages', [True, False])
def test_with_a_value_network_a_step_teaches_if_a_token_has_an_advantage(has_token_advantages):
    settings = types.SimpleNamespace(entropy_coef=0.0, baseline='value', old_logp='sampler')
    rows = [Row('solver', types.SimpleNamespace(contexts=[]), 0.0, 0, advantage=0.0)]
    plan = RolePlan('solver', settings, [rows], 0.0, {})
    plan.has_token_advantages = has_token_advantages
    # The norm may be that of a KL term alone.
    plan.add(0, {'gradient_norm': (0.1, 1.0)})
    assert plan.learnt == has_token_advantages


def training_step(index, steps=4):
    return Step(Phase('solver', steps, ('solver',)), index, index + 1)


def reasons_of(**reasons):
    """Policy → reason, of each of two tasks."""
    return {name: collections.Counter({reason: 2}) for name, reason in reasons.items()}


@pytest.mark.parametrize(
    ('pays', 'settings', 'trains'),
    [
        ((1, 0), {}, True),
        ((1, 1), {'entropy_coef': 0.01}, True),
        ((1, 1), {}, False),
        # Also where the rows stay in the batch: weight decay and a KL term are no learning.
        ((1, 1), {'kl_coef': 0.1}, False),
    ],
)
def test_a_step_trains_with_reward_variance_or_an_entropy_bonus(policy, pays, settings, trains):  # noqa: F811
    engine, _ = make(policy, lambda item: pays, **settings)
    play(engine, 0)
    learning = engine.learning
    assert (learning.trained_steps, learning.empty_steps) == (
        ({'solver': 1}, {}) if trains else ({}, {'solver': 1})
    )
    if trains:
        assert not learning.notices and learning.stuck_policies(1) == []
        return
    assert learning.last_reasons == {'solver': {'equal_rewards': 2}}
    notice = 'step 0 (solver 1.1) trained nothing: equal_rewards 100 % of 2 tasks'
    assert learning.notices == [notice] and learning.stuck_policies(2) == []
    # The counts survive a checkpoint.
    saved = json.loads(json.dumps(engine.host_state()))
    learning.restore(LearningRecord().state())
    assert learning.stuck_policies(1) == []
    engine.restore(engine.device_state(), saved)
    play(engine, 1)
    assert learning.stuck_policies(2) == ['solver'] and not learning.stuck_policies(0)


def test_policies_of_a_step_are_counted_one_by_one():
    record = LearningRecord()
    reasons = reasons_of(second='equal_rewards')
    for index in range(2):
        record.add_training_step(training_step(index), {'first': True, 'second': False}, reasons)
    assert record.stuck_policies(2) == ['second']
    assert 'trained nothing in second: equal_rewards' in record.notices[0]
    # A step of another policy does not stop the run because of this one.
    record.add_training_step(training_step(2), {'first': True}, {})
    assert record.stuck_policies(2) == []


def test_a_pool_that_stays_empty_is_reported_and_stops_the_next_phase():
    record = LearningRecord()
    step = Step(Phase('generate', 1), 0, 1)
    outcomes = [Outcome(drop='no_question'), Outcome(drop='prompt_too_long')]
    drops = {'no_question': 1, 'prompt_too_long': 1}
    record.add_rollout_step(step, outcomes, 0, drops)
    assert record.notices[0].startswith('step 1 (generate 1.1): all tasks were dropped: ')
    assert 'left the pool of questions empty: no_question 50 %' in record.notices[1]
    # The first step without a task is enough, whatever the limit.
    record.add_training_step(training_step(0), {'solver': False}, {'solver': collections.Counter()})
    assert record.stuck_policies(5) == ['solver'] and record.stuck_policies(0) == []
    assert record.last_reasons == {'solver': drops}, (
        'the reasons of the phase that made no questions'
    )
