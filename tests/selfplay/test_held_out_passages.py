"""Training reads no passage of a held-out document; evaluations search the whole corpus."""

import re

import pytest
from input_files import write

from zeroplay_jax.configs import quickstart
from zeroplay_jax.data import files
from zeroplay_jax.retrieval import client, folder
from zeroplay_jax.retrieval.client import Client
from zeroplay_jax.retrieval.types import SearchFailed
from zeroplay_jax.selfplay.library import Library, SearchableCorpus
from zeroplay_jax.selfplay.library_builder import build_library, check_and_reset_failures
from zeroplay_jax.tools.base import Invocation
from zeroplay_jax.tools.registry import build_tools
from zeroplay_jax.types import UserError


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A folder with an index of 40 passages about the same word; the first 20 are about it most."""
    place = tmp_path_factory.mktemp('held out')
    lines = []
    for number in range(40):
        text = 'river ' * (40 - number) + f'and number{number}.'
        lines.append({'id': f'p{number}', 'contents': f'"Town {number // 2}"\n{text}'})
    write(place / 'c.jsonl', *lines)
    folder.build(place / 'c.jsonl', place / 'index', 'bm25', None)
    return place


@pytest.fixture
def config(place):
    config = quickstart.get_config()
    config.retrieval.update(kind='folder', path=str(place / 'index'))
    config.tools.top_k = 3
    return config


def library_without(config, place, numbers):
    held_out = [{'document_id': f'p{n}', 'title': f'Town {n // 2}'} for n in numbers]
    config.retrieval.held_out = write(place / 'held_out.jsonl', *held_out)
    return build_library(config)


def found(corpus, query):
    (passages,) = corpus.search([query])
    return [passage['id'] for passage in passages]


def test_a_search_of_training_skips_held_out_passages(config, place):
    best = found(build_library(config).training, 'river')
    assert len(best) == 3
    # The best of all, and so many that further passages are fetched twice.
    for numbers in ([int(best[0][1:])], range(0, 40, 2), range(0, 37)):
        library = library_without(config, place, numbers)
        ids = found(library.training, 'river')
        assert len(ids) == 3 and not {f'p{number}' for number in numbers} & set(ids)
        assert found(library.held_out, 'river') == best
    # In the order of the search without a list; fewer passages than asked for end the search.
    config.retrieval.held_out = ''
    config.tools.top_k = 40
    order = found(build_library(config).training, 'river')
    library = library_without(config, place, range(0, 40, 2))
    held_out = {f'p{number}' for number in range(0, 40, 2)}
    assert found(library.training, 'river') == [each for each in order if each not in held_out]


def test_a_search_that_fails_on_the_way_has_failed(config, place, monkeypatch):
    library = library_without(config, place, range(0, 37))
    retrieve = library.training.client.retrieve
    # The first passages are held out, and the request for further ones fails.
    monkeypatch.setattr(
        library.training.client,
        'retrieve',
        lambda queries, k: retrieve(queries, k) if k == 6 else [None for _ in queries],
    )
    assert library.training.search(['river', 'number38'])[0] is None
    assert library.training.search(['number38'])[0][0]['id'] == 'p38'


@pytest.fixture
def opened(config, tmp_path):
    """Shows all pages of a document by the tool `open` of a role in training, and by that of an evaluation."""

    def open_all(reference, rows, held_out):
        write(tmp_path / 'c.jsonl', *rows)
        index = tmp_path / 'index'
        if not index.exists():
            folder.build(tmp_path / 'c.jsonl', index, 'bm25', None, passage_words=20)
        config.retrieval.path = str(index)
        lines = [{'document_id': one, 'title': ''} for one in held_out]
        config.retrieval.held_out = write(tmp_path / 'held_out.jsonl', *lines)
        library = build_library(config)
        config.tools.names = ('open',)
        shown = []
        for source in (library.training, library.held_out):
            tool = build_tools(config, source)['open']
            pages = range(1, 4)
            calls = [Invocation({'document': reference, 'page': page}) for page in pages]
            results = tool.run(calls)
            shown.append('\n'.join(result.text or result.error for result in results))
        return shown

    return open_all


def words_of(numbers):
    return {f'w{number}' for number in numbers}


def test_training_opens_an_untitled_row_without_its_held_out_passages(opened):
    # Passage X#n has the twenty words from 20·n on, and each page of 200 words ten passages.
    sentences = [
        f'{" ".join(f"w{n}" for n in range(k, k + 19))} w{k + 19}.' for k in range(0, 500, 20)
    ]
    rows = [{'id': 'X', 'contents': ' '.join(sentences)}, {'id': 'Y', 'contents': 'Another row.'}]
    held_out = [0, 3, 10, 24]
    forbidden = {number for part in held_out for number in range(20 * part, 20 * part + 20)}
    for reference in ('X#3', 'X#5'):
        training, evaluation = opened(reference, rows, [f'X#{part}' for part in held_out])
        found = set(re.findall(r'w\d+', training))
        assert found == words_of(set(range(500)) - forbidden)
        assert set(re.findall(r'w\d+', evaluation)) == words_of(range(500))


def test_training_opens_rows_of_one_document_without_titles_and_texts_of_held_out_ones(opened):
    rows = []
    for name in ('First', 'Second', 'Third'):
        passage = {'id': name[0], 'title': f'{name} part', 'text': f'The text of {name.lower()}.'}
        rows.append(passage | {'document_name': 'one'})
    for held_out, shown in ((['F'], ['Second', 'Third']), (['S'], ['First', 'Third'])):
        training, evaluation = opened('T', rows, held_out)
        assert [
            name for name in ('First', 'Second', 'Third') if name.lower() in training.lower()
        ] == shown
        assert 'First part' in evaluation and 'of second.' in evaluation
    training, evaluation = opened('T', rows, ['F', 'S', 'T'])
    assert 'part' not in training and 'First part' in evaluation


def test_a_list_of_another_index_is_refused(config, place):
    other = [{'document_id': 'p1', 'title': 'Town 0'}, {'document_id': 'page 7#3', 'title': ''}]
    config.retrieval.held_out = write(place / 'other.jsonl', *other)
    with pytest.raises(UserError, match=r"has no passage 'page 7#3'; make both from one corpus"):
        build_library(config)


def test_a_server_with_other_ids_cannot_leave_passages_out(config, place, monkeypatch):
    def retrieve(server, queries, k):
        answer = {'title': 'Town 1', 'text': 'river', 'score': 0.0}
        return [[answer | {'id': ids.pop(0)}] for _ in queries]

    monkeypatch.setattr(client.Http, 'retrieve', retrieve)
    monkeypatch.setattr(client.Http, 'ready', lambda server: True)
    config.retrieval.update(kind='http', url='http://127.0.0.1:9')
    ids = ['p2', 'f3a1']
    assert library_without(config, place, [1]).training is not None
    with pytest.raises(UserError, match="http://127.0.0.1:9 returns a passage with the id 'f3a1'"):
        library_without(config, place, [1])


class Flaky:
    """A backend that fails for as long as it is told to."""

    name = 'flaky'
    fails = True

    def retrieve(self, queries, k):
        if self.fails:
            raise SearchFailed('connection refused')
        return [[] for _ in queries]


@pytest.mark.parametrize('is_shared', [True, False])
def test_failures_of_the_held_out_corpus_count_once(is_shared):
    backends = Flaky(), Flaky()
    training, held_out = (SearchableCorpus(Client(each, 100, 0.5), 3, 100) for each in backends)
    library = Library(held_out if is_shared else training, held_out, (), ())
    held_out.search(['a'])
    backends[1].fails = False
    held_out.search(['b', 'c', 'd'])
    assert [check_and_reset_failures(library)['failed'] for _ in range(2)] == [1, 0]


def test_every_file_of_questions_has_its_sample_and_its_name_whatever_the_seed(config, place):
    file = write(place / 'q.jsonl', *({'question': f'{i}?', 'answer': 'a'} for i in range(50)))
    config.eval.update(file=file, questions=5)
    alone = build_library(config).questions
    assert len(alone) == 5 and alone != tuple(files.questions(file)[:5])
    config.seed = 7
    config.eval.file += ',' + write(place / 'more.jsonl', {'question': 'Where?', 'answer': 'here'})
    both = build_library(config).questions
    assert [one.origin['set'] for one in both] == ['q'] * 5 + ['more']
    assert [one.text for one in both[:5]] == [one.text for one in alone]
