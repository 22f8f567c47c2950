"""A policy as judge: what its replies are worth, and what they earn."""

import asyncio

import pytest
import scripted

from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay import answers
from zeroplay_jax.selfplay.collection import Collector
from zeroplay_jax.selfplay.context import Episodes
from zeroplay_jax.selfplay.judge import Judge, judgements_of_episode, policy_writer
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.types import Question, Task, TaskDropped, Turn


@pytest.mark.parametrize('is_trained', [True, False])
def test_a_role_that_the_step_trains_judges_by_the_majority_and_is_paid_for_it(is_trained):
    """reward.answer=judge."""
    said = ('Wrong', 'I am not sure', 'Correct', 'Correct')
    replies = [scripted.trajectory(Turn(text), finish='eos') for text in said]
    context = scripted.ScriptedContext(grader=replies)
    phase = Phase('solver', 1, ('solver', 'grader') if is_trained else ('solver',))
    context.episodes = Episodes(step=Step(phase, 0, 7), recipe=Recipe(None, None))
    context.prompts = prompts.select('mini')
    writer = policy_writer(0.6, {'judge.answer': 'grader'}, {'grader': 4})
    context.judge = Judge(writer, (3, 5)).bound(context)
    task = Task((7, 0), Question('q', ('a',)))
    judgements_of_episode.set([])
    # Whose episode asks decides whose row it is, whatever the identity begins with.
    value = asyncio.run(answers.score(context, 'judge', (6, 9, 1), task.payload, 'b'))
    rows = Collector._judge_rows(None, context, task)
    if not is_trained:
        assert (value, rows) == (0.0, [])
        return
    assert value == 1.0
    assert [row.reward for row in rows] == [0.0, 0.0, 1.0, 1.0]
    assert [row.info.details['verdict'] for row in rows] == [False, None, True, True]
    assert len({row.group for row in rows}) == 1 and {row.role for row in rows} == {'grader'}


def too_long(fields):
    raise TaskDropped('prompt_too_long')


def said(text, finish):
    return [scripted.trajectory(Turn(text), finish=finish)]


@pytest.mark.parametrize(
    ('script', 'verdict'),
    [
        (said('Correct.', 'eos'), True),
        # 'Correct' alone would be approval; what came after it nobody knows.
        (said('Correct. Corr', 'turn_tokens'), None),
        (said('Correct.', 'context'), None),
        (too_long, None),
    ],
)
def test_a_verdict_that_was_cut_off_is_none(script, verdict):
    context = scripted.ScriptedContext()
    context.scripts['judge'] = script
    context.prompts = prompts.select('mini')
    judge = Judge(policy_writer(0.6), (3, 5)).bound(context)
    assert asyncio.run(judge.correct((0,), 'q', ['a'], 'a')) is verdict
    assert judge.stats == {'asked': 1} | ({'failed': 1} if verdict is None else {})
