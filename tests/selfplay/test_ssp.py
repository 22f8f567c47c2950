"""SSP as an episode: the gate, the check with other people's passages, zero-sum rewards, and how a batch is filled."""

import asyncio
import collections

import pytest
from scripted import Table, final, searching
from zeroplay_jax.selfplay.corpus import Corpus

from zeroplay_jax.configs import ssp
from zeroplay_jax.selfplay.engine import Draw, Phase, Step
from zeroplay_jax.selfplay.recipes.ssp import Recipe
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import TaskDropped

LOMI = dict(id=1, title='Lomi', text='Lomi is a city in Tarva.')
GUMU = dict(id=2, title='Gumu', text='Gumu was born in Puto.')
STEP = Step(Phase('selfplay', 9, ('solver', 'proposer')), 2, 7)


def recipe(**changes):
    config = ssp.get_config('mini')
    for name, value in changes.items():
        node, leaf = name.split('__')
        config[node][leaf] = value
    return Recipe(
        config, Corpus(None, None, (), (), 3, answers=tuple(f'answer{i}' for i in range(40)))
    )


def hidden(question='What is the country of Lomi?', found=(LOMI,)):
    return searching(('Tarva', found), question=question)


def play(game, table, payloads):
    """Plays the items of a step together, as the engine does."""
    tasks = game.tasks(STEP, TaskPool(), Draw(missing=len(payloads)))[: len(payloads)]
    names = [list(t.identity) for t in tasks]
    for i, (task, payload) in enumerate(zip(tasks, payloads)):
        task.payload.update(payload, beside=[names[(i + 1) % len(names)]] if len(names) > 1 else [])

    async def all_of_them():
        return await asyncio.gather(*(game.episode(table, STEP, t) for t in tasks))

    return asyncio.run(all_of_them())


ITEM = dict(answer='Tarva', hops=1)


@pytest.mark.parametrize('right,reward', [(0, 1.0), (1, 2 / 3), (3, 0.0)])
def test_the_game_is_zero_sum(right, reward):
    tries = [final(answer='Tarva')] * right + [final(answer='x')] * (3 - right)
    table = Table(proposer=[hidden()], checker=[final(answer='tarva')], solver=tries)
    (out,) = play(recipe(), table, [ITEM])
    roles = collections.Counter(row.role for row in out.rows)
    assert roles == {'proposer': 1, 'solver': 3} and out.drop is None
    assert out.rows[0].reward == pytest.approx(reward) and out.rows[0].info['solved'] == right
    assert [q['answers'] for q in out.questions] == [['Tarva']]


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
    table = Table(proposer=[rollout])
    (out,) = play(recipe(reward__invalid=-0.1), table, [ITEM])
    assert out.drop == reason and out.rows[0].reward == -0.1 and len(table.asked) == 1


def test_what_the_material_does_not_answer_is_turned_away():
    table = Table(proposer=[hidden()], checker=[final(answer='Puto')])
    (out,) = play(recipe(), table, [ITEM])
    assert out.drop == 'unanswerable' and out.rows[0].reward == 0 and not out.questions
    table = Table(proposer=[hidden()], solver=[final(answer='x')] * 3)
    assert play(recipe(check__on=False), table, [ITEM])[0].drop is None


@pytest.mark.parametrize('noise,seen', [(0, 1), (1, 2), (4, 3)])
def test_the_check_mixes_in_what_others_read(noise, seen):
    third = dict(id=3, title='Puto', text='Puto worked as a poet.')
    proposals = [hidden(), hidden(found=(GUMU,)), hidden(found=(third,))]
    table = Table(proposer=proposals, checker=[final(answer='x')] * 3)
    game = recipe(check__noise=noise, proposer__batch=3)
    tasks = game.tasks(STEP, TaskPool(), Draw(missing=3))
    assert [len(t.payload['beside']) for t in tasks] == [min(noise, 2)] * 3

    async def all_of_them():
        await asyncio.gather(*(game.episode(table, STEP, t) for t in tasks))

    asyncio.run(all_of_them())
    checks = [fields['documents'] for role, _, _, fields in table.asked if role == 'checker']
    assert [text.count('Title:') for text in checks] == [seen] * 3


def test_late_answers_are_checked_among_as_many_neighbours():
    game = recipe(fill__kind='resample', check__noise=4)
    (late,) = game.tasks(STEP, TaskPool(), Draw(phase=8, step=8, round=1, missing=1, outside=8))
    assert late.payload['beside'] == [[7, 0], [7, 1], [7, 2], [7, 3]]


