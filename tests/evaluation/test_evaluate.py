"""The evaluation inside a run: questions are matched, open tasks graded, and what no judge graded says so."""

import asyncio

import numpy as np
import pytest
from zeroplay_jax.evaluation.evaluate import evaluate

from zeroplay_jax.selfplay.roles import TaskDropped
from zeroplay_jax.types import POLICY, Trajectory, Turn, UserError

RUBRICS = [{'text': text, 'priority': 'important'} for text in ('one', 'two')]
ITEMS = (
    {'question': 'Where is it?', 'answers': ['Rome'], 'hops': 2},
    {'question': 'Who was it?', 'answers': ['Nobody'], 'hops': 1},
    {'question': 'Describe one.', 'rubrics': RUBRICS, 'answers': [], 'hops': 2},
    {'question': 'Describe what cannot be judged.', 'rubrics': RUBRICS, 'answers': [], 'hops': 1},
)


class Judge:
    async def grade(self, identity, task, answer, rubric):
        return None if 'cannot' in task else rubric == 'one'


class Table:
    """Answers Rome to everything."""

    judge = Judge()

    def __init__(self):
        self.asked = {}

    async def ask(self, role, identity, samples, temperature, prompt, **fields):
        self.asked[identity] = (role, samples, temperature, prompt, fields)
        if 'too long' in str(fields):
            raise TaskDropped('prompt_too_long')
        source = np.full(2, POLICY, np.int8)
        turn = Turn('<answer>Rome</answer>')
        return [
            Trajectory(
                np.zeros(2, np.int32),
                source,
                np.zeros(2, np.float32),
                (turn,),
                'answer',
                'w',
                0,
                identity,
            )
        ]

    def play(self, episodes, done):
        async def all_of_them():
            return [await play() for play in episodes.values()]

        return asyncio.run(all_of_them())


def test_questions_are_matched_and_tasks_graded():
    table = Table()
    correct, rows = evaluate(table, ITEMS, 7)
    assert {hops: flags.tolist() for hops, flags in correct.items()} == {1: [False], 2: [True]}
    assert [row.parts for row in rows] == [
        {'exact_match': 1},
        {'exact_match': 0},
        {'rubrics': 0.5},
        {'rubrics': 0},
    ]
    assert [row.drop for row in rows] == [None, None, None, 'ungraded']
    assert [row.group for row in rows] == [2, 1, 2, 1] and rows[2].info['answer_given'] == 'Rome'
    assert table.asked[7, 0] == ('solver', 1, 0.0, 'solver', {'question': 'Where is it?'})
    assert table.asked[7, 2] == ('solver', 1, 0.0, 'task_solver', {'task': 'Describe one.'})


def test_what_is_too_long_to_ask_is_one_line():
    with pytest.raises(
        UserError, match="'A task that is too long' cannot be asked: prompt_too_long; raise"
    ) as error:
        evaluate(Table(), [dict(ITEMS[2], question='A task that is too long')], 0)
    assert '\n' not in str(error.value)
