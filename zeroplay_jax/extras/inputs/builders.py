"""Builds the lines of input files: answers to hide, questions to solve, documents to ask about.

A sample of a corpus consists of the items with the lowest hashes of (seed, item). It is uniform over distinct items,
does not depend on the order of the passages, and takes one pass and memory for the sample alone (bottom-k sampling).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from zeroplay_jax.data import answer_fields, files
from zeroplay_jax.objectives.answers import normalize_answer
from zeroplay_jax.objectives.rewards import stratify
from zeroplay_jax.retrieval.corpus import Record, split
from zeroplay_jax.retrieval.types import short
from zeroplay_jax.types import Json, UserError, identity_rng

T = TypeVar('T')
# (name of a file, line number, object)
Line = tuple[str, int, Json]

# Candidates per requested answer. Most mentions occur in one document only and are discarded at the end.
_CANDIDATES_PER_ANSWER = 16
_MIN_CANDIDATES = 1 << 12


class Dropped(collections.Counter[str]):
    """How many items were left out, by reason.

    Attributes:
      first: of some reasons, the first item that was left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, str] = {}

    def too_few(self, where: str, usable: int, what: str, count: int) -> UserError:
        """Returns the error where only `usable` items can be used, fewer than requested."""
        ways = ['lower --count'] if usable else []
        if self['no_title'] and not usable:
            ways.append('give passages with titles')
        if self['too_short']:
            ways.append('lower --least-words')
        if self['too_long']:
            ways.append('raise --most-words')
        fix = ' or '.join(ways or ['give other files'])
        problem = f'{usable} {what} can be used (left out: {self}), not {count}'
        return UserError(f'{where}{problem}; {fix}')

    def __str__(self) -> str:
        counts = []
        for reason, count in sorted(self.items()):
            first = f' (the first: {self.first[reason]})' if reason in self.first else ''
            if count:
                counts.append(f'{count} {reason}{first}')
        return ', '.join(counts) or 'nothing'


@dataclasses.dataclass
class BuiltFile:
    """The lines of a file, and how many items were left out."""

    lines: list[dict[str, Any]]
    dropped: Dropped


class BottomK(Generic[T]):
    """Collects the k items of a stream with the lowest keys; holds at most 2 k items.

    The bound of `admits` only ever falls, so an item of the result was admitted at each of its occurrences. A
    caller that counts occurrences therefore counts all of them.
    """

    def __init__(self, k: int):
        self._k = k
        self._items: dict[int, T] = {}
        # Keys have 64 bits, so all of them are below the initial bound.
        self._bound = 1 << 64

    def admits(self, key: int) -> bool:
        """Returns whether an item of this key can still be among the k lowest."""
        return key < self._bound

    def get(self, key: int) -> T | None:
        """Returns the stored item of a key; None if there is none."""
        return self._items.get(key)

    def put(self, key: int, item: T) -> None:
        """Stores an item, replacing an earlier one of this key; `admits(key)` must be true."""
        self._items[key] = item
        # Pruning only at 2 k makes the cost of sorting logarithmic per item.
        if len(self._items) >= 2 * self._k:
            lowest_keys = self._lowest_keys()
            self._items = {key: self._items[key] for key in lowest_keys}
            self._bound = lowest_keys[-1] + 1

    def ordered(self) -> list[T]:
        """Returns the items of the k lowest keys, sorted by key."""
        return [self._items[key] for key in self._lowest_keys()]

    def _lowest_keys(self) -> list[int]:
        return sorted(self._items)[: self._k]


def hash_key(seed: int, text: str) -> int:
    """Returns a 64-bit hash of a seed and a text, the same in every process."""
    digest = hashlib.blake2b(f'{seed},{text}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little')


def _one_line(text: str) -> str:
    """Returns the text with single blanks between its words."""
    return ' '.join(text.split())


