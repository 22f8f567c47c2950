"""Indexes: queries in, passages out, and a query's answer depends on the query alone.

Every query is searched by itself: a first step proposes candidates (a scan, or ScaNN's tree and hashing;
Guo et al. 2020, arXiv:1908.10396), a second scores them again in float64 in one fixed order. Equal scores go
to the lower id. Neither the queries beside it, nor their number, nor the thread it runs on change an answer.

Letters: N passages, Q queries, D dimension, C candidates of one query.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np

# ScaNN learns √N leaves and 16 hash centres per block: from fewer passages both are noise; a scan is faster.
SCANN_MINIMUM = 1_000

# Float32 dot products of unit vectors are this near to exact up to D ≈ 1,600 (rounding bound D·2⁻²⁴).
_MARGIN = 1e-4

Passage = dict[str, Any]


class Encoder(Protocol):
    """Text to unit vectors. A query's vector must not depend on the queries beside it."""

    dimension: int

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """float32 [N, D]."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """float32 [Q, D]."""
        ...


class Index(Protocol):
    """What a search tool needs. Safe to call from several threads."""

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [Q, k], scores float32 [Q, k]), best first."""
        ...

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """{'id', 'title', 'text'} of each id."""
        ...


class ExactIndex:
    """Scores every passage: the truth other indexes are measured by, and the way through a small corpus."""

    def __init__(self, encoder: Encoder, titles: Sequence[str], texts: Sequence[str], vectors: np.ndarray):
        """Takes passages and their vectors (float32 [N, D]); `build` encodes them.

        Raises:
          ValueError: no passages, another shape, or a vector that is not finite and of length 1 (named).
        """
        if not len(titles) or vectors.shape != (len(titles), encoder.dimension) or len(texts) != len(titles):
            raise ValueError(
                f'index: {len(titles)} titles, {len(texts)} texts and vectors of shape {vectors.shape} for '
                f'dimension {encoder.dimension}; give at least one passage, and a title, text and vector each'
            )
        bad = np.flatnonzero(~_is_unit(vectors))
        if bad.size:
            raise ValueError(
                f'index: the vector of passage {bad[0]}, {_short(titles[bad[0]])}, and {bad.size - 1} more '
                'are not finite and of length 1; mend the encoder or leave the passages out'
            )
        self.encoder = encoder
        self.parameters: dict[str, Any] = {'kind': 'exact', 'passages': len(titles)}
        self._titles, self._texts = list(titles), list(texts)
        self._vectors = np.ascontiguousarray(vectors, np.float32)

    @classmethod
    def build(cls, encoder: Encoder, titles: Sequence[str], texts: Sequence[str], **parameters: Any) -> Self:
        """Encodes N passages, whose places 0 … N−1 are their ids; `parameters` as of the class."""
        return cls(encoder, titles, texts, encoder.encode_passages(titles, texts), **parameters)

    def __len__(self) -> int:
        return len(self._titles)

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest passages of each query.

        Args:
          queries: Q texts, none blank.
          k: passages per query, 1 … N.

        Returns:
          ids int64 [Q, k] and scores float32 [Q, k] (cosine), best first, equal scores by lower id.

        Raises:
          ValueError: k outside 1 … N; a query that is blank or whose vector is zero or not finite (names it).
        """
        if isinstance(queries, str):
            raise ValueError(f'search: queries is the single text {_short(queries)}; give a list of texts')
        if not 1 <= k <= len(self):
            raise ValueError(f'search: k is {k}, but must lie between 1 and the number of passages, {len(self)}')
        for row, query in enumerate(queries):
            if not query.strip():
                raise ValueError(f'search: query {row} of {len(queries)} is empty: {_short(query)}; leave it out')
        vectors = np.ascontiguousarray(self.encoder.encode_queries(queries), np.float32)
        bad = np.flatnonzero(~_is_unit(vectors))
        if bad.size:
            raise ValueError(
                f'search: the vector of query {bad[0]} of {len(queries)}, {_short(queries[bad[0]])}, is '
                'zero, not finite or not of length 1; leave the query out or mend the encoder'
            )
        ids = np.empty((len(queries), k), np.int64)
        scores = np.empty((len(queries), k), np.float32)
        for row, vector in enumerate(vectors):
            ids[row], scores[row] = self._rank(vector, self._candidates(vector, k), k)
        return ids, scores

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """The passages of some ids, each {'id': int, 'title': str, 'text': str}.

        Raises:
          ValueError: an id outside 0 … N−1.
        """
        found = []
        for number in ids:
            at = int(number)
            if not 0 <= at < len(self):
                raise ValueError(f'passages: no passage has id {at}; ids lie between 0 and {len(self) - 1}')
            found.append({'id': at, 'title': self._titles[at], 'text': self._texts[at]})
        return found

    def _candidates(self, vector: np.ndarray, k: int) -> np.ndarray:
        """Ids of all passages that can be among the best k, int64 [C]: a float32 scan, less its rounding."""
        rough = self._vectors @ vector
        return np.flatnonzero(rough >= np.partition(rough, -k)[-k] - 2 * _MARGIN)

    def _rank(self, vector: np.ndarray, candidates: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores candidates [C] exactly and keeps the best k: ids int64 [k], scores float32 [k]."""
        products = self._vectors[candidates].astype(np.float64) * vector
        scores = products.sum(axis=1).astype(np.float32)
        best = np.lexsort((candidates, -scores))[:k]
        return candidates[best], scores[best]


