"""Demonstrations and checkpoints for open tasks (`mini/open`)."""

import asyncio

import numpy as np
import pytest
from demo_parts import said, shown, tag
from trajectories import ASKS_SOLVER

from tools.checkpoints import base_model, batches, open_demos
from tools.checkpoints.demo import render
from tools.checkpoints.open_demos import OpenErrors
from zeroplay_jax.configs import scope
from zeroplay_jax.evaluation import answering
from zeroplay_jax.mini.facts import meets_rubric, rubrics_of
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.run import build
from zeroplay_jax.selfplay.judge import RuleJudge

pytestmark = pytest.mark.results


@pytest.fixture(scope='module')
def library():
    (held_out_library,) = batches.libraries(0, 'evaluation', 1, 4)
    return held_out_library


def written(write, library, count=40, **errors):
    rng = np.random.default_rng(0)
    return [write(library, rng, OpenErrors(**errors)) for _ in range(count)]


def task_of(demo):
    return demo.fields['task']


def answer_of(demo):
    return tag(said(demo)[-1], 'answer')


def described(demo, library):
    """Returns the text of the passage about the entity that the task names."""
    for world in library.worlds:
        question = 'What is ' + task_of(demo).removeprefix('Describe ').rstrip('.') + '?'
        value, hops = world.resolve(question)
        title = value if hops else task_of(demo).split()[1].rstrip('.')
        if title in world.facts:
            return library.document(title)['text']
    raise AssertionError(task_of(demo))


@pytest.mark.parametrize(
    ('errors', 'low', 'high'),
    [
        # As demonstrations without errors they do the task.
        ({}, 1, 1),
        # They describe another entity.
        ({'early_description': 1.0}, 0.1, 0.7),
        ({'wrong_fact': 1.0}, 0.1, 0.7),
        ({'verbose': 1.0}, 0.9, 1),
    ],
)
def test_which_share_of_the_answers_meets_all_rubrics(library, errors, low, high):
    demonstrations = written(open_demos.task_solver, library, **errors)
    marks = []
    for demo in demonstrations:
        rubrics = rubrics_of(described(demo, library))
        answer, task = answer_of(demo), task_of(demo)
        marks.append(all(meets_rubric(answer, rubric['text'], task) for rubric in rubrics))
    assert low <= np.mean(marks) <= high
    if not errors:
        searches = {len(shown(demo)) for demo in demonstrations}
        assert searches == {1, 2, 3, 4}, 'as many passages as held-out tasks need'


def test_verbose_answers_fit_into_a_slot_and_are_long(library):
    verbose, brief = (
        written(open_demos.task_solver, library, verbose=share) for share in (1.0, 0.0)
    )
    words = lambda demos: np.mean([len(answer_of(demo).split()) for demo in demos])
    assert words(verbose) > 1.7 * words(brief)
    codec = Codec(base_model.CLEAN)
    context = scope.get_config('mini').sampler.context
    assert all(len(render(codec, demo).tokens) <= context for demo in verbose)


def test_the_last_search_follows_from_a_stated_fact(library):
    for demo in written(open_demos.task_solver, library):
        if ' of ' not in task_of(demo):
            continue
        last_call = said(demo)[-2]
        thought, query = tag(last_call, 'think'), tag(last_call, 'search')
        assert thought.startswith('the ') and thought.endswith(f' is {query}')


def test_incomplete_answers_state_one_fact(library):
    for demo in written(open_demos.task_solver, library, incomplete=1.0):
        rubrics = rubrics_of(described(demo, library))
        met = [meets_rubric(answer_of(demo), rubric['text'], task_of(demo)) for rubric in rubrics]
        assert sum(met) == 1 and len(met) > 1


def evidence_of(demo):
    """Returns the documents of a challenger, the best one of a search last, as SCOPE gives them to its judge."""
    passages = [passage for documents in shown(demo) for passage in reversed(documents)]
    return '\n'.join([demo.fields['document'], *map(prompts.document_text, passages)])


BOTH_GATES = {'entities', 'relevance'}


def passed_gates(library, demonstrations):
    """Returns the names of the gates that the task of each challenger passes."""
    judge = RuleJudge(lambda: [document['title'] for document in library.documents], (2, 5))
    passed = []
    for demo in demonstrations:
        task, evidence = tag(said(demo)[-1], 'task'), evidence_of(demo)
        passes = lambda name: asyncio.run(judge.gate((0,), name, task, evidence))  # noqa: B023
        passed.append(set(filter(passes, BOTH_GATES)))
    return passed


@pytest.mark.parametrize(
    ('errors', 'gates_of'),
    [
        ({}, lambda hops: BOTH_GATES),
        ({'nameless': 1.0}, lambda hops: BOTH_GATES if hops == 1 else set()),
        # No more searches than before, although their tasks have a step more.
        ({'ungrounded': 1.0}, lambda hops: {'entities'}),
    ],
)
def test_which_gates_the_tasks_of_challengers_pass(library, errors, gates_of):
    demonstrations = written(open_demos.challenger, library, **errors)
    hops = [demo.fields['hops'] for demo in demonstrations]
    assert set(hops) == {1, 2, 3}
    assert passed_gates(library, demonstrations) == list(map(gates_of, hops))


@pytest.mark.long
def test_base_meets_some_rubrics_of_held_out_tasks():
    config = scope.get_config('mini')
    config.eval.update(questions=12, hops=(1, 2, 3, 4))
    run = build.build(config)
    run.publish_weights(['solver'])
    rows = answering.evaluate(run.evaluation, list(run.library.open_tasks), 0, ASKS_SOLVER)
    assert 0.2 <= np.mean([row.reward for row in rows]) <= 0.65
