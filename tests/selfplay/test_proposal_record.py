"""How many proposed questions could be read, and how many find the document that they are about."""

import json

import pytest
from scripted import final

from zeroplay_jax.recipes.datasets import HiddenAnswer, SeedDocument
from zeroplay_jax.selfplay import records
from zeroplay_jax.selfplay.records import ProposalRecord
from zeroplay_jax.types import Outcome, Question, Row, RowInfo, Task


class Corpus:
    """Finds the documents whose title is in the query; fails for queries about `broken` ones."""

    def __init__(self, documents, broken=()):
        self.documents, self.broken, self.batches = documents, broken, []

    def search(self, queries):
        self.batches.append(list(queries))
        results = []
        for query in queries:
            passages = []
            for number, (title, text) in enumerate(self.documents):
                if title in query:
                    passages.append({'id': str(number), 'title': title, 'text': text})
            results.append(None if query in self.broken else passages)
        return results


DOCUMENTS = [('Gumu', 'Gumu lies in Lomi.'), ('Mimi', 'Mimi was founded by Duvos.')]


def proposal(step, index, text='', rejected=None, document=0, document_id=None):
    """A task about a document and the outcome of its proposer."""
    title, body = DOCUMENTS[document]
    origin = {} if document_id is None else {'document_id': document_id}
    task = Task((step, index), SeedDocument(title, body, 1, origin=origin))
    info = RowInfo(question=Question(text), valid=rejected is None, rejected=rejected)
    trajectory = final(question=text)
    object.__setattr__(trajectory, 'identity', (step, index, 0, 0))
    return task, Outcome([Row('proposer', trajectory, 0.0, 0, info=info)])


def record_of(*proposals):
    record = ProposalRecord()
    record.add([task for task, _ in proposals], [outcome for _, outcome in proposals])
    return record


def test_shares_over_readable_and_answerable_proposals():
    record = record_of(
        proposal(1, 0, 'Where does Gumu lie?'),
        proposal(1, 1, 'Where does it lie?'),
        proposal(1, 2, 'Gumu?', rejected='leaks_answer'),
        proposal(1, 3, rejected='unfinished'),
        proposal(1, 4, rejected='no_answer'),
    )
    assert record.readable == pytest.approx(3 / 5)
    # The rejected ones count as not answerable, and they are not searched for.
    corpus = Corpus(DOCUMENTS)
    assert record.answerable(corpus) == pytest.approx(1 / 5)
    assert sum(map(len, corpus.batches)) == 2


def test_a_document_is_recognised_by_its_text_and_not_by_its_id():
    # An id of another index is that of another passage.
    other_text = [('Gumu', 'Another edition of this passage.')]
    with_id = proposal(1, 0, 'Where is Gumu?', document_id='0')
    assert record_of(with_id).answerable(Corpus(other_text)) == 0.0
    assert record_of(with_id).answerable(Corpus(DOCUMENTS)) == 1.0


def test_failed_searches_are_left_out():
    record = record_of(proposal(1, 0, 'Gumu?'), proposal(1, 1, 'Mimi?', document=1))
    assert record.answerable(Corpus(DOCUMENTS, broken=['Mimi?'])) == 1.0
    assert record.answerable(Corpus(DOCUMENTS, broken=['Mimi?', 'Gumu?'])) is None


def test_a_recipe_that_proposes_nothing_from_documents_has_neither():
    task = Task((1, 0), HiddenAnswer('Lomi', 1))
    _, outcome = proposal(1, 0, 'Where is Gumu?')
    record = record_of((task, outcome))
    assert record.readable is None and record.answerable(Corpus(DOCUMENTS)) is None


def test_the_sample_does_not_depend_on_interruptions(monkeypatch):
    monkeypatch.setattr(records, 'SAMPLE_SIZE', 8)
    steps = [
        [proposal(step, index, f'Gumu {step} {index}') for index in range(5)] for step in range(6)
    ]
    whole = ProposalRecord()
    resumed = ProposalRecord()
    for number, proposals in enumerate(steps):
        tasks = [task for task, _ in proposals]
        outcomes = [outcome for _, outcome in proposals]
        whole.add(tasks, outcomes)
        resumed.add(tasks, outcomes)
        if number == 2:
            saved = json.loads(json.dumps(resumed.state()))
            resumed = ProposalRecord()
            resumed.restore(saved)
    assert whole.state() == resumed.state()
    queries = {query for _, query, _ in whole.state()['sample']}
    assert len(queries) == 8 and len({query.split()[1] for query in queries}) > 2, 'of all steps'
