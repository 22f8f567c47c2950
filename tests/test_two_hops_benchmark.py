"""What the benchmark of questions of two hops counts, on a workdir written by hand."""

import json

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


def proposal(question, answer, query='Lomi Kelpar', rejected=None):
    title, text = PASSAGES['b']
    turn = {
        'arguments': {'query_list': [query]},
        'documents': [[{'id': 'b', 'title': title, 'text': text}]],
    }
    info = {'hops': 2, 'question': question, 'answers': [answer], 'rejected': rejected}
    # The proposer sees the name as a link.
    linked_text = PASSAGES['a'][1].replace('Lomi Kelpar', '[ Lomi Kelpar ]')
    prompt = f'Document: (Title: Gumu) {linked_text}'
    segments = [{'source': 'prompt', 'text': prompt}]
    row = {'is_proposal': True, 'drop': None, 'info': info}
    # A call that could not be read comes first.
    malformed = {'arguments': None, 'documents': []}
    return row | {'turns': [malformed, turn, None], 'segments': segments}


def test_what_is_counted(tmp_path, monkeypatch, capsys):
    corpus = tmp_path / 'corpus.jsonl'
    records = [{'id': key, 'contents': f'"{t}"\n{text}'} for key, (t, text) in PASSAGES.items()]
    write(corpus, records)
    folder.build(corpus, tmp_path / 'index', 'bm25', None)
    question = {
        'question': f'{SENTENCE} {CLAUSE}',
        'answers': ['Viru'],
        'hops': 2,
        'document_id': 'b',
        'first_document_id': 'a',
        'bridge': 'Lomi Kelpar',
    }
    write(tmp_path / 'questions.jsonl', [question, {'question': 'One ____.', 'hops': 1}])
    (tmp_path / 'run').mkdir()
    rows = [
        proposal(question['question'], 'Viru'),
        proposal(question['question'], 'Gumu'),
        proposal(f'Another sentence about #1. {CLAUSE}', 'Viru'),
        proposal('One ____.', 'Viru'),
        proposal(None, 'Viru', rejected='no_question'),
    ]
    write(tmp_path / 'run' / 'trajectories.jsonl', rows)
    monkeypatch.setattr('sys.argv', ['two_hops', str(tmp_path)])
    two_hops.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed['held out']['questions'] == 1
    assert printed['held out']['clause with name finds second passage'] == 1.0
    assert printed['proposed'] == {
        'proposals': 5,
        'accepted': 0.8,
        'second half of another document': 0.4,
        'joins two documents': 0.2,
        'clause of a held-out question': 0.4,
    }
