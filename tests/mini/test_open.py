"""Demonstrations and checkpoints for open tasks (`mini/open`)."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
from committed_folders import check_hashes, check_stages, figures_of
from demo_parts import said, shown, tag
from world_answers import resolve

from tools.checkpoints import base_model, base_open, batches, open_demos
from tools.checkpoints.demo import render
from tools.checkpoints.open_demos import OpenErrors
from zeroplay_jax.configs import scope
from zeroplay_jax.evaluation import play
from zeroplay_jax.mini.facts import meets_rubric, rubrics_of
from zeroplay_jax.policy import hf
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay.judge import RuleJudge
from zeroplay_jax.training import build

FOLDER = base_model.MINI / 'open'


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
        value, hops = resolve(world, question)
        title = value if hops else task_of(demo).split()[1].rstrip('.')
        if title in world.facts:
            return library.document(title)['text']
    raise AssertionError(task_of(demo))


def share_of_full_marks(demonstrations, library):
    marks = []
    for demo in demonstrations:
        rubrics = rubrics_of(described(demo, library))
        answer, task = answer_of(demo), task_of(demo)
        marks.append(all(meets_rubric(answer, rubric['text'], task) for rubric in rubrics))
    return np.mean(marks)


def test_demonstrations_without_errors_do_the_task(library):
    demonstrations = written(open_demos.task_solver, library)
    assert share_of_full_marks(demonstrations, library) == 1
    searches = {len(shown(demo)) for demo in demonstrations}
    assert searches == {1, 2, 3, 4}, 'as many passages as held-out tasks need'


def test_the_last_search_follows_from_a_stated_fact(library):
    for demo in written(open_demos.task_solver, library):
        if ' of ' not in task_of(demo):
            continue
        last_call = said(demo)[-2]
        thought, query = tag(last_call, 'think'), tag(last_call, 'search')
        assert thought.startswith('the ') and thought.endswith(f' is {query}')


def test_demonstrations_fit_into_a_slot(library):
    codec = Codec(base_model.CLEAN)
    context = scope.get_config('mini').sampler.context
    for demo in written(open_demos.task_solver, library, verbose=1.0):
        assert len(render(codec, demo).tokens) <= context


@pytest.mark.parametrize('error', ['early_description', 'wrong_fact'])
def test_errors_describe_another_entity(library, error):
    demonstrations = written(open_demos.task_solver, library, **{error: 1.0})
    assert 0.1 < share_of_full_marks(demonstrations, library) < 0.7


def test_incomplete_answers_state_one_fact(library):
    for demo in written(open_demos.task_solver, library, incomplete=1.0):
        rubrics = rubrics_of(described(demo, library))
        met = [meets_rubric(answer_of(demo), rubric['text'], task_of(demo)) for rubric in rubrics]
        assert sum(met) == 1 and len(met) > 1


def test_verbose_answers_are_right_and_long(library):
    def words(demonstrations):
        return np.mean([len(answer_of(demo).split()) for demo in demonstrations])

    verbose = written(open_demos.task_solver, library, verbose=1.0)
    assert share_of_full_marks(verbose, library) > 0.9
    assert words(verbose) > 1.7 * words(written(open_demos.task_solver, library))


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


def test_tasks_without_errors_pass_the_gates(library):
    demonstrations = written(open_demos.challenger, library)
    assert {demo.fields['hops'] for demo in demonstrations} == {1, 2, 3}
    assert all(names == BOTH_GATES for names in passed_gates(library, demonstrations))


def test_nameless_tasks_do_not_pass_the_gates(library):
    demonstrations = written(open_demos.challenger, library, nameless=1.0)
    expected = [BOTH_GATES if demo.fields['hops'] == 1 else set() for demo in demonstrations]
    assert passed_gates(library, demonstrations) == expected


def test_ungrounded_tasks_do_not_pass_the_gate(library):
    demonstrations = written(open_demos.challenger, library, ungrounded=1.0)
    # No more searches than before, although their tasks have a step more.
    assert {demo.fields['hops'] for demo in demonstrations} == {1, 2, 3}
    assert all(names == {'entities'} for names in passed_gates(library, demonstrations))


@pytest.mark.long
def test_the_command_continues_from_the_clean_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(base_model, 'DIAGNOSED_EPISODES', 4)
    monkeypatch.setattr(base_model, 'LIBRARY_COUNT', 1)
    monkeypatch.setattr(base_model, 'WORLDS_PER_LIBRARY', 2)
    stage = dataclasses.replace(
        base_open.STAGES[0], steps=1, rows=1, adam_rate=1e-5, muon_rate=1e-5
    )
    monkeypatch.setattr(base_open, 'STAGES', (stage,))
    monkeypatch.setattr('sys.argv', ['base_open', '--out', str(tmp_path)])
    base_open.main()
    check_hashes(tmp_path / 'clean')
    before, after = hf.load(base_model.CLEAN), hf.load(tmp_path / 'clean')
    changes = jax.tree.map(lambda a, b: float(abs(a - b).max()), before, after)
    assert 0 < max(jax.tree.leaves(changes)) < 1e-3


@pytest.mark.parametrize('name', ['clean', 'base'])
def test_committed_folder_was_trained_by_these_stages(name):
    check_hashes(FOLDER / name)
    folders = [stage.folder for stage in base_open.STAGES]
    check_stages(FOLDER / name, base_open.STAGES[: folders.index(name) + 1])


def test_clean_predicts_more_of_open_tasks_than_base():
    # Whole episodes are not the measure: an answer may have its sentences in any order.
    clean, base = figures_of(FOLDER / 'clean'), figures_of(FOLDER / 'base')
    assert clean['task_solver']['tokens'] > base['task_solver']['tokens'] + 0.01
    assert clean['solver']['episodes'] > max(0.85, base['solver']['episodes'] + 0.25)


@pytest.mark.long
def test_clean_meets_the_rubrics_of_held_out_tasks_and_base_does_not():
    met = {}
    for name in ('clean', 'base'):
        config = scope.get_config('mini')
        config.policy.path = str(FOLDER / name)
        config.eval.update(questions=12, hops=(1, 2, 3, 4))
        run = build.build(config)
        run.publish_weights(['solver'])
        _, rows = play.evaluate(run.evaluation, list(run.library.open_tasks), 0, 'solver')
        met[name] = np.mean([row.reward for row in rows])
    assert met['clean'] >= 0.8
    assert met['base'] <= 0.65
