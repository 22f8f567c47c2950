"""The miniature world: a small encyclopedia by seed, in plain English, whose names occur nowhere else.

A world holds people, cities, countries, books, companies, rivers and currencies. Each has a passage of a title
and two or three short sentences; the value stands last in its sentence. Questions name a relation of a relation
of an entity, one to four hops deep, so the truth of any question in that form can be looked up (`resolve`).

Names are pronounceable inventions. A hash splits them between training and evaluation, and the worlds of a
split share them out, so that no name occurs twice: one index can hold the passages of many worlds.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import zlib
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.types import UserError

Step = tuple[str, str, str]  # entity, relation, value

JOBS = 'poet painter chemist judge sailor singer farmer pilot baker dancer'.split()
PRODUCTS = 'clocks ships paper glass candles shoes lamps bread carpets bells'.split()
METALS = 'gold silver copper iron bronze nickel'.split()
CLOSED = {'job': JOBS, 'goods': PRODUCTS, 'metal': METALS}

# kind → relation → (sentence, kind of the value). {s} is the name or, after the first sentence, a pronoun.
RELATIONS = {
    'person': {
        'birthplace': ('{s} was born in {v}.', 'city'),
        'teacher': ('{s} studied under {v}.', 'person'),
        'job': ('{s} worked as a {v}.', 'job'),
    },
    'city': {
        'country': ('{s} is a city in {v}.', 'country'),
        'river': ('{s} lies on the river {v}.', 'river'),
        'mayor': ('{s} is led by {v}.', 'person'),
    },
    'country': {
        'capital': ('{s} is ruled from {v}.', 'city'),
        'currency': ('{s} pays with the {v}.', 'currency'),
        'language': ('{s} speaks {v}.', 'language'),
    },
    'book': {
        'author': ('{s} was written by {v}.', 'person'),
        'publisher': ('{s} was printed by {v}.', 'company'),
    },
    'company': {
        'founder': ('{s} was founded by {v}.', 'person'),
        'headquarters': ('{s} has its offices in {v}.', 'city'),
        'product': ('{s} makes {v}.', 'goods'),
    },
    'river': {
        'source': ('{s} rises at {v}.', 'mountain'),
        'mouth': ('{s} flows into {v}.', 'lake'),
    },
    'currency': {
        'designer': ('{s} was drawn by {v}.', 'person'),
        'metal': ('{s} is struck in {v}.', 'metal'),
    },
}
RELATION_NAMES = tuple(relation for kind in RELATIONS.values() for relation in kind)
COUNTS = dict(person=32, city=19, country=8, book=15, company=13, river=11, currency=8)
LEAVES = dict(language=8, mountain=10, lake=10)  # named things without a passage of their own

# Invented syllables sometimes spell a real person, place or rude word.
BLOCKED = frozenset(
    'Putin Lenin Stalin Biden Modi Sunak Macron Merkel Rubin Solon Platon Milan Paris Turin Roma Lima Bonn Bali '
    'Mali Male Nice Kiel Graz Tokio Rodin Dali Miro Monet Manet Verdi Bizet Ravel Satan Penis Semen Puta Kaka '
    'Titan Denis Robin Roman Simon Simin Selim Karin Marin Maris Doris Boris Loris Moris Turan Sudan Bruno '
    'Diana Marina Sabin Salim Samir Mario Maria Peron Peres Rabin Begin Mandel Tito Kadar Sade Nero Remus '
    'Moron Nazi Nazis Pedo Rape Rapes Rapist Homo Homos Jesus Moses Judas Jonas Lukas Tobin Soros Bezos Gates'.split()
)


# A name is a head and a tail; a tail is a consonant and an ending. The head tells the kind, as the sound of a
# name tells a river from a person.
_ONSETS = 'B D F G H J K L M N P R S T V Z Br Dr Fr Gr Kr Pl Sk Tr St Bl'.split()
HEADS = tuple(onset + vowel for vowel in 'aeiou' for onset in _ONSETS)
CONSONANTS = 'bdfgklmnprstvz'
_ENDINGS = tuple(vowel + coda for coda in ('', 'n', 's') for vowel in 'aeiou')
TAILS = tuple(consonant + ending for consonant in CONSONANTS for ending in _ENDINGS)
_HELD_OUT = 0.28  # share of the names that only evaluation worlds use


@functools.cache
def _heads() -> dict[str, tuple[str, ...]]:
    """Kind → the heads of its names, in proportion to how many a world needs."""
    counts = {**COUNTS, **LEAVES}
    edges = np.round(np.cumsum([0, *counts.values()]) * len(HEADS) / sum(counts.values())).astype(
        int
    )
    order = [HEADS[i] for i in np.random.default_rng(0).permutation(len(HEADS))]
    return {
        kind: tuple(order[a:b])
        for kind, (a, b) in zip(counts, itertools.pairwise(edges), strict=True)
    }


@functools.cache
def _pool(split: str, kind: str) -> tuple[tuple[str, str], ...]:
    """Pairs of names that differ in one or two letters, in a fixed order; a name is in one pair only."""
    pairs = []
    for head, consonant in itertools.product(_heads()[kind], CONSONANTS):
        names = [head + consonant + ending for ending in _ENDINGS]
        names = [name for name in names if name not in BLOCKED]
        names.sort(key=lambda name: zlib.crc32(name.encode()))
        pairs += zip(names[::2], names[1::2], strict=False)
    pairs.sort(key=lambda pair: hashlib.blake2b('|'.join(pair).encode()).digest())
    held_out = int(_HELD_OUT * len(pairs))
    return tuple(pairs[:held_out] if split == 'evaluation' else pairs[held_out:])


@dataclasses.dataclass(frozen=True)
class Passage:
    """One document. id: unique over all worlds ('train-0-17'); title: the name; text: 2–3 sentences."""

    id: str
    title: str
    text: str


class World:
    """One encyclopedia, a pure function of its arguments.

    Attributes:
      passages: list of Passage, in a shuffled order.
      facts: title → relation → value, for every passage (near misses included).
      kinds: title → kind.
      near: near-miss title → the title that it resembles.
    """

    def __init__(self, seed: int, split: str = 'train', near_misses: float = 0.25, deal: int = 0):
        """Builds the world. Raises ValueError for an unknown split, a bad share or a seed beyond the name pool.

        Args:
          seed: which world, from 0; the worlds of a split never share a name.
          split: 'train' or 'evaluation'; their names never overlap.
          near_misses: share of entities that get a further document with a look-alike title and other facts.
          deal: which facts the same names get (the base checkpoint learns from deals other than 0).
        """
        if split not in ('train', 'evaluation'):
            raise UserError(f"World(split={split!r}): no such split; give 'train' or 'evaluation'")
        if not 0 <= near_misses <= 1:
            raise UserError(f'World(near_misses={near_misses}): a share; give a number from 0 to 1')
        if not 0 <= seed < worlds_available(split):
            raise UserError(
                f'World(seed={seed}, split={split!r}): the names suffice for seeds 0 to {worlds_available(split) - 1}'
            )
        self.seed, self.split = seed, split
        self._rng = np.random.default_rng([seed, split == 'evaluation', deal])
        self._members, look_alikes = {}, {}
        for kind, count in {**COUNTS, **LEAVES}.items():
            pairs = _pool(split, kind)[seed * count : (seed + 1) * count]
            self._members[kind] = [name for name, _ in pairs]
            look_alikes.update(pairs)
        self.facts, self.kinds, self.near = {}, {}, {}
        for kind in RELATIONS:
            for name in self._members[kind]:
                self._add(name, kind)
        entities = list(self.facts)
        for i in self._rng.permutation(len(entities))[: round(near_misses * len(entities))]:
            name = entities[i]
            self.near[look_alikes[name]] = name
            self._add(look_alikes[name], self.kinds[name], unlike=self.facts[name])
        titles = [list(self.facts)[i] for i in self._rng.permutation(len(self.facts))]
        self.titles = tuple(titles)
        self.passages = [
            Passage(f'{split}-{seed}-{i}', title, self._text(title))
            for i, title in enumerate(titles)
        ]

    def _choice(self, values):
        return values[int(self._rng.integers(len(values)))]

    def _add(self, name, kind, unlike=None):
        self.kinds[name], self.facts[name] = kind, {}
        for relation, (_, value_kind) in RELATIONS[kind].items():
            taken = {name, (unlike or {}).get(relation)}
            values = [
                v for v in CLOSED.get(value_kind) or self._members[value_kind] if v not in taken
            ]
            self.facts[name][relation] = self._choice(values)

    def _text(self, name):
        kind = self.kinds[name]
        pronoun = self._choice(('He', 'She')) if kind == 'person' else 'It'
        relations = list(RELATIONS[kind].items())
        sentences = []
        for i in self._rng.permutation(len(relations)):
            relation, (sentence, _) = relations[i]
            sentences.append(
                sentence.format(s=pronoun if sentences else name, v=self.facts[name][relation])
            )
        return ' '.join(sentences)

    def chain(
        self, hops: int, rng: np.random.Generator, start: str | None = None
    ) -> list[Step] | None:
        """Draws a chain of facts: [(entity, relation, value), …], each value the next entity.

        Args:
          hops: its length, at least 1.
          rng: where the draw comes from.
          start: title of the first entity; any if None.

        Returns:
          A chain in which nothing is visited twice and whose question does not contain its answer, or None
          when no such chain starts there.
        """
        starts = (
            [start]
            if start is not None
            else [self.titles[i] for i in rng.permutation(len(self.titles))]
        )
        for title in starts:
            if found := self._extend([], title, hops, rng):
                return found
        return None

    def _extend(self, steps, entity, hops, rng):
        relations = list(self.facts.get(entity, ()))
        for i in rng.permutation(len(relations)):
            value = self.facts[entity][relations[i]]
            chain = [*steps, (entity, relations[i], value)]
            if any(value == e for e, _, _ in chain):
                continue
            if hops == 1:
                if value.lower() not in question(chain).lower():
                    return chain
            elif found := self._extend(chain, value, hops - 1, rng):
                return found
        return None

    def resolve(self, text: str) -> tuple[str | None, int]:
        """Truth of a question in the world's form: (answer or None, hops). For diagnostics and tests only."""
        match = re.fullmatch(r'What is ((?:the \w+ of )+)(\w+)\?', text.strip())
        if not match:
            return None, 0
        relations = re.findall(r'the (\w+) of', match[1])
        value = match[2]
        for relation in reversed(relations):
            value = self.facts.get(value, {}).get(relation)
        return value, len(relations)


