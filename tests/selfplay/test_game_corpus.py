"""The quickstart's corpus: large enough for a real index, and nothing of the evaluation within training's reach."""

import json
import re

import numpy as np
import pytest

from zeroplay_jax.configs import quickstart
from zeroplay_jax.data import files
from zeroplay_jax.mini.world import World
from zeroplay_jax.recipes.datasets import DocumentSampler
from zeroplay_jax.retrieval.client import Client
from zeroplay_jax.retrieval.types import SearchFailed
from zeroplay_jax.selfplay.library import Library, SearchableCorpus
from zeroplay_jax.selfplay.library_builder import build_library, check_and_reset_failures
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.types import UserError


@pytest.fixture(scope='module')
def config():
    return quickstart.get_config()


@pytest.fixture(scope='module')
def library(config):
    return build_library(config)


def held_out_names(config):
    first, count = config.world.evaluation
    worlds = [World(first + i, 'evaluation', config.world.near_misses) for i in range(count)]
    return {w for world in worlds for p in world.passages for w in re.findall(r'\w+', p.title)}


def test_both_indexes_are_real_ones(library):
    for corpus in (library.training, library.held_out):
        index = corpus.client.backend.index
        assert len(index) >= 5_000 and index.parameters['kind'] == 'scann'


def test_training_finds_nothing_of_the_evaluation(config, library):
    """Neither by a training title, nor by a held-out one, nor in any document that a proposer may start from."""
    names = held_out_names(config)
    queries = [d.title for d in library.documents[::7]] + sorted(names)[::3]
    for found in library.training.search(queries):
        assert len(found) == 3
        assert not names & {
            w for d in found for w in re.findall(r'\w+', d['title'] + ' ' + d['text'])
        }
    assert not names & {
        w for d in library.documents for w in re.findall(r'\w+', d.title + ' ' + d.text)
    }


def test_evaluation_questions_can_be_answered_by_search(config, library):
    names = held_out_names(config)
    for question in library.questions[::10]:
        (start,) = names & set(re.findall(r'\w+', question.text))
        assert library.held_out.search([start])[0][0]['title'] == start
    assert [q.hops for q in library.questions] == sorted(
        np.repeat(config.eval.hops, config.eval.questions)
    )


def write_corpus(path, count=40):
    passages = [f'"Town {i}"\nTown {i} lies beside town {i + 1}.' for i in range(count)]
    path.write_text(
        '\n'.join(json.dumps({'id': f'p{i}', 'contents': text}) for i, text in enumerate(passages))
    )
    return path


def test_an_index_folder_is_searched_and_asked_about(config, tmp_path):
    from zeroplay_jax.retrieval import build

    folder = tmp_path / 'index'
    build.main(
        [
            '--corpus',
            str(write_corpus(tmp_path / 'c.jsonl')),
            '--encoder',
            'lexical',
            '--out',
            str(folder),
        ]
    )
    own = config.copy_and_resolve_references()
    own.retrieval.update(kind='folder', path=str(folder))
    own.eval.file = str(tmp_path / 'q.jsonl')
    (tmp_path / 'q.jsonl').write_text(
        json.dumps({'question': 'Where does town 7 lie?', 'answer': 'town 8'})
    )
    library = build_library(own)
    ((first, *_),) = library.training.search(['Town 7'])
    assert library.questions[0].answers == ('town 8',)
    lines = [json.dumps({'question': f'Number {i}?', 'answer': 'yes'}) for i in range(50)]
    (tmp_path / 'q.jsonl').write_text('\n'.join(lines))
    own.eval.questions = 5
    asked = build_library(own).questions
    own.seed = 7
    assert len(asked) == 5 and asked == build_library(own).questions
    assert asked != tuple(files.questions(own.eval.file)[:5]), 'drawn from the whole file'
    assert library.open_tasks == ()
    own.eval.tasks = str(tmp_path / 't.jsonl')
    (tmp_path / 't.jsonl').write_text(
        json.dumps({'task': 'Describe Town 7.', 'rubrics': ['Name town 8.']})
    )
    (task,) = build_library(own).open_tasks
    assert task.text == 'Describe Town 7.' and task.rubrics[0]['text'] == 'Name town 8.'
    assert first['title'] == 'Town 7' and first['id'] == 'p7' and library.about
    tasks = DocumentSampler(own, library).tasks(Step(Phase('proposer', 1), 0, 3), 20)
    assert len({t.payload.title for t in tasks}) == 20 and tasks[0].payload.text.startswith('Town')
    own.retrieval.path = str(tmp_path / 'nothing')
    with pytest.raises(UserError, match='nothing'):
        build_library(own)


def test_failures_of_the_held_out_corpus_count_once(config):
    class Flaky:
        name = 'flaky'
        fails = True

        def retrieve(self, queries, k):
            if self.fails:
                raise SearchFailed('connection refused')
            return [[] for _ in queries]

        def ready(self):
            return True

    def flaky_corpus():
        return SearchableCorpus(Client(Flaky(), 100, 0.5), 3, 100)

    library = Library(flaky_corpus(), flaky_corpus(), (), ())
    held_out = library.held_out
    held_out.search(['a'])
    held_out.client.backend.fails = False
    held_out.search(['b', 'c', 'd'])
    assert check_and_reset_failures(library)['failed'] == 1
    # Of the six searches of both evaluations half failed; of the last two all did.
    held_out.client.backend.fails = True
    held_out.search(['e', 'f'])
    setting = 'config.retrieval.max_failure_rate'
    with pytest.raises(UserError, match=f'2 of 2 searches failed.*{setting}'):
        check_and_reset_failures(library)
    shared = flaky_corpus()
    shared.search(['a'])
    shared.client.backend.fails = False
    shared.search(['b', 'c'])
    assert check_and_reset_failures(Library(shared, shared, (), ()))['failed'] == 1
    assert check_and_reset_failures(Library(shared, shared, (), ()))['failed'] == 0
