"""SSP as an episode: the gate, the check with other people's passages, zero-sum rewards, and how a batch is filled."""

import pathlib
import re

import scripted
from refused_calls import check_table
from scripted import ScriptedContext, final, searching

from zeroplay_jax.configs import ssp
from zeroplay_jax.recipes.datasets import HiddenAnswer
from zeroplay_jax.recipes.ssp import Recipe
from zeroplay_jax.selfplay.schedule import BatchCursor, Phase, QuestionPool, Step, in_epochs
from zeroplay_jax.types import Question, Task, TaskDropped, Turn

LOMI = dict(id=1, title='Lomi', text='Lomi is a city in Tarva.')
GUMU = dict(id=2, title='Gumu', text='Gumu was born in Puto.')
STEP = Step(Phase('selfplay', 9, ('solver', 'proposer')), 2, 7)


def recipe(**changes):
    config = ssp.get_config('mini')
    config.update_from_flattened_dict(
        {name.replace('__', '.'): value for name, value in changes.items()}
    )
    material = scripted.Material(answers=[f'answer{i}' for i in range(40)])
    return Recipe(config, scripted.library(worlds=material))


def hidden(question='What is the country of Lomi?', found=(LOMI,)):
    return searching(('Tarva', found), question=question)


def play(context, count=2, **changes):
    """Plays the answers of a step together, as the engine does; (tasks, outcomes)."""
    game = recipe(proposer__batch=count, **changes)
    tasks = game.tasks(STEP, QuestionPool(), BatchCursor(missing=count))
    return tasks, scripted.run_episodes(game, context, STEP, tasks)


ITEM = Task((7, 0), HiddenAnswer('Tarva', hops=1))


class Answerer:
    """A judge that answers from documents."""

    def __init__(self, answer):
        self.reply, self.asked = answer, []

    async def answer(self, identity, question, documents):
        self.asked.append((question, documents))
        return self.reply


class Speechless:
    """A judge without verdicts."""

    async def correct(self, *_):
        return None


class Down:
    """A judge whose server fails at some of its judgements."""

    def __init__(self, *failing):
        self.failing, self.asked = failing, 0

    async def correct(self, *_):
        self.asked += 1
        if self.asked in self.failing:
            raise TaskDropped('judge_failed')
        return self.asked == 1

    answer = correct


TARVA = final(answer='Tarva')
WRONG = [final(answer='x')] * 3
PENALTY = dict(ssp__invalid_reward=-0.1)
BARE = scripted.trajectory(Turn('Tarva it is: <answer>Tarva</answer>'))
LOOSE = scripted.trajectory(
    hidden().turns[0], Turn('Now: <question>What is the country of Lomi?</question>')
)


def too_long(fields):
    raise TaskDropped('prompt_too_long')


def episode(proposal=None, solver=WRONG, checker=(), judge=None, **changes):
    """Who was asked for one hidden answer, and what the outcome is."""
    proposal = proposal or hidden()
    context = ScriptedContext(judge, proposer=[proposal], checker=checker, solver=solver)
    (outcome,) = scripted.run_episodes(recipe(**changes), context, STEP, [ITEM])
    asked = [role for role, *_ in context.asked]
    if isinstance(judge, Answerer):
        ((question, documents),) = judge.asked
        assert question == 'What is the country of Lomi?' and LOMI['text'] in documents
    if outcome.drop:
        assert not outcome.questions and len(outcome.rows) == 1
    else:
        (question,) = outcome.questions
        assert question.answers == ('Tarva',)
        assert [row.role for row in outcome.rows] == ['proposer', *['solver'] * 3]
    rewards = [round(row.reward, 3) for row in outcome.rows]
    drops = list(dict.fromkeys(row.drop for row in outcome.rows))
    solve_count = outcome.rows[0].info.solve_count
    return f'{asked}: rewards {rewards}, dropped {outcome.drop}, {drops}, solved {solve_count}'


