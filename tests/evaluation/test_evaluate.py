"""The evaluation inside a run: questions are matched, open tasks graded, and what no judge graded says so."""

import asyncio
import dataclasses
import types

from trajectories import ASKS_SOLVER, make_trajectory

from zeroplay_jax.evaluation.answering import evaluate, scores_by_hop
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.run import loop
from zeroplay_jax.run.loop import RunState
from zeroplay_jax.types import Question, Turn

RUBRICS = tuple({'text': text, 'priority': 'important'} for text in ('one', 'two'))
QUESTIONS = (
    Question('Where is it?', ('Rome',), hops=2),
    Question('Who was it?', ('Nobody',), hops=1),
    Question('Describe one.', rubrics=RUBRICS, hops=2),
    Question('Describe what cannot be judged.', rubrics=RUBRICS, hops=1),
)


class Judge:
    async def grade(self, identity, task, answer, rubric):
        return None if 'cannot' in task else rubric == 'one'


class Context:
    """A rollout context in which every question is answered with Rome."""

    judge = Judge()
    roles = {'solver': types.SimpleNamespace(prompt='solver')}
    prompts = {'solver': Prompt('Question: {question}')}

    def __init__(self):
        self.asked = {}

    async def ask(self, role, identity, samples, temperature, prompt, **fields):
        self.asked[identity] = (role, samples, temperature, prompt, fields)
        return [make_trajectory(Turn('<answer>Rome</answer>'), identity=identity)]

    def run_episodes(self, episodes, on_episode_end):
        async def run_all():
            return [await episode() for episode in episodes.values()]

        return asyncio.run(run_all())


def test_questions_are_matched_and_tasks_graded():
    context, part = Context(), dataclasses.replace(QUESTIONS[1], answers=('Rom',))
    rows = evaluate(context, (QUESTIONS[0], part, *QUESTIONS[2:]), 7, ASKS_SOLVER)
    correct = scores_by_hop(rows, 'exact_match')
    assert {hops: flags.tolist() for hops, flags in correct.items()} == {1: [0], 2: [1]}
    assert [row.parts for row in rows] == [
        {'exact_match': 1},
        {'exact_match': 0},
        {'rubrics': 0.5},
        {'rubrics': 0},
    ]
    assert [row.drop for row in rows] == [None, None, None, 'ungraded']
    assert [row.group for row in rows] == [2, 1, 2, 1] and rows[2].info.answer == 'Rome'
    assert context.asked[7, 0] == ('solver', 1, 0.0, 'solver', {'question': 'Where is it?'})
    assert context.asked[7, 2] == ('solver', 1, 0.0, 'solver.task', {'task': 'Describe one.'})


def test_a_further_metric_is_measured_beside_exact_match():
    questions = (Question('Where is it?', ('rom',), hops=2), *QUESTIONS[:3])
    rows = evaluate(Context(), questions, 7, ASKS_SOLVER, metric='subem')
    assert scores_by_hop(rows, 'exact_match')[2].tolist() == [0, 1], 'the headline stays'
    both = [{'exact_match': 0, 'subem': 1}, {'exact_match': 1, 'subem': 1}]
    assert [row.parts for row in rows[:2]] == both and rows[3].parts == {'rubrics': 0.5}
    state = RunState({})
    metrics = loop.record_scores(state, '7', rows, 'subem')
    # The mean over two hop counts, as of exact match: 1 and 0.
    assert metrics == {'rubrics/mean': 0.5, 'rubrics/ungraded': 0.0, 'subem/mean': 0.5}
    assert state.rubrics == {'7': [0.5]} and state.scores == {'7': [1.0, 1.0, 0.0]}


def test_each_of_several_files_has_a_metric():
    sets = zip(QUESTIONS, ('nq', 'hotpotqa'))
    of_file = [dataclasses.replace(question, origin={'set': name}) for question, name in sets]
    rows = evaluate(Context(), [*of_file, of_file[0], QUESTIONS[2]], 7, ASKS_SOLVER, metric='subem')
    metrics = loop.record_scores(RunState({}), '7', rows, 'subem')
    for name in ('em', 'subem'):
        assert metrics[f'{name}/nq/mean'] == 1.0 and metrics[f'{name}/hotpotqa/mean'] == 0.0
