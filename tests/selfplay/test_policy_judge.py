"""A policy as judge: scripted tokens through the real scheduler, prompts, tokenizer and parsers."""

import asyncio

import pytest
import scripted
from speaker import Speaker

from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay import answers
from zeroplay_jax.selfplay.collection import Collector
from zeroplay_jax.selfplay.context import Episodes, Role, RolloutContext
from zeroplay_jax.selfplay.judge import Judge, judgements_of_episode, policy_writer
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.types import Question, Task, Turn


@pytest.fixture(scope='module')
def codec():
    return Codec(BUILT_IN_CHECKPOINT)


def context_of(codec, says, tokens=200, prompt_tokens=900):
    """A context whose judge speaks as told, in at most so many tokens."""
    env = Environment(codec, syntax_of('search_r1'), Limits(1, tokens, 0), {}, ())
    role = Role('judge', 'initial', 'judge.answer', env, 0.6, prompt_tokens)
    scheduler = Scheduler({'initial': SlotPool(Speaker(codec, says), 0)})
    scheduler.weights.publish('initial', {})
    return RolloutContext(scheduler, {'judge': role}, prompts.select('mini'))


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


@pytest.mark.parametrize(
    ('says', 'options', 'verdict'),
    [
        # 'Correct' alone would be approval; what came after it nobody knows.
        ('Correct. ' * 20, dict(tokens=12), None),
        ('Correct.', dict(tokens=12), True),
        (None, dict(tokens=30), None),
        ('Correct.', dict(prompt_tokens=10), None),
    ],
)
def test_a_verdict_that_was_cut_off_is_none(codec, says, options, verdict):
    context = context_of(codec, lambda prompt: says, **options)
    judge = Judge(policy_writer(0.6), (3, 5)).bound(context)
    assert context.scheduler.run([judge.correct((0,), 'q', ['a'], 'a')]) == [verdict]
    assert judge.stats == {'asked': 1} | ({'failed': 1} if verdict is None else {})
