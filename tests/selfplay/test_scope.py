"""SCOPE as an episode: gates before rubrics before trials, and what form, difficulty and length pay."""

from unittest.mock import AsyncMock

import pytest
import scripted
from scripted import ScriptedContext, final, searching

from zeroplay_jax.configs import scope
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.recipes.scope import Recipe
from zeroplay_jax.selfplay.library import Document
from zeroplay_jax.selfplay.schedule import BatchCursor, Phase, Step, TaskPool
from zeroplay_jax.settings.kinds import ConfigError
from zeroplay_jax.types import Question, Task

LOMI = dict(id=1, title='Lomi', text='Lomi is a city in Tarva. It is led by Puto.')
ITEM = SeedDocument('Gumu', 'Gumu was born in Lomi.', hops=2)
GOOD = 'Lomi is a city in Tarva. It is led by Puto.'


class Judge:
    """Gates, rubrics and grades as the test says; remembers the order of what it was asked."""

    def __init__(
        self,
        entities=True,
        relevance=True,
        rubrics=3,
        grade=lambda answer, rubric: rubric in answer,
    ):
        self.gates = dict(entities=entities, relevance=relevance)
        self.items, self.graded = rubrics, grade
        self.asked, self.seen = [], []

    async def gate(self, identity, name, task, document):
        self.asked.append(name)
        return self.gates[name]

    async def rubrics(self, identity, task, document):
        self.asked.append('rubrics')
        self.seen.append(document)
        return [
            {'text': t, 'priority': 'important'} for t in ('Tarva', 'Puto', 'sea')[: self.items]
        ] or None

    async def grade(self, identity, task, answer, rubric):
        self.asked.append('grade')
        return self.graded(answer, rubric)


def recipe(**changes):
    config = scope.get_config('mini')
    for name, value in changes.items():
        node, leaf = name.split('__')
        config[node][leaf] = value
    return Recipe(config, scripted.library((Document('Gumu', ITEM.text, 3),)))


def play(game, phase, context, payload):
    step = Step(Phase(phase, 1), 0, 7)
    (outcome,) = scripted.run_episodes(game, context, step, [Task((7, 0), payload)])
    return outcome


def challenge(task='Describe the birthplace of Gumu.'):
    return searching(('Lomi', (LOMI,)), task=task)


GOOD_TRIES = [final(answer=GOOD)] * 2


def challenged(judge, rollout=None, solver=GOOD_TRIES, **changes):
    """(row of a challenge, what was asked)."""
    context = ScriptedContext(judge, proposer=[rollout or challenge()], solver=solver)
    game = recipe(proposer__samples=1, **changes)
    (row,) = play(game, 'proposer', context, ITEM).rows
    return row, context.asked


def test_a_challenger_is_paid_for_form_and_for_being_half_done():
    judge = Judge(rubrics=2)
    row, _ = challenged(judge, solver=[final(answer='In Tarva'), final(answer=GOOD)])
    assert row.info.score == 0.75  # one answer meets half of the rubrics, the other all
    assert row.parts['difficulty'] == pytest.approx(0.5)
    assert row.parts['format'] == pytest.approx(0.5)
    assert row.reward == pytest.approx(1.0) and row.drop is None
    assert judge.seen[0].endswith('(Title: Lomi) ' + LOMI['text'])
    assert judge.asked[:3] == ['entities', 'relevance', 'rubrics']


@pytest.mark.parametrize(
    'judge,reason,asked',
    [
        (Judge(entities=False), 'gate_entities', 1),
        (Judge(relevance=None), 'gate_relevance', 2),
        (Judge(rubrics=0), 'no_rubrics', 3),
    ],
)
def test_what_the_judge_does_not_approve_pays_its_form_only_and_is_not_tried(judge, reason, asked):
    row, requests = challenged(judge)
    assert row.info.rejected == reason and row.parts['difficulty'] == 0
    assert row.reward == row.parts['format'] > 0
    assert len(judge.asked) == asked and len(requests) == 1


@pytest.mark.parametrize(('setting', 'read'), [('source', 'Gumu'), ('evidence', 'Lomi')])
def test_a_task_has_to_be_about_its_source(setting, read):
    judge = Judge()
    judge.gate = gate = AsyncMock(return_value=True)
    challenged(judge, scope__relevant_to=setting)
    documents = [call.args[3] for call in gate.await_args_list]
    assert len(documents) == 2
    assert all(document.split('\n')[-1].startswith(f'(Title: {read})') for document in documents)


def test_a_rule_follows_facts_through_the_evidence():
    config = scope.get_config('mini')
    config.scope.relevant_to = 'source'
    with pytest.raises(ConfigError, match='scope.relevant_to.*give evidence'):
        Recipe.check(config)


def test_gates_are_a_switch():
    row, _ = challenged(Judge(entities=False), scope__gates=False)
    assert row.info.rejected is None and row.parts['difficulty'] > 0


