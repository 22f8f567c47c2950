"""Rollouts whose tool failed, not the policy: kept, dropped, or played anew under an identity of their own."""

import asyncio
import dataclasses
import types

import pytest
from test_engine import Game, make, play, policy  # noqa: F401
from trajectories import make_trajectory

from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.selfplay.context import _REPLAY, REPLAYS, Role, RolloutContext
from zeroplay_jax.types import ToolCall, Turn


def rollout(error, identity=(0, 0)):
    """One with a call that worked, one with this error, and an answer."""
    calls = [ToolCall('search', {'query': 'q'}), ToolCall('search', {'query': 'q'}, error=error)]
    turns = [Turn('search', call) for call in calls]
    return make_trajectory(*turns, Turn('<answer>Lomi</answer>'), identity=identity)


class Broken(Game):
    """The tool fails in the first rollout of every item, the policy in the second."""

    async def episode(self, context, step, task):
        outcome = await super().episode(context, step, task)
        for row, error in zip(outcome.rows, ('timeout', 'malformed'), strict=True):
            row.trajectory = dataclasses.replace(row.trajectory, turns=rollout(error).turns)
        return outcome


@pytest.fixture(scope='module')
def broken(policy):  # noqa: F811
    engine, game = make(policy, lambda item: (1, 0), singleton='raw')
    game.__class__ = Broken
    return engine


@pytest.mark.parametrize('index, failed', list(enumerate(['keep', 'drop', 'retry'])))
def test_a_dropped_rollout_is_in_no_group_and_counted_apart(broken, index, failed):
    broken.config.rollout.failed = failed
    metrics, rows = play(broken, index)
    is_kept = failed == 'keep'
    reason = None if is_kept else 'tool_failed'
    assert [row.drop for row in rows] == [reason, None] * 2
    assert metrics['solver/tool_failed'] == 0.5
    assert metrics['solver/tool_error_rate'] == 0.5
    assert metrics.get('solver/row_drop/tool_failed') == (None if is_kept else 0.5)
    # What is left is alone in its group.
    assert [row.advantage == 0 for row in rows] == [not is_kept, not is_kept] * 2
    assert metrics['solver/skipped_updates'] == (not is_kept)


class Scheduler:
    """Rollouts with the errors of a script: identity of a request → error of each sample."""

    def __init__(self, script):
        self.script, self.requests = script, []

    async def rollout(self, request):
        self.requests.append(request)
        errors = self.script.get(request.identity, [None] * request.samples)
        return [rollout(error, (*request.identity, i)) for i, error in enumerate(errors)]


def test_a_rollout_is_played_anew_at_most_twice_in_its_own_place():
    script = {
        (7, 1): ['malformed', 'failed', 'failed'],
        (7, 1, 1, _REPLAY): ['timeout'],
        (7, 1, 2, _REPLAY): ['failed'],
        (7, 1, 2, _REPLAY + 1): ['failed'],
    }
    scheduler = Scheduler(script)
    env = types.SimpleNamespace(prompt_ids=lambda prompt, **fields: [1, 2])
    context = RolloutContext(
        scheduler, {'solver': Role('solver', 'w', 'p', env)}, {'p': Prompt('q')}, replays=REPLAYS
    )
    rollouts = asyncio.run(context.ask('solver', (7, 1), samples=3))
    assert [one.identity for one in rollouts] == [(7, 1, 0), (7, 1, 1), (7, 1, 2)]
    assert [one.has_tool_failure for one in rollouts] == [False, False, True]
    assert context.episodes.replays == 2 * REPLAYS and context.episodes.rollouts == 3
    # Each with randomness of its own, and otherwise as it was asked.
    assert {request.identity for request in scheduler.requests} == {*script, (7, 1, 1, _REPLAY + 1)}
    for request in scheduler.requests[1:]:
        assert dataclasses.replace(request, identity=(7, 1), samples=3) == scheduler.requests[0]
