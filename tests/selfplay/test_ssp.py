"""SSP as an episode: the gate, the check with other people's passages, zero-sum rewards, and how a batch is filled."""

import dataclasses
import types
from unittest.mock import AsyncMock

import pytest
import scripted
from scripted import ScriptedContext, ScriptedRole, final, searching

from zeroplay_jax.configs import ssp
from zeroplay_jax.recipes.datasets import HiddenAnswer
from zeroplay_jax.recipes.ssp import Recipe
from zeroplay_jax.selfplay.schedule import BatchCursor, Phase, Step, TaskPool
from zeroplay_jax.types import Question, TaskDropped

LOMI = dict(id=1, title='Lomi', text='Lomi is a city in Tarva.')
GUMU = dict(id=2, title='Gumu', text='Gumu was born in Puto.')
STEP = Step(Phase('selfplay', 9, ('solver', 'proposer')), 2, 7)


def recipe(**changes):
    config = ssp.get_config('mini')
    for name, value in changes.items():
        node, leaf = name.split('__')
        config[node][leaf] = value
    material = scripted.Material(answers=[f'answer{i}' for i in range(40)])
    return Recipe(config, scripted.library(worlds=material))


def hidden(question='What is the country of Lomi?', found=(LOMI,)):
    return searching(('Tarva', found), question=question)


def play(game, context, payloads):
    """Plays the items of a step together, as the engine does."""
    count = len(payloads)
    issued = game.tasks(STEP, TaskPool(), BatchCursor(missing=count))[:count]
    tasks = []
    for i, (task, payload) in enumerate(zip(issued, payloads)):
        neighbours = (issued[(i + 1) % count].identity,) if count > 1 else ()
        payload = dataclasses.replace(payload, noise_from=neighbours)
        tasks.append(dataclasses.replace(task, payload=payload))
    return scripted.run_episodes(game, context, STEP, tasks)


ITEM = HiddenAnswer('Tarva', hops=1)


class Answerer:
    """A judge that answers from documents."""

    def __init__(self, answer):
        self.reply, self.asked = answer, []

    async def answer(self, identity, question, documents):
        self.asked.append((question, documents))
        return self.reply


WRONG = [final(answer='x')] * 3


def episode(proposal=None, solver=WRONG, checker=(), judge=None, **changes):
    """(outcome of one hidden answer, the context that was asked)."""
    scripts = dict(proposer=[proposal or hidden()], checker=checker, solver=solver)
    context = ScriptedContext(judge, **scripts)
    (outcome,) = play(recipe(**changes), context, [ITEM])
    return outcome, context


@pytest.mark.parametrize(
    'reply,drop', [('tarva', None), ('Puto', 'unanswerable'), (None, 'unanswerable')]
)
def test_the_check_may_be_the_judges_as_in_the_released_code(reply, drop):
    judge = Answerer(reply)
    out, context = episode(judge=judge, ssp__checker='judge')
    assert out.drop == drop and 'checker' not in {role for role, *_ in context.asked}
    ((question, documents),) = judge.asked
    assert question == 'What is the country of Lomi?' and LOMI['text'] in documents


@pytest.mark.parametrize('right,reward', [(0, 1.0), (1, 2 / 3), (3, 0.0)])
def test_the_game_is_zero_sum(right, reward):
    tries = [final(answer='Tarva')] * right + WRONG[right:]
    out, _ = episode(checker=[final(answer='tarva')], solver=tries)
    assert [row.role for row in out.rows] == ['proposer', *['solver'] * 3] and out.drop is None
    assert out.rows[0].reward == pytest.approx(reward) and out.rows[0].info.solve_count == right
    assert [q.answers for q in out.questions] == [('Tarva',)]


@pytest.mark.parametrize(
    'rollout,reason',
    [
        (hidden(question='Is Lomi in Tarva?'), 'leaks_answer'),
        (final(question='What is the country of Lomi?'), 'few_searches'),
        (final(finish='turns', question='What is the country of Lomi?'), 'unfinished'),
        (searching(('Tarva', (LOMI,)), answer='x'), 'no_question'),
    ],
)
def test_the_gate_turns_away_before_anybody_is_asked(rollout, reason):
    out, context = episode(rollout, ssp__invalid_reward=-0.1)
    assert out.drop == reason and out.rows[0].reward == -0.1 and len(context.asked) == 1


def test_what_the_material_does_not_answer_is_turned_away():
    out, _ = episode(checker=[final(answer='Puto')])
    assert out.drop == 'unanswerable' and out.rows[0].reward == 0 and not out.questions
    out, _ = episode(ssp__answerability_check=False)
    assert out.drop is None


@pytest.mark.parametrize('noise,seen', [(0, 1), (1, 2), (4, 3)])
def test_the_check_mixes_in_what_others_read(noise, seen):
    third = dict(id=3, title='Puto', text='Puto worked as a poet.')
    proposals = [hidden(), hidden(found=(GUMU,)), hidden(found=(third,))]
    context = ScriptedContext(proposer=proposals, checker=[final(answer='x')] * 3)
    game = recipe(ssp__noise=noise, proposer__batch=3)
    tasks = game.tasks(STEP, TaskPool(), BatchCursor(missing=3))
    assert [len(t.payload.noise_from) for t in tasks] == [min(noise, 2)] * 3
    scripted.run_episodes(game, context, STEP, tasks)
    checks = [fields['documents'] for role, _, _, fields in context.asked if role == 'checker']
    assert [text.count('Title:') for text in checks] == [seen] * 3