def test_no_task_no_trial():
    judge = Judge()
    row, _ = challenged(judge, final(answer='x'))
    assert row.info.rejected == 'no_task' and not judge.asked


def test_answers_that_cannot_be_graded_say_nothing_about_the_task():
    row, _ = challenged(Judge(grade=lambda answer, rubric: None))
    assert row.info.rejected == 'ungraded' and row.parts['difficulty'] == 0
    row, _ = challenged(Judge(), solver=[final(finish='turns')] * 2)
    assert row.info.score == 0  # no answer is worth nothing, and that is known


def test_one_task_per_document_inside_the_window():
    judge = Judge(rubrics=2)
    tries = [final(answer=GOOD)] * 2 + [final(answer='In Tarva')] * 2
    context = ScriptedContext(
        judge, proposer=[challenge('Describe Lomi.'), challenge('Describe Gumu.')], solver=tries
    )
    out = play(recipe(pool__window=(0.2, 0.8)), 'generate', context, ITEM)
    (kept,) = out.questions
    assert kept.text == 'Describe Gumu.' and kept.origin['score'] == 0.5 and len(kept.rubrics) == 2
    context = ScriptedContext(judge, proposer=[challenge()] * 2, solver=[final(answer=GOOD)] * 4)
    assert play(recipe(pool__window=(0.2, 0.8)), 'generate', context, ITEM).drop == 'outside_window'


def test_challenges_are_measured_by_eight_answers_and_filtered_by_four():
    """Appendix G: as many as the phase says."""
    changes = dict(reward__solves=8, pool__measure=4, proposer__samples=1, pool__samples=1)
    for phase, answers in (('proposer', 8), ('generate', 4)):
        context = ScriptedContext(Judge(), proposer=[challenge()], solver=[final(answer=GOOD)] * 9)
        game = recipe(**changes)
        play(game, phase, context, ITEM)
        assert [samples for role, _, samples, _ in context.asked if role == 'solver'] == [answers]
        assert game.rollouts_per_step(Phase(phase, 1)) == 8 * (1 + answers)
    context = ScriptedContext(Judge(), proposer=[challenge()], solver=[final(answer=GOOD)] * 9)
    play(recipe(**changes | dict(pool__measure=0)), 'generate', context, ITEM)
    assert context.asked[1][2] == 8


def test_generation_ends_when_enough_tasks_stand():
    game, pool = recipe(pool__target=2, pool__batches=3), TaskPool()
    step = Step(Phase('generate', 3), 1, 7)
    assert len(game.tasks(step, pool, BatchCursor())) == 8
    for text in ('a b', 'c d'):
        pool.add(Question(text))
    assert game.tasks(step, pool, BatchCursor()) == []
    # The solver's phase and the challenger's do not end with it.
    assert game.tasks(Step(Phase('proposer', 3), 1, 8), pool, BatchCursor())
    config = scope.get_config('mini')
    config.pool.update(batch=8, batches=2, target=17)
    with pytest.raises(ConfigError, match=r'pool\.target=17: .* reads 16; raise pool\.batches'):
        Recipe.check(config)


TASK = Question('Describe Lomi.', rubrics=({'text': 'Tarva', 'priority': 'important'},) * 2)


def test_a_solver_is_paid_for_rubrics_length_form_and_searching():
    short = searching(('Lomi', (LOMI,)), answer='In Tarva')
    long = searching(('Lomi', (LOMI,)), answer='Tarva ' * 96)
    none = final(finish='turns')
    out = play(recipe(), 'solver', ScriptedContext(Judge(), solver=[short, long, none]), TASK)
    a, b, c = out.rows
    assert a.parts['rubrics'] == 1 and a.parts['search'] == pytest.approx(0.1 / 3)
    assert a.reward == pytest.approx(1 + 0.5 + 0.1 / 3)
    assert b.parts['length_factor'] == pytest.approx(0.525) and b.reward < a.reward
    assert c.parts['rubrics'] == 0 and c.drop is None and len({r.group for r in out.rows}) == 1
    out = play(
        recipe(scope__length_factor=False),
        'solver',
        ScriptedContext(Judge(), solver=[short, long, none]),
        TASK,
    )
    assert out.rows[1].parts['rubrics'] == 1


def test_an_answer_that_cannot_be_graded_is_not_trained_on():
    context = ScriptedContext(
        Judge(grade=lambda answer, rubric: None), solver=[final(answer='x')] * 3
    )
    assert [r.drop for r in play(recipe(), 'solver', context, TASK).rows] == ['ungraded'] * 3


def test_a_frozen_challenger_has_no_phase_of_its_own():
    game = recipe(schedule__iterations=3, proposer__train_iterations=1)
    assert [(p.iteration, p.name) for p in game.phases()] == [
        (0, 'proposer'), (0, 'generate'), (0, 'solver'), (1, 'generate'), (1, 'solver'), (2, 'generate'), (2, 'solver')
    ]  # fmt: skip
