"""The quickstart's corpus: large enough for a real index, and nothing of the evaluation within training's reach."""

import re

import pytest
from input_files import write

from zeroplay_jax.configs import quickstart
from zeroplay_jax.data import files
from zeroplay_jax.mini.world import World
from zeroplay_jax.recipes.datasets import DocumentSampler
from zeroplay_jax.retrieval import build
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
    return words(*(passage.title for world in worlds for passage in world.passages))


def test_training_finds_nothing_of_the_evaluation(config, library):
    """Neither by a training title, nor by a held-out one, nor in any document that a proposer may start from."""
    names = held_out_names(config)
    queries = [d.title for d in library.documents[::7]] + sorted(names)[::3]
    for found in library.training.search(queries):
        assert len(found) == 3
        assert not any(names & words(d['title'], d['text']) for d in found)
    assert not any(names & words(d.title, d.text) for d in library.documents)


def words(*texts):
    return set(re.findall(r'\w+', ' '.join(texts)))


def test_an_index_folder_is_searched_and_asked_about(config, tmp_path):
    towns = [f'"Town {i}"\nTown {i} lies beside town {i + 1}.' for i in range(40)]
    passages = [{'id': f'p{i}', 'contents': text} for i, text in enumerate(towns)]
    index = tmp_path / 'index'
    corpus = write(tmp_path / 'c.jsonl', *passages)
    build.main([f'--corpus={corpus}', '--encoder=lexical', f'--out={index}'])
    own = config.copy_and_resolve_references()
    own.retrieval.update(kind='folder', path=str(index))
    # Questions are drawn from the whole file; so are open tasks.
    questions = [{'question': f'Number {i}?', 'answer': 'yes'} for i in range(50)]
    own.eval.file = write(tmp_path / 'q.jsonl', *questions)
    task = {'task': 'Describe Town 7.', 'rubrics': ['Name town 8.']}
    own.eval.update(questions=5, tasks=write(tmp_path / 't.jsonl', task))
    library = build_library(own)
    ((first, *_),) = library.training.search(['Town 7'])
    assert first['title'] == 'Town 7' and first['id'] == 'p7'
    tasks = DocumentSampler(own, library).tasks(Step(Phase('proposer', 1), 0, 3), 20)
    assert len({t.payload.title for t in tasks}) == 20 and tasks[0].payload.text.startswith('Town')
    own.seed = 7
    asked = library.questions
    assert len(asked) == 5 and asked == build_library(own).questions
    assert asked != tuple(files.questions(own.eval.file)[:5])
    assert not any(question.origin for question in asked)
    # Of several files each has its sample and its name.
    more = write(tmp_path / 'more.jsonl', {'question': 'Where is town 9?', 'answer': 'here'})
    own.eval.file += f',{more}'
    both = build_library(own).questions
    assert [one.origin['set'] for one in both] == ['q'] * 5 + ['more']
    assert [one.text for one in both[:5]] == [one.text for one in asked]
    (task,) = library.open_tasks
    assert task.text == 'Describe Town 7.' and task.rubrics[0]['text'] == 'Name town 8.'


class Flaky:
    """A backend that fails for as long as it is told to."""

    name = 'flaky'
    fails = True

    def retrieve(self, queries, k):
        if self.fails:
            raise SearchFailed('connection refused')
        return [[] for _ in queries]

    def ready(self):
        return True


def failures_of(corpus, other):
    return check_and_reset_failures(Library(other, corpus, (), ()))['failed']


def test_failures_of_the_held_out_corpus_count_once():
    training, held_out = (SearchableCorpus(Client(Flaky(), 100, 0.5), 3, 100) for _ in range(2))
    for other in (training, held_out):
        held_out.client.backend.fails = True
        held_out.search(['a'])
        held_out.client.backend.fails = False
        held_out.search(['b', 'c', 'd'])
        assert failures_of(held_out, other) == 1
        assert failures_of(held_out, other) == 0
    # Of all searches so far few failed; of the last two all did.
    held_out.client.backend.fails = True
    held_out.search(['e', 'f'])
    setting = 'config.retrieval.max_failure_rate'
    with pytest.raises(UserError, match=f'2 of 2 searches failed.*{setting}'):
        failures_of(held_out, training)
