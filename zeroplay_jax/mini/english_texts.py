"""English passages to draw demonstrations from, with an exact search over them and disguises for their names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from zeroplay_jax.mini import chains, cloze
from zeroplay_jax.mini.chains import Chain
from zeroplay_jax.mini.draws import pick
from zeroplay_jax.mini.library import TOP_K, Document
from zeroplay_jax.retrieval.lexical import LexicalEncoder

# Weights with which `draw_cloze` draws the kind of answer. Most questions of people ask for names and numbers; words
# have a weight, so that a sentence without either can be asked about.
_KIND_WEIGHTS = {'name': 0.6, 'number': 0.35, 'word': 0.05}
_CAPITALISED = re.compile(r'\b[A-Z][^\W\d_]{2,}\b')
_DIGITS = re.compile(r'\d+')
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
        return {'title': self(document['title']), 'text': self(document['text'])}

    def cloze(self, case: cloze.Cloze) -> cloze.Cloze:
        """Returns a disguised cloze question."""
        return cloze.Cloze(self(case.left), self(case.answer), self(case.right), case.kind)

    def _replace_name(self, match: re.Match[str]) -> str:
        """Returns another name; for a name that was replaced before, the same one again."""
        name = match.group()
        if name not in self._replacements:
            self._replacements[name] = self._new_name()
        return self._replacements[name]

    def _new_name(self) -> str:
        # Some names are invented, with sequences of tokens that no text has.
        if self._rng.random() < 0.3:
            return invented_name(self._rng)
        return pick(self._rng, self._names)

    def _replace_digits(self, match: re.Match[str]) -> str:
        """Returns as many random digits; for digits that were replaced before, the same ones again."""
        digits = match.group()
        if digits not in self._replacements:
            new_digits = self._rng.integers(0, 10, len(digits))
            # No number begins with 0.
            new_digits[0] = self._rng.integers(1, 10)
            self._replacements[digits] = ''.join(map(str, new_digits))
        return self._replacements[digits]


def invented_name(rng: Generator) -> str:
    """Returns a random name of two to four syllables."""
    syllables = []
    for _ in range(int(rng.integers(2, 5))):
        syllables.append(pick(rng, _CONSONANTS) + pick(rng, _VOWELS))
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
        self.documents: list[Document] = []
        self.sources: list[Source] = []
        for title, text in passages:
            document = {'title': title, 'text': text}
            self.documents.append(document)
            cloze_lists = [cases for cases in map(cloze.clozes, cloze.sentences(text)) if cases]
            if cloze_lists:
                self.sources.append(Source(document, cloze_lists))
        self.titled = [source for source in self.sources if source.document['title'].strip()]
        texts = [document['text'] for document in self.documents]
        titles = [document['title'] for document in self.documents]
        self._find_chains(titles, texts)
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
        self.search = functools.lru_cache(maxsize=4096)(self._search)

    def _search(self, query: str) -> list[Document]:
        """Returns the TOP_K passages with the highest scores, best first."""
        scores = self._passage_vectors @ self._encoder.encode_queries([query])[0]
        # A stable sort resolves ties by row, so the result is the same on every machine.
        best_rows = np.argsort(-scores, kind='stable')[:TOP_K]
        return [self.documents[row] for row in best_rows]

    def draw(self, rng: Generator) -> tuple[Document, cloze.Cloze]:
        """Returns a random passage and a random cloze question about it."""
        source = pick(rng, self.sources)
        return source.document, draw_cloze(rng, pick(rng, source.cloze_lists))

    def _find_chains(self, titles: Sequence[str], texts: Sequence[str]) -> None:
        """Finds what chains are drawn from."""
        self._links = chains.Links(list(zip(titles, texts, strict=True)))
        self.chained = sorted(self._links.chains)
        # For chains that join any two passages: sentences that describe a name, and clauses about the subject of a
        # passage. The first words of a sentence can look like a name; the words of a title are one.
        self._described: list[tuple[cloze.Cloze, int]] = []
        for index, text in enumerate(texts):
            for sentence in cloze.sentences(text):
                self._described += [(case, index) for case in chains.described(sentence)]
        self._statements: list[tuple[str, list[chains.Statement]]] = []
        for name, statements in sorted(self._links.statements.items()):
            about_title = [each for each in statements if name in titles[each.passage]]
            if about_title:
                self._statements.append((name, about_title))

    def draw_link(self, rng: Generator, real_share: float) -> Link:
        """Returns a random chain of two passages.

        Args:
          real_share: probability of a chain that the passages have. In the others a name of the first passage has to
            be replaced by the bridge: there are far more of them.
        """
        if self.chained and rng.random() < real_share:
            index = pick(rng, self.chained)
            chain, second_index = pick(rng, self._links.chains[index])
            return Link(chain, self.documents[index], self.documents[second_index], '')
        while True:
            case, index = pick(rng, self._described)
            bridge, statements = pick(rng, self._statements)
            clause, second_index = pick(rng, statements)
            first = case._replace(answer=bridge)
            is_new = bridge not in self.documents[index]['text']
            if is_new and case.answer not in clause.sentence and chains.can_join(first, clause):
                chain = Chain(first, clause)
                return Link(chain, self.documents[index], self.documents[second_index], case.answer)


def draw_cloze(rng: Generator, cases: Sequence[cloze.Cloze]) -> cloze.Cloze:
    """Returns one of the cloze questions of a sentence; each is drawn with the weight of its kind."""
    weights = np.array([_KIND_WEIGHTS[case.kind] for case in cases])
    index = int(rng.choice(len(cases), p=weights / weights.sum()))
    return cases[index]
