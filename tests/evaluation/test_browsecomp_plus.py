"""BrowseComp-Plus in the form that its publisher's script writes, on a sample of our own."""

import json

import pytest

from zeroplay_jax.data import files
from zeroplay_jax.retrieval import build, corpus, folder
from zeroplay_jax.retrieval.types import search_records
from zeroplay_jax.types import UserError

DOCUMENTS = [
    {'docid': '7', 'text': '---\ntitle: Ann\n---\nAnn was taught by Bob.', 'url': 'https://a.test'},
    {'docid': '19', 'text': 'Mimi was founded by Ann.', 'url': 'https://b.test'},
]
QUESTION = 'Who taught the person who founded the company that is called Mimi?'
LINE = {
    'query_id': '769',
    'query': QUESTION,
    'answer': 'Bob',
    'gold_docs': [DOCUMENTS[0]],
    'evidence_docs': DOCUMENTS,
    'negative_docs': [],
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'data').mkdir()
    return tmp_path


def test_the_set_has_a_name_where_its_script_wrote_it(place):
    problem = 'browsecomp-plus: there is no data/browsecomp_plus_decrypted.jsonl; write it with the decryption script'
    with pytest.raises(UserError, match=problem):
        files.check_set('browsecomp-plus')
    with pytest.raises(
        UserError, match='browsecomp_plus is not a file .*; did you mean browsecomp-plus'
    ):
        files.check_set('browsecomp_plus')
    path = place / 'data' / 'browsecomp_plus_decrypted.jsonl'
    path.write_text(json.dumps(LINE) + '\n')
    files.check_set('browsecomp-plus')
    for name in ('browsecomp-plus', str(path)):
        (question,) = files.load_set(name)
        assert (question.text, question.answers) == (QUESTION, ('Bob',))


def test_its_corpus_keeps_the_ids_of_documents(place):
    source = place / 'corpus.jsonl'
    source.write_text(''.join(json.dumps(document) + '\n' for document in DOCUMENTS))
    records = [record for _, record in corpus.read(source)]
    assert [(record.id, record.contents) for record in records] == [
        (document['docid'], document['text']) for document in DOCUMENTS
    ]
    build.main([f'--corpus={source}', '--kind=bm25', f'--out={place}/index'])
    index = folder.open_index(place / 'index')
    ((record, _),) = search_records(index, ['Who founded Mimi?'], 1)[0]
    assert record.id == '19'
