"""SCOPE as an episode: gates before rubrics before trials, and what form, difficulty and length pay."""

import dataclasses
import pathlib

import input_files
import scripted
from refused_calls import check_table
from scripted import ScriptedContext, final, searching

from zeroplay_jax.configs import scope
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.recipes.scope import Recipe
from zeroplay_jax.selfplay.library import Document
from zeroplay_jax.selfplay.schedule import BatchCursor, QuestionPool, Step, all_steps
from zeroplay_jax.settings.kinds import refuse
from zeroplay_jax.types import Question, Task, TaskDropped

LOMI = dict(id=1, title='Lomi', text='Lomi is a city in Tarva. It is led by Puto.')
ITEM = SeedDocument('Gumu', 'Gumu was born in Lomi.', hops=2)
GOOD = 'Lomi is a city in Tarva. It is led by Puto.'


class Judge:
    """Gates, rubrics and grades as the test says; remembers the order of what it was asked.

    It fails at judgements of the kind `down`, at grades of short answers alone.
    """

    def __init__(self, rubrics=3, is_graded=True, down=None, **gates):
        self.down, self.count, self.is_graded = down, rubrics, is_graded
        self.gates = dict(entities=True, relevance=True) | gates
        self.asked, self.documents = [], []

    def note(self, name, *documents):
        self.asked.append(name)
        self.documents += documents
        if name == self.down:
            raise TaskDropped('judge_failed')

    async def gate(self, identity, name, task, document):
        self.note(name, document)
        return self.gates[name]

    async def rubrics(self, identity, task, document, kind):
        self.note('rubrics', document)
        texts = ('Tarva', 'Puto', 'sea')[: self.count]
        return [{'text': text, 'priority': 'important'} for text in texts] or None

    async def grade(self, identity, task, answer, rubric):
        self.asked.append('grade')
        if self.down == 'grade' and len(answer) < 100:
            raise TaskDropped('judge_failed')
        return rubric in answer if self.is_graded else None


def configured(**changes):
    config = scope.get_config('mini')
    for name, value in changes.items():
        node, leaf = name.split('__')
        config[node][leaf] = value
    return config


def recipe(**changes):
    return Recipe(configured(**changes), scripted.library((Document('Gumu', ITEM.text, 3),)))


def check_config(**changes):
    config = configured(**changes)
    refuse(config, Recipe.check(config))


def play(phase, payload, judge, scripts, **changes):
    """(game, its outcome, what was asked)."""
    game, context = recipe(**changes), ScriptedContext(judge, **scripts)
    step = Step(scripted.phase(phase), 0, 7)
    (outcome,) = scripted.run_episodes(game, context, step, [Task((7, 0), payload)])
    return game, outcome, context.asked


def challenge(task='Describe the birthplace of Gumu.'):
    return searching(('Lomi', (LOMI,)), task=task)


GOOD_TRIES = [final(answer=GOOD)] * 2


def parts_of(row):
    parts = {name: round(value, 3) for name, value in row.parts.items()}
    return f'reward {row.reward:.3f}, {parts}, dropped {row.drop}'


def challenged(judge, rollout=None, solver=GOOD_TRIES, **changes):
    """What a challenge pays, and what judge and roles were asked."""
    scripts = dict(proposer=[rollout or challenge()], solver=solver)
    _, outcome, asked = play('proposer', ITEM, judge, scripts, proposer__samples=1, **changes)
    (row,) = outcome.rows
    judged = ' '.join(dict.fromkeys(judge.asked))
    roles = ' '.join(role for role, *_ in asked)
    text = f'{parts_of(row)}; rejected {row.info.rejected}, score {row.info.score}'
    return f'{text}; judge: {judged}; roles: {roles}'


def generated(*tasks, solver):
    scripts = dict(proposer=map(challenge, tasks), solver=solver)
    _, outcome, _ = play('generate', ITEM, Judge(rubrics=2), scripts, pool__window=(0.5, 0.8))
    kept = [(task.text, task.origin['score'], len(task.rubrics)) for task in outcome.questions]
    return f'{kept}, dropped {outcome.drop}'


def answers_asked_for(phase, **changes):
    changes |= dict(reward__solves=8, proposer__samples=1, pool__samples=1)
    scripts = dict(proposer=[challenge()], solver=GOOD_TRIES * 5)
    game, _, asked = play(phase, ITEM, Judge(), scripts, **changes)
    ((_, _, answers, _),) = [request for request in asked if request[0] == 'solver']
    return answers


TASK = Question('Describe Lomi.', rubrics=({'text': 'Tarva', 'priority': 'important'},) * 2)
SHORT, LONG = (searching(('Lomi', (LOMI,)), answer=text) for text in ('In Tarva', 'Tarva ' * 96))


NONE = final(finish='turns')
LEFT = dataclasses.replace(searching(('Lomi', (LOMI,)), search='Puto'), finish='turns')


def solved(judge, last=NONE, **changes):
    """What a short answer, a long one and none pay."""
    scripts = dict(solver=[SHORT, LONG, last])
    _, outcome, _ = play('solver', TASK, judge, scripts, **changes)
    assert len({row.group for row in outcome.rows}) == 1
    return '\n'.join(map(parts_of, outcome.rows))


def test_episodes_of_every_phase():
    check_table(pathlib.Path(__file__).parent / 'scope.txt', globals())


def test_given_tasks_go_on_where_the_last_iteration_ended(tmp_path):
    lines = [{'task': f'Describe {number}.', 'rubrics': ['Names it.']} for number in range(12)]
    path = input_files.write(tmp_path / 'tasks.jsonl', *lines)
    changes = dict(schedule__iterations=3, solver__steps=2, solver__batch=2, inputs__tasks=path)
    game = Recipe(configured(**changes), scripted.library())
    drawn = []
    for step in all_steps(game.phases()):
        cursor = BatchCursor(drawn_in_phase=2 * step.index, missing=2)
        drawn += [task.payload.text for task in game.tasks(step, QuestionPool(), cursor)]
    # Three iterations of two steps read all twelve once.
    assert len(drawn) == len(set(drawn)) == 12