class ScannIndex(ExactIndex):
    """ScaNN proposes candidates by tree, asymmetric hashing and reordering; these are scored again exactly.

    ScaNN holds every distinct vector once, so passages of equal vectors tie whatever its hashing does. The
    same passages give the same index in every process. With fewer than `SCANN_MINIMUM` distinct vectors there
    is too little to learn from: the index scans all passages, `parameters['kind']` says 'exact', and a log
    line tells it.
    """

    def __init__(
        self,
        encoder: Encoder,
        titles: Sequence[str],
        texts: Sequence[str],
        vectors: np.ndarray,
        overfetch: int = 32,
        leaves: int | None = None,
        leaves_searched: int | None = None,
    ):
        """Trains the index on passages and their vectors (float32 [N, D]); `build` encodes them.

        Args:
          encoder, titles, texts, vectors: see `ExactIndex`.
          overfetch: candidates per query that are scored again exactly (more where k asks for more).
          leaves: partitions of the tree; None: √N.
          leaves_searched: partitions read per query; None: 8·√leaves, that is all of them at N = 1,000, nine
            in ten at 6,000, four in ten at 200,000, one in eight at 20 million.

        Raises:
          ValueError: bad passages or vectors (see `ExactIndex`), or a parameter outside its range.
        """
        super().__init__(encoder, titles, texts, vectors)
        groups: dict[bytes, list[int]] = {}
        for row, vector in enumerate(self._vectors):
            groups.setdefault(vector.tobytes(), []).append(row)
        self._groups = [np.array(rows, np.int64) for rows in groups.values()]
        distinct = self._vectors[[rows[0] for rows in self._groups]]
        leaves = leaves or max(1, math.isqrt(len(distinct)))
        leaves_searched = leaves_searched or min(leaves, math.ceil(8 * math.sqrt(leaves)))
        if overfetch < 1 or not 1 <= leaves_searched <= leaves <= len(distinct):
            raise ValueError(
                f'ScannIndex: overfetch {overfetch}, leaves {leaves}, leaves_searched {leaves_searched} with '
                f'{len(distinct)} vectors: needs overfetch ≥ 1 and 1 ≤ leaves_searched ≤ leaves ≤ vectors'
            )
        self._overfetch = overfetch
        self._searcher = None
        if len(distinct) < SCANN_MINIMUM:
            logging.info(
                'search: %d distinct passages, fewer than %d: scanned exactly, without ScaNN',
                len(distinct),
                SCANN_MINIMUM,
            )
            return
        self._searcher = _searcher(distinct, overfetch, leaves, leaves_searched)
        self.parameters.update(
            kind='scann',
            distinct=len(distinct),
            leaves=leaves,
            leaves_searched=leaves_searched,
            overfetch=overfetch,
        )

    def _candidates(self, vector: np.ndarray, k: int) -> np.ndarray:
        """Ids of the passages ScaNN finds nearest, int64 [C ≥ k]; of equal vectors the k lowest ids."""
        if self._searcher is None:
            return super()._candidates(vector, k)
        wanted = max(self._overfetch, 2 * k)
        # One query per call: a batched call may share work between queries, and with it their rounding.
        found, _ = self._searcher.search(vector, wanted, 4 * wanted)
        candidates = np.concatenate([self._groups[group][:k] for group in found] or [np.empty(0, np.int64)])
        # Too few passages in the leaves that were read: only a scan can still answer.
        return candidates if candidates.size >= k else super()._candidates(vector, k)


def _searcher(vectors: np.ndarray, overfetch: int, leaves: int, leaves_searched: int) -> Any:
    """Trains ScaNN on distinct unit vectors, float32 [N, D]."""
    # Here and not above: ScaNN brings TensorFlow, which an exact index has no use for.
    import tensorflow as tf
    from scann.scann_ops.py import scann_ops_pybind

    tf.config.set_visible_devices([], 'GPU')  # it would take all of their memory

    builder = scann_ops_pybind.builder(vectors, overfetch, 'dot_product')
    # Reproducible to the bit, as measured (README.md): k-means++ from ScaNN's fixed seed on one thread builds
    # the same index every time, a random start does not; with SOAR distances vary from call to call.
    builder.tree(
        leaves,
        leaves_searched,
        training_sample_size=min(len(vectors), 100_000),
        min_partition_size=10,
        random_init=False,
    )
    builder.score_ah(2, anisotropic_quantization_threshold=0.2)
    builder.reorder(4 * overfetch)
    return builder.set_n_training_threads(1).build()


def _is_unit(vectors: np.ndarray) -> np.ndarray:
    """Whether each vector [D] of [N, D] is finite and of length 1: bool [N]."""
    lengths = np.sqrt(np.einsum('nd,nd->n', vectors, vectors, dtype=np.float64))
    return np.abs(lengths - 1) < 1e-3  # False for NaN and infinity too


def _short(text: str) -> str:
    """A text for an error line."""
    return repr(text if len(text) <= 60 else text[:57] + '…')
