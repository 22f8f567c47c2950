"""How many proposed questions could be read, and how many find the document that they are about."""

import json
import pathlib

from refused_calls import check_table
from trajectories import make_trajectory

from zeroplay_jax.recipes.datasets import HiddenAnswer, SeedDocument
from zeroplay_jax.selfplay import proposal_record
from zeroplay_jax.selfplay.proposal_record import ProposalRecord
from zeroplay_jax.types import Outcome, Question, Row, RowInfo, Task


class Corpus:
    """Finds the documents whose title is in the query; fails for queries about `broken` ones."""

    def __init__(self, documents, broken=()):
        self.documents, self.broken, self.count = documents, broken, 0

    def search(self, queries):
        self.count += len(queries)
        return [None if query in self.broken else self.found(query) for query in queries]

    def found(self, query):
        return [
            {'id': '', 'title': title, 'text': text}
            for title, text in self.documents
            if title in query
        ]


DOCUMENTS = [('Gumu', 'Gumu lies in Lomi.'), ('Mimi', 'Mimi was founded by Duvos.')]


def proposal(step, index, text='', rejected=None, document=0, document_id=None):
    """A task about a document and the outcome of its proposer."""
    title, body = DOCUMENTS[document]
    origin = {} if document_id is None else {'document_id': document_id}
    task = Task((step, index), SeedDocument(title, body, 1, origin=origin))
    info = RowInfo(question=Question(text), valid=rejected is None, rejected=rejected)
    trajectory = make_trajectory(identity=(step, index, 0, 0))
    return task, Outcome([Row('proposer', trajectory, 0.0, 0, info=info)])


def shares(*proposals, documents=DOCUMENTS, broken=()):
    record, corpus = ProposalRecord(), Corpus(documents, broken)
    record.add(*map(list, zip(*proposals)))
    answerable = record.answerable(corpus)
    return f'readable {record.readable}, answerable {answerable}, {corpus.count} searches'


def from_an_answer():
    task = Task((1, 0), HiddenAnswer('Lomi', 1))
    return task, proposal(1, 0, 'Where is Gumu?')[1]


def test_shares_over_readable_and_answerable_proposals():
    check_table(pathlib.Path(__file__).parent / 'proposals.txt', globals())


def test_the_sample_does_not_depend_on_interruptions(monkeypatch):
    monkeypatch.setattr(proposal_record, 'SAMPLE_SIZE', 8)
    whole, resumed = ProposalRecord(), ProposalRecord()
    for step in range(6):
        proposals = [proposal(step, index, f'Gumu {step} {index}') for index in range(5)]
        for record in (whole, resumed):
            record.add(*map(list, zip(*proposals)))
        if step == 2:
            saved = json.loads(json.dumps(resumed.state()))
            resumed = ProposalRecord()
            resumed.restore(saved)
    assert whole.state() == resumed.state()
    queries = {query for _, query, _ in whole.state()['sample']}
    assert len(queries) == 8 and len({query.split()[1] for query in queries}) > 2, 'of all steps'
