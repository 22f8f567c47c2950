"""The quality of the questions that a run proposes about documents, over the whole run.

`readable` is counted in every step. `answerable` needs a search per question, so it is measured at the end, on a sample
of the proposals: those with the smallest hashes of their identities. The sample depends on the run alone, not on when
it was interrupted. A checkpoint holds counts and sample.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

from zeroplay_jax.selfplay.library import SearchableCorpus
from zeroplay_jax.selfplay.task_log import payload_json
from zeroplay_jax.types import Json, Outcome, Row, Task

# Enough for a standard error of 0.02; 500 records take about 100 kB of a checkpoint.
SAMPLE_SIZE = 500
# Queries per search.
_BATCH = 50
# Rejection reasons of rollouts from which question and answer (or the task) cannot be read.
_UNREADABLE = ('unfinished', 'no_question', 'no_answer', 'no_task')


class ProposalRecord:
    """Counts and a sample of all proposals about documents."""

    def __init__(self) -> None:
        self._total = 0
        self._readable = 0
        # [hash of the rollout's identity, query or None, hash of the document], sorted by the first hash.
        self._sample: list[list[Any]] = []

    def add(self, tasks: Sequence[Task], outcomes: Sequence[Outcome]) -> None:
        """Counts the proposals of a step whose tasks have a document, and updates the sample."""
        records: list[list[Any]] = []
        for task, outcome in zip(tasks, outcomes, strict=True):
            proposals = [row for row in outcome.rows if row.info.is_proposal]
            document = _seed_document(task) if proposals else None
            if document is None:
                continue
            for row in proposals:
                self._total += 1
                self._readable += row.info.rejected not in _UNREADABLE
                records.append(_sample_record(row, document))
        ordered = sorted(self._sample + records, key=operator.itemgetter(0))
        self._sample = ordered[:SAMPLE_SIZE]

    @property
    def readable(self) -> float | None:
        """Share of the proposals from which question and answer could be read; None without proposals."""
        return self._readable / self._total if self._total else None

    def answerable(self, corpus: SearchableCorpus) -> float | None:
        """Returns the share in [0, 1] of the sampled proposals whose question, as a query, finds its document.

        Searches `corpus` for every question of the sample. A rejected proposal counts as not answerable. Queries whose
        search failed are left out. None without proposals or if all searches failed.
        """
        searchable = [record for record in self._sample if record[1]]
        num_measured = len(self._sample) - len(searchable)
        num_answerable = 0
        for start in range(0, len(searchable), _BATCH):
            batch = searchable[start : start + _BATCH]
            results = corpus.search([record[1] for record in batch])
            for record, passages in zip(batch, results, strict=True):
                if passages is None:
                    continue
                num_measured += 1
                num_answerable += _contains(passages, record)
        return num_answerable / num_measured if num_measured else None

    def state(self) -> Json:
        """Returns counts and sample as JSON, for a checkpoint."""
        return {'total': self._total, 'readable': self._readable, 'sample': self._sample}

    def restore(self, state: Json) -> None:
        """Inverse of `state`."""
        self._total = state['total']
        self._readable = state['readable']
        self._sample = [list(record) for record in state['sample']]


def _seed_document(task: Task) -> Json | None:
    """Returns a task's payload as JSON if it is a document (has 'title' and 'text'), else None."""
    record = payload_json(task)
    if not isinstance(record, dict) or not {'title', 'text'} <= record.keys():
        return None
    return record


def _sample_record(row: Row, document: Json) -> list[Any]:
    """Returns the entry of `ProposalRecord._sample` for a proposal; its query is None if it was rejected."""
    query = None
    if row.info.rejected is None and row.info.question is not None:
        query = row.info.question.text
    identity = ','.join(map(str, row.trajectory.identity))
    return [_hash(identity), query, _content_hash(document)]


def _contains(passages: Sequence[Json], record: Sequence[Any]) -> bool:
    """Returns whether the document of a sample record is among the passages."""
    # Contents are compared and not ids: the documents may be those of another index, with other ids.
    return any(_content_hash(passage) == record[-1] for passage in passages)


def _content_hash(document: Json) -> str:
    return _hash(f'{document["title"]}\n{document["text"]}')


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(errors='replace'), digest_size=8).hexdigest()
