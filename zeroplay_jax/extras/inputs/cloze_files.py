"""Held-out questions and training documents of any corpus, split by document: no passage is in both.

The questions are clozes (`cloze.py`), so they need neither labels nor a model. The split is a function
of the seed and the names of the documents alone: those with the lowest hashes are held out. A document is a file of a
folder of texts, or all passages of the same title in a file of passages.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from zeroplay_jax.extras.inputs import chains
from zeroplay_jax.extras.inputs.builders import BottomK, hash_key
from zeroplay_jax.extras.inputs.chains import CorpusChain
from zeroplay_jax.extras.inputs.cloze import (
    SENTENCE_WORDS,
    Cloze,
    LeftOut,
    Passage,
    Passages,
    clozes,
    parse,
    sentences,
)
from zeroplay_jax.retrieval.corpus import Record, split
from zeroplay_jax.rollout import prompts
from zeroplay_jax.settings.kinds import ENGLISH_CHECKPOINT
from zeroplay_jax.types import Json, UserError

# Questions are about so many documents or more, where whole documents are held out. A corpus with fewer than five times
# as many is split by passage: some passages of every document are held out.
MIN_HELD_OUT = 20
MIN_DOCUMENTS = 5 * MIN_HELD_OUT
# Share of the questions that have two hops, where the corpus has as many.
TWO_HOP_SHARE = 1 / 4
# Share of the proposals in training. It is smaller, because fewer passages lead on to another one.
TWO_HOP_TRAINING_SHARE = 1 / 8
# With fewer questions of two hops, all questions have one hop: the score of a run is the mean over hop counts, so a
# handful of questions would decide half of it. With 20, one question is 0.025 of the score.
MIN_TWO_HOP_QUESTIONS = 20
# With fewer passages to start questions of two hops from, all questions have one hop.
MIN_TWO_HOP_STARTS = 16
# With fewer questions, the 95 % interval of a mean score may be wider than ±0.18 (1.96 · 0.5 / √30).
MIN_QUESTIONS = 30
MIN_TRAINING_PASSAGES = 8
# What to do about a corpus with too few questions, or too few passages to train on.
_FIX = 'give more or longer English texts'


@dataclasses.dataclass
class ClozeFiles:
    """Held-out questions, training documents, and how they were split.

    Attributes:
      questions: lines {'question', 'answers', 'hops', 'kind', 'title', 'source', 'document', 'document_id', 'line'}.
      documents: lines as `inputs.documents` takes them.
      held_out_passages: lines {'document_id', 'title'} of all held-out passages, as `retrieval.held_out` takes them.
      held_out: number of units that are held out.
      total: number of units with a usable sentence; at most 100,000 are counted.
      unit: what was split: 'documents', or 'passages' of a corpus with few documents.
      one_hop_reason: why all questions have one hop; '' if some have two.
      left_out: number of passages that are neither held out nor trained on.
      sentences_left_out: sentences of the corpus of another length or form, and repeated ones, by reason; not those
        without a usable cloze, of passages that are not English, or whose question another sentence gives too.
    """

    questions: list[dict[str, Any]]
    documents: list[dict[str, Any]]
    held_out_passages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    held_out: int = 0
    total: int = 0
    unit: str = 'documents'
    one_hop_reason: str = ''
    left_out: int = 0
    sentences_left_out: LeftOut = dataclasses.field(default_factory=LeftOut)

    def __str__(self) -> str:
        two_hop_questions = sum(question['hops'] == 2 for question in self.questions)
        two_hop_documents = sum(document['hops'] == 2 for document in self.documents)
        of_two_hops = f' ({two_hop_questions} of two hops)' if two_hop_questions else ''
        ending = ''
        if two_hop_documents:
            ending = (
                f', and {two_hop_documents} with a link to another document, to train on two hops'
            )
        elif self.one_hop_reason:
            ending = f'; all of one hop: {self.one_hop_reason}'
        if self.left_out:
            ending += f'; left out: {self.left_out} passages without one, or beyond the number to train on'
        about = len({question['document'] for question in self.questions})
        of_documents = f' about {about} documents,' if about else ''
        asked = f'{len(self.questions)} questions{of_two_hops}{of_documents}'
        return (
            f'{asked} of {self.held_out} held-out {self.unit} (of {self.total}), '
            f'{len(self.documents) - two_hop_documents} passages of the others, with a sentence to ask about, to train '
            f'on{ending}'
        )


def build(passages: Passages, source: str, count: int, seed: int, max_documents: int) -> ClozeFiles:
    """Splits a corpus and returns its questions and training documents.

    Args:
      passages: yields the whole corpus at every call; called at most nine times, or five times if `count` is 0.
      source: name of the corpus in the lines.
      count: questions to make; a small corpus gives fewer. With 0 nothing is held out.
      seed: seed of the split, the questions and the sample of documents.
      max_documents: largest number of training documents; a larger corpus is sampled.

    Raises:
      UserError: fewer than `MIN_QUESTIONS` questions, or than `MIN_TRAINING_PASSAGES` documents.
    """
    files = ClozeFiles([], [])
    unit_of = DocumentNames().name_of
    candidates: dict[str, list[Passage]] = {}
    if count:
        # Twice as many documents as questions, because some have usable sentences but give no question.
        candidates, files.total = find_candidates(passages(), seed, 2 * count, unit_of)
        if files.total < MIN_DOCUMENTS:
            files.unit = 'passages'
            candidates, files.total = _spread(passages(), seed, 2 * count, unit_of)
            unit_of = passage_of
        max_held_out = int(MAX_SHARE * files.total)
        candidates = dict(itertools.islice(candidates.items(), max_held_out))
    found_chains = chains.find(passages, seed, max_documents, unit_of)
    chains.add_searches(passages, found_chains, seed)
    repeats = set()
    if count:
        repeats = _repeated_sentences(
            passages(), candidates, found_chains, files.sentences_left_out
        )
    held_out = _hold_out(files, candidates, found_chains, repeats, source, count, seed)
    two_hop_starts = _two_hop_starts(found_chains, held_out, source)
    files.one_hop_reason = _one_hop_reason(files.questions, len(two_hop_starts), count)
    if files.one_hop_reason and found_chains:
        two_hop_starts = []
        held_out = _hold_out(files, candidates, [], repeats, source, count, seed)
    files.held_out = len(held_out)
    if len(files.questions) < min(count, MIN_QUESTIONS):
        shortest, longest = SENTENCE_WORDS
        raise UserError(
            f'{source}: {len(files.questions)} questions can be made of {files.held_out} of its {files.total} '
            f'{files.unit} with usable sentences (of {shortest} to {longest} words), at least '
            f'{min(count, MIN_QUESTIONS)} are needed and at most {MAX_SHARE:.0%} of a corpus is held out; {_FIX}'
        )
    _add_passages(files, passages(), source, seed, max_documents, held_out, unit_of)
    if len(files.documents) < MIN_TRAINING_PASSAGES:
        raise UserError(
            f'{source}: {len(files.documents)} passages remain to train on, at least {MIN_TRAINING_PASSAGES} are '
            f'needed; {_FIX}'
        )
    files.documents += two_hop_starts
    return files


def _one_hop_reason(questions: Sequence[Json], num_starts: int, count: int) -> str:
    """Returns why no question of two hops is asked or trained on; '' if there are enough.

    Args:
      questions: the held-out questions, if some of two hops are asked.
      num_starts: number of passages that a proposer could start a question of two hops from.
      count: number of questions that were requested; with 0 the user has questions of their own.
    """
    num_questions = sum(question['hops'] == 2 for question in questions)
    most_questions = int(TWO_HOP_SHARE * count)
    if count and most_questions < MIN_TWO_HOP_QUESTIONS:
        enough = int(MIN_TWO_HOP_QUESTIONS / TWO_HOP_SHARE)
        return (
            f'at most {most_questions} of {count} questions would have two, {MIN_TWO_HOP_QUESTIONS} are needed; ask '
            f'for {enough} questions or more'
        )
    if count and num_questions < MIN_TWO_HOP_QUESTIONS:
        return f'{num_questions} of two hops can be made, {MIN_TWO_HOP_QUESTIONS} are needed'
    if num_starts < MIN_TWO_HOP_STARTS:
        return (
            f'{num_starts} passages to train on have a link to another document, '
            f'{MIN_TWO_HOP_STARTS} are needed'
        )
    return ''


def _hold_out(
    files: ClozeFiles,
    candidates: dict[str, list[Passage]],
    found_chains: Sequence[CorpusChain],
    repeats: set[str],
    source: str,
    count: int,
    seed: int,
) -> set[str]:
    """Chooses the questions, writes them into `files`, and returns the names of their documents.

    Args:
      files: its questions are replaced.
      candidates: documents for questions of one hop, by name, in the order in which they are held out.
      found_chains: questions of two hops to choose from.
      repeats: sentences, in lower case, that are not asked about.
      source: name of the corpus in the lines.
      count: number of questions.
      seed: seed of the questions of one hop.
    """
    max_two_hops = int(TWO_HOP_SHARE * count)
    max_documents = int(USUAL_SHARE * files.total)
    # A question that one search answers would have one hop.
    candidate_chains = [each for each in found_chains if each.needs_bridge]
    two_hops = chains.choose(candidate_chains, max_two_hops, max_documents, repeats)
    held_out = set()
    used_sentences = set(repeats)
    for each in two_hops:
        held_out |= each.documents
        used_sentences.update(each.sentences)
    # questions_of[document][passage] lists the questions of a passage, best first; `_take` chooses from it.
    questions_of = []
    for name in _affordable(candidates, held_out, int(MAX_SHARE * files.total)):
        document = candidates[name]
        questions_of.append(
            [_questions(passage, source, seed, used_sentences) for passage in document]
        )
    _remove_ambiguous(questions_of)
    one_hop_count = count - len(two_hops)
    num_documents = held_out_count(questions_of, one_hop_count, files.total)
    files.questions = _take(questions_of[:num_documents], one_hop_count)
    files.questions += [each.question_line(source) for each in two_hops]
    return held_out | set(itertools.islice(candidates, num_documents))


def _remove_ambiguous(questions_of: Sequence[Sequence[list[dict[str, Any]]]]) -> None:
    """Removes questions that several sentences give, and that have as many answers, in place."""
    passages = list(itertools.chain.from_iterable(questions_of))
    every = itertools.chain.from_iterable(passages)
    counts = collections.Counter(question['question'].lower() for question in every)
    for questions in passages:
        questions[:] = [each for each in questions if counts[each['question'].lower()] == 1]


def _affordable(candidates: Iterable[str], held_out: Collection[str], limit: int) -> list[str]:
    """Returns the first candidates, as many as can be held out too so that there are at most `limit` documents.

    Documents are held out in the order of their hashes, so that a larger number of questions adds documents and removes
    none.
    """
    affordable = []
    num_held_out = len(held_out)
    for name in candidates:
        num_held_out += name not in held_out
        if num_held_out > limit:
            break
        affordable.append(name)
    return affordable


def _two_hop_starts(
    found_chains: Iterable[CorpusChain], held_out: set[str], source: str
) -> list[dict[str, Any]]:
    """Returns the lines of the passages from which a proposer can find a chain, each once, without held-out documents.

    A proposer searches for the name alone, so such a search has to return the second passage. The line says which name
    it is, as a link of a web page does: most names of a passage lead nowhere.
    """
    lines: dict[str, dict[str, Any]] = {}
    for each in found_chains:
        link = each.chain.first.answer
        line = each.first.document_line(source, link)
        # The link is the first occurrence of the name, and the sentence that is asked about has to contain it.
        shown = ' '.join(prompts.document_text(line).split())
        first = each.chain.first
        is_linked = f'{first.left}[ {link} ]{first.right}' in shown
        # Neither end of this link is a held-out document. The proposer's own search may find others about the name.
        if each.is_found_by_bridge and is_linked and held_out.isdisjoint(each.documents):
            lines.setdefault(each.first.id, line)
    return list(lines.values())


def hop_ratio(lines: Iterable[Json] = ()) -> tuple[float, ...]:
    """Returns the `schedule.hop_ratio` with which a run takes the lines of training documents."""
    has_two_hops = any(line['hops'] == 2 for line in lines)
    return (1 - TWO_HOP_TRAINING_SHARE, TWO_HOP_TRAINING_SHARE) if has_two_hops else (1.0,)


def _add_passages(
    files: ClozeFiles,
    passages: Iterable[tuple[int, Record]],
    source: str,
    seed: int,
    max_documents: int,
    held_out: Collection[str],
    unit_of: Callable[[Record], str],
) -> None:
    """Sets the training documents of `files`, and the passages of the documents that are held out.

    The training documents are a uniform sample of at most `max_documents` passages of the other documents. A passage
    is usable if at least one cloze can be made of it.
    """
    sample: BottomK[dict[str, Any]] = BottomK(max_documents)
    files.held_out_passages = []
    for line, record in passages:
        title, _ = split(record.contents)
        if unit_of(record) in held_out:
            files.held_out_passages.append({'document_id': record.id, 'title': title})
            continue
        files.left_out += 1
        key = hash_key(seed, record.id)
        # The cheap test comes first, because splitting into sentences takes most of the time.
        passage = parse(line, record) if sample.admits(key) else None
        if passage and any(_best_cloze(text, title, seed) for text in passage.sentences):
            sample.put(key, passage.document_line(source))
    files.documents = sample.ordered()
    files.left_out -= len(files.documents)


def _repeated_sentences(
    passages: Iterable[tuple[int, Record]],
    candidates: Mapping[str, list[Passage]],
    found_chains: Iterable[CorpusChain],
    left_out: LeftOut,
) -> set[str]:
    """Returns those of the sentences that may be asked about, in lower case, that occur more than once in the corpus.

    Such a sentence does not belong to one passage, and another copy may be trained on. `left_out` counts them, and the
    sentences of the corpus that have another length or form.
    """
    asked: list[Sequence[str]] = [each.sentences for each in found_chains]
    asked += [passage.sentences for passage in itertools.chain.from_iterable(candidates.values())]
    counts = {text.lower(): 0 for text in itertools.chain.from_iterable(asked)}
    # All passages are searched, not only usable ones (`parse`): any copy of a sentence makes it repeated.
    for _, record in passages:
        for sentence in sentences(split(record.contents)[1], left_out):
            if sentence.lower() in counts:
                counts[sentence.lower()] += 1
                if counts[sentence.lower()] > 1:
                    left_out.add('it occurs more than once', sentence)
    return {sentence for sentence, count in counts.items() if count > 1}


def _questions(passage: Passage, source: str, seed: int, repeats: set[str]) -> list[dict[str, Any]]:
    """Returns the lines of at most one question per sentence of a passage, those about names and numbers first.

    Sentences in `repeats` (in lower case) and sentences without a usable cloze give none.
    """
    questions = []
    for sentence in passage.sentences:
        case = _best_cloze(sentence, passage.title, seed)
        if case is None or sentence.lower() in repeats:
            continue
        questions.append(passage.question_line(source, case, case.question, 1))
    return sorted(questions, key=lambda q: (_RANKS[q['kind']], hash_key(seed, q['question'])))


# Common words can often be guessed or replaced by others; names, numbers and terms cannot.
_RANKS = {'name': 0, 'number': 0, 'term': 1, 'word': 2}
_TERM_TOKENS = 3


def _best_cloze(sentence: str, title: str, seed: int) -> Cloze | None:
    """Returns one cloze of a sentence, of the first kinds of `_RANKS`; None if no cloze is usable."""
    cases = []
    for case in clozes(sentence):
        if case.kind == 'word' and _is_term(case.answer):
            case = case._replace(kind='term')
        if chains.is_fair(case, title):
            cases.append(case)
    if not cases:
        return None
    best = min(_RANKS[case.kind] for case in cases)
    preferred = [case for case in cases if _RANKS[case.kind] == best]
    # Chosen by a hash: the first cloze would always have its blank near the start.
    return preferred[hash_key(seed, sentence) % len(preferred)]


def _is_term(word: str) -> bool:
    """Returns whether a word is rare in English: of three tokens or more of a tokenizer that read Wikipedia."""
    return len(_tokenizer().encode(f' {word}')) >= _TERM_TOKENS and not word.endswith('ly')


@functools.cache
def _tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(ENGLISH_CHECKPOINT / 'tokenizer.json'))


def _take(
    questions_of: Sequence[Sequence[Sequence[dict[str, Any]]]], count: int
) -> list[dict[str, Any]]:
    """Returns at most `count` questions: one from every passage, then a second one from every passage, and so on.

    The first passages of all documents come before their second ones, and common words after all others.
    """
    ranked = []
    for document in questions_of:
        # Passages without questions do not count, so that every document with a question has one of the first rank.
        for passage_number, questions in enumerate(filter(None, document)):
            for number, question in enumerate(questions):
                is_word = question['kind'] == 'word'
                ranked.append(((is_word, number, passage_number), question))
    # Equal ranks stay in the order of the documents.
    ranked.sort(key=lambda item: item[0])
    return [question for _, question in ranked[:count]]


# The documents with the lowest hashes of their names are held out.
# Largest share of the documents that is held out, which a small corpus reaches. All others may be trained on.
MAX_SHARE = 0.4
# Share of a large corpus that is held out, so that the questions come from many documents.
USUAL_SHARE = 0.1

# Documents beyond this number are not counted: `MAX_SHARE` of so many is more than any number of questions needs.
_COUNTED_DOCUMENTS = 100_000


class DocumentNames:
    """Names of documents: the title, with the file behind it if another file had the same title first ('Notes')."""

    def __init__(self) -> None:
        # Title → file. Filled only for sources with files: the millions of titles of an encyclopedia are not stored.
        self._first_document: dict[str, str] = {}

    def name_of(self, record: Record) -> str:
        """Returns the name of a passage's document; a passage with neither title nor file is a document of its own."""
        title, _ = split(record.contents)
        if not title:
            return record.document or passage_of(record)
        if not record.document:
            return title
        # The name is the title alone where that is unique, so that a file that is moved stays on its side of the split.
        first_document = self._first_document.setdefault(title, record.document)
        if first_document == record.document:
            return title
        return f'{title}\n{record.document}'


