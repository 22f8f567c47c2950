"""Lexical hashing encoder: names and short texts to unit vectors, without training and without a corpus.

A word is a bag of features: itself, and its character n-grams with marked boundaries, so that a misspelt
name still lies near the right one. Every feature is hashed (BLAKE2b, the same in every process and on every
machine) to a few signed places of the vector: feature hashing (Weinberger et al. 2009, arXiv:0902.2206) with
several places per feature (Kane and Nelson 2014, arXiv:1012.1577), so that one collision decides no ranking.
A text is the sum of its words, of length 1; a passage is its title and its body. A body's length is shared by all of
its words, so a name counts for more in a title, but whoever searches for it also finds who mentions it.

Letters: N passages, Q queries, D dimension.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .corpus import split

# Longer runs of letters are read in pieces: bounds the work and the cache whatever a policy writes.
_WORD = re.compile(r'\w{1,32}')
_SYMBOL = re.compile(r'\S')

# Words that carry no name. They keep a little weight: a query of nothing else still has a direction.
_COMMON = frozenset(
    'a about an and are as at be by did do does for from had has have he her his how i in into is it its '
    'me of on or she that the their them they this to was were what when where which who whom whose why '
    'will with'.split()
)


class LexicalEncoder:
    """Encodes names and short texts; a pure function of the text and of the settings below.

    Args:
      dimension: D, at least 64. Scores of unrelated texts scatter around 0 by about 1/√D.
      ngrams: lengths of the character n-grams, counted with the boundary marks.
      word_share: share of a word's squared length that the whole word holds; its n-grams share the rest.
      title_weight: length of the title's vector where the body's is 1.
      common_weight: weight of words such as 'the' and 'of' where any other word has 1.
      places: signed places per feature.

    Raises:
      ValueError: a setting outside its range.
    """

    def __init__(
        self,
        dimension: int = 1024,
        ngrams: Sequence[int] = (2, 3),
        word_share: float = 0.5,
        title_weight: float = 0.8,
        common_weight: float = 0.1,
        places: int = 4,
    ):
        if dimension < 64 or places < 1 or not ngrams or min(ngrams) < 1:
            raise ValueError(
                f'LexicalEncoder: dimension {dimension}, places {places}, ngrams {tuple(ngrams)}: give '
                'a dimension of at least 64, at least one place and n-gram lengths of at least 1'
            )
        if not (0 < word_share < 1 and title_weight > 0 and common_weight > 0):
            raise ValueError(
                f'LexicalEncoder: word_share {word_share}, title_weight {title_weight}, common_weight '
                f'{common_weight}: the share must lie inside (0, 1) and the weights above 0'
            )
        self.dimension = dimension
        self.ngrams = tuple(ngrams)
        self.word_share = word_share
        self.title_weight = title_weight
        self.common_weight = common_weight
        self.places = places
        self.settings: dict[str, Any] = dict(
            kind='lexical',
            dimension=dimension,
            ngrams=list(ngrams),
            word_share=word_share,
            title_weight=title_weight,
            common_weight=common_weight,
            places=places,
        )
        self._word = functools.lru_cache(maxsize=1 << 14)(self._word_vector)

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """Unit vectors of passages: float32 [N, D].

        Raises:
          ValueError: titles and texts of unequal number, or a passage without any visible character.
        """
        if len(titles) != len(texts):
            raise ValueError(
                f'encode_passages: {len(titles)} titles but {len(texts)} texts; give one of each'
            )
        vectors = np.empty((len(titles), self.dimension), np.float32)
        for row, (title, text) in enumerate(zip(titles, texts, strict=True)):
            vector = _unit(self.title_weight * self._text(title) + self._text(text))
            if not vector.any():
                raise ValueError(
                    f'encode_passages: passage {row} has neither title nor text; leave it out'
                )
            vectors[row] = vector
        return vectors

    def encode(self, texts: Iterable[str]) -> np.ndarray:
        """Unit vectors of passages in wire form, float32 [N, D]."""
        pairs = [split(text) for text in texts]
        return self.encode_passages([title for title, _ in pairs], [text for _, text in pairs])

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Vectors of queries: float32 [Q, D], of length 1; 0 for a blank query, which indexes refuse."""
        vectors = np.empty((len(queries), self.dimension), np.float32)
        for row, query in enumerate(queries):
            vectors[row] = self._text(query)
        return vectors

    def _text(self, text: str) -> np.ndarray:
        """Unit vector of a text, float64 [D]; zeros when nothing in it is visible."""
        counts: dict[str, int] = {}
        for word in _words(text):
            counts[word] = counts.get(word, 0) + 1
        total = np.zeros(self.dimension)
        for word, count in counts.items():
            weight = self.common_weight if word in _COMMON else 1.0 + math.log(count)
            total += weight * self._word(word)
        return _unit(total)

    def _word_vector(self, word: str) -> np.ndarray:
        """Vector of one word, float64 [D], of length about 1."""
        marked = f'<{word}>'
        grams = [marked[at : at + n] for n in self.ngrams for at in range(len(marked) - n + 1)]
        vector = np.zeros(self.dimension)
        self._add(vector, [f'w{word}'], math.sqrt(self.word_share))
        self._add(
            vector,
            [f'g{gram}' for gram in grams],
            math.sqrt((1 - self.word_share) / max(1, len(grams))),
        )
        vector.flags.writeable = False
        return vector

    def _add(self, vector: np.ndarray, features: Iterable[str], weight: float) -> None:
        """Adds each feature at its signed places."""
        size = weight / math.sqrt(self.places)
        for feature in features:
            key = feature.encode('utf-8', 'surrogatepass')
            digest = hashlib.blake2b(key, digest_size=4 * self.places).digest()
            for at in range(0, len(digest), 4):
                value = int.from_bytes(digest[at : at + 4], 'little')
                vector[(value >> 1) % self.dimension] += size if value & 1 else -size


def _words(text: str) -> list[str]:
    """Words without case and accents; the single symbols of a text that has no word."""
    plain = unicodedata.normalize('NFKD', text).casefold()
    plain = ''.join(c for c in plain if not unicodedata.combining(c))
    return _WORD.findall(plain) or _SYMBOL.findall(text)


def _unit(vector: np.ndarray) -> np.ndarray:
    """The vector at length 1, or zeros. NumPy's own sum, whose order is fixed, and not a BLAS product's."""
    length = math.sqrt(np.sum(vector * vector))
    return vector / length if length > 0 else vector
