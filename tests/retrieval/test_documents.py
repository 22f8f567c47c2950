"""Whole documents: which passages make one, lookup by id and title, pages, the endpoint and the client."""

import json

import numpy as np
import pytest
from refusals import refused
from serving import served

from zeroplay_jax.retrieval import corpus as corpus_lib
from zeroplay_jax.retrieval.client import Client, Http, InProcess
from zeroplay_jax.retrieval.corpus import (
    Corpus,
    DocumentPage,
    MemoryCorpus,
    contents,
    document_page,
)
from zeroplay_jax.retrieval.index import Bm25Index
from zeroplay_jax.retrieval.types import CannotOpen, RetrievalError, SearchFailed

# (title, text) in order: runs of equal titles, a title that returns, passages without a title.
PASSAGES = [
    ('Gumu', 'Gumu is a town.'),
    ('Gumu', 'It lies by a river.'),
    ('Ünï "x" 漢字 …', 'first\nline'),
    ('', 'no title'),
    ('', 'no title either'),
    ('Gumu', 'Another Gumu.'),
    ('7', 'a title that looks like a row'),
    ('gumu', 'lower case'),
]
DOCUMENTS = [range(0, 2), range(2, 3), range(3, 4), range(4, 5), range(5, 6), range(6, 7)]
DOCUMENTS += [range(7, 8)]


def written(tmp_path, form, passages=PASSAGES):
    """A corpus of these passages: in memory, or read from a file."""
    if form == 'memory':
        return MemoryCorpus(*zip(*passages))
    path, out = tmp_path / 'c.jsonl', tmp_path / form
    lines = [{'id': f'p{row}', 'contents': contents(*x)} for row, x in enumerate(passages)]
    path.write_text('\n'.join(map(json.dumps, lines)))
    out.mkdir()
    corpus_lib.write(path, out)
    return Corpus(out)


@pytest.mark.parametrize('form,prefix', [('jsonl', 'p'), ('memory', '')])
def test_consecutive_passages_of_one_title_are_a_document(tmp_path, form, prefix):
    corpus = written(tmp_path, form)
    for rows in DOCUMENTS:
        for row in rows:
            assert corpus.record(row).id == f'{prefix}{row}'
            assert corpus.document_rows(np.int64(row)) == rows
            assert corpus.find_document(f'{prefix}{row}') == rows
    for row in (-1, len(PASSAGES)):
        with refused(f'no row {row}; rows lie between 0 and 7'):
            corpus.document_rows(row)
    assert corpus.find_document('Gumu') == range(0, 2)  # the first of two documents
    assert corpus.find_document('gumu') == range(7, 8)
    assert corpus.find_document('Ünï "x" 漢字 …') == range(2, 3)
    for reference in ('', 'Gumu ', 'GUMU', 'Gumu\0', '\ud800', '-1', '99', '٣'):
        assert corpus.find_document(reference) is None


def test_a_folder_of_texts_has_one_document_per_file(tmp_path):
    texts, out = tmp_path / 'texts', tmp_path / 'out'
    texts.mkdir()
    out.mkdir()
    (texts / 'a.md').write_text('# Same title\n' + 'word ' * 250)
    (texts / 'b.txt').write_text('Same title\nanother file')
    corpus_lib.write(texts, out)
    corpus = Corpus(out)
    assert [corpus.document_rows(row) for row in range(4)] == [range(0, 3)] * 3 + [range(3, 4)]
    assert corpus.find_document('a.md#2') == corpus.find_document('Same title') == range(0, 3)
    assert corpus.find_document('b.txt#0') == range(3, 4)


@pytest.mark.parametrize('words_per_page', [1, 499, 10**6])
def test_the_pages_of_a_long_document_are_its_text(tmp_path, words_per_page):
    """One document of 1,000 passages between two others."""
    parts = [f'part {part}\n"quoted" \u2028 a\x00b <b> 漢字' for part in range(1_000)]
    passages, reference = (
        [('Before', 'x'), *(('Long', part) for part in parts), ('After', 'y')],
        'p76',
    )
    corpus = written(tmp_path, 'jsonl', passages)
    whole = ' '.join(parts)
    words = whole.split()
    count = -(-len(words) // words_per_page)
    for number in {1, count // 2 + 1, count}:
        page = document_page(corpus, reference, number, words_per_page)
        assert (page.title, page.page, page.pages) == ('Long', number, count)
        assert page.id == corpus.record(1).id and page.text in whole
        expected = words[(number - 1) * words_per_page : number * words_per_page]
        assert page.text.split() == expected
    assert document_page(corpus, reference, count + 1, words_per_page) is None


@pytest.fixture(scope='module')
def index():
    titles, texts = zip(*PASSAGES)
    return Bm25Index(MemoryCorpus(titles, texts))


@pytest.fixture(scope='module')
def url(index):
    with served(index) as url:
        yield url


def test_in_process_and_http_open_the_same(index, url):
    references = ['Gumu', '1', 'none', '', '7', 'Ünï "x" 漢字 …', 'Gumu', 'Gumu']
    pages = [2, 1, 1, 1, 1, 1, 0, 99]
    first = Client(InProcess(index)).open(references, pages, 4)
    assert Client(Http(f'{url}/retrieve', batch=2)).open(references, pages, 4) == first
    shown = [{'id': '1', 'title': 'Gumu', 'text': 'It lies by a'}]
    assert first[0] == DocumentPage('Gumu', 'It lies by a', 2, 3, '0', shown)
    assert first[4].title == 'gumu' and first[5].text == 'first\nline'
    assert [row for row, page in enumerate(first) if page] == [0, 1, 4, 5]


def test_pages_are_cached_and_failures_counted(index):
    backend, calls = InProcess(index), []
    plain = backend.open

    def open_or_refuse(references, *arguments):
        calls.append(list(references))
        if 'refused' in references:
            raise RetrievalError('refused')
        return plain(references, *arguments)

    backend.open = open_or_refuse
    client = Client(backend)
    first = client.open(['Gumu', 'none', 'Gumu'], [1, 1, 1], 4)
    assert first[0] == first[2] and first[1] is None
    assert client.open(['Gumu', 'none'], [1, 1], 4) == first[:2]
    client.open(['Gumu', 'Gumu'], [2, 1], 4)
    assert calls == [['Gumu', 'none'], ['Gumu']]
    client.metrics()
    for _ in range(2):
        with pytest.raises(SearchFailed):
            client.open(['refused', '0'], [1, 1], 4)
    # What could be opened is cached, a failure is not.
    assert calls[2:] == [['refused', '0'], ['refused'], ['0'], ['refused']]
    with refused('2 of 4 searches failed.*refused'):
        client.check_failure_rate()


def test_a_server_without_the_endpoint_is_one_clear_error(fake):
    fake.script = [(404, {})]
    with refused('no endpoint /open for whole documents; serve', CannotOpen):
        Client(Http(fake.url)).open(['a', 'b'], [1, 1], 500)
    assert len(fake.seen) == 1
