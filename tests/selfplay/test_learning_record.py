"""Steps that train nothing are counted, with their reasons, by the policy that learnt nothing."""

import collections
import json
import pathlib
import types

import pytest
from refused_calls import check_table
from test_engine import make, play, policy  # noqa: F401 - a fixture

from zeroplay_jax.selfplay import records
from zeroplay_jax.selfplay.records import LearningRecord
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.selfplay.update import RolePlan
from zeroplay_jax.training.outcome import learning_summary, stop_line
from zeroplay_jax.types import Outcome, Row, TaskDropped


@pytest.mark.parametrize('has_token_advantages', [True, False])
def test_with_a_value_network_a_step_teaches_if_a_token_has_an_advantage(has_token_advantages):
    settings = types.SimpleNamespace(entropy_coef=0.0, baseline='value', old_logp='sampler')
    rows = [Row('solver', types.SimpleNamespace(contexts=[]), 0.0, 0, advantage=0.0)]
    plan = RolePlan('solver', settings, [rows], 0.0, {})
    plan.has_token_advantages = has_token_advantages
    # The norm may be that of a KL term alone.
    plan.add(0, {'gradient_norm': (0.1, 1.0)})
    assert plan.learnt == has_token_advantages


def trains(index=0, steps=4, **learnt):
    """A training step: policy → whether it learnt."""
    step = Step(Phase('solver', steps, ('solver',)), index, index + 1)

    def add(record, reasons):
        named = {}
        for name in learnt:
            if not learnt[name]:
                named[name] = collections.Counter({reasons[name]: 2} if reasons else {})
        record.add_training_step(step, learnt, named)

    return add


def generates(*reasons, size=0):
    """A step of the generation with tasks that are dropped, None: not so, after which the pool has this size."""
    step = Step(Phase('generate', 1), 0, 1)
    outcomes = [Outcome(drop=reason) for reason in reasons]
    drops = dict.fromkeys(filter(None, reasons), 1)
    return lambda record, reasons: record.add_rollout_step(step, outcomes, size, drops)


def test_what_is_recorded_of_steps(policy):  # noqa: F811
    engine, _ = make(policy, lambda item: (1, 1))
    engine.weights_of = {'proposer': 'first', 'solver': 'second'}

    def recorded(*steps, reasons=None, limit=2):
        """Notices of the last step, policies that are stuck, and the lines about them."""
        record = LearningRecord()
        for add in steps:
            add(record, reasons or {})
        engine.learning = record
        notices = list(record.notices)
        record.restore(json.loads(json.dumps(record.state())))
        stuck = record.stuck_policies(limit)
        assert record.stuck_policies(0) == []
        lines = [f'notices {notices}', f'stuck {stuck}, reasons {record.last_reasons}']
        step = Step(Phase('both', 1, ('proposer', 'solver')), 0, 0)
        if stuck:
            lines.append(stop_line(engine, stuck, step))
        lines.append(f'warning: {learning_summary(engine, [step], [], None)["warning"]}')
        return '\n'.join(lines)

    names = globals() | {'recorded': recorded, 'shares_text': records.shares_text}
    check_table(pathlib.Path(__file__).parent / 'learning_record.txt', names)


def test_dropped_tasks_are_counted_with_their_reasons_and_a_training_step_starts_anew(
    policy,  # noqa: F811
    monkeypatch,
):
    engine, game = make(policy, lambda item: (1, 0), batch=4)
    whole = game.episode

    async def dropped(context, step, task):
        if step.index < 2:
            raise TaskDropped('prompt_too_long' if task.payload['item'] % 4 else 'outside_window')
        return await whole(context, step, task)

    monkeypatch.setattr(game, 'episode', dropped)
    play(engine, 0)
    (notice,) = engine.learning.notices
    assert notice.endswith('trained nothing: prompt_too_long 75 %, outside_window 25 % of 4 tasks')
    play(engine, 1)
    assert engine.learning.consecutive_empty['solver'] == 2
    play(engine, 2)
    assert engine.learning.consecutive_empty['solver'] == 0 and not engine.learning.notices


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
