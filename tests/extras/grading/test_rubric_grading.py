"""Rubric grading of a file of tasks: what is recorded once is never asked again, and lost verdicts count as lost."""

import asyncio
import collections
import json
import pathlib
import types

import pytest
from input_files import write
from refused_calls import check_table
from trajectories import ASKS_SOLVER, make_trajectory

from zeroplay_jax.evaluation.answering import Answer
from zeroplay_jax.extras.grading import graded, grading_results
from zeroplay_jax.extras.grading.record import Grade, GradingRecord, Judgement, load_tasks
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.selfplay.judge import RuleJudge
from zeroplay_jax.types import ToolCall, Turn, UserError

RIVERS = ('Arv', 'Bero', 'Cilu')


def write_tasks(path, count, rubrics=3):
    """Writes tasks about cities: rubric i is about the river, the country or the mayor."""
    facts = ('lies on the river Arv', 'is a city in Tarva', 'is led by Puto')[:rubrics]
    lines = []
    for number in range(count):
        texts = [f'State that City{number} {fact}.' for fact in facts]
        task = {'id': f'task {number}', 'task': f'Describe City{number}.', 'rubrics': texts}
        lines.append(task)
    return load_tasks(write(path, *lines))


def answer_to(task):
    """Every third answer knows the river, every second one the country, one of fifty says nothing."""
    number = int(task.removeprefix('Describe City').rstrip('.'))
    if number % 50 == 7:
        return ''
    text = f'City{number} is led by Puto. '
    text += f'It lies on the river {RIVERS[number % 3]}. '
    return text + ('It is a city in Tarva.' if number % 2 else '')


class Context:
    """A rollout context whose policy answers at once, in an order that depends on the task."""

    roles = {'solver': types.SimpleNamespace(prompt='solver.task', prompt_tokens=40)}
    prompts = {'solver.task': Prompt('Task: {task}')}

    def __init__(self, error=None, failing=()):
        self.scheduler, self.error, self.failing = self, error, failing
        self.played = collections.Counter()

    def run(self, episodes):
        async def run_all():
            await asyncio.gather(*episodes)

        asyncio.run(run_all())

    def prompt_ids(self, role, prompt, task):
        return task

    async def ask(self, role, identity, samples, temperature, prompt, task):
        for _ in range(hash(task) % 5):
            await asyncio.sleep(0)
        self.played[task] += 1
        assert temperature == (0.0 if samples == 1 else None)
        call = ToolCall(
            'search', {'query': task}, error=self.error if task in self.failing else None
        )
        turns = (Turn('', call), Turn(f'<answer>{answer_to(task)}</answer>'))
        return [make_trajectory(*turns, identity=identity)] * samples


class StrictJudge(RuleJudge):
    """Grades as the rule does, and refuses one answer of 29."""

    def __init__(self):
        super().__init__(list, (1, 5), 0.5)
        self.asked = collections.Counter()

    async def grade(self, identity, task, answer, rubric):
        await asyncio.sleep(0)
        self.asked[identity] += 1
        if (identity[1] + identity[3]) % 29 == 0:
            self._add_failure('unread', 'I cannot grade this.')
            return None
        return await super().grade(identity, task, answer, rubric)


def play_all(folder, tasks, context, judge, key='key', on_grades=lambda number: None, **options):
    folder.mkdir(exist_ok=True)
    record = GradingRecord(folder)
    grader = graded.Grader(judge.bound(None), key, record, 16, on_grades)
    graded.grade_tasks(context, ASKS_SOLVER, tasks, grader, **options)
    record = GradingRecord(folder)
    return grading_results.results({}, 'tasks', tasks, key, record, options.get('samples', 1))


def rule():
    return RuleJudge(list, (1, 5))