def _shuffled(items: Sequence[T], seed: int, *identity: int) -> list[T]:
    """Returns the items in an order that is a function of seed and identity."""
    permutation = identity_rng(seed, *identity).permutation(len(items))
    return [items[index] for index in permutation]


def unfit(answer: str, max_words: int) -> str | None:
    """Returns why an answer cannot be used: 'empty' (in normal form), 'too_long'; None if it can."""
    if not normalize_answer(answer):
        return 'empty'
    if len(answer.split()) > max_words:
        return 'too_long'
    return None


def answers_of_sets(
    sets: Sequence[Iterable[Line]], count: int, seed: int, max_words: int
) -> BuiltFile:
    """Returns SSP's answer set: a random sample of the first accepted answers of QA training questions.

    Its lines are {'answer', 'source', 'line'}. No answer occurs twice in normal form.

    Args:
      sets: the lines of each file; they contribute in proportion to their usable answers.
      count: answers in the sample.
      max_words: words of the longest usable answer.

    Raises:
      UserError: there are fewer answers than requested.
    """
    dropped = Dropped()
    used_answers: set[str] = set()
    answers: list[dict[str, Any]] = []
    for source, line, record in itertools.chain.from_iterable(sets):
        answer = _one_line(answer_fields.accepted_answers(record)[0])
        normal_form = normalize_answer(answer)
        reason = unfit(answer, max_words)
        if reason is None and normal_form in used_answers:
            reason = 'duplicate'
        if reason is not None:
            dropped[reason] += 1
            continue
        used_answers.add(normal_form)
        answers.append({'answer': answer, 'source': source, 'line': line})
    if len(answers) < count:
        raise dropped.too_few('', len(answers), 'answers', count)
    # The second order is that of earlier versions, whose files stay as they are.
    return BuiltFile(_shuffled(_shuffled(answers, seed, 0)[:count], seed, 1), dropped)


@dataclasses.dataclass
class _Candidate:
    """A possible answer from a corpus.

    Attributes:
      text: spelling of the first occurrence, or of the first title.   kind: 'title', 'date' or 'entity'.
      document_id, line: id and line number of the passage of that occurrence.
      document: name of its document.
      is_shared: whether another document contains the answer as well.
    """

    text: str
    kind: str
    document_id: str
    line: int
    document: str
    is_shared: bool = False


def answers_of_corpus(
    passages: Iterable[tuple[int, Record]], source: str, count: int, seed: int, max_words: int
) -> BuiltFile:
    """Returns a sample of the answers in a corpus: its titles, and mentions that at least two documents share.

    Its lines are {'answer', 'source', 'kind', 'document_id', 'line'}; kind is 'title', 'date' or 'entity', and the
    last two name the first passage with this title, or else with this mention. Passages of one title are one document;
    a passage without a title is a document of its own. `BuiltFile.dropped` counts titles and mentions that are unfit,
    titles of lists and, among the candidates in the sample, mentions that occur in one document only.

    Args:
      passages: (line number, passage), as `retrieval.corpus.read` yields them.
      source: name of the corpus, written to every line.
      count: answers in the sample.
      max_words: words of the longest usable answer.

    Raises:
      UserError: there are fewer answers than requested.
    """
    sample: BottomK[_Candidate] = BottomK(max(_CANDIDATES_PER_ANSWER * count, _MIN_CANDIDATES))
    dropped = Dropped()
    untitled = 0
    for line, record in passages:
        title, text = split(record.contents)
        untitled += not title
        # A line feed occurs in no title, so the name of an untitled document is unique.
        document = title or f'\n{record.id}'
        for kind, answer in _possible_answers(title, text, dropped):
            reason = unfit(answer, max_words)
            if reason is not None:
                dropped[reason] += 1
                continue
            # The key is that of the normal form, so that spellings of one answer are one candidate.
            key = hash_key(seed, normalize_answer(answer))
            if not sample.admits(key):
                continue
            earlier = sample.get(key)
            # A title is a better source than a mention of the same text.
            is_upgrade = earlier is not None and kind == 'title' and earlier.kind != 'title'
            if earlier is None or is_upgrade:
                sample.put(key, _Candidate(answer, kind, record.id, line, document))
            elif earlier.document != document:
                earlier.is_shared = True
    candidates = sample.ordered()
    # A name in one document only may be an accident of its text; a title is the subject of its document.
    usable = [
        candidate for candidate in candidates if candidate.kind == 'title' or candidate.is_shared
    ]
    dropped['one_document'] += len(candidates) - len(usable)
    if len(usable) < count:
        # Counted only here: mentions of passages without titles may be answers.
        dropped['no_title'] = 0 if usable else untitled
        raise dropped.too_few(f'{source}: ', len(usable), 'answers', count)
    lines: list[dict[str, Any]] = []
    for candidate in usable[:count]:
        answer_line = {'answer': candidate.text, 'source': source, 'kind': candidate.kind}
        lines.append(answer_line | {'document_id': candidate.document_id, 'line': candidate.line})
    return BuiltFile(lines, dropped)