def test_late_answers_are_checked_among_as_many_neighbours():
    game = recipe(ssp__fill='resample', ssp__noise=4)
    (late,) = game.tasks(
        STEP, TaskPool(), BatchCursor(phase=8, step=8, round=1, missing=1, external=8)
    )
    assert late.payload.noise_from == ((7, 0), (7, 1), (7, 2), (7, 3))


def test_replayed_questions_do_not_use_up_the_deck():
    game = recipe()
    first = [t.payload.answer for t in game.tasks(STEP, TaskPool(), BatchCursor(missing=8))]
    after = [
        t.payload.answer
        for t in game.tasks(STEP, TaskPool(), BatchCursor(phase=14, external=8, missing=8))
    ]
    whole = [item.answer for item in game._answers.take(0, 16)]
    assert first + after == whole


def test_a_judge_without_verdicts_says_nothing_about_a_question():
    judge = types.SimpleNamespace(correct=AsyncMock(return_value=None))
    changes = dict(reward__answer='judge', ssp__answerability_check=False)
    out, _ = episode(judge=judge, **changes)
    assert [row.drop for row in out.rows] == ['ungraded'] * 4


def test_a_question_that_is_too_long_is_turned_away_alone():
    def too_long(fields):
        raise TaskDropped('prompt_too_long')

    out, _ = episode(checker=too_long)
    assert out.drop == 'prompt_too_long' and len(out.rows) == 1 and out.rows[0].reward == 0


def test_noise_is_left_out_where_the_prompt_gets_too_long():
    context = ScriptedContext(
        proposer=[hidden(), hidden(found=(GUMU,))], checker=[final(answer='x')] * 2
    )
    context.roles['checker'].prompt_tokens = 18
    play(recipe(), context, [ITEM, ITEM])
    checks = {
        name[1]: fields['documents'] for role, name, _, fields in context.asked if role == 'checker'
    }
    assert all(text.count('Title:') == 1 for text in checks.values())
    assert 'Lomi' in checks[0] and 'Gumu' in checks[1]


@pytest.mark.parametrize(('limit', 'passages'), [(18, 1), (10_000, 2), (None, 2)])
def test_noise_is_left_out_by_the_limit_of_the_judge_where_it_answers(limit, passages):
    judge = Answerer('x')
    context = ScriptedContext(judge, proposer=[hidden(), hidden(found=(GUMU,))])
    context.roles['checker'].prompt_tokens = 18
    # A server is no role.
    if limit is not None:
        context.roles['judge'] = ScriptedRole(limit)
    play(recipe(ssp__checker='judge'), context, [ITEM, ITEM])
    assert [text.count('Title:') for _, text in judge.asked] == [passages] * 2


def test_a_failing_neighbour_keeps_nobody_waiting():
    context = ScriptedContext(
        proposer=[hidden(), final(finish='turns')], checker=[final(answer='x')]
    )
    outs = play(recipe(), context, [ITEM, ITEM])
    assert [o.drop for o in outs] == ['unanswerable', 'unfinished']


def test_the_batch_is_filled_as_the_config_says():
    pool = TaskPool()
    for i in range(3):
        pool.add(Question(f'What is {i}?', ('x',)))
    after = BatchCursor(phase=16, step=8, round=1, missing=5)
    kinds = {}
    for kind in ('pad', 'resample', 'replay_full', 'replay_reset'):
        kinds[kind] = recipe(ssp__fill=kind).tasks(STEP, pool, after)
    assert kinds['pad'] == []
    assert len(kinds['resample']) == 5 and all(
        t.external and isinstance(t.payload, HiddenAnswer) for t in kinds['resample']
    )
    for kind in ('replay_full', 'replay_reset'):
        assert len(kinds[kind]) == 5 and all(
            isinstance(t.payload, Question) and not t.external for t in kinds[kind]
        )
    assert {t.identity for t in kinds['resample']} == {(7, 8 + i) for i in range(5)}
    late = BatchCursor(phase=99, step=80, round=6, missing=5)
    assert recipe(ssp__fill='resample', ssp__fill_rounds=5).tasks(STEP, pool, late) == []
    assert recipe(ssp__fill='replay_full').tasks(STEP, TaskPool(), after) == []


def test_an_old_question_is_solved_again_without_a_proposer():
    context = ScriptedContext(solver=[final(answer='x')] * 3)
    game = recipe(ssp__fill='replay_full')
    pool = TaskPool()
    pool.add(Question('What is 1?', ('x',)))
    (task,) = game.tasks(STEP, pool, BatchCursor(8, 8, 1, 1))
    (out,) = scripted.run_episodes(game, context, STEP, [task])
    assert [r.role for r in out.rows] == ['solver'] * 3 and all(r.reward == 1 for r in out.rows)


def test_phases_train_both_roles_or_the_one_that_still_learns():
    def phase(**changes):
        (phase,) = recipe(**changes).phases()
        return phase

    assert phase().trains == ('solver', 'proposer')
    assert phase(ssp__first_update='proposer').trains == ('proposer', 'solver')
    assert phase(proposer__train_iterations=0).trains == ('solver',)
    assert phase(ssp__fill='replay_reset', ssp__fill_period=4).clear_pool_every == 4
