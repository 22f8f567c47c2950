"""Questions of two hops from plain text: a sentence that mentions a name, and a sentence about that name elsewhere.

The name, called the bridge, is replaced in both, and the second sentence has a blank:

    The game was developed by Rockstar San Diego and published by #1. #1 released its sequel on ____, for PlayStation 3.

A reader searches for the first sentence, reads the name that `#1` replaces, searches for the second sentence with this
name, and reads what was left out. The second sentence begins with the bridge and ends a few words after the blank.
The mark is that of MuSiQue (Trivedi et al. 2022), whose questions refer to earlier answers by `#1`, `#2` and so on.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import NamedTuple

from zeroplay_jax.mini import cloze
from zeroplay_jax.mini.cloze import Cloze

# Stands for the bridge. No sentence that is asked about contains its first character.
BRIDGE = '#1'
# A bridge that more passages mention, such as a large country, selects no passage.
MAX_MENTIONS = 50
# Most words between the bridge and the blank, and most words after the blank.
GAP_WORDS = 10
RIGHT_WORDS = 4
# A word by which a name can be recognised.
_TELLING_WORD = re.compile(r'\w{3,}')
_CLAUSE_ENDS = (',', ';', ':', '.', '!', '?')
_BRACKETED_END = re.compile(r' \([^()]*\)$')


class Chain(NamedTuple):
    """A question of two hops.

    Attributes:
      first: a sentence of the first passage; its left-out span is the bridge.
      second: the clause of the second passage, which begins with the bridge.
    """

    first: Cloze
    second: Cloze

    @property
    def question(self) -> str:
        """The sentence and the clause with the blank; the bridge is replaced in both."""
        clause = BRIDGE + self.second.question.removeprefix(self.first.answer)
        return f'{self.first.left}{BRIDGE}{self.first.right} {clause}'


def names(text: str) -> set[str]:
    """Returns all names in a text, those of a single word included."""
    return {match.group() for match in cloze.NAMES.finditer(text)}


def described(sentence: str) -> list[Cloze]:
    """Returns the clozes that leave a name out, no word of which occurs elsewhere in the sentence."""
    cases = []
    for case in cloze.clozes(sentence):
        remainder = f'{case.left}{case.right}'.lower()
        words = _TELLING_WORD.findall(case.answer.lower())
        is_given_away = any(word in remainder for word in words)
        if case.kind == 'name' and not is_given_away:
            cases.append(case)
    return cases


def subjects(sentence: str) -> list[str]:
    """Returns the names with which a sentence begins: one or none, or two if it begins with 'The'."""
    match = cloze.NAMES.match(sentence)
    if match is None:
        return []
    name = match.group()
    if name.startswith('The '):
        return [name, name.removeprefix('The ')]
    return [name]


def is_bridge(name: str, title: str) -> bool:
    """Returns whether a name means the same in a passage with this title as elsewhere.

    A single word, such as a first name, often means something else, except where it is the title. What a title has in
    brackets at its end is not part of the name.
    """
    return ' ' in name or is_title(name, title)


def is_title(name: str, title: str) -> bool:
    """Returns whether a name is a title, apart from brackets at its end."""
    return name == _BRACKETED_END.sub('', title)


def clauses(sentence: str, bridge: str) -> list[Cloze]:
    """Returns the clozes of a sentence with this subject, cut after a few words; the left part begins with the subject.

    Only names and numbers are left out; without the rest of the sentence, words could be replaced by others.
    """
    start = sentence.index(bridge)
    cases = []
    for case in cloze.clozes(sentence):
        left = case.left[start:]
        gap = left.removeprefix(bridge)
        gap_words = gap.split()
        is_statement = (
            left.startswith(bridge)
            # After a comma or another name the words do not begin to say something about the subject.
            and gap.startswith(' ')
            and 0 < len(gap_words) <= GAP_WORDS
            and gap_words[0].islower()
        )
        if is_statement and case.kind != 'word' and bridge not in gap + case.right:
            cases.append(case._replace(left=left, right=_first_words(case.right)))
    return cases


def _first_words(right: str) -> str:
    """Returns the beginning of the text after a blank: a few words, or what precedes the first punctuation mark."""
    if right.startswith(_CLAUSE_ENDS):
        return right[0]
    words = []
    for word in right.split()[:RIGHT_WORDS]:
        words.append(word)
        if word.endswith(_CLAUSE_ENDS):
            break
    # A closing bracket or quotation mark follows the blank without a space.
    space = ' ' if right.startswith(' ') else ''
    return space + ' '.join(words)


def statements(title: str, sentence: str) -> list[tuple[str, Cloze]]:
    """Returns the clauses of a sentence that are about its subject, each with the name of the subject.

    Args:
      title: title of the passage.
      sentence: one of its sentences.
    """
    named_clauses = []
    for name in subjects(sentence):
        if is_bridge(name, title):
            named_clauses += [(name, clause) for clause in clauses(sentence, name)]
    return named_clauses


def can_join(first: Cloze, clause: Cloze) -> bool:
    """Returns whether a sentence and a clause make a question: the sentence does not contain the answer."""
    return clause.answer.lower() not in first.sentence.lower()


class Statement(NamedTuple):
    """A clause about a name, and the index of its passage."""

    clause: Cloze
    passage: int


class Linked(NamedTuple):
    """A chain and the index of its second passage."""

    chain: Chain
    second_passage: int


class Links:
    """All statements and chains of some passages.

    Attributes:
      statements: name → the clauses that are about it.
      chains: index of a first passage → its chains to passages of other titles.
    """

    def __init__(self, passages: Sequence[tuple[str, str]]):
        """Finds the links between passages, each (title, text)."""
        sentence_lists = [cloze.sentences(text) for _, text in passages]
        self.statements: dict[str, list[Statement]] = {}
        mentions: collections.Counter[str] = collections.Counter()
        for index, (title, text) in enumerate(passages):
            mentions.update(names(text))
            for sentence in sentence_lists[index]:
                for name, clause in statements(title, sentence):
                    self.statements.setdefault(name, []).append(Statement(clause, index))
        self.chains: dict[int, list[Linked]] = {}
        for index, (title, _) in enumerate(passages):
            linked = []
            for sentence in sentence_lists[index]:
                for first in described(sentence):
                    if mentions[first.answer] > MAX_MENTIONS:
                        continue
                    for statement in self.statements.get(first.answer, ()):
                        if passages[statement.passage][0] != title and can_join(
                            first, statement.clause
                        ):
                            chain = Chain(first, statement.clause)
                            linked.append(Linked(chain, statement.passage))
            if linked:
                self.chains[index] = linked
