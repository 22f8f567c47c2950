"""English passages to draw demonstrations from, with an exact search over them and disguises for their names."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from tools.checkpoints.library import TOP_K, Document
from zeroplay_jax.extras.inputs import chains, cloze
from zeroplay_jax.extras.inputs.chains import Chain
from zeroplay_jax.mini.names import pick
from zeroplay_jax.retrieval.lexical import LexicalEncoder

# Weights with which `draw_cloze` draws the kind of answer. Most questions of people ask for names and numbers; words
# have a weight, so that a sentence without either can be asked about.
_KIND_WEIGHTS = {'name': 0.6, 'number': 0.35, 'word': 0.05}
_CAPITALISED = re.compile(r'\b[A-Z][^\W\d_]{2,}\b')
_DIGITS = re.compile(r'\d+')
# Share of the replaced names that are invented: they have sequences of tokens that no text has.
_INVENTED_SHARE = 0.3
_VOWELS = 'aeiou'
_CONSONANTS = 'bcdfghjklmnprstvwz'


class Source(NamedTuple):
    """A passage and the cloze questions of its sentences, one list per sentence."""

    document: Document
    cloze_lists: list[list[cloze.Cloze]]


class Link(NamedTuple):
    """A chain and its two passages.

    Attributes:
      chain: sentence and clause.
      first, second: the passages.
      replaced_name: name in the first passage in whose place the bridge has to be written; '' if it mentions the
        bridge itself.
    """

    chain: Chain
    first: Document
    second: Document
    replaced_name: str


class Statement(NamedTuple):
    """A clause about a name, and the index of its passage."""

    clause: cloze.Cloze
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
            mentions.update(chains.names(text))
            for sentence in sentence_lists[index]:
                for name, clause in chains.statements(title, sentence):
                    self.statements.setdefault(name, []).append(Statement(clause, index))
        self.chains: dict[int, list[Linked]] = {}
        for index, (title, _) in enumerate(passages):
            linked = []
            for sentence in sentence_lists[index]:
                for first in chains.described(sentence):
                    if mentions[first.answer] > chains.MAX_MENTIONS:
                        continue
                    for statement in self.statements.get(first.answer, ()):
                        if passages[statement.passage][0] != title and chains.can_join(
                            first, statement.clause
                        ):
                            chain = Chain(first, statement.clause)
                            linked.append(Linked(chain, statement.passage))
            if linked:
                self.chains[index] = linked


class _Described(NamedTuple):
    """A sentence that describes a name, with the name as its answer, and the index of its passage."""

    case: cloze.Cloze
    passage: int


class _About(NamedTuple):
    """A name that is the subject of passages, and the clauses about it."""

    name: str
    statements: list[Statement]


class Disguise:
    """Replaces capitalised words and numbers by random ones, equal ones in the same way throughout an episode.

    A policy that has seen a passage before could answer from memory. Under a disguise it has to copy what it reads,
    which is what it needs for texts it has never seen.
    """

    def __init__(self, rng: Generator, names: Sequence[str], probability: float = 1.0):
        """Creates the disguise of one episode.

        Args:
          rng: source of all random choices.
          names: names that replace others.
          probability: with which texts are changed at all; drawn once, here.
        """
        self._rng = rng
        self._names = names
        self._is_active = rng.random() < probability
        self._replacements: dict[str, str] = {}
        self._merged_name = ''
        self._bridge = ''

    def merge(self, name: str, bridge: str) -> None:
        """Replaces one name by another one in all texts, also where nothing else is replaced."""
        self._merged_name = name
        self._bridge = bridge

    def __call__(self, text: str) -> str:
        """Returns the text with replaced names and numbers."""
        if self._merged_name:
            text = text.replace(self._merged_name, self._bridge)
        if not self._is_active:
            return text
        text = _CAPITALISED.sub(self._replace_name, text)
        return _DIGITS.sub(self._replace_digits, text)

    def document(self, document: Document) -> Document:
        """Returns a disguised passage."""
        title = self(document['title'])
        text = self(document['text'])
        return {'title': title, 'text': text}

    def documents(self, documents: Iterable[Document]) -> list[Document]:
        """Returns disguised passages."""
        return [self.document(document) for document in documents]

    def cloze(self, case: cloze.Cloze) -> cloze.Cloze:
        """Returns a disguised cloze question."""
        left = self(case.left)
        answer = self(case.answer)
        right = self(case.right)
        return cloze.Cloze(left, answer, right, case.kind)

    def _replace_name(self, match: re.Match[str]) -> str:
        """Returns another name; for a name that was replaced before, the same one again."""
        name = match.group()
        if name not in self._replacements:
            self._replacements[name] = self._new_name()
        return self._replacements[name]

    def _new_name(self) -> str:
        if self._rng.random() < _INVENTED_SHARE:
            return invented_name(self._rng)
        return pick(self._rng, self._names)

    def _replace_digits(self, match: re.Match[str]) -> str:
        """Returns as many random digits; for digits that were replaced before, the same ones again."""
        digits = match.group()
        if digits not in self._replacements:
            self._replacements[digits] = self._new_digits(len(digits))
        return self._replacements[digits]

    def _new_digits(self, count: int) -> str:
        digits = self._rng.integers(0, 10, count)
        # No number begins with 0.
        digits[0] = self._rng.integers(1, 10)
        return ''.join(map(str, digits))


def invented_name(rng: Generator) -> str:
    """Returns a random name of two to four syllables."""
    name = ''
    syllables = rng.integers(2, 5)
    for _ in range(syllables):
        name += pick(rng, _CONSONANTS)
        name += pick(rng, _VOWELS)
    return name.capitalize()


class Texts:
    """Some passages and an exact search over them with the encoder that rollouts use.

    Attributes:
      documents: all passages.
      sources: the passages that have cloze questions.
      titled: those of `sources` that have a title.
      chained: indices of the passages from which a chain leads to another one.
      names: distinct capitalised words of the texts, sorted; names are disguised with them.
      words: distinct words of the texts, sorted.
      search: function from a query to its TOP_K passages, best first.
    """

    def __init__(self, passages: Iterable[tuple[str, str]]):
        """Encodes passages, each (title, text)."""
        self.documents: list[Document] = []
        self.sources: list[Source] = []
        for title, text in passages:
            document = {'title': title, 'text': text}
            self.documents.append(document)
            cloze_lists = _cloze_lists(text)
            if cloze_lists:
                source = Source(document, cloze_lists)
                self.sources.append(source)
        self.titled: list[Source] = []
        for source in self.sources:
            if source.document['title'].strip():
                self.titled.append(source)
        titles = [document['title'] for document in self.documents]
        texts = [document['text'] for document in self.documents]
        passage_pairs = list(zip(titles, texts))
        self._links = Links(passage_pairs)
        self.chained = sorted(self._links.chains)
        self._described = _described_names(texts)
        self._statements = self._statements_about_titles(titles)
        self._encoder = LexicalEncoder()
        self._passage_vectors = self._encoder.encode_passages(titles, texts)
        names: set[str] = set()
        words: set[str] = set()
        for text in texts:
            names.update(_CAPITALISED.findall(text))
            words.update(text.split())
        # Sorted, because the order of a set differs between processes.
        self.names = sorted(names)
        self.words = sorted(words)
        # Cached, because demonstrations search for the same titles again and again.
        cached = functools.lru_cache(maxsize=4096)
        self.search = cached(self._search)

    def _search(self, query: str) -> list[Document]:
        """Returns the TOP_K passages with the highest scores, best first."""
        query_vector = self._encoder.encode_queries([query])[0]
        scores = self._passage_vectors @ query_vector
        # A stable sort resolves ties by row, so the result is the same on every machine.
        rows = np.argsort(-scores, kind='stable')
        best_rows = rows[:TOP_K]
        return [self.documents[row] for row in best_rows]

    def draw(self, rng: Generator) -> tuple[Document, cloze.Cloze]:
        """Returns a random passage and a random cloze question about it."""
        source = pick(rng, self.sources)
        cases = pick(rng, source.cloze_lists)
        case = draw_cloze(rng, cases)
        return source.document, case

    def _statements_about_titles(self, titles: Sequence[str]) -> list[_About]:
        """Returns the names that are subjects of passages, sorted, each with the clauses about it."""
        subjects = []
        for name in sorted(self._links.statements):
            clauses = []
            # The first words of a sentence can look like a name; the words of a title are one.
            for statement in self._links.statements[name]:
                if name in titles[statement.passage]:
                    clauses.append(statement)
            if clauses:
                subjects.append(_About(name, clauses))
        return subjects

    def draw_link(self, rng: Generator, real_share: float) -> Link:
        """Returns a random chain of two passages.

        Args:
          real_share: probability of a chain that the passages have. In the others a name of the first passage has to
            be replaced by the bridge: there are far more of them.
        """
        if self.chained and rng.random() < real_share:
            first_index = pick(rng, self.chained)
            linked = pick(rng, self._links.chains[first_index])
            first = self.documents[first_index]
            second = self.documents[linked.second_passage]
            return Link(linked.chain, first, second, replaced_name='')
        while True:
            described = pick(rng, self._described)
            about = pick(rng, self._statements)
            bridge = about.name
            clause, second_index = pick(rng, about.statements)
            name = described.case.answer
            sentence = described.case._replace(answer=bridge)
            first = self.documents[described.passage]
            # Neither passage may have the other's name: one answer would then fit both blanks.
            is_distinct = bridge not in first['text'] and name not in clause.sentence
            if is_distinct and chains.can_join(sentence, clause):
                second = self.documents[second_index]
                chain = Chain(sentence, clause)
                return Link(chain, first, second, replaced_name=name)


def _described_names(texts: Sequence[str]) -> list[_Described]:
    """Returns the sentences of passages that describe a name."""
    described = []
    for index, text in enumerate(texts):
        for sentence in cloze.sentences(text):
            for case in chains.described(sentence):
                described.append(_Described(case, index))
    return described


def _cloze_lists(text: str) -> list[list[cloze.Cloze]]:
    """Returns the cloze questions of each sentence that has any."""
    cloze_lists = []
    for sentence in cloze.sentences(text):
        cases = cloze.clozes(sentence)
        if cases:
            cloze_lists.append(cases)
    return cloze_lists


def draw_cloze(rng: Generator, cases: Sequence[cloze.Cloze]) -> cloze.Cloze:
    """Returns one of the cloze questions of a sentence; each is drawn with the weight of its kind."""
    weights = np.array([_KIND_WEIGHTS[case.kind] for case in cases])
    probabilities = weights / weights.sum()
    index = rng.choice(len(cases), p=probabilities)
    return cases[index]
