"""Held-out questions and training documents of any corpus, split by document: no passage is in both.

The questions are clozes (`zeroplay_jax.mini.cloze`), so they need neither labels nor a model. The split is a function
of the seed and the names of the documents alone: those with the lowest hashes are held out. A document is a file of a
folder of texts, or all passages of the same title in a file of passages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zeroplay_jax.mini.cloze import ANSWER_WORDS, SENTENCE_WORDS, Cloze, clozes, sentences
from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.retrieval.corpus import Record, split
from zeroplay_jax.retrieval.english import problem_of
from zeroplay_jax.selfplay.builders import BottomK, hash_key, unfit
from zeroplay_jax.types import UserError

# Largest share of the documents that is held out, which a small corpus reaches. All others may be trained on.
MAX_SHARE = 0.4
# Share of a large corpus that is held out, so that the questions come from many documents.
USUAL_SHARE = 0.1
# A corpus of fewer documents, such as two books, is split by passage.
MIN_DOCUMENTS = 5
# With fewer questions, the 95 % interval of a mean score may be wider than ±0.18 (1.96 · 0.5 / √30).
MIN_QUESTIONS = 30
MIN_TRAINING_PASSAGES = 8

# Documents beyond this number are not counted: `MAX_SHARE` of so many is more than any number of questions needs.
_COUNTED_DOCUMENTS = 100_000

# A new stream of (line number, passage) at every call: a corpus is read twice.
Passages = Callable[[], Iterable[tuple[int, Record]]]


@dataclasses.dataclass
class ClozeFiles:
    """Held-out questions, training documents, and how they were split.

    Attributes:
      questions: lines {'question', 'answers', 'hops', 'kind', 'title', 'source', 'document_id', 'line'}.
      documents: lines as `inputs.documents` takes them.
      held_out: number of documents that are held out.
      total: number of documents with a usable sentence; at most 100,000 are counted.
      unit: what was split: 'documents', or 'passages' of a corpus with few documents.
      divided: number of documents that may have passages both held out and trained on.
    """

    questions: list[dict[str, Any]]
    documents: list[dict[str, Any]]
    held_out: int
    total: int
    unit: str
    divided: int = 0

    @property
    def warning(self) -> str:
        """A sentence for the user where several documents were split by passage; '' otherwise."""
        if self.divided < 2:
            return ''
        return (
            f'the corpus has {self.divided} documents with usable sentences, fewer than {MIN_DOCUMENTS}, and is split '
            'by passage: training reads other passages of the documents that questions are about'
        )

    def __str__(self) -> str:
        return (
            f'{len(self.questions)} questions of {self.held_out} held-out {self.unit} (of {self.total}), '
            f'{len(self.documents)} passages of the others, with a sentence to ask about, to train on'
        )


@dataclasses.dataclass
class _Passage:
    """A passage with the sentences that a question can be made of (`mini.cloze.sentences`)."""

    line: int
    id: str
    title: str
    text: str
    sentences: list[str]

    def document_line(self, source: str) -> dict[str, Any]:
        """The line of the file of training documents."""
        document: dict[str, Any] = {'title': self.title, 'text': self.text, 'source': source}
        return document | {'document_id': self.id, 'line': self.line, 'hops': 1}


def build(passages: Passages, source: str, count: int, seed: int, max_documents: int) -> ClozeFiles:
    """Splits a corpus and returns its questions and training documents.

    Args:
      passages: yields the whole corpus at every call; called three or four times, or once if `count` is 0.
      source: name of the corpus in the lines.
      count: questions to make; a small corpus gives fewer. With 0 nothing is held out.
      seed: seed of the split, the questions and the sample of documents.
      max_documents: largest number of training documents; a larger corpus is sampled.

    Raises:
      UserError: fewer than `MIN_QUESTIONS` questions, or than `MIN_TRAINING_PASSAGES` documents.
    """
    files = ClozeFiles([], [], 0, 0, 'documents')
    held_out: set[str] = set()
    unit_of = _DocumentNames().name_of
    if count:
        # Twice as many documents as questions, because some have usable sentences but give no question.
        candidates, files.total = _candidates(passages(), seed, 2 * count, unit_of)
        if files.total < MIN_DOCUMENTS:
            files.unit = 'passages'
            files.divided = files.total
            unit_of = _passage_of
            candidates, files.total = _candidates(passages(), seed, 2 * count, unit_of)
        # Documents are held out in the order of their hashes, so that a larger count adds documents and removes none.
        max_held_out = int(MAX_SHARE * files.total)
        candidates = dict(itertools.islice(candidates.items(), max_held_out))
        repeats = _repeated_sentences(passages(), candidates)
        # questions_of[document][passage] lists the questions of a passage, best first; `_take` chooses from it.
        questions_of = []
        for document in candidates.values():
            questions_of.append(
                [_questions(passage, source, seed, repeats) for passage in document]
            )
        files.held_out = _held_out_count(questions_of, count, files.total)
        files.questions = _take(questions_of[: files.held_out], count)
        held_out = set(itertools.islice(candidates, files.held_out))
        if len(files.questions) < min(count, MIN_QUESTIONS):
            shortest, longest = SENTENCE_WORDS
            raise UserError(
                f'{source}: {len(files.questions)} questions can be made of {files.held_out} of its {files.total} '
                f'{files.unit} with usable sentences (of {shortest} to {longest} words), at least '
                f'{min(count, MIN_QUESTIONS)} are needed and at most {MAX_SHARE:.0%} of a corpus is held out; give '
                'more or longer English texts'
            )
    files.documents = _training_documents(
        passages(), source, seed, max_documents, held_out, unit_of
    )
    if len(files.documents) < MIN_TRAINING_PASSAGES:
        raise UserError(
            f'{source}: {len(files.documents)} passages remain to train on, at least {MIN_TRAINING_PASSAGES} are '
            'needed; give more or longer English texts'
        )
    return files


# ---- the split -----------------------------------------------------------------------------------------


class _DocumentNames:
    """Names of documents: the title, with the file behind it if another file had the same title first ('Notes')."""

    def __init__(self) -> None:
        # Title → file. Filled only for sources with files: the millions of titles of an encyclopedia are not stored.
        self._first_document: dict[str, str] = {}

    def name_of(self, record: Record) -> str:
        """Returns the name of a passage's document; a passage with neither title nor file is a document of its own."""
        title, _ = split(record.contents)
        if not title:
            return record.document or _passage_of(record)
        if not record.document:
            return title
        # The name is the title alone where that is unique, so that a file that is moved stays on its side of the split.
        first_document = self._first_document.setdefault(title, record.document)
        if first_document == record.document:
            return title
        return f'{title}\n{record.document}'