def test_replayed_questions_do_not_use_up_the_deck():
    game = recipe()
    first = [t.payload['answer'] for t in game.tasks(STEP, TaskPool(), Draw(missing=8))]
    after = [
        t.payload['answer']
        for t in game.tasks(STEP, TaskPool(), Draw(phase=14, outside=8, missing=8))
    ]
    whole = [item['answer'] for item in game._deck.deal(0, 16)]
    assert first + after == whole


def test_a_judge_without_verdicts_says_nothing_about_a_question():
    class Silent:
        async def correct(self, *_):
            return None

    table = Table(Silent(), proposer=[hidden()], solver=[final(answer='x')] * 3)
    (out,) = play(recipe(reward__answer='judge', check__on=False), table, [ITEM])
    assert [row.drop for row in out.rows] == ['ungraded'] * 4


def test_a_question_that_is_too_long_is_turned_away_alone():
    def too_long(fields):
        raise TaskDropped('prompt_too_long')

    table = Table(proposer=[hidden()], checker=too_long)
    (out,) = play(recipe(), table, [ITEM])
    assert out.drop == 'prompt_too_long' and len(out.rows) == 1 and out.rows[0].reward == 0


def test_noise_is_left_out_where_the_prompt_gets_too_long():
    table = Table(proposer=[hidden(), hidden(found=(GUMU,))], checker=[final(answer='x')] * 2)
    table.roles['checker'].prompt_tokens = 18
    play(recipe(), table, [ITEM, ITEM])
    checks = {
        name[1]: fields['documents'] for role, name, _, fields in table.asked if role == 'checker'
    }
    assert all(text.count('Title:') == 1 for text in checks.values())
    assert 'Lomi' in checks[0] and 'Gumu' in checks[1]


def test_a_failing_neighbour_keeps_nobody_waiting():
    table = Table(proposer=[hidden(), final(finish='turns')], checker=[final(answer='x')])
    outs = play(recipe(), table, [ITEM, ITEM])
    assert [o.drop for o in outs] == ['unanswerable', 'unfinished']


def test_the_batch_is_filled_as_the_config_says():
    pool = TaskPool()
    for i in range(3):
        pool.add({'question': f'What is {i}?', 'answers': ['x'], 'hops': 1})
    after = Draw(phase=16, step=8, round=1, missing=5)
    kinds = {}
    for kind in ('pad', 'resample', 'replay_full', 'replay_reset'):
        kinds[kind] = recipe(fill__kind=kind).tasks(STEP, pool, after)
    assert kinds['pad'] == []
    assert len(kinds['resample']) == 5 and all(
        t.outside and 'answer' in t.payload for t in kinds['resample']
    )
    for kind in ('replay_full', 'replay_reset'):
        assert len(kinds[kind]) == 5 and all(
            'question' in t.payload and not t.outside for t in kinds[kind]
        )
    assert {t.identity for t in kinds['resample']} == {(7, 8 + i) for i in range(5)}
    late = Draw(phase=99, step=80, round=6, missing=5)
    assert recipe(fill__kind='resample', fill__rounds=5).tasks(STEP, pool, late) == []
    assert recipe(fill__kind='replay_full').tasks(STEP, TaskPool(), after) == []


def test_an_old_question_is_solved_again_without_a_proposer():
    table = Table(solver=[final(answer='x')] * 3)
    game = recipe(fill__kind='replay_full')
    pool = TaskPool()
    pool.add({'question': 'What is 1?', 'answers': ['x'], 'hops': 1})
    (task,) = game.tasks(STEP, pool, Draw(8, 8, 1, 1))
    out = asyncio.run(game.episode(table, STEP, task))
    assert [r.role for r in out.rows] == ['solver'] * 3 and all(r.reward == 1 for r in out.rows)


def test_phases_train_both_roles_or_the_one_that_still_learns():
    assert [p.trains for p in recipe().phases()] == [('solver', 'proposer')]
    assert [p.trains for p in recipe(schedule__first='proposer').phases()] == [
        ('proposer', 'solver')
    ]
    assert [p.trains for p in recipe(proposer__train_iterations=0).phases()] == [('solver',)]
    assert [p.clears_pool for p in recipe(fill__kind='replay_reset', fill__period=4).phases()] == [
        4
    ]