def passage_of(record: Record) -> str:
    """Returns the name of a passage as a document of its own, which no title equals: titles contain no line feed."""
    return f'\n{record.id}'


def find_candidates(
    passages: Iterable[tuple[int, Record]],
    seed: int,
    count: int,
    unit_of: Callable[[Record], str],
) -> tuple[dict[str, list[Passage]], int]:
    """Returns the documents with the lowest hashes, lowest first, and the number of documents of the corpus.

    Only documents with a usable sentence count. The documents are returned as name → usable passages; their number
    is exact up to 100,000, beyond which no more are counted.

    Args:
      count: largest number of documents to return.
      unit_of: function from a passage to the name of its document.
    """
    sample: BottomK[tuple[str, list[Passage]]] = BottomK(count)
    keys: set[int] = set()
    for line, record in passages:
        name = unit_of(record)
        key = hash_key(seed, name)
        is_counted = len(keys) < _COUNTED_DOCUMENTS
        # In a large corpus most passages are skipped here, before the costly search for sentences.
        if not is_counted and not sample.admits(key):
            continue
        passage = parse(line, record)
        if passage is None:
            continue
        if is_counted:
            keys.add(key)
        if sample.admits(key):
            # Passages of one document need not follow each other.
            _, document = sample.get(key) or (name, [])
            document.append(passage)
            sample.put(key, (name, document))
    candidates = dict(sample.ordered())
    for document in candidates.values():
        # Not always the beginning of a document.
        document.sort(key=lambda passage: hash_key(seed, passage.id))
    return candidates, len(keys)


