"""Questions of two hops from plain text: a sentence that mentions a name, and a sentence about that name elsewhere.

The name, called the bridge, is replaced in both, and the second sentence has a blank:

    The game was developed by Rockstar San Diego and published by #1. #1 released its sequel on ____, for PlayStation 3.

A reader searches for the first sentence, reads the name that `#1` replaces, searches for the second sentence with this
name, and reads what was left out. The second sentence begins with the bridge and ends a few words after the blank.
The mark is that of MuSiQue (Trivedi et al. 2022), whose questions refer to earlier answers by `#1`, `#2` and so on.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from zeroplay_jax.extras.inputs import cloze
from zeroplay_jax.extras.inputs.builders import BottomK, hash_key, unfit
from zeroplay_jax.extras.inputs.cloze import ANSWER_WORDS, BLANK, Cloze, Passage, Passages, parse
from zeroplay_jax.objectives.answers import normalize_answer
from zeroplay_jax.retrieval.corpus import Record, split
from zeroplay_jax.retrieval.lexical import LexicalEncoder

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


# In memory that does not grow with the corpus.
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
class Statement:
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
      first: its first passage.
      first_document: name of the document of that passage.
      statement: its second passage.
      needs_bridge: whether a search without the bridge does not return the second passage (`add_searches`).
      is_found_by_bridge: whether a search for the bridge alone returns it.
    """

    chain: Chain
    first: Passage
    first_document: str
    statement: Statement
    needs_bridge: bool = False
    is_found_by_bridge: bool = False

    @property
    def second(self) -> Passage:
        """Its second passage."""
        return self.statement.passage

    @property
    def documents(self) -> set[str]:
        """Names of both documents."""
        return {self.first_document, self.statement.document}

    @property
    def clause_without_bridge(self) -> str:
        """The clause after the bridge."""
        return self.chain.second.question.removeprefix(self.chain.first.answer)

    @property
    def sentences(self) -> tuple[str, str]:
        """Both sentences, in lower case."""
        return self.chain.first.sentence.lower(), self.statement.sentence.lower()

    def question_line(self, source: str) -> dict[str, Any]:
        """Returns the line of the file of questions; its title and document are those of the answer."""
        line = self.second.question_line(source, self.chain.second, self.chain.question, 2)
        return line | {
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
            bridges.update(case.answer for case in described(sentence))
    statements = _statements(passages(), seed, bridges, unit_of)
    corpus_chains: list[CorpusChain] = []
    for passage, document in starts:
        start_chains = []
        for sentence in passage.sentences:
            for case in described(sentence):
                for statement in statements.get(case.answer, ()):
                    has_two_documents = (
                        statement.document != document and statement.passage.title != passage.title
                    )
                    if has_two_documents and can_join(case, statement.clause):
                        chain = Chain(case, statement.clause)
                        start_chains.append(CorpusChain(chain, passage, document, statement))
        # Short clauses first: their words find fewer passages without the name. Among clauses of a length by a hash, so
        # that the first chain of a passage is not always about its first name.
        start_chains.sort(
            key=lambda each: (
                len(each.chain.second.question.split()),
                hash_key(seed, each.chain.question),
            )
        )
        corpus_chains += start_chains
    return corpus_chains


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
        if passage and any(described(sentence) for sentence in passage.sentences):
            sample.put(key, (passage, unit_of(record)))
    return sample.ordered()


def _statements(
    passages: Iterable[tuple[int, Record]], seed: int, bridges: set[str], unit_of: UnitOf
) -> dict[str, list[Statement]]:
    """Returns a sample of the clauses about each of the names that not too many passages mention."""
    mentions: collections.Counter[str] = collections.Counter()
    samples: dict[str, BottomK[Statement]] = {}
    for line, record in passages:
        title, text = split(record.contents)
        mentioned = names(text) & bridges
        mentions.update(mentioned)
        is_rare = any(mentions[name] <= MAX_MENTIONS for name in mentioned)
        # Most passages mention none of the names, and need not be split into sentences.
        passage = parse(line, record) if is_rare else None
        if passage is None:
            continue
        document = unit_of(record)
        for sentence in passage.sentences:
            for name, clause in statements(title, sentence):
                if name in bridges and is_fair(clause, title):
                    sample = samples.setdefault(name, BottomK(_CLAUSES_PER_NAME))
                    key = hash_key(seed, f'{record.id}\n{clause.question}')
                    if sample.admits(key):
                        sample.put(key, Statement(clause, sentence, passage, document))
    result = {}
    for name, sample in samples.items():
        if mentions[name] <= MAX_MENTIONS:
            result[name] = sample.ordered()
    return result


def is_fair(clause: Cloze, title: str) -> bool:
    """Returns whether the answer is usable, and neither in the title, which a search sees, nor in the question."""
    normal_answer = f' {normalize_answer(clause.answer)} '
    is_given_away = (
        normal_answer in f' {normalize_answer(title)} '
        or normal_answer in f' {normalize_answer(clause.question)} '
    )
    return unfit(clause.answer, ANSWER_WORDS) is None and not is_given_away


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
    used_sentences = set(repeats)
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
