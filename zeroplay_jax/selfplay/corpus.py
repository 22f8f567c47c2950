"""What the players can search and start from: passages, an index over them, and documents to ask about."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from retrieval.index import Index, ScannIndex
from retrieval.lexical import LexicalEncoder
from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.types import Json


@dataclasses.dataclass(frozen=True)
class Document:
    """A passage that a proposer may start from; `depth` hops at most can be chained from it."""

    title: str
    text: str
    depth: int


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Everything outside the policy that a run plays with.

    Attributes:
      index: what players search while they learn; no passage of the evaluation is in it.
      held_out: what is searched in evaluations: the same passages and those of the held-out worlds.
      documents: starting points of proposers.
      questions: held-out evaluation questions {'question', 'answers', 'hops'}.
      train_questions: the same of the training worlds, and `answers` of theirs: for games that are given some.
      top_k: passages per query.
      held_out_about: names corpus, index and encoder of `held_out`: results are comparable where it is the same.
    """

    index: Index
    held_out: Index
    documents: tuple[Document, ...]
    questions: tuple[Json, ...]
    top_k: int
    train_questions: tuple[Json, ...] = ()
    answers: tuple[str, ...] = ()
    held_out_about: str = ''

    def search(self, queries: Sequence[str]) -> list[list[Json]]:
        """Per query its `top_k` passages, best first, for training."""
        return _search(self.index, queries, self.top_k)

    def search_held_out(self, queries: Sequence[str]) -> list[list[Json]]:
        """The same for evaluation."""
        return _search(self.held_out, queries, self.top_k)


def _search(index: Index, queries: Sequence[str], top_k: int) -> list[list[Json]]:
    ids, scores = index.search(list(queries), top_k)
    return [[dict(p, score=float(s)) for p, s in zip(index.passages(row), score)] for row, score in zip(ids, scores)]


def build(config) -> Corpus:
    """The corpus that `config.retrieval` names: so far the miniature worlds."""
    first, count = config.world.train
    train = [World(first + i, 'train', config.world.near_misses) for i in range(count)]
    first, count = config.world.evaluation
    held_out = [World(first + i, 'evaluation', config.world.near_misses) for i in range(count)]
    index, exam = (_index(worlds, config.retrieval.overfetch) for worlds in (train, train + held_out))
    documents = linked_documents([(p.title, p.text) for world in train for p in world.passages])
    questions = evaluation_questions(held_out, config.eval.questions, tuple(config.eval.hops))
    given: dict = {}
    about = f'worlds {config.world.train} and {config.world.evaluation}, near misses {config.world.near_misses}'
    if config.recipe == 'dspo' and not config.inputs.questions:
        hops = [h for h, share in enumerate(config.schedule.hop_ratio, 1) if share]
        given['train_questions'] = tuple(evaluation_questions(train, config.inputs.world_questions, hops))
    if config.recipe == 'ssp' and not config.inputs.answers:
        given['answers'] = tuple(dict.fromkeys(v for w in train for facts in w.facts.values() for v in facts.values()))
    return Corpus(index, exam, documents, tuple(questions), config.tools.top_k, held_out_about=about, **given)


def _index(worlds: Sequence[World], overfetch: int) -> Index:
    passages = [p for world in worlds for p in world.passages]
    titles, texts = [p.title for p in passages], [p.text for p in passages]
    return ScannIndex.build(LexicalEncoder(), titles, texts, overfetch=overfetch)


def linked_documents(passages: Sequence[tuple[str, str]], deepest: int = 4) -> tuple[Document, ...]:
    """Documents with the length of the longest chain of distinct ones in which each names the next one's title.

    A hop follows a name to its own document, so a document that names none cannot open a question of two hops.
    This reads the passages only: it is no knowledge about answers.
    """
    titles = {title for title, _ in passages}
    links = {
        title: [w for w in dict.fromkeys(re.findall(r'\w+', text)) if w in titles and w != title]
        for title, text in passages
    }

    def depth(title, seen):
        if len(seen) == deepest:
            return deepest
        return max((depth(to, seen | {to}) for to in links[title] if to not in seen), default=len(seen))

    return tuple(Document(title, text, depth(title, frozenset([title]))) for title, text in passages)