def _possible_answers(title: str, text: str, dropped: Dropped) -> list[tuple[str, str]]:
    """Returns (kind, text) of the title and the mentions of a passage, each once.

    Counts titles of lists and disambiguations in `dropped['list']`.
    """
    possible: list[tuple[str, str]] = []
    title_answer = answer_of_title(title) if title else None
    if title_answer:
        possible.append(('title', title_answer))
    # answer_of_title returns None for a list, and '' for a title that consists of brackets, which is not counted.
    dropped['list'] += bool(title) and title_answer is None
    return list(dict.fromkeys(possible + mentions(text)))


def questions_of_sets(
    sets: Sequence[Iterable[Line]], held_out: Iterable[str], count: int, seed: int
) -> BuiltFile:
    """Returns DSPO's training set: the questions of QA training files in one form, shuffled, each once.

    Its lines are {'question', 'answers', 'source', 'line'}, with 'hops' where the file has them.

    Args:
      sets: the lines of each file.
      held_out: questions that must not be trained on; questions are compared by `question_key`.
      count: questions from each set; 0: all.

    Raises:
      UserError: a set has fewer questions, or none remains.
    """
    dropped = Dropped()
    # `_usable_questions` adds the questions that it takes, so that later ones of the same text are excluded.
    excluded: dict[str, Json] = {files.question_key(text): {} for text in held_out}
    sample: list[dict[str, Any]] = []
    for number, lines in enumerate(sets):
        source, questions = _usable_questions(lines, excluded, dropped)
        if len(questions) < count:
            raise dropped.too_few(f'{source}: ', len(questions), 'questions', count)
        questions = _shuffled(questions, seed, number)
        sample += questions[:count] if count else questions
    if not sample:
        raise UserError(f'no question is left (left out: {dropped}); give other sets')
    return BuiltFile(_shuffled(sample, seed, len(sets)), dropped)


def _usable_questions(
    lines: Iterable[Line], excluded: dict[str, Json], dropped: Dropped
) -> tuple[str, list[dict[str, Any]]]:
    """Returns the name of a set, and its questions that are not in `excluded`.

    Args:
      excluded: `question_key` → the line that was taken, {} for a held-out question; the returned lines are added.
      dropped: counts the other questions as 'empty', 'held_out', 'duplicate' or 'duplicate_with_other_answers', which
        shares no answer with the line that was taken.
    """
    questions: list[dict[str, Any]] = []
    source = ''
    for source, line, record in lines:
        text = record['question']
        answers = answer_fields.accepted_answers(record)
        key = files.question_key(text)
        if not key or key in excluded:
            reason = _why_left_out(answers, excluded[key]) if key else 'empty'
            dropped[reason] += 1
            dropped.first.setdefault(reason, f'{source}, line {line}, {short(text)}')
            continue
        question: dict[str, Any] = {'question': text, 'answers': list(dict.fromkeys(answers))}
        excluded[key] = question
        # A run takes 1 for a missing number of hops.
        if record.get('hops') is not None:
            question['hops'] = files.hops(source, line, record)
        question['source'] = source
        question['line'] = line
        questions.append(question)
    return source, questions