def _passage_of(record: Record) -> str:
    """Returns the name of a passage as a document of its own, which no title equals: titles contain no line feed."""
    return f'\n{record.id}'


def _parse(line: int, record: Record) -> _Passage | None:
    """Returns a passage with its usable sentences; None if there are none or if it is not in English."""
    title, text = split(record.contents)
    usable_sentences = sentences(text)
    if not usable_sentences or problem_of(text) is not None:
        return None
    return _Passage(line, record.id, title, text, usable_sentences)


def _candidates(
    passages: Iterable[tuple[int, Record]],
    seed: int,
    count: int,
    unit_of: Callable[[Record], str],
) -> tuple[dict[str, list[_Passage]], int]:
    """Returns the documents with the lowest hashes, lowest first, and the number of documents of the corpus.

    Only documents with a usable sentence count. The documents are returned as name → usable passages; their number
    is exact up to 100,000, beyond which no more are counted.

    Args:
      count: largest number of documents to return.
      unit_of: function from a passage to the name of its document.
    """
    sample: BottomK[tuple[str, list[_Passage]]] = BottomK(count)
    keys: set[int] = set()
    for line, record in passages:
        name = unit_of(record)
        key = hash_key(seed, name)
        is_counted = len(keys) < _COUNTED_DOCUMENTS
        # In a large corpus most passages are skipped here, before the costly search for sentences.
        if not is_counted and not sample.admits(key):
            continue
        passage = _parse(line, record)
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