def test_500_tasks_killed_twice_give_what_an_uninterrupted_evaluation_gives(tmp_path):
    tasks = write_tasks(tmp_path / 'tasks.jsonl', 500)
    whole = play_all(tmp_path / 'whole', tasks, Context(), StrictJudge())
    folder, context, judge = tmp_path / 'parts', Context(), StrictJudge()
    done = []

    def stop_twice(number):
        done.append(number)
        if len(done) in (200, 750):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            play_all(folder, tasks, context, judge, on_grades=stop_twice)
        for name in ('answers.jsonl', 'grades.jsonl'):
            # A write that was cut off.
            with (folder / name).open('a', encoding='utf-8') as file:
                file.write('{"task": "task 49')
    parts = play_all(folder, tasks, context, judge)
    assert json.dumps(parts) == json.dumps(whole)
    # The interrupt came after the grade was written and before it was counted: nothing was asked twice.
    assert set(judge.asked.values()) == {1}
    assert context.played.total() <= 500 + 2 * 16 and len(context.played) == 500
    fresh = StrictJudge()
    again = play_all(folder, tasks, Context(), fresh)
    assert again == whole and not fresh.asked, 'a finished evaluation asks nothing'
    # 10 of 500 say nothing.
    assert whole['answers'] == {'given': 490, 'missing': 10, 'finish': {'answer': 500}}
    # Another judge grades the same answers: the mayor is known, 1/3 of the rivers, 1/2 of the countries.
    context = Context()
    other = play_all(folder, tasks, context, rule(), 'rule')
    assert not context.played
    assert other['rubrics_met'][0] == pytest.approx(0.98 * (1 + 1 / 3 + 1 / 2) / 3, abs=0.01)


def test_verdicts_that_were_not_given_are_neither_met_nor_not_met(tmp_path):
    tasks = write_tasks(tmp_path / 'tasks.jsonl', 4, rubrics=2)
    answer, none = Answer('It is.', 'answer', 1, 0.0, 5), Answer(None, 'turns', 2, 0.5, 9)
    unread, failed = Grade(None, 'unread', 'Hm.'), Grade(None, 'failed', 'timeout')
    yes, no = Grade(True), Grade(False)
    verdicts = [[yes, unread], [no, yes], [failed, unread], []]
    record = GradingRecord(tmp_path)
    for task, grades in zip(tasks, verdicts, strict=True):
        record.add_answers(task.id, (answer if grades else none,))
        for number, grade in enumerate(grades):
            record.add_grade(Judgement('a', task.id, 0, number), grade)
    record = GradingRecord(tmp_path)
    result = grading_results.results({}, 'tasks', tasks, 'a', record, 1)
    # Of task 2 nothing was graded: it has no score. The answer that is missing has 0.
    assert [entry['score'] for entry in result['task_scores']] == [1.0, 0.5, None, 0.0]
    assert result['rubrics_met'][0] == 0.5 and result['scored_tasks'] == 3
    assert result['judgements'] == {'met': 2, 'not_met': 1, 'unread': 2, 'failed': 1}
    assert result['answers'] == {'given': 3, 'missing': 1, 'finish': {'answer': 3, 'turns': 1}}
    assert result['sets']['tasks']['mean']['searches'] == 1.25


def test_answers_after_failed_tool_calls_are_recorded_only_if_these_are_rare(tmp_path):
    tasks = write_tasks(tmp_path / 'tasks.jsonl', 40)
    failing = {task.question.text for task in tasks[:20]}

    def refuse():
        raise UserError('20 of 40 calls failed')

    def context():
        return Context('timeout', failing)

    folder = tmp_path / 'run'
    with pytest.raises(UserError, match='20 of 40'):
        play_all(folder, tasks, context(), rule(), samples=2, check_tools=refuse)
    record = GradingRecord(folder)
    assert set(record.answers) == {task.id for task in tasks[20:]}
    result = play_all(folder, tasks, context(), rule(), samples=2)
    assert result['answers']['given'] == 2 * 39
    assert sum(result['judgements'].values()) == 2 * 39 * 3


def test_lines_of_tasks_are_read_or_refused_as_the_table_says(tmp_path):
    def load(*lines):
        path = write(tmp_path / 'tasks.jsonl', *lines)
        return [(one.id, one.index, one.question.rubrics) for one in load_tasks(path)]

    check_table(pathlib.Path(__file__).parent / 'tasks.txt', {'load': load}, tmp_path)


def test_rubrics_count_by_their_weights(tmp_path):
    river, mayor = 'State that City0 lies on the river Arv.', 'State that City0 is led by Puto.'
    country = {'text': 'State that City0 is a city in Tarva.', 'weight': 5}
    rubrics = [{'text': river, 'weight': 3}, {'text': mayor, 'weight': -1}, country]
    path = write(tmp_path / 'tasks.jsonl', {'task': 'Describe City0.', 'rubrics': rubrics})
    # River and mayor are met: (3 - 1) / (3 + 5).
    results = play_all(tmp_path / 'run', load_tasks(path), Context(), rule())
    assert results['task_scores'] == [{'task': '1', 'score': 0.25}]