def worlds_available(split: str) -> int:
    """How many worlds the names of a split suffice for."""
    return min(len(_pool(split, kind)) // count for kind, count in {**COUNTS, **LEAVES}.items())


def phrase(chain: Sequence[Step]) -> str:
    """The noun phrase of a chain: 'the birthplace of the author of Gumu'."""
    return ' '.join(f'the {relation} of' for _, relation, _ in reversed(chain)) + f' {chain[0][0]}'


def question(chain: Sequence[Step]) -> str:
    """The question that a chain answers with its last value: 'What is the birthplace of the author of Gumu?'."""
    return f'What is {phrase(chain)}?'


def rubrics_of(text: str) -> list[dict]:
    """One rubric {'text', 'priority'} per sentence of a passage: to state it."""
    sentences = [s.strip().rstrip('.') for s in text.split('. ') if s.strip()]
    return [{'text': f'State that {s}.', 'priority': 'important'} for s in sentences]


def evaluation_questions(
    worlds: Sequence[World], per_hop: int, hops: Sequence[int] = (1, 2, 3, 4), seed: int = 0
) -> list[dict]:
    """Distinct questions with known answers, spread evenly over the worlds.

    Args:
      worlds: where they are asked.
      per_hop: questions per hop count.
      hops: hop counts.
      seed: of the draw.

    Returns:
      List of {'question': str, 'answers': [str], 'hops': int, 'world': int seed}, hop counts in the order given.
      Raises ValueError when the worlds do not hold that many distinct questions.
    """

    def draw(world, count, rng):
        chain = world.chain(count, rng)
        return chain and dict(question=question(chain), answers=[chain[-1][2]])

    return _distinct(draw, 'question', worlds, per_hop, hops, seed)


def evaluation_tasks(
    worlds: Sequence[World], per_hop: int, hops: Sequence[int] = (1, 2, 3, 4), seed: int = 0
) -> list[dict]:
    """Distinct open tasks: to describe what a chain of facts ends at.

    Args:
      worlds, per_hop, seed: as for `evaluation_questions`.
      hops: how many passages one reads on the way, the described one included.

    Returns:
      List of {'question': the task, 'rubrics': a fact of the passage each, 'answers': [], 'hops': int, 'world': int}.
      Raises ValueError when the worlds do not hold that many distinct tasks.
    """

    def draw(world, count, rng):
        if count == 1:
            title = named = world.titles[int(rng.integers(len(world.titles)))]
        else:
            chain = world.chain(count - 1, rng)
            if chain is None or chain[-1][2] not in world.facts:  # a value without a passage
                return None
            title, named = chain[-1][2], phrase(chain)
        text = next(p.text for p in world.passages if p.title == title)
        return dict(question=f'Describe {named}.', rubrics=rubrics_of(text), answers=[])

    return _distinct(draw, 'task', worlds, per_hop, hops, seed)


def _distinct(draw, noun, worlds, per_hop, hops, seed) -> list[dict]:
    found = []
    for count in hops:
        rng = np.random.default_rng([seed, count])
        seen: set[str] = set()
        for attempt in range(20 * per_hop):
            if len(seen) == per_hop:
                break
            world = worlds[attempt % len(worlds)]
            item = draw(world, count, rng)
            if item is None or item['question'] in seen:
                continue
            seen.add(item['question'])
            found.append(item | dict(hops=count, world=world.seed))
        if len(seen) < per_hop:
            raise UserError(
                f'evaluation_{noun}s: {len(worlds)} worlds gave only {len(seen)} distinct {count}-hop {noun}s '
                f'of {per_hop}; give more worlds or ask for fewer {noun}s'
            )
    return found
