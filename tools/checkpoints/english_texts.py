"""English passages to draw demonstrations from, with an exact search over them and disguises for their names."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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


class Placed(NamedTuple):
    """A chain, a sentence that describes a name, or a clause about a name; and the index of its (second) passage."""

    value: Any
    passage: int


class Links:
    """All statements and chains of some passages.

    Attributes:
      statements: name → the clauses that are about it.
      chains: index of a first passage → its chains to passages of other titles.
    """

    def __init__(self, passages: Sequence[tuple[str, str]]):
        """Finds the links between passages, each (title, text)."""
        self._titles = [title for title, _ in passages]
        sentence_lists = [cloze.sentences(text) for _, text in passages]
        self.statements: dict[str, list[Placed]] = {}
        self._mentions: collections.Counter[str] = collections.Counter()
        for index, (title, text) in enumerate(passages):
            self._mentions.update(chains.names(text))
            for sentence in sentence_lists[index]:
                for name, clause in chains.statements(title, sentence):
                    self.statements.setdefault(name, []).append(Placed(clause, index))
        self.chains: dict[int, list[Placed]] = {}
        for index, sentences in enumerate(sentence_lists):
            linked = [chain for sentence in sentences for chain in self._linked(index, sentence)]
            if linked:
                self.chains[index] = linked

    def _linked(self, index: int, sentence: str) -> Iterator[Placed]:
        """Yields the chains that begin with a sentence of a passage."""
        for first in chains.described(sentence):
            if self._mentions[first.answer] <= chains.MAX_MENTIONS:
                for clause, passage in self.statements.get(first.answer, ()):
                    is_other = self._titles[passage] != self._titles[index]
                    if is_other and chains.can_join(first, clause):
                        yield Placed(Chain(first, clause), passage)


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
        return _DIGITS.sub(self._replace, _CAPITALISED.sub(self._replace, text))

    def document(self, document: Document) -> Document:
        """Returns a disguised passage."""
        return {'title': self(document['title']), 'text': self(document['text'])}

    def documents(self, documents: Iterable[Document]) -> list[Document]:
        """Returns disguised passages."""
        return [self.document(document) for document in documents]

    def cloze(self, case: cloze.Cloze) -> cloze.Cloze:
        """Returns a disguised cloze question."""
        return cloze.Cloze(self(case.left), self(case.answer), self(case.right), case.kind)

    def _replace(self, match: re.Match[str]) -> str:
        """Returns another name or number; for one that was replaced before, the same one again."""
        word = match.group()
        if word not in self._replacements:
            is_number = word[0].isdigit()
            self._replacements[word] = (
                self._new_digits(len(word)) if is_number else self._new_name()
            )
        return self._replacements[word]

    def _new_name(self) -> str:
        if self._rng.random() < _INVENTED_SHARE:
            return invented_name(self._rng)
        return pick(self._rng, self._names)

    def _new_digits(self, count: int) -> str:
        digits = self._rng.integers(0, 10, count)
        # No number begins with 0.
        digits[0] = self._rng.integers(1, 10)
        return ''.join(map(str, digits))


def invented_name(rng: Generator) -> str:
    """Returns a random name of two to four syllables."""
    syllables = [pick(rng, _CONSONANTS) + pick(rng, _VOWELS) for _ in range(rng.integers(2, 5))]
    return ''.join(syllables).capitalize()


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
        self.documents = [{'title': title, 'text': text} for title, text in passages]
        self.sources: list[Source] = []
        for document in self.documents:
            lists = cloze_lists(document['text'])
            if lists:
                self.sources.append(Source(document, lists))
        self.titled = [source for source in self.sources if source.document['title'].strip()]
        titles = [document['title'] for document in self.documents]
        texts = [document['text'] for document in self.documents]
        self._links = Links(list(zip(titles, texts)))
        self.chained = sorted(self._links.chains)
        self._described = _described_names(texts)
        self._statements = self._statements_about_titles(titles)
        self._encoder = LexicalEncoder()
        self._passage_vectors = self._encoder.encode_passages(titles, texts)
        # Sorted, because the order of a set differs between processes.
        self.names = sorted({name for text in texts for name in _CAPITALISED.findall(text)})
        self.words = sorted({word for text in texts for word in text.split()})
        # Cached, because demonstrations search for the same titles again and again.
        self.search = functools.lru_cache(maxsize=4096)(self._search)

    def _search(self, query: str) -> list[Document]:
        """Returns the TOP_K passages with the highest scores, best first."""
        query_vector = self._encoder.encode_queries([query])[0]
        scores = self._passage_vectors @ query_vector
        # A stable sort resolves ties by row, so the result is the same on every machine.
        rows = np.argsort(-scores, kind='stable')
        return [self.documents[row] for row in rows[:TOP_K]]

    def draw(self, rng: Generator) -> tuple[Document, cloze.Cloze]:
        """Returns a random passage and a random cloze question about it."""
        source = pick(rng, self.sources)
        return source.document, draw_cloze(rng, pick(rng, source.cloze_lists))

    def _statements_about_titles(self, titles: Sequence[str]) -> list[tuple[str, list[Placed]]]:
        """Returns the names that are subjects of passages, sorted, each with the clauses about it."""
        subjects = []
        for name, statements in sorted(self._links.statements.items()):
            # The first words of a sentence can look like a name; the words of a title are one.
            clauses = [placed for placed in statements if name in titles[placed.passage]]
            if clauses:
                subjects.append((name, clauses))
        return subjects

    def draw_link(self, rng: Generator, real_share: float) -> Link:
        """Returns a random chain of two passages.

        Args:
          real_share: probability of a chain that the passages have. In the others a name of the first passage has to
            be replaced by the bridge: there are far more of them.
        """
        if self.chained and rng.random() < real_share:
            first = pick(rng, self.chained)
            chain, second = pick(rng, self._links.chains[first])
            return Link(chain, self.documents[first], self.documents[second], replaced_name='')
        while True:
            case, first = pick(rng, self._described)
            bridge, clauses = pick(rng, self._statements)
            clause, second = pick(rng, clauses)
            sentence = case._replace(answer=bridge)
            documents = self.documents[first], self.documents[second]
            # Neither passage may have the other's name: one answer would then fit both blanks.
            is_distinct = bridge not in documents[0]['text'] and case.answer not in clause.sentence
            if is_distinct and chains.can_join(sentence, clause):
                return Link(Chain(sentence, clause), *documents, replaced_name=case.answer)


def _described_names(texts: Sequence[str]) -> list[Placed]:
    """Returns the sentences of passages that describe a name."""
    described = []
    for index, text in enumerate(texts):
        for sentence in cloze.sentences(text):
            described += [Placed(case, index) for case in chains.described(sentence)]
    return described


def cloze_lists(text: str) -> list[list[cloze.Cloze]]:
    """Returns the cloze questions of each sentence that has any."""
    case_lists = [cloze.clozes(sentence) for sentence in cloze.sentences(text)]
    return [cases for cases in case_lists if cases]


def draw_cloze(rng: Generator, cases: Sequence[cloze.Cloze]) -> cloze.Cloze:
    """Returns one of the cloze questions of a sentence; each is drawn with the weight of its kind."""
    weights = np.array([_KIND_WEIGHTS[case.kind] for case in cases])
    return cases[rng.choice(len(cases), p=weights / weights.sum())]
