"""Lexical hashing encoder: maps names and short texts to unit vectors, without training and without a corpus.

A word is a bag of features: the word itself and its character n-grams with marked boundaries, so that a misspelt
name is still close to the correct one. Every feature is hashed (BLAKE2b, equal in every process and on every
machine) to a few signed components of the vector: feature hashing (Weinberger et al. 2009, arXiv:0902.2206) with
several components per feature (Kane and Nelson 2014, arXiv:1012.1577), so that a single collision does not decide a
ranking. A text is the normalised sum of its words; a passage is the weighted sum of its title and its body.

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
from jaxtyping import Float32, Float64

from .types import split

# Longer runs of letters are cut: this bounds the work and the cache for any text a policy writes.
_WORD = re.compile(r'\w{1,32}')
_SYMBOL = re.compile(r'\S')

# Words whose vectors are cached.
_CACHED_WORDS = 1 << 14
# Bytes of a hash per component: one bit for the sign, the others for the position.
_HASH_BYTES = 4
# Lengths of the character n-grams, boundary marks included.
_NGRAMS = (2, 3)
# Share of a word's squared norm that belongs to the whole word; the n-grams share the remainder.
_WORD_SHARE = 0.5
# Norm of the title's vector, where the body's is 1.
_TITLE_WEIGHT = 0.8
# Weight of words such as 'the' and 'of', where any other word has 1.
_COMMON_WEIGHT = 0.1
# Signed components per feature.
_PLACES = 4

# Words that are not part of a name. Their weight is small but not 0, so that a query of only such words has a vector.
_COMMON = frozenset(
    'a about an and are as at be by did do does for from had has have he her his how i in into is it its '
    'me of on or she that the their them they this to was were what when where which who whom whose why '
    'will with'.split()
)


class LexicalEncoder:
    """Encodes names and short texts; a pure function of the text and of the dimension.

    Args:
      dimension: D. Scores of unrelated texts scatter around 0 by about 1/√D.
    """

    def __init__(self, dimension: int = 1024):
        self.dimension = dimension
        self.settings: dict[str, Any] = {
            'kind': 'lexical',
            'dimension': dimension,
            'ngrams': list(_NGRAMS),
            'word_share': _WORD_SHARE,
            'title_weight': _TITLE_WEIGHT,
            'common_weight': _COMMON_WEIGHT,
            'places': _PLACES,
        }
        # Each encoder has its own cache, because encoders of different dimensions give different vectors.
        self._cached_word_vector = functools.lru_cache(maxsize=_CACHED_WORDS)(self._word_vector)

    def encode_passages(
        self, titles: Sequence[str], texts: Sequence[str]
    ) -> Float32[np.ndarray, 'passages dimension']:
        """Returns unit vectors of passages, float32 [N, D]; 0 for a blank passage, which indexes refuse."""
        vectors = np.empty((len(titles), self.dimension), np.float32)
        for row, (title, text) in enumerate(zip(titles, texts, strict=True)):
            # The norm of the body is shared by all of its words, so that a name counts for more in a title than in a
            # body, but a search for it also finds the passages that mention it.
            vectors[row] = _unit(_TITLE_WEIGHT * self._text_vector(title) + self._text_vector(text))
        return vectors

    def encode(self, texts: Iterable[str]) -> Float32[np.ndarray, 'passages dimension']:
        """Returns unit vectors of passages in wire form, float32 [N, D]."""
        titles = []
        bodies = []
        for text in texts:
            title, body = split(text)
            titles.append(title)
            bodies.append(body)
        return self.encode_passages(titles, bodies)

    def encode_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, 'queries dimension']:
        """Returns unit vectors of queries, float32 [Q, D]; 0 for a blank query, which indexes refuse."""
        vectors = np.empty((len(queries), self.dimension), np.float32)
        for row, query in enumerate(queries):
            vectors[row] = self._text_vector(query)
        return vectors

    def _text_vector(self, text: str) -> Float64[np.ndarray, ' dimension']:
        """Returns the unit vector of a text; zeros if no character of it is visible."""
        counts: dict[str, int] = {}
        decomposed = unicodedata.normalize('NFKD', text).casefold()
        letters = ''.join(c for c in decomposed if not unicodedata.combining(c))
        # Without case and accents; a text without words has its single symbols.
        for word in _WORD.findall(letters) or _SYMBOL.findall(text):
            counts[word] = counts.get(word, 0) + 1
        total = np.zeros(self.dimension)
        for word, count in counts.items():
            # Sublinear term frequency: a word that repeats ten times does not drown the others.
            weight = 1.0 + math.log(count)
            if word in _COMMON:
                weight = _COMMON_WEIGHT
            total += weight * self._cached_word_vector(word)
        return _unit(total)

    def _word_vector(self, word: str) -> Float64[np.ndarray, ' dimension']:
        """Returns the vector of one word, of norm about 1: the sum of its features, the word and its n-grams.

        The prefixes 'w' and 'g' keep a word and an n-gram of the same letters apart.
        """
        marked_word = f'<{word}>'
        ngram_features = []
        for length in _NGRAMS:
            for start in range(len(marked_word) - length + 1):
                ngram_features.append(f'g{marked_word[start : start + length]}')
        vector = np.zeros(self.dimension)
        self._add_features(vector, [f'w{word}'], math.sqrt(_WORD_SHARE))
        # Features are nearly orthogonal, so squared norms add up: n of them at √(share / n) have the norm √share.
        ngram_weight = math.sqrt((1 - _WORD_SHARE) / max(1, len(ngram_features)))
        self._add_features(vector, ngram_features, ngram_weight)
        # The cache returns the same array to every caller.
        vector.flags.writeable = False
        return vector

    def _add_features(
        self, vector: Float64[np.ndarray, ' dimension'], features: Iterable[str], weight: float
    ) -> None:
        """Adds each feature to `vector` in place: `_PLACES` components of equal size at hashed positions and signs.

        Args:
          vector: changed in place.
          features: texts that are hashed.
          weight: norm of a feature.
        """
        size = weight / math.sqrt(_PLACES)
        for feature in features:
            # A policy can write a lone surrogate, which plain UTF-8 refuses to encode.
            key = feature.encode('utf-8', 'surrogatepass')
            digest = hashlib.blake2b(key, digest_size=_HASH_BYTES * _PLACES).digest()
            for start in range(0, len(digest), _HASH_BYTES):
                value = int.from_bytes(digest[start : start + _HASH_BYTES], 'little')
                position = (value >> 1) % self.dimension
                if value & 1:
                    vector[position] += size
                else:
                    vector[position] -= size


def _unit(vector: Float64[np.ndarray, ' dimension']) -> Float64[np.ndarray, ' dimension']:
    """Returns the vector scaled to norm 1; zeros stay zeros."""
    # NumPy's own sum has a fixed order; a BLAS product may sum differently from machine to machine.
    norm = math.sqrt(np.sum(vector * vector))
    if norm > 0:
        return vector / norm
    return vector