def _spread(
    passages: Iterable[tuple[int, Record]],
    seed: int,
    count: int,
    document_of: Callable[[Record], str],
) -> tuple[dict[str, list[Passage]], int]:
    """Returns passages as units of the split, one of every document, then a second one of each, and their total.

    Of a document `MAX_SHARE` of the passages are among them at most, but at least one.
    """
    samples: dict[str, BottomK[Passage]] = {}
    totals: collections.Counter[str] = collections.Counter()
    for line, record in passages:
        passage = parse(line, record)
        if passage is not None:
            name, key = document_of(record), hash_key(seed, record.id)
            totals[name] += 1
            sample = samples.setdefault(name, BottomK(count))
            if sample.admits(key):
                sample.put(key, passage)
    ranked = []
    for name, sample in samples.items():
        most = max(1, int(MAX_SHARE * totals[name]))
        for number, passage in enumerate(sample.ordered()[:most]):
            ranked.append((number, hash_key(seed, name), passage))
    ranked.sort(key=lambda item: item[:2])
    return {f'\n{passage.id}': [passage] for _, _, passage in ranked}, totals.total()


def held_out_count(
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
    # Of each document the passages with a question about more than a common word.
    numbers = [
        sum(any(question['kind'] != 'word' for question in passage) for passage in document)
        for document in questions_of
    ]
    needed = 1 + sum(number < count for number in itertools.accumulate(numbers))
    asked = itertools.accumulate(number > 0 for number in numbers)
    least = 1 + sum(number < MIN_HELD_OUT for number in asked)
    usual = min(count, max(least, int(USUAL_SHARE * total)))
    return min(max(needed, usual), len(questions_of))
