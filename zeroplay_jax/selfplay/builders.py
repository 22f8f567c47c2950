"""How files of inputs are made: answers to hide, questions to solve, documents to ask about. Pure functions.

Samples of a corpus are the items with the lowest hashes of (seed, item): uniform over what is distinct, the same
whatever the order of the passages, and found in one pass with memory for the sample alone.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.objectives.schedules import stratify
from zeroplay_jax.retrieval.corpus import Record, split
from zeroplay_jax.selfplay import files
from zeroplay_jax.types import Json, UserError, identity_rng

T = TypeVar('T')
Line = tuple[str, int, Json]  # name of a file, line number, object

# Candidates that are followed per answer asked for. Spans that stand in one document only outnumber the others.
_FOLLOWED = 16


@dataclasses.dataclass
class Built:
    """The lines of a file, and how much was left out, by reason."""

    lines: list[dict[str, Any]]
    dropped: collections.Counter[str]


class Lowest(Generic[T]):
    """The k items with the lowest keys of a stream, in memory for 2 k.

    The bound only ever falls. So an item that is kept in the end was kept from the first time it came, and what is
    counted about it is exact.
    """

    def __init__(self, k: int):
        self._k, self._items, self._bound = k, dict[int, T](), 1 << 64

    def admits(self, key: int) -> bool:
        """Whether an item of this key can still be among the lowest."""
        return key < self._bound

    def get(self, key: int) -> T | None:
        """The item kept under a key."""
        return self._items.get(key)

    def put(self, key: int, item: T) -> None:
        """Keeps an item of a key that `admits`."""
        self._items[key] = item
        if len(self._items) >= 2 * self._k:
            kept = sorted(self._items)[: self._k]
            self._items = {key: self._items[key] for key in kept}
            self._bound = kept[-1] + 1

    def ordered(self) -> list[T]:
        """The k lowest, by key."""
        return [self._items[key] for key in sorted(self._items)[: self._k]]


def key(seed: int, text: str) -> int:
    """64 bits that a seed and a text determine."""
    return int.from_bytes(
        hashlib.blake2b(f'{seed},{text}'.encode(), digest_size=8).digest(), 'little'
    )


# ------------------------------------------------------------------------------------------------------------
# Answers
# ------------------------------------------------------------------------------------------------------------


def unfit(answer: str, most_words: int) -> str | None:
    """Why nothing can be hidden behind an answer: 'empty' in normal form, 'yes_no', 'too_long'; or None."""
    normal = normalize_answer(answer)
    if not normal:
        return 'empty'
    if normal in ('yes', 'no'):
        return 'yes_no'
    return 'too_long' if len(answer.split()) > most_words else None


def answers_of_sets(
    sets: Sequence[Iterable[Line]], count: int, seed: int, most_words: int, mix: str
) -> Built:
    """SSP's answer set: a random sample of the first accepted answers of QA training questions.

    Args:
      sets: the lines of each file.
      mix: 'pool' samples all answers together, as SSP does; 'equal' as many from every set.

    Raises:
      UserError: fewer answers than asked for.
    """
    found: list[list[dict[str, Any]]] = []
    dropped: collections.Counter[str] = collections.Counter()
    seen: set[str] = set()
    for lines in sets:
        found.append([])
        for source, line, record in lines:
            answer = ' '.join(files.accepted_answers(record)[0].split())
            normal = normalize_answer(answer)
            if reason := unfit(answer, most_words) or ('duplicate' if normal in seen else None):
                dropped[reason] += 1
                continue
            seen.add(normal)
            found[-1].append(dict(answer=answer, source=source, line=line))
    groups = found if mix == 'equal' else [[item for items in found for item in items]]
    picked = []
    for number, (items, share) in enumerate(zip(groups, stratify([1] * len(groups), count))):
        if len(items) < share:
            of = f' of set {number + 1}' if mix == 'equal' else ''
            raise UserError(
                f'{len(items)} answers{of} can be used ({_shown(dropped)}), not {share}; lower --count'
            )
        order = identity_rng(seed, number).permutation(len(items))[:share]
        picked += [items[i] for i in order]
    return Built(
        [picked[i] for i in identity_rng(seed, len(groups)).permutation(len(picked))], dropped
    )


@dataclasses.dataclass
class _Candidate:
    """An answer that a corpus may give, and the document where it was met first; `twice`: another has it as well."""

    text: str
    kind: str
    document_id: str
    line: int
    document: str
    twice: bool = False


_UPPER = ''.join(letter for letter in map(chr, range(0x250)) if letter.isupper())
_WORD = rf'(?:[{_UPPER}]\.|[{_UPPER}][\w’\'-]*\w)'
_JOINER = r'(?:of the|of|de la|de|del|della|di|da|du|la|le|van der|van|von|der|bin|ibn|al)'
_MONTH = '(?:January|February|March|April|May|June|July|August|September|October|November|December)'
_MENTION = re.compile(
    rf'(?P<date>\b(?:\d{{1,2}} {_MONTH} \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}}))\b'
    rf'|(?P<year>(?<![\w,.$£€])(?:1\d|20)\d\d(?![\w%]|[,.]\d))'
    rf'|(?P<entity>(?<!\w){_WORD}(?: (?:{_JOINER} )?{_WORD})+)'
)
# Words with a capital that begin a sentence and no name.
_OPENERS = frozenset(
    'A After Although An And As At Because Before Both But By During For From He Her His However If In It Its On Once '
    'One Or Our She Since So Some That The Their Then There These They This Those Though Through To Two Under Until '
    'Upon Was We What When Where Which While Who With Within'.split()
)


def mentions(text: str) -> list[tuple[str, str]]:
    """(kind, text) of what a passage mentions, kind 'date' or 'entity', by rule:

    - dates (12 March 1998; March 12, 1998), and years from 1000 to 2099 that stand alone;
    - two or more words with a capital in a row, initials and joiners such as 'of the' or 'von' between them included.
      Words that only begin a sentence (The, In, When, …) are taken off, and so is a possessive 's; a sentence that
      ends in an initial ends the name.

    The capitals are those of Latin script. Where a script has none, titles and dates are all there is.
    """
    found = []
    for match in _MENTION.finditer(text):
        if match.lastgroup != 'entity':
            found.append(('date', match[0]))
            continue
        words = match[0].split()
        while words and words[0] in _OPENERS:
            del words[0]
        ends = (
            i
            for i, word in enumerate(words)
            if i and word in _OPENERS and words[i - 1].endswith('.')
        )
        name = re.sub(r"(?:['’]s|\.)$", '', ' '.join(words[: next(ends, None)]))
        if ' ' in name and name[0] in _UPPER:
            found.append(('entity', name))
    return found


def answer_of_title(title: str) -> str | None:
    """A title without what tells it from others in brackets; None for lists and pages that only refer."""
    if re.match(r'(?:Lists? of|Index of|Outline of) ', title) or '(disambiguation)' in title:
        return None
    return re.sub(r' *\([^()]*\)$', '', title).strip()


def answers_of_corpus(
    passages: Iterable[tuple[int, Record]], source: str, count: int, seed: int, most_words: int
) -> Built:
    """Answers that a corpus itself gives: its titles, and what at least two documents mention (see `mentions`).

    Passages of one title are one document; a passage without a title is one of its own. `dropped` counts titles and
    mentions that were passed over, and, of the candidates followed to the end, those of one document only.

    Args:
      passages: (line number, passage), as `retrieval.corpus.read` yields them.

    Raises:
      UserError: fewer answers than asked for.
    """
    sample: Lowest[_Candidate] = Lowest(max(_FOLLOWED * count, 1 << 12))
    dropped: collections.Counter[str] = collections.Counter()
    for line, record in passages:
        title, text = split(record.contents)
        named = answer_of_title(title) if title else None
        dropped['list'] += bool(title) and named is None
        document = title or f'\n{record.id}'
        given = [('title', named)] if named else []
        for kind, answer in dict.fromkeys(given + mentions(text)):
            if reason := unfit(answer, most_words):
                dropped[reason] += 1
                continue
            at = key(seed, normalize_answer(answer))
            if not sample.admits(at):
                continue
            old = sample.get(at)
            if old is None or (kind == 'title' and old.kind != 'title'):
                sample.put(at, _Candidate(answer, kind, record.id, line, document))
            elif old.document != document:
                old.twice = True
    followed = sample.ordered()
    known = [c for c in followed if c.kind == 'title' or c.twice]
    dropped['one_document'] += len(followed) - len(known)
    if len(known) < count:
        raise UserError(
            f'{source}: {len(known)} answers can be used ({_shown(dropped)}), not {count}; lower --count'
        )
    fields = ('kind', 'document_id', 'line')
    lines = [
        dict(answer=c.text, source=source) | {f: getattr(c, f) for f in fields}
        for c in known[:count]
    ]
    return Built(lines, dropped)


# ------------------------------------------------------------------------------------------------------------
# Questions and documents
# ------------------------------------------------------------------------------------------------------------


def questions_of_sets(
    sets: Sequence[Iterable[Line]], held_out: Iterable[str], count: int, seed: int
) -> Built:
    """DSPO's training set: the questions of QA training files in one form, shuffled, each once.

    Args:
      held_out: questions that must not be trained on; compared, like all, in the normal form of answers.
      count: so many of each set; 0: all.

    Raises:
      UserError: a set has fewer, or no question is left.
    """
    dropped: collections.Counter[str] = collections.Counter()
    banned, seen = {normalize_answer(text) for text in held_out}, set[str]()
    picked: list[dict[str, Any]] = []
    for number, lines in enumerate(sets):
        items: list[dict[str, Any]] = []
        source = ''
        for source, line, record in lines:
            text = ' '.join(record['question'].split())
            normal = normalize_answer(text)
            if not normal or normal in banned or normal in seen:
                dropped[
                    'empty' if not normal else 'held_out' if normal in banned else 'duplicate'
                ] += 1
                continue
            seen.add(normal)
            answers = list(
                dict.fromkeys(' '.join(a.split()) for a in files.accepted_answers(record))
            )
            item: dict[str, Any] = dict(question=text, answers=answers)
            if 'hops' in record:
                item['hops'] = files.hops(source, line, record)
            items.append(item | dict(source=source, line=line))
        if len(items) < count:
            raise UserError(
                f'{source}: {len(items)} questions can be used ({_shown(dropped)}), not {count}; lower --count'
            )
        order = identity_rng(seed, number).permutation(len(items))
        picked += [items[i] for i in (order[:count] if count else order)]
    if not picked:
        raise UserError(f'no question is left ({_shown(dropped)}); give other sets')
    return Built(
        [picked[i] for i in identity_rng(seed, len(sets)).permutation(len(picked))], dropped
    )


def documents_of_corpus(
    passages: Iterable[tuple[int, Record]],
    source: str,
    count: int,
    seed: int,
    hops: Sequence[int],
    kinds: Sequence[str] = (),
    least_words: int = 20,
) -> Built:
    """A uniform sample of passages, each with a number of hops, and a kind of task where `kinds` are given.

    Args:
      passages: (line number, passage), as `retrieval.corpus.read` yields them.
      hops: shares of 1, 2, … hops, met exactly (largest remainder). Kinds are dealt in turn over the documents in
        the order of their hops: equally often in all, and within each number of hops, to one.
      least_words: passages with fewer, or without a title, are left out: nobody could be asked about them.

    Raises:
      UserError: fewer passages than asked for.
    """
    sample: Lowest[dict[str, Any]] = Lowest(count)
    dropped: collections.Counter[str] = collections.Counter()
    for line, record in passages:
        title, text = split(record.contents)
        if not title.strip() or len(text.split()) < least_words:
            dropped['too_short' if title.strip() else 'no_title'] += 1
            continue
        at = key(seed, record.id)
        if sample.admits(at):
            sample.put(
                at, dict(title=title, text=text, source=source, document_id=record.id, line=line)
            )
    chosen = sample.ordered()
    if len(chosen) < count:
        raise UserError(
            f'{source}: {len(chosen)} passages can be used ({_shown(dropped)}), not {count}; lower --count'
        )
    assigned = np.repeat(np.arange(len(hops)) + 1, stratify(hops, count))
    for i, (document, n) in enumerate(zip(chosen, assigned, strict=True)):
        document['hops'] = int(n)
        if kinds:
            document['type'] = kinds[i % len(kinds)]
    return Built([chosen[i] for i in identity_rng(seed).permutation(count)], dropped)


def _shown(dropped: collections.Counter[str]) -> str:
    return (
        ', '.join(f'{n} {reason}' for reason, n in sorted(dropped.items()) if n)
        or 'nothing left out'
    )