def filled(kind, questions=3, step=8, round=1, **changes):
    """Kinds of the tasks that fill a batch."""
    pool = QuestionPool()
    for number in range(questions):
        pool.add(Question(f'What is {number}?', ('x',)))
    cursor = BatchCursor(drawn_in_phase=16, drawn_in_step=step, round=round, missing=5)
    tasks = recipe(ssp__fill=kind, **changes).tasks(STEP, pool, cursor)
    assert [task.identity for task in tasks] == [(7, step + i) for i in range(len(tasks))]
    kinds = {(type(task.payload).__name__, task.external) for task in tasks}
    return f'{len(tasks)} {kinds or ""}'.strip()


def phase(**changes):
    (phase,) = recipe(**changes).phases()
    return f'{phase.trains}, pool cleared every {phase.clear_pool_every}'


def test_episodes_batches_and_phases():
    check_table(pathlib.Path(__file__).parent / 'ssp.txt', globals())


def noise_of(*others, read=(LOMI,), prompt_tokens=10_000, **changes):
    """Ids of what the check of the first of several answers reads; `others`: what the other proposers read."""
    proposals = [hidden(found=found) for found in (read, *others)]
    context = ScriptedContext(proposer=proposals, checker=WRONG[:1] * len(proposals))
    context.roles['checker'].prompt_tokens = prompt_tokens
    tasks, _ = play(context, len(proposals), **changes)
    (documents,) = [
        fields['documents']
        for role, identity, _, fields in context.asked
        if role == 'checker' and identity[:2] == tasks[0].identity
    ]
    return sorted(map(int, re.findall(r'Title: "?P(\d+)', documents)))


def passages(*numbers):
    return [dict(id=number, title=f'P{number}', text='Text.') for number in numbers]


def test_noise_is_so_many_single_documents_of_other_proposers():
    """As in section 4.4: four documents, whatever each of the others read."""
    others = [passages(10), [], passages(10), passages(1, 2), passages(*range(20, 30))]
    others += [passages(30), passages(31), passages(40)]
    read = passages(1, 2, 3)
    noise = {*noise_of(*others, read=read, ssp__noise=4)} - {1, 2, 3}
    # None from a proposer that found nothing, or only what is known; one from each of the first four others.
    assert noise - {*range(20, 30)} == {10, 30, 31} and len(noise) == 4
    everything = dict(ssp__noise=5, ssp__noise_unit='trajectory')
    assert {*noise_of(*others, read=read, **everything)} == {1, 2, 3, 10, *range(20, 30)}


def test_the_documents_of_the_noise_are_drawn_by_seed_and_task():
    drawn = set()
    for seed in range(8):
        first, again = (noise_of(passages(*range(10, 20)), ssp__noise=1, seed=seed) for _ in '12')
        assert first == again
        drawn.add(frozenset(first))
    assert len(drawn) > 3


def test_a_passage_that_both_read_is_no_noise():
    assert noise_of(passages(1), read=passages(1)) == [1]


def test_noise_is_left_out_where_the_prompt_gets_too_long():
    assert noise_of(passages(2), read=passages(1)) == [1, 2]
    assert noise_of(passages(2), read=passages(1), prompt_tokens=10) == [1]


def test_a_failing_neighbour_keeps_nobody_waiting():
    proposals = [hidden(), final(finish='turns')]
    context = ScriptedContext(proposer=proposals, checker=WRONG[:1])
    _, outcomes = play(context)
    assert [outcome.drop for outcome in outcomes] == ['unanswerable', 'unfinished']


def test_replayed_questions_do_not_use_up_the_deck():
    game = recipe(proposer__batch=8, solver__batch=8)
    answers = []
    for cursor in (BatchCursor(missing=8), BatchCursor(drawn_in_phase=14, external=8, missing=8)):
        answers += [task.payload.answer for task in game.tasks(STEP, QuestionPool(), cursor)]
    assert answers == [item.answer for item in in_epochs(game._answers, 0, 16, game.config.seed)]
