"""What the benchmark of questions of two hops counts, on a workdir written by hand."""

import json

import pytest

from benchmarks import two_hops
from zeroplay_jax.retrieval import folder

SENTENCE = 'The old mill on the river was sold to #1, a farmer.'
CLAUSE = '#1 was born in ____ in'
PASSAGES = {
    'a': ('Gumu', SENTENCE.replace('#1', 'Lomi Kelpar')),
    'b': ('Kelpar', 'Lomi Kelpar was born in Viru in 1912.'),
    'c': ('Other', 'A sentence about nothing in particular.'),
}


def write(path, lines):
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def proposal(question, answer, query='Lomi Kelpar', rejected=None, hops=2):
    title, text = PASSAGES['b']
    turn = {
        'arguments': {'query_list': [query]},
        'documents': [[{'id': 'b', 'title': title, 'text': text}]],
    }
    info = {'hops': hops, 'question': question, 'answers': [answer], 'rejected': rejected}
    # The proposer sees the name as a link.
    linked_text = PASSAGES['a'][1].replace('Lomi Kelpar', '[ Lomi Kelpar ]')
    prompt = f'Document: (Title: Gumu) {linked_text}'
    segments = [{'source': 'prompt', 'text': prompt}]
    row = {'phase': 'proposer', 'is_proposal': True, 'drop': None, 'info': info}
    # A call that could not be read comes first.
    malformed = {'arguments': None, 'documents': []}
    return row | {'turns': [malformed, turn, None], 'segments': segments}


QUESTION = {
    'question': f'{SENTENCE} {CLAUSE}',
    'answers': ['Viru'],
    'hops': 2,
    'document_id': 'b',
    'first_document_id': 'a',
    'bridge': 'Lomi Kelpar',
}
ONE_HOP = {'question': 'The bridge of Gumu was built in ____.', 'answers': ['1203'], 'hops': 1}


@pytest.fixture
def workdir(tmp_path):
    """The files of a quickstart with logged proposals."""
    corpus = tmp_path / 'corpus.jsonl'
    records = [{'id': key, 'contents': f'"{t}"\n{text}'} for key, (t, text) in PASSAGES.items()]
    write(corpus, records)
    folder.build(corpus, tmp_path / 'index', 'bm25', None)
    write(tmp_path / 'questions.jsonl', [QUESTION, ONE_HOP])
    write(tmp_path / 'held_out.jsonl', [{'document_id': 'b'}, {'document_id': 'd'}])
    (tmp_path / 'run').mkdir()
    rows = [
        proposal(QUESTION['question'], 'Viru'),
        proposal(QUESTION['question'], 'Gumu'),
        # The first sentence is another one, the clause is that of the held-out question.
        proposal(f'Another sentence about #1. {CLAUSE}', 'Viru'),
        proposal('One ____.', 'Viru'),
        proposal(None, 'Viru', rejected='no_question'),
        proposal(QUESTION['question'], 'Viru') | {'phase': 'evaluation'},
    ]
    write(tmp_path / 'run' / 'trajectories.jsonl', rows)
    return tmp_path


def measured(workdir, monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['two_hops', str(workdir)])
    two_hops.main()
    return json.loads(capsys.readouterr().out)


def test_what_is_counted(workdir, monkeypatch, capsys):
    printed = measured(workdir, monkeypatch, capsys)
    assert printed['held out']['questions'] == 1
    assert printed['held out']['clause with name finds second passage'] == 1.0
    assert printed['proposed'] == {
        'proposals': 6,
        'accepted': 5 / 6,
        'second half of another document': 3 / 6,
        'joins two documents': 2 / 6,
    }
