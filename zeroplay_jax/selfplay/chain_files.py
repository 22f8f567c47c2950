"""Finds the questions of two hops in any corpus (`mini.chains`), in memory that does not grow with the corpus."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from zeroplay_jax.mini import chains
from zeroplay_jax.mini.chains import BRIDGE, Chain
from zeroplay_jax.mini.cloze import ANSWER_WORDS, BLANK, Cloze
from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.retrieval.corpus import Record, split
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.selfplay.builders import BottomK, hash_key, unfit
from zeroplay_jax.selfplay.cloze_passages import Passage, Passages, parse

# Clauses that are stored per name; a corpus may have many more about a well-known one.
_CLAUSES_PER_NAME = 20
# Chains that `add_searches` searches for, and passages that it searches in: enough for some hundred questions.
_SEARCHED_CHAINS = 2_000
_SEARCHED_PASSAGES = 20_000
# Passages per search, and passages that are encoded at once.
_TOP_K = 3
_BLOCK = 1_000

UnitOf = Callable[[Record], str]


@dataclasses.dataclass
class _Statement:
    """A clause about a name, with its sentence, its passage and the document of the passage."""

    clause: Cloze
    sentence: str
    passage: Passage
    document: str


@dataclasses.dataclass
class CorpusChain:
    """A question of two hops and the passages that it needs.

    Attributes:
      chain: the question.
      first, second: its passages.
      first_document, second_document: names of their documents.
      second_sentence: the sentence of the second passage that the clause is cut out of.
      needs_bridge: whether a search without the bridge does not return the second passage (`add_searches`).
      is_found_by_bridge: whether a search for the bridge alone returns it.
    """

    chain: Chain
    first: Passage
    second: Passage
    first_document: str
    second_document: str
    second_sentence: str
    needs_bridge: bool = False
    is_found_by_bridge: bool = False

    @property
    def documents(self) -> set[str]:
        """Names of both documents."""
        return {self.first_document, self.second_document}

    @property
    def clause_without_bridge(self) -> str:
        """The clause after the bridge."""
        return self.chain.second.question.removeprefix(self.chain.first.answer)

    @property
    def sentences(self) -> tuple[str, str]:
        """Both sentences, in lower case."""
        return self.chain.first.sentence.lower(), self.second_sentence.lower()

    def question_line(self, source: str) -> dict[str, Any]:
        """Returns the line of the file of questions; its title and document are those of the answer."""
        return {
            'question': self.chain.question,
            'answers': [self.chain.second.answer],
            'hops': 2,
            'kind': self.chain.second.kind,
            'title': self.second.title,
            'source': source,
            'document_id': self.second.id,
            'line': self.second.line,
            'bridge': self.chain.first.answer,
            'first_title': self.first.title,
            'first_document_id': self.first.id,
        }


def find(passages: Passages, seed: int, max_passages: int, unit_of: UnitOf) -> list[CorpusChain]:
    """Returns the chains that start from a uniform sample of passages, in the order of hashes of these passages.

    Args:
      passages: yields the whole corpus; called twice.
      seed: seed of the sample.
      max_passages: largest number of first passages.
      unit_of: function from a passage to the name of its document.
    """
    starts = _starts(passages(), seed, max_passages, unit_of)
    bridges: set[str] = set()
    for passage, _ in starts:
        for sentence in passage.sentences:
            bridges.update(case.answer for case in chains.described(sentence))
    statements = _statements(passages(), seed, bridges, unit_of)
    corpus_chains: list[CorpusChain] = []
    for passage, document in starts:
        start_chains = []
        for sentence in passage.sentences:
            for case in chains.described(sentence):
                for statement in statements.get(case.answer, ()):
                    if _is_question(case, statement, passage, document):
                        start_chains.append(_corpus_chain(case, statement, passage, document))
        # Short clauses first: their words find fewer passages without the name. Among clauses of a length by a hash, so
        # that the first chain of a passage is not always about its first name.
        start_chains.sort(
            key=lambda each: (_clause_words(each), hash_key(seed, each.chain.question))
        )
        corpus_chains += start_chains
    return corpus_chains


def _clause_words(corpus_chain: CorpusChain) -> int:
    """Returns the number of words of a clause."""
    return len(corpus_chain.chain.second.question.split())


def _starts(
    passages: Iterable[tuple[int, Record]], seed: int, max_passages: int, unit_of: UnitOf
) -> list[tuple[Passage, str]]:
    """Returns a sample of passages that describe a name, with the names of their documents."""
    sample: BottomK[tuple[Passage, str]] = BottomK(max_passages)
    for line, record in passages:
        key = hash_key(seed, record.id)
        # The cheap test comes first, because splitting into sentences takes most of the time.
        if not sample.admits(key):
            continue
        passage = parse(line, record)
        if passage and any(chains.described(sentence) for sentence in passage.sentences):
            sample.put(key, (passage, unit_of(record)))
    return sample.ordered()


def _statements(
    passages: Iterable[tuple[int, Record]], seed: int, bridges: set[str], unit_of: UnitOf
) -> dict[str, list[_Statement]]:
    """Returns a sample of the clauses about each of the names that not too many passages mention."""
    mentions: collections.Counter[str] = collections.Counter()
    samples: dict[str, BottomK[_Statement]] = {}
    for line, record in passages:
        title, text = split(record.contents)
        mentioned = chains.names(text) & bridges
        mentions.update(mentioned)
        is_rare = any(mentions[name] <= chains.MAX_MENTIONS for name in mentioned)
        # Most passages mention none of the names, and need not be split into sentences.
        passage = parse(line, record) if is_rare else None
        if passage is None:
            continue
        document = unit_of(record)
        for sentence in passage.sentences:
            for name, clause in chains.statements(title, sentence):
                if name in bridges and _is_fair(clause, title):
                    sample = samples.setdefault(name, BottomK(_CLAUSES_PER_NAME))
                    key = hash_key(seed, f'{record.id}\n{clause.question}')
                    if sample.admits(key):
                        sample.put(key, _Statement(clause, sentence, passage, document))
    result = {}
    for name, sample in samples.items():
        if mentions[name] <= chains.MAX_MENTIONS:
            result[name] = sample.ordered()
    return result


def _is_fair(clause: Cloze, title: str) -> bool:
    """Returns whether the answer of a clause is usable and not part of the title, which a search sees."""
    normal_answer = f' {normalize_answer(clause.answer)} '
    is_given_away = (
        normal_answer in f' {normalize_answer(title)} '
        or normal_answer in f' {normalize_answer(clause.question)} '
    )
    return unfit(clause.answer, ANSWER_WORDS) is None and not is_given_away


def _is_question(case: Cloze, statement: _Statement, passage: Passage, document: str) -> bool:
    """Returns whether a sentence of a passage and a statement make a question over two documents."""
    has_two_documents = statement.document != document and statement.passage.title != passage.title
    return has_two_documents and chains.can_join(case, statement.clause)


def _corpus_chain(
    case: Cloze, statement: _Statement, passage: Passage, document: str
) -> CorpusChain:
    return CorpusChain(
        Chain(case, statement.clause),
        passage,
        statement.passage,
        document,
        statement.document,
        statement.sentence,
    )


def add_searches(passages: Passages, corpus_chains: Sequence[CorpusChain], seed: int) -> None:
    """Sets `needs_bridge` and `is_found_by_bridge` of the first chains; the others keep False.

    The searches are those of the lexical encoder; another index may rank in another way. A large corpus is sampled,
    which counts more passages as found than a search in all of it would find.

    Args:
      passages: yields the whole corpus; called once.
      corpus_chains: the chains; changed in place.
      seed: seed of the sample.
    """
    searched = corpus_chains[:_SEARCHED_CHAINS]
    if not searched:
        return
    clauses = [_searched_text(each.clause_without_bridge) for each in searched]
    questions = [_searched_text(each.chain.question) for each in searched]
    bridges = [each.chain.first.answer for each in searched]
    targets = [each.second for each in searched]
    searches = (clauses, questions, bridges)
    is_found = _is_found(passages, searches, targets, seed)
    for each, by_clause, by_question, by_bridge in zip(searched, *is_found, strict=True):
        each.needs_bridge = not (by_clause or by_question)
        each.is_found_by_bridge = bool(by_bridge)


def _searched_text(question: str) -> str:
    """Returns the words of a question or clause, without the marks of bridge and blank."""
    return ' '.join(question.replace(BRIDGE, ' ').replace(BLANK, ' ').split())


def _is_found(
    passages: Passages, searches: Sequence[Sequence[str]], targets: Sequence[Passage], seed: int
) -> Bool[np.ndarray, 'searches targets']:
    """Returns for each query whether its target is among the first passages of a search.

    Args:
      passages: yields the corpus, of which a sample is searched.
      searches: lists of queries, each with one query per target.
      targets: the passages that are searched for.
      seed: seed of the sample.
    """
    sample: BottomK[tuple[str, str]] = BottomK(_SEARCHED_PASSAGES)
    for _, record in passages():
        key = hash_key(seed, record.id)
        if sample.admits(key):
            sample.put(key, split(record.contents))
    encoder = LexicalEncoder()
    query_vectors = np.stack([encoder.encode_queries(queries) for queries in searches])
    target_vectors = encoder.encode_passages(
        [target.title for target in targets], [target.text for target in targets]
    )
    target_scores = np.sum(query_vectors * target_vectors, axis=-1)
    # Rounding differs between the two products, and a target is no better than itself.
    least_scores = target_scores[..., None] + 1e-6
    num_better = np.zeros(target_scores.shape, np.int64)
    searched = sample.ordered()
    for start in range(0, len(searched), _BLOCK):
        titles, texts = zip(*searched[start : start + _BLOCK], strict=True)
        scores = query_vectors @ encoder.encode_passages(titles, texts).T
        num_better += np.sum(scores > least_scores, axis=-1)
    return num_better < _TOP_K


def choose(
    corpus_chains: Iterable[CorpusChain], count: int, max_documents: int, repeats: Collection[str]
) -> list[CorpusChain]:
    """Returns at most `count` chains of at most `max_documents` documents, no two with a sentence in common.

    Args:
      corpus_chains: the chains, best first.
      count: largest number of chains.
      max_documents: largest number of documents, both of each chain counted.
      repeats: sentences, in lower case, that are not asked about.
    """
    chosen: list[CorpusChain] = []
    used_sentences: set[str] = set(repeats)
    documents: set[str] = set()
    for each in corpus_chains:
        if len(chosen) == count:
            break
        is_used = not used_sentences.isdisjoint(each.sentences)
        if is_used or len(documents | each.documents) > max_documents:
            continue
        chosen.append(each)
        used_sentences.update(each.sentences)
        documents |= each.documents
    return chosen