def _why_left_out(answers: Iterable[str], taken: Json) -> str:
    """Returns why a question with these answers is left out; `taken` is the line in `excluded` of the same question."""
    if not taken:
        return 'held_out'
    taken_answers = set(map(normalize_answer, taken['answers']))
    is_other = taken_answers.isdisjoint(map(normalize_answer, answers))
    return 'duplicate_with_other_answers' if is_other else 'duplicate'


def documents_of_corpus(
    passages: Iterable[tuple[int, Record]],
    source: str,
    count: int,
    seed: int,
    hops: Sequence[int],
    types: Sequence[str] = (),
    min_words: int = 20,
) -> BuiltFile:
    """Returns a uniform sample of passages, each as one document to ask about.

    Each line has a number of hops and, with `types`, a type of task. 'document_id' is the id of the passage.

    Args:
      passages: (line number, passage), as `retrieval.corpus.read` yields them.
      source: name of the corpus, written to every line.
      count: passages in the sample.
      hops: weights of 1, 2, … hops such as (4, 3, 2, 1); counts are rounded by largest remainder.
      types: types of task, assigned in turn; overall and within each number of hops their counts differ by at most 1.
      min_words: passages that are shorter, or have no title, are left out: there is nothing to ask
        about them.

    Raises:
      UserError: there are fewer passages than requested.
    """
    sample: BottomK[dict[str, Any]] = BottomK(count)
    dropped = Dropped()
    for line, record in passages:
        title, text = split(record.contents)
        if not title.strip():
            dropped['no_title'] += 1
            continue
        if len(text.split()) < min_words:
            dropped['too_short'] += 1
            continue
        key = hash_key(seed, record.id)
        if sample.admits(key):
            document: dict[str, Any] = {'title': title, 'text': text, 'source': source}
            sample.put(key, document | {'document_id': record.id, 'line': line})
    documents = sample.ordered()
    if len(documents) < count:
        raise dropped.too_few(f'{source}: ', len(documents), 'passages', count)
    # The sample is in the order of its hashes, so blocks of equal hops are random as well.
    hop_counts = np.repeat(np.arange(len(hops)) + 1, stratify(hops, count))
    for index, (document, hop_count) in enumerate(zip(documents, hop_counts, strict=True)):
        document['hops'] = int(hop_count)
        if types:
            document['type'] = types[index % len(types)]
    # Shuffled, because the documents are now sorted by hops.
    return BuiltFile(_shuffled(documents, seed), dropped)