def _held_out_count(
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


def _training_documents(
    passages: Iterable[tuple[int, Record]],
    source: str,
    seed: int,
    max_documents: int,
    held_out: set[str],
    unit_of: Callable[[Record], str],
) -> list[dict[str, Any]]:
    """Returns the lines of a uniform sample of passages, of all documents but those held out.

    A passage is usable if at least one cloze can be made of it; at most `max_documents` are sampled.
    """
    sample: BottomK[dict[str, Any]] = BottomK(max_documents)
    for line, record in passages:
        title, _ = split(record.contents)
        key = hash_key(seed, record.id)
        # The cheap tests come first, because splitting into sentences takes most of the time.
        if not sample.admits(key) or unit_of(record) in held_out:
            continue
        passage = _parse(line, record)
        if passage and any(_best_cloze(text, title, seed) for text in passage.sentences):
            sample.put(key, passage.document_line(source))
    return sample.ordered()


# ---- questions -----------------------------------------------------------------------------------------


def _repeated_sentences(
    passages: Iterable[tuple[int, Record]], candidates: dict[str, list[_Passage]]
) -> set[str]:
    """Returns the sentences of candidates, in lower case, that occur more than once in the corpus.

    Such a sentence does not belong to one passage, and another copy may be trained on.
    """
    counts: dict[str, int] = {}
    for document in candidates.values():
        for passage in document:
            for sentence in passage.sentences:
                counts[sentence.lower()] = 0
    # All passages are searched, not only usable ones (`_parse`): any copy of a sentence makes it repeated.
    for _, record in passages:
        _, text = split(record.contents)
        for sentence in sentences(text):
            key = sentence.lower()
            if key in counts:
                counts[key] += 1
    return {sentence for sentence, count in counts.items() if count > 1}


def _questions(
    passage: _Passage, source: str, seed: int, repeats: set[str]
) -> list[dict[str, Any]]:
    """Returns the lines of at most one question per sentence of a passage, those about names and numbers first.

    Sentences in `repeats` (in lower case) and sentences without a usable cloze give none.
    """
    questions = []
    for sentence in passage.sentences:
        case = _best_cloze(sentence, passage.title, seed)
        if case is None or sentence.lower() in repeats:
            continue
        questions.append(
            {
                'question': case.question,
                'answers': [case.answer],
                'hops': 1,
                'kind': case.kind,
                'title': passage.title,
                'source': source,
                'document_id': passage.id,
                'line': passage.line,
            }
        )

    def priority(question: dict[str, Any]) -> tuple[bool, int]:
        return question['kind'] == 'word', hash_key(seed, question['question'])

    return sorted(questions, key=priority)


def _best_cloze(sentence: str, title: str, seed: int) -> Cloze | None:
    """Returns one cloze of a sentence, about a name or number if possible; None if no cloze is usable."""
    normal_title = f' {normalize_answer(title)} '
    cases = []
    for case in clozes(sentence):
        normal_answer = normalize_answer(case.answer)
        normal_question = f' {normalize_answer(case.question)} '
        # The title names the passage to search for, and a question must not contain its answer.
        is_given_away = (
            f' {normal_answer} ' in normal_title or f' {normal_answer} ' in normal_question
        )
        if unfit(case.answer, ANSWER_WORDS) is None and not is_given_away:
            cases.append(case)
    # Words can often be guessed or replaced by others; names and numbers cannot.
    preferred = [case for case in cases if case.kind != 'word'] or cases
    if not preferred:
        return None
    # Chosen by a hash: the first cloze would always have its blank near the start.
    return preferred[hash_key(seed, sentence) % len(preferred)]


def _take(
    questions_of: Sequence[Sequence[Sequence[dict[str, Any]]]], count: int
) -> list[dict[str, Any]]:
    """Returns at most `count` questions: one from every passage, then a second one from every passage, and so on.

    The first passages of all documents come before their second ones.
    """
    ranked = []
    for document_number, document in enumerate(questions_of):
        # Passages without questions do not count, so that every document with a question has one of the first rank.
        asked_passages = [questions for questions in document if questions]
        for passage_number, questions in enumerate(asked_passages):
            for number, question in enumerate(questions):
                ranked.append(((number, passage_number, document_number), question))
    ranked.sort(key=lambda item: item[0])
    return [question for _, question in ranked[:count]]
