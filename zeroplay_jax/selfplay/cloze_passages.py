"""Passages of a corpus with the sentences that cloze questions can be made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from zeroplay_jax.mini.cloze import sentences
from zeroplay_jax.retrieval.corpus import Record, split
from zeroplay_jax.retrieval.english import problem_of

# A new stream of (line number, passage) at every call: a corpus is read several times.
Passages = Callable[[], Iterable[tuple[int, Record]]]


@dataclasses.dataclass
class Passage:
    """A passage with the sentences that a question can be made of (`mini.cloze.sentences`)."""

    line: int
    id: str
    title: str
    text: str
    sentences: list[str]

    def document_line(self, source: str, link: str = '') -> dict[str, Any]:
        """Returns the line of the file of training documents; with the name that links it to another one two hops."""
        document: dict[str, Any] = {'title': self.title, 'text': self.text, 'source': source}
        document |= {'document_id': self.id, 'line': self.line}
        if link:
            return document | {'hops': 2, 'link': link}
        return document | {'hops': 1}


def parse(line: int, record: Record) -> Passage | None:
    """Returns a passage with its usable sentences; None if there are none or if it is not in English."""
    title, text = split(record.contents)
    usable_sentences = sentences(text)
    if not usable_sentences or problem_of(text) is not None:
        return None
    return Passage(line, record.id, title, text, usable_sentences)