EXAMPLES = """examples:
  zeroplay inputs answers --sets nq_train.jsonl,hotpotqa_train.jsonl --out answers.jsonl
  zeroplay inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl --out questions.jsonl
  zeroplay inputs documents --corpus wiki-18.jsonl.gz --count 100000 --out documents.jsonl
  zeroplay inputs cloze --corpus texts --documents documents.jsonl --out held_out.jsonl

`zeroplay inputs answers --help` explains one kind; the others in the same way.
"""
ANSWERS = """Answers that SSP's proposer hides.

--sets: a random sample of the first accepted answers of QA training questions, as in the paper (50,000 of NQ,
HotpotQA and others). Ours: no answer occurs twice in normal form, and yes, no and long answers are left out, because
no question can be written for which they are the only true answer.

--corpus: needs no questions at all. Candidates are the titles of the corpus, without brackets at their end and without
lists, and mentions that at least two documents share: dates, years, and names of two or more words, which are found by
their capitals (Latin script). No language model is used. The sample is uniform over distinct candidates.

Lines: {"answer", "source", "line"}; of a corpus also "kind" (title, entity, date) and "document_id".
"""
ANSWERS_EXAMPLES = """examples:
  zeroplay inputs answers --sets nq_train.jsonl,hotpotqa_train.jsonl --out answers.jsonl
  zeroplay inputs answers --corpus wiki-18.jsonl.gz --count 50000 --out answers.jsonl
"""
QUESTIONS = """Questions with answers, for DSPO: several sets in one form, shuffled, each question once.

A set is a file, or one of nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, bamboogle, which are downloaded.
Those are the held-out questions that papers report on: for config.eval.file and --not-in, not for training.

Two questions are the same if they differ only in case, blanks, quotes around words, and marks at the ends of words. The
first is taken; "duplicate_with_other_answers" counts the others that share no answer with it.

The answers may be in answers, golden_answers, answer, target, ground_truth, possible_answers or verl's reward_model, as
a text, a list, or an object of SQuAD or TriviaQA, with answer_aliases, aliases or alt_ans beside them; they become a
list, without those marked wrong. Questions that say that they have no answer are left out. A set is JSON lines, a TSV
with headings or Parquet.

Lines: {"question", "answers", "source", "line"}, and "hops" if the set has them.
"""
QUESTIONS_EXAMPLES = """examples:
  zeroplay inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl --out questions.jsonl
  zeroplay inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl --count 5000 \\
      --not-in nq,hotpotqa --out questions.jsonl
  zeroplay inputs questions --sets nq --out data/nq_test.jsonl
"""
DOCUMENTS = """Documents that a proposer starts from, with the number of hops (Dr. Zero, π-Play) or searches (SCOPE).

A uniform sample of the corpus. Hops are assigned exactly in the ratio, not drawn; a run uses the ratio of its config,
which should be the same. --types also assigns types of task, equally often; those of SCOPE are long_form_qa,
summarisation, planning and writing, and its table 6 leaves out one at a time.

Lines: {"title", "text", "source", "document_id", "line", "hops"}, and "type" with --types.
"""
DOCUMENTS_EXAMPLES = """examples:
  zeroplay inputs documents --corpus wiki.jsonl --count 100000 --hops 4:3:2:1 --out documents.jsonl
  zeroplay inputs documents --corpus wiki-18.jsonl.gz --count 30000 --hops 4:3:2 \\
      --types long_form_qa,summarisation,planning,writing --out documents.jsonl
"""
CLOZE = """Held-out questions for a corpus without any, and documents to train on, split by document.

A question is a sentence with a name, a number or a term left out, written ____, and the answer is what was left out.
Common words are left out last. Sentences that occur twice are not asked about, nor what the title says. By default one
question from each passage; a small corpus gives several from each, and 40 % of its documents are held out at most, or
of the passages of each, but at least one. Up to a quarter
of the questions have two hops, if names connect enough documents for 20 of them: a sentence in which #1 replaces a
name, and a sentence of another document about #1 with a blank, which no search without the name finds. The training
documents are passages of all other documents, each with one hop, and with two hops those with a name about which
there is another document (Dr. Zero, π-Play); the name is their "link", shown to the proposer in brackets. A document
is a file of a folder of texts, or all passages with the same title; a corpus of fewer than 100 is split by passage.

A third file lists the held-out passages. With it as config.retrieval.held_out no search of a training
run returns them; evaluations search the whole corpus.

Lines of --out: {"question", "answers", "hops", "kind", "title", "source", "document", "document_id", "line"}; of
--documents as `zeroplay inputs documents` writes them, and "link"; of --held-out: {"document_id", "title"}.
"""
CLOZE_EXAMPLES = """examples:
  zeroplay inputs cloze --corpus wiki-18.jsonl.gz --documents documents.jsonl --out held_out.jsonl
  zeroplay inputs cloze --corpus own --passage-words 80 --documents docs.jsonl --out out.jsonl
"""

