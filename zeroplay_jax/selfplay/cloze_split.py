"""Splits the documents of a corpus by hashes of their names: those with the lowest are held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zeroplay_jax.retrieval.corpus import Record, split
from zeroplay_jax.selfplay.builders import BottomK, hash_key
from zeroplay_jax.selfplay.cloze_passages import Passage, parse

# Largest share of the documents that is held out, which a small corpus reaches. All others may be trained on.
MAX_SHARE = 0.4
# Share of a large corpus that is held out, so that the questions come from many documents.
USUAL_SHARE = 0.1

# Documents beyond this number are not counted: `MAX_SHARE` of so many is more than any number of questions needs.
_COUNTED_DOCUMENTS = 100_000


class DocumentNames:
    """Names of documents: the title, with the file behind it if another file had the same title first ('Notes')."""

    def __init__(self) -> None:
        # Title → file. Filled only for sources with files: the millions of titles of an encyclopedia are not stored.
        self._first_document: dict[str, str] = {}

    def name_of(self, record: Record) -> str:
        """Returns the name of a passage's document; a passage with neither title nor file is a document of its own."""
        title, _ = split(record.contents)
        if not title:
            return record.document or passage_of(record)
        if not record.document:
            return title
        # The name is the title alone where that is unique, so that a file that is moved stays on its side of the split.
        first_document = self._first_document.setdefault(title, record.document)
        if first_document == record.document:
            return title
        return f'{title}\n{record.document}'


def passage_of(record: Record) -> str:
    """Returns the name of a passage as a document of its own, which no title equals: titles contain no line feed."""
    return f'\n{record.id}'


def candidates(
    passages: Iterable[tuple[int, Record]],
    seed: int,
    count: int,
    unit_of: Callable[[Record], str],
) -> tuple[dict[str, list[Passage]], int]:
    """Returns the documents with the lowest hashes, lowest first, and the number of documents of the corpus.

    Only documents with a usable sentence count. The documents are returned as name → usable passages; their number
    is exact up to 100,000, beyond which no more are counted.

    Args:
      count: largest number of documents to return.
      unit_of: function from a passage to the name of its document.
    """
    sample: BottomK[tuple[str, list[Passage]]] = BottomK(count)
    keys: set[int] = set()
    for line, record in passages:
        name = unit_of(record)
        key = hash_key(seed, name)
        is_counted = len(keys) < _COUNTED_DOCUMENTS
        # In a large corpus most passages are skipped here, before the costly search for sentences.
        if not is_counted and not sample.admits(key):
            continue
        passage = parse(line, record)
        if passage is None:
            continue
        if is_counted:
            keys.add(key)
        if sample.admits(key):
            # Passages of one document need not follow each other.
            _, document = sample.get(key) or (name, [])
            document.append(passage)
            sample.put(key, (name, document))
    return dict(sample.ordered()), len(keys)


def held_out_count(
    questions_of: Sequence[Sequence[Sequence[dict[str, Any]]]], count: int, total: int
) -> int:
    """Returns the number of documents to hold out: the first so many of `questions_of`.

    It is enough for `count` questions with at most one from each passage, and at least the usual share of the corpus,
    but never more than `questions_of` has.

    Args:
      questions_of: per document and passage its questions.
      count: number of questions.
      total: number of documents in the corpus.
    """
    needed = len(questions_of)
    passages_so_far = 0
    for number, document in enumerate(questions_of, 1):
        passages_so_far += sum(1 for questions in document if questions)
        if passages_so_far >= count:
            needed = number
            break
    usual = min(count, int(USUAL_SHARE * total))
    return min(max(needed, usual), len(questions_of))
