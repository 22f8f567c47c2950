"""Cloze questions from plain text: a sentence with a name, a number or a word left out, and the text left out.

Cloze questions need no labels and no model, and a search finds their passage in any corpus. They are used to train the
checkpoint that reads English and to measure policies on texts of the user (cloze test: Taylor 1953).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zeroplay_jax.extras.inputs.sentences import (
    ends_sentence,
    problem_of,
    split_paragraphs,
    split_sentences,
    without_list_mark,
)
from zeroplay_jax.mini.question_form import BLANK as BLANK
from zeroplay_jax.retrieval.corpus import Record, split
from zeroplay_jax.types import Json

# Fewest and most words of a sentence: shorter ones have too few words to search for, longer ones would fill the prompt.
SENTENCE_WORDS = (8, 30)
# Least number of words before the blank, by which a reader recognises the sentence.
LEFT_WORDS = 3
# Largest number of words of an answer.
ANSWER_WORDS = 5
# A sentence of the most words has 20 characters per word at most; a longer one is not prose.
_MAX_CHARACTERS = 20 * SENTENCE_WORDS[1]
# Examples of each reason why sentences are left out, and characters of each.
_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 200
# Characters of tables, code and markup.
_MARKUP = frozenset('#|`*_<>{}\\')
_BEGINS_IN_BRACKETS = re.compile(r'[^(\[]*[)\]]')

_MONTH = 'January|February|March|April|May|June|July|August|September|October|November|December'
_MONTHS = frozenset(_MONTH.split('|'))
_DATE = rf'(?:\d{{1,2}} (?:{_MONTH})(?: \d{{4}})?|(?:{_MONTH}) \d{{1,2}}(?:, \d{{4}})?)'
_NUMBER = r'\d+(?:[.,:]\d+)*'
_NAME_WORD = r"[A-Z][\w'’-]*\w"
_NAME = rf'{_NAME_WORD}(?: (?:(?:of|the|de|la|von|van|and) ){{0,2}}{_NAME_WORD}){{0,3}}'
# An answer starts after white space only: a byte-level tokenizer then gives it the same tokens in the text and alone.
# The look-ahead excludes parts of hyphenated compounds, of names such as Node.js and of numbers such as 6.4kb.
_STARTS_WORD = r'(?<!\S)'
_ENDS_WORD = r'(?=[\s.,;:!?)"”\]]|$)(?![.,:]\w)'
# Spans that `clozes` leaves out as names.
NAMES = re.compile(f'{_STARTS_WORD}{_NAME}{_ENDS_WORD}')
_KINDS = (
    ('number', re.compile(f'{_STARTS_WORD}(?:{_DATE}|{_NUMBER}){_ENDS_WORD}')),
    ('name', NAMES),
    ('word', re.compile(f'{_STARTS_WORD}[a-z]{{6,}}{_ENDS_WORD}')),
)


class Cloze(NamedTuple):
    """A sentence with a span left out.

    Attributes:
      left: the sentence before the span.
      answer: the span that is left out.
      right: the sentence after the span.
      kind: 'number' (dates included), 'name' or 'word'.
    """

    left: str
    answer: str
    right: str
    kind: str

    @property
    def sentence(self) -> str:
        """The whole sentence."""
        return self.left + self.answer + self.right

    @property
    def question(self) -> str:
        """The sentence with a blank."""
        return self.left + BLANK + self.right


class LeftOut(collections.Counter[str]):
    """Counts what is left out by reason, and keeps the first examples of each."""

    def __init__(self) -> None:
        super().__init__()
        self.examples: dict[str, list[str]] = {}

    def add(self, reason: str, example: str) -> None:
        self[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(example[:_EXAMPLE_CHARACTERS])

    def to_json(self) -> Json:
        """Returns {reason: {'count', 'examples'}}, the most frequent reason first."""
        return {
            reason: {'count': count, 'examples': self.examples[reason]}
            for reason, count in self.most_common()
        }


def sentences(text: str, left_out: LeftOut | None = None) -> list[str]:
    """Returns the complete sentences of a passage that are long and short enough to ask about.

    A passage cut out of an article often starts and ends within a sentence; incomplete sentences are left out. No
    sentence goes beyond a list item or heading. `left_out` counts the others.
    """
    # The usual passage is one line. A dash at its start may be from the middle of a sentence, so it is no list mark.
    paragraphs = [' '.join(text.split())]
    if '\n' in text:
        paragraphs = [without_list_mark(paragraph) for paragraph in split_paragraphs(text)]
    usable_sentences = []
    for paragraph in paragraphs:
        for sentence in split_sentences(paragraph):
            problem = _problem(sentence)
            if not problem:
                usable_sentences.append(sentence)
            elif left_out is not None:
                left_out.add(problem, sentence)
    return usable_sentences


def _problem(sentence: str) -> str:
    """Returns why nothing is asked about a sentence; '' if it is complete, of a usual length and plain text."""
    min_words, max_words = SENTENCE_WORDS
    num_words = len(sentence.split())
    if num_words < min_words:
        return 'too short'
    if num_words > max_words or len(sentence) > _MAX_CHARACTERS:
        return 'too long'
    if not ends_sentence(sentence):
        return 'no full stop'
    if not (sentence[:1].isupper() or sentence[:1].isdigit()):
        return 'no capital letter at its beginning'
    # The rest of a citation or of an aside, such as 'Cit., p. 87] Of course'.
    if _BEGINS_IN_BRACKETS.match(sentence):
        return 'begins within brackets'
    # Refuses control characters and markup, which includes the underscores of a blank.
    if not sentence.isprintable() or not _MARKUP.isdisjoint(sentence):
        return 'marks of code or tables'
    return ''


def clozes(sentence: str) -> list[Cloze]:
    """Returns every way to leave a name, a number or a word out of a sentence, in the order of the text.

    The left-out text occurs nowhere else in the sentence, so the question does not contain its answer.
    """
    cases = []
    lower_sentence = sentence.lower()
    for kind, pattern in _KINDS:
        for match in pattern.finditer(sentence):
            answer = match.group()
            left = sentence[: match.start()]
            is_repeated = lower_sentence.count(answer.lower()) > 1
            if len(left.split()) < LEFT_WORDS or len(answer.split()) > ANSWER_WORDS or is_repeated:
                continue
            # A month looks like a name. Dates, which contain it, are found by the pattern of numbers.
            if kind == 'name' and answer in _MONTHS:
                continue
            cases.append(Cloze(left, answer, sentence[match.end() :], kind))
    return sorted(cases, key=lambda case: len(case.left))


# Passages of a corpus with the sentences that questions can be made of.
# A new stream of (line number, passage) at every call: a corpus is read several times.
Passages = Callable[[], Iterable[tuple[int, Record]]]


@dataclasses.dataclass
class Passage:
    """A passage with the sentences that a question can be made of (`sentences`)."""

    line: int
    id: str
    title: str
    text: str
    sentences: list[str]
    document: str

    def document_line(self, source: str, link: str = '') -> dict[str, Any]:
        """Returns the line of the file of training documents; with the name that links it to another one two hops."""
        document: dict[str, Any] = {'title': self.title, 'text': self.text, 'source': source}
        document |= {'document_id': self.id, 'line': self.line}
        if link:
            return document | {'hops': 2, 'link': link}
        return document | {'hops': 1}

    def question_line(self, source: str, case: Cloze, question: str, hops: int) -> dict[str, Any]:
        """Returns the line of the file of questions about this passage; `case` has the answer."""
        return {
            'question': question,
            'answers': [case.answer],
            'hops': hops,
            'kind': case.kind,
            'title': self.title,
            'source': source,
            'document': self.document,
            'document_id': self.id,
            'line': self.line,
        }


def parse(line: int, record: Record) -> Passage | None:
    """Returns a passage with its usable sentences; None if there are none or if it is not in English."""
    title, text = split(record.contents)
    usable_sentences = sentences(text)
    if not usable_sentences or problem_of(text) is not None:
        return None
    document = record.document or title or record.id
    return Passage(line, record.id, title, text, usable_sentences, document)