# Kind of file → summary, description and examples of its command.
HELP = {
    'answers': ('answers to hide (SSP)', ANSWERS, ANSWERS_EXAMPLES),
    'questions': ('questions with answers (DSPO)', QUESTIONS, QUESTIONS_EXAMPLES),
    'documents': ('documents with hops (Dr. Zero, π-Play, SCOPE)', DOCUMENTS, DOCUMENTS_EXAMPLES),
    'cloze': ('held-out questions of any corpus, and documents to train on', CLOZE, CLOZE_EXAMPLES),
}

# Names and dates are found in a text by rules, without a language model.

# Capital letters of Latin script: the blocks up to Latin Extended-B.
_UPPER = ''.join(letter for letter in map(chr, range(0x250)) if letter.isupper())
# An initial such as 'J.', or a word that begins with a capital and has an end.
_WORD = rf'(?:[{_UPPER}]\.|[{_UPPER}][\w’\'-]{{0,80}}\w)'
_JOINER = r'(?:of the|of|de la|de|del|della|di|da|du|la|le|van der|van|von|der|bin|ibn|al)'
_MONTH = '(?:January|February|March|April|May|June|July|August|September|October|November|December)'
# Dates come first: their month would otherwise be taken for a name.
_MENTION = re.compile(
    rf'(?P<date>\b(?:\d{{1,2}} {_MONTH} \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}}))\b'
    rf'|(?P<year>(?<![\w,.$£€])(?:1\d|20)\d\d(?![\w%]|[,.]\d))'
    rf'|(?P<entity>(?<!\w){_WORD}(?: (?:{_JOINER} )?{_WORD})+)'
)
# Words that have a capital only because they begin a sentence.
_OPENERS = frozenset(
    'A After Although An And As At Because Before Both But By During For From He Her His However If In It Its On Once '
    'One Or Our She Since So Some That The Their Then There These They This Those Though Through To Two Under Until '
    'Upon Was We What When Where Which While Who With Within'.split()
)


def mentions(text: str) -> list[tuple[str, str]]:
    """Returns (kind, text) of the dates and names in a passage, in order; kind is 'date' or 'entity'.

    Dates are full dates (12 March 1998; March 12, 1998) and years from 1000 to 2099 that stand alone.

    Names are two or more capitalised words in a row, with initials and joiners such as 'of the' or
    'von' between them. Words that only begin a sentence (The, In, When, …) and a possessive 's are
    removed; a sentence that ends in an initial ends the name. Capitals are those of Latin script, so
    texts in other scripts have dates only.
    """
    mentioned: list[tuple[str, str]] = []
    for match in _MENTION.finditer(text):
        if match.lastgroup != 'entity':
            mentioned.append(('date', match[0]))
            continue
        name = _name(match[0].split())
        # A single capitalised word may be any word at the beginning of a sentence.
        if ' ' in name and name[0] in _UPPER:
            mentioned.append(('entity', name))
    return mentioned


def _name(words: list[str]) -> str:
    """Returns the name in a match of `_MENTION`: without openers, and cut where a new sentence begins."""
    while words and words[0] in _OPENERS:
        words = words[1:]
    end = len(words)
    for index in range(1, len(words)):
        # 'World War I. The Beatles': the dot ends a sentence.
        if words[index] in _OPENERS and words[index - 1].endswith('.'):
            end = index
            break
    return re.sub(r"(?:['’]s|\.)$", '', ' '.join(words[:end]))


def answer_of_title(title: str) -> str | None:
    """Returns a title without the brackets at its end; None for titles of lists and disambiguations."""
    is_list = re.match(r'(?:Lists? of|Index of|Outline of) ', title) is not None
    if is_list or '(disambiguation)' in title:
        return None
    return re.sub(r' *\([^()]*\)$', '', title).strip()
