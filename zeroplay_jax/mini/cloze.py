"""Cloze questions from plain text: a sentence with a name, a number or a word left out, and the text left out.

They need no labels and no model, and a search finds their passage in any corpus, so they serve to train the
checkpoint that reads English and to measure policies on texts of the user (cloze test: Taylor 1953).
"""

from __future__ import annotations

import re
from typing import NamedTuple

BLANK = '____'

# Shorter sentences leave nothing to search for; longer ones would fill the prompt.
SENTENCE_WORDS = (8, 30)
# Words before the blank: a reader recognises the sentence by them.
LEFT_WORDS = 3
ANSWER_WORDS = 5

# A full stop, the quotes or brackets that close the sentence, white space, and the start of another sentence.
_SENTENCE_END = re.compile(r'(?<=[.!?])["\')\]”’]{0,2}\s+(?=["\'(\[“‘]?[A-Z0-9])')
# Full stops after these do not end a sentence, nor after initials.
_ABBREVIATION = re.compile(
    r'(?:\b(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Rev|Gen|Col|Capt|Lt|Sgt|No|Nos|vs|ca|c|b|d|r|ft|approx|est|cf|e\.g|i\.e|U\.S'
    r'|Ltd|Inc|Co|Corp|Bros|Mt|Ave|Vol|pp|p)|\b[A-Z])\.$'
)
_MONTH = 'January|February|March|April|May|June|July|August|September|October|November|December'
_DATE = rf'(?:\d{{1,2}} (?:{_MONTH})(?: \d{{4}})?|(?:{_MONTH}) \d{{1,2}}(?:, \d{{4}})?)'
_NUMBER = r'\d+(?:[.,:]\d+)*'
_NAME_WORD = r"[A-Z][\w'’-]*\w"
_NAME = rf'{_NAME_WORD}(?: (?:(?:of|the|de|la|von|van|and) ){{0,2}}{_NAME_WORD}){{0,3}}'
# After white space only: a byte-level tokenizer then gives the answer the same tokens in the text and alone. The
# look-ahead excludes parts of hyphenated compounds.
_STARTS_WORD = r'(?<!\S)'
_ENDS_WORD = r'(?=[\s.,;:!?)"”\]]|$)'
_KINDS = (
    ('number', re.compile(f'{_STARTS_WORD}(?:{_DATE}|{_NUMBER}){_ENDS_WORD}')),
    ('name', re.compile(f'{_STARTS_WORD}{_NAME}{_ENDS_WORD}')),
    ('word', re.compile(f'{_STARTS_WORD}[a-z]{{6,}}{_ENDS_WORD}')),
)


class Cloze(NamedTuple):
    """A sentence in three parts, and the kind of the part that is left out: 'number', 'name' or 'word'."""

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


def sentences(text: str) -> list[str]:
    """Returns the complete sentences of a passage that are long and short enough to ask about.

    A passage cut out of an article often starts and ends within a sentence; those parts are left out.
    """
    text = ' '.join(text.split())
    usable = []
    for sentence in _split(text):
        word_count = len(sentence.split())
        starts_complete = sentence[:1].isupper() or sentence[:1].isdigit()
        ends_complete = sentence.rstrip('"\')]”’').endswith(('.', '!', '?'))
        low, high = SENTENCE_WORDS
        if (
            starts_complete
            and ends_complete
            and low <= word_count <= high
            and BLANK not in sentence
        ):
            usable.append(sentence)
    return usable


def _split(text: str) -> list[str]:
    parts = []
    start = 0
    for boundary in _SENTENCE_END.finditer(text):
        candidate = text[start : boundary.start()]
        if _ABBREVIATION.search(candidate):
            continue
        # The closing quotes belong to the sentence that they close.
        end = boundary.start() + len(boundary.group().rstrip())
        parts.append(text[start:end])
        start = boundary.end()
    parts.append(text[start:])
    return parts


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
            cases.append(Cloze(left, answer, sentence[match.end() :], kind))
    return sorted(cases, key=lambda case: len(case.left))
