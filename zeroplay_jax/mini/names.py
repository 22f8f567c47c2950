"""Invented, pronounceable names for the miniature world, split between training and evaluation.

A name is a head ('Bra') and a tail ('min'); the tail is a consonant and an ending. Each kind of thing has its own
heads, so a name reveals its kind, as the sound of a real name tells a river from a person.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.random import Generator

# Kind → names in one world. Languages, mountains and lakes are values of relations and have no passage.
NAMES_PER_WORLD = {
    'person': 32,
    'city': 19,
    'country': 8,
    'book': 15,
    'company': 13,
    'river': 11,
    'currency': 8,
    'language': 8,
    'mountain': 10,
    'lake': 10,
}

# Invented syllables sometimes spell a real person, place or rude word.
BLOCKED = frozenset(
    'Putin Lenin Stalin Biden Modi Sunak Macron Merkel Rubin Solon Platon Milan Paris Turin Roma Lima Bonn Bali '
    'Mali Male Nice Kiel Graz Tokio Rodin Dali Miro Monet Manet Verdi Bizet Ravel Satan Penis Semen Puta Kaka '
    'Titan Denis Robin Roman Simon Simin Selim Karin Marin Maris Doris Boris Loris Moris Turan Sudan Bruno '
    'Diana Marina Sabin Salim Samir Mario Maria Peron Peres Rabin Begin Mandel Tito Kadar Sade Nero Remus '
    'Moron Nazi Nazis Pedo Rape Rapes Rapist Homo Homos Jesus Moses Judas Jonas Lukas Tobin Soros Bezos Gates'.split()
)

VOWELS = 'aeiou'
CONSONANTS = 'bdfgklmnprstvz'
_ONSETS = 'B D F G H J K L M N P R S T V Z Br Dr Fr Gr Kr Pl Sk Tr St Bl'.split()
_ENDINGS = tuple(vowel + coda for coda in ('', 'n', 's') for vowel in VOWELS)
HEADS = tuple(onset + vowel for vowel in VOWELS for onset in _ONSETS)
TAILS = tuple(consonant + ending for consonant in CONSONANTS for ending in _ENDINGS)

# Share of the name pairs that only evaluation worlds use.
_EVALUATION_SHARE = 0.28


@functools.cache
def _heads_by_kind() -> dict[str, tuple[str, ...]]:
    """Returns kind → heads of its names; a kind has as large a share of HEADS as of the names in one world."""
    counts = np.array(list(NAMES_PER_WORLD.values()))
    cumulative_counts = np.cumsum([0, *counts])
    exact_boundaries = cumulative_counts * len(HEADS) / counts.sum()
    boundaries = np.round(exact_boundaries).astype(int)
    # Shuffled, because otherwise most names of a kind would share their first vowel.
    shuffled_heads = shuffled(np.random.default_rng(0), HEADS)
    heads = {}
    for i, kind in enumerate(NAMES_PER_WORLD):
        heads[kind] = tuple(shuffled_heads[boundaries[i] : boundaries[i + 1]])
    return heads


@functools.cache
def name_pairs(split: str, kind: str) -> tuple[tuple[str, str], ...]:
    """Returns all pairs of similar names of a kind, in a fixed order.

    The names of a pair share their head and consonant and differ in one or two letters. No name is in two pairs.

    Args:
      split: 'train' or 'evaluation'; their names are disjoint.
      kind: a key of `NAMES_PER_WORLD`.
    """
    pairs: list[tuple[str, str]] = []
    heads = _heads_by_kind()[kind]
    for head, consonant in itertools.product(heads, CONSONANTS):
        names = []
        for ending in _ENDINGS:
            name = head + consonant + ending
            if name not in BLOCKED:
                names.append(name)
        # Sorted by a checksum: in the order of the endings, the same endings would form a pair everywhere.
        names.sort(key=lambda name: zlib.crc32(name.encode()))
        # With an odd number of names the last one stays unused.
        pairs.extend(zip(names[::2], names[1::2], strict=False))
    # Sorting by a hash shuffles the pairs in the same way on every machine.
    pairs.sort(key=lambda pair: hashlib.blake2b('|'.join(pair).encode()).digest())
    evaluation_count = int(_EVALUATION_SHARE * len(pairs))
    if split == 'evaluation':
        return tuple(pairs[:evaluation_count])
    return tuple(pairs[evaluation_count:])


T = TypeVar('T')


def pick(rng: Generator, values: Sequence[T]) -> T:
    """Returns one of the values with equal probability."""
    # Generator.choice would convert the values into a NumPy array and return NumPy strings.
    index = int(rng.integers(len(values)))
    return values[index]


def shuffled(rng: Generator, values: Sequence[T]) -> list[T]:
    """Returns the values in random order."""
    order = rng.permutation(len(values))
    return [values[i] for i in order]
