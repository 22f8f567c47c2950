"""Indexes of vectors: queries in, passages out, and a query's answer depends on the query alone.

A first step proposes candidates (a matrix product on the devices, or ScaNN's tree and hashing; Guo et al. 2020,
arXiv:1908.10396), a second scores them again in float64 in one fixed order. Equal scores go to the lower id. Neither
the queries beside it, nor their number, nor the thread it runs on change an answer.

Letters: N passages, Q queries, D dimension, C candidates of one query, G distinct vectors.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from .corpus import MemoryCorpus, Record
from .quiet import quiet
from .shards import is_unit
from .types import Encoder, Passage, RetrievalError, short
from .types import Index as Index

# ScaNN learns √N leaves and 16 hash centres per block: from fewer passages both are noise; a scan is faster.
SCANN_MINIMUM = 1_000

# Float32 dot products of unit vectors are this near to exact up to D ≈ 1,600 (rounding bound D·2⁻²⁴).
_MARGIN = 1e-4
# Queries that are scored in one device call; fewer are padded to a power of two.
_QUERIES = 64
# Candidates beyond k that the devices hand back; only more near-ties than that need a second look.
_SPARE = 16
# Queries whose candidates are rescored together: what fits into a core's cache.
_RESCORED = 16


class Passages(Protocol):
    """Where passages are read from (`MemoryCorpus`, `Corpus`)."""

    def __len__(self) -> int:
        """Number of passages, N."""
        ...

    def passage(self, number: int) -> Passage:
        """{'id', 'title', 'text'}."""
        ...

    def record(self, number: int) -> Record:
        """The passage as its source gave it."""
        ...


def check_queries(queries: Sequence[str], k: int, passages: int) -> None:
    """RetrievalError where k lies outside 1 … N or a query is blank (names it)."""
    if isinstance(queries, str):
        raise RetrievalError(
            f'search: queries is the single text {short(queries)}; give a list of texts'
        )
    if not 1 <= k <= passages:
        raise RetrievalError(
            f'search: k is {k}, but must lie between 1 and the number of passages, {passages}'
        )
    for row, query in enumerate(queries):
        if not query.strip():
            raise RetrievalError(
                f'search: query {row} of {len(queries)} is empty: {short(query)}; leave it out'
            )


def read_passages(source: Passages, ids: Sequence[int]) -> list[Passage]:
    """The passages of some ids; RetrievalError for an id outside 0 … N−1."""
    for number in ids:
        if not 0 <= number < len(source):
            raise RetrievalError(
                f'passages: no passage has id {number}; ids lie between 0 and {len(source) - 1}'
            )
    return [source.passage(int(number)) for number in ids]


class ExactIndex:
    """Scores every passage on the devices: the truth other indexes are measured by, and the way through a small corpus.

    The matrix lies on all devices of this process, split by rows.
    """

    def __init__(self, encoder: Encoder, corpus: Passages, vectors: np.ndarray):
        """Takes passages and their unit vectors ([N, D], float32 or float16); `build` encodes and checks them.

        Raises:
          RetrievalError: no passages, or vectors of another shape.
        """
        if not len(corpus) or vectors.shape != (len(corpus), encoder.dimension):
            raise RetrievalError(
                f'index: {len(corpus)} passages and vectors of shape {vectors.shape} for dimension '
                f'{encoder.dimension}; give at least one passage and one vector each'
            )
        self.encoder, self.corpus = encoder, corpus
        self.parameters: dict[str, Any] = {'kind': 'exact', 'passages': len(corpus)}
        self._vectors = vectors
        self._matrix: jax.Array | None = None

    @classmethod
    def build(
        cls, encoder: Encoder, titles: Sequence[str], texts: Sequence[str], **parameters: Any
    ) -> Self:
        """Encodes N passages, whose places 0 … N−1 are their ids; `parameters` as of the class."""
        corpus = MemoryCorpus(titles, texts)
        vectors = encoder.encode_passages(titles, texts)
        check_vectors(vectors, corpus)
        return cls(encoder, corpus, vectors, **parameters)

    def __len__(self) -> int:
        return len(self.corpus)

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest passages of each query.

        Args:
          queries: Q texts, none blank.
          k: passages per query, 1 … N.

        Returns:
          ids int64 [Q, k] and scores float32 [Q, k] (cosine), best first, equal scores by lower id.

        Raises:
          RetrievalError: k outside 1 … N; a query that is blank or whose vector is zero or not finite (names it).
        """
        check_queries(queries, k, len(self))
        vectors = np.ascontiguousarray(self.encoder.encode_queries(queries), np.float32)
        bad = np.flatnonzero(~is_unit(vectors))
        if bad.size:
            raise RetrievalError(
                f'search: the vector of query {bad[0]} of {len(queries)}, {short(queries[bad[0]])}, is '
                'zero, not finite or not of length 1; leave the query out or mend the encoder'
            )
        return self.search_vectors(vectors, k)

    def search_vectors(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The same for unit vectors of queries, float32 [Q, D]."""
        ids, scores = np.empty((len(vectors), k), np.int64), np.empty((len(vectors), k), np.float32)
        candidates = self._candidates(vectors, k)
        for at in range(0, len(vectors), _RESCORED):
            part = slice(at, at + _RESCORED)
            ids[part], scores[part] = self._rank(vectors[part], candidates[part], k)
        return ids, scores

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """The passages of some ids, each {'id': int, 'title': str, 'text': str}.

        Raises:
          RetrievalError: an id outside 0 … N−1.
        """
        return read_passages(self.corpus, ids)

    def _candidates(self, vectors: np.ndarray, k: int) -> list[np.ndarray]:
        """Per query the ids of all passages that can be among its best k, int64 [C]."""
        if self._matrix is None:
            self._matrix = _on_devices(self._vectors)
        wanted = min(1 << (k + _SPARE - 1).bit_length(), len(self))
        found = []
        for at in range(0, len(vectors), _QUERIES):
            part = vectors[at : at + _QUERIES]
            padded = np.zeros((1 << (len(part) - 1).bit_length(), vectors.shape[1]), np.float32)
            padded[: len(part)] = part
            rough, ids = (np.asarray(x) for x in _nearest(self._matrix, padded, wanted, len(self)))
            for row, vector in enumerate(part):
                enough = rough[row] >= rough[row, k - 1] - 2 * _MARGIN
                found.append(
                    ids[row][enough].astype(np.int64) if not enough.all() else self._scan(vector, k)
                )
        return found

    def _scan(self, vector: np.ndarray, k: int) -> np.ndarray:
        """Ids of all passages that can be among the best k, int64 [C]: a float32 scan, less its rounding."""
        rough = np.concatenate(
            [
                self._vectors[at : at + (1 << 16)].astype(np.float32, copy=False) @ vector
                for at in range(0, len(self), 1 << 16)
            ]
        )
        return np.flatnonzero(rough >= np.partition(rough, -k)[-k] - 2 * _MARGIN)

    def _rank(
        self, vectors: np.ndarray, candidates: list[np.ndarray], k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores the candidates of some queries exactly, keeps the best k: ids int64 [q, k], scores float32 [q, k]."""
        most = max(len(c) for c in candidates)
        ids = np.full((len(candidates), most), len(self), np.int64)
        for row, found in enumerate(candidates):
            ids[row, : len(found)] = found
        rows = self._vectors[np.minimum(ids, len(self) - 1)].astype(np.float64)  # [q, C, D]
        # NumPy's own sum along a row, whose order is fixed, and not a BLAS product's.
        scores = (rows * vectors[:, None, :]).sum(axis=2).astype(np.float32)
        scores[ids == len(self)] = -np.inf
        best = np.lexsort((ids, -scores), axis=1)[:, :k]
        return np.take_along_axis(ids, best, 1), np.take_along_axis(scores, best, 1)


def _on_devices(vectors: np.ndarray) -> jax.Array:
    """The matrix on all local devices, float32 [N', D], rows of zeros at the end where N does not divide."""
    devices = jax.local_devices()
    sharding = jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ('rows',)), jax.P('rows'))
    shape = (-(-len(vectors) // len(devices)) * len(devices), vectors.shape[1])

    def part(index):
        rows = np.asarray(vectors[index[0]], np.float32)  # only this device's rows are ever copied
        return np.pad(rows, ((0, shape[0] // len(devices) - len(rows)), (0, 0)))

    return jax.make_array_from_callback(shape, sharding, part)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _nearest(
    matrix: jax.Array, vectors: jax.Array, wanted: int, rows: int
) -> tuple[jax.Array, jax.Array]:
    """(scores float32 [Q, wanted], row numbers int32 [Q, wanted]) by falling score, of equal ones the lower row first.

    'highest' keeps a TPU or GPU from rounding the factors, which the margin of the callers does not allow for.
    """
    scores = jnp.matmul(vectors, matrix.T, precision='highest')
    return jax.lax.top_k(jnp.where(jnp.arange(len(matrix)) < rows, scores, -jnp.inf), wanted)


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
        corpus: Passages,
        vectors: np.ndarray,
        overfetch: int = 32,
        reordered: int | None = None,
        leaves: int | None = None,
        leaves_searched: int | None = None,
        threshold: float = 0.2,
        reorder: str = 'float32',
        saved: pathlib.Path | None = None,
    ):
        """Trains the index on passages and their vectors ([N, D]); `build` encodes them.

        Args:
          encoder, corpus, vectors: see `ExactIndex`.
          overfetch: candidates per query that are scored again exactly (more where k asks for more).
          reordered: candidates that ScaNN itself looks at twice, by its own copy of the vectors; None: 4·overfetch.
          leaves: partitions of the tree; None: √N.
          leaves_searched: partitions read per query; None: 8·√leaves, that is all of them at N = 1,000, nine
            in ten at 6,000, four in ten at 200,000, one in eight at 20 million.
          threshold: of anisotropic quantisation (ibid., section 3).
          reorder: float32 or bfloat16, what ScaNN keeps of a vector for its own second look.
          saved: a folder that `save` wrote, with the same settings: nothing is trained.

        Raises:
          RetrievalError: vectors of another shape, or a parameter outside its range.
        """
        super().__init__(encoder, corpus, vectors)
        self._rows, self._starts = _load_groups(saved) if saved else _group(vectors)
        distinct = len(self._starts) - 1
        leaves = leaves or max(1, math.isqrt(distinct))
        leaves_searched = leaves_searched or min(leaves, math.ceil(8 * math.sqrt(leaves)))
        reordered = reordered or 4 * overfetch
        if (
            not 1 <= overfetch <= reordered
            or not 1 <= leaves_searched <= leaves <= distinct
            or reorder not in ('float32', 'bfloat16')
        ):
            raise RetrievalError(
                f'ScannIndex: overfetch {overfetch}, reordered {reordered}, leaves {leaves}, leaves_searched '
                f'{leaves_searched} with {distinct} vectors, reorder {reorder!r}: needs 1 ≤ overfetch ≤ '
                'reordered, 1 ≤ leaves_searched ≤ leaves ≤ vectors, and float32 or bfloat16'
            )
        self._overfetch, self._reordered, self._leaves_searched = (
            overfetch,
            reordered,
            leaves_searched,
        )
        self._searcher = None
        if distinct < SCANN_MINIMUM:
            logging.info(
                'search: %d distinct passages, fewer than %d: scanned exactly, without ScaNN',
                distinct,
                SCANN_MINIMUM,
            )
            return
        settings: dict[str, Any] = dict(
            leaves=leaves, leaves_searched=leaves_searched, overfetch=overfetch, reordered=reordered
        )
        settings |= dict(threshold=threshold, reorder=reorder)
        if saved:
            self._searcher = _load_searcher(saved)
        else:
            firsts = self._rows[self._starts[:-1]]
            whole = (
                len(firsts) == len(vectors) and vectors.dtype == np.float32
            )  # then it need not be copied
            self._searcher = _searcher(
                vectors if whole else vectors[firsts].astype(np.float32), **settings
            )
        self.parameters.update(kind='scann', distinct=distinct, **settings)

    def save(self, folder: pathlib.Path) -> None:
        """Writes what was trained into an empty folder."""
        np.save(folder / 'rows.npy', self._rows)
        np.save(folder / 'starts.npy', self._starts)
        if self._searcher is not None:
            self._searcher.serialize(str(folder), relative_path=True)

    def _candidates(self, vectors: np.ndarray, k: int) -> list[np.ndarray]:
        """Per query the ids of the passages ScaNN finds nearest, int64 [C ≥ k]; of equal vectors the k lowest ids."""
        if self._searcher is None:
            return super()._candidates(vectors, k)
        wanted, found = max(self._overfetch, 2 * k), []
        looked_at = max(self._reordered, 2 * wanted)
        for vector in vectors:
            # One query per call: a batched call may share work between queries, and with it their rounding.
            groups, _ = self._searcher.search(vector, wanted, looked_at, self._leaves_searched)
            starts = self._starts[groups]
            counts = np.minimum(self._starts[groups + 1] - starts, k)
            candidates = self._rows[np.repeat(starts, counts) + _within(counts)]
            # Too few passages in the leaves that were read: only a scan can still answer.
            found.append(candidates if candidates.size >= k else self._scan(vector, k))
        return found


def check_vectors(vectors: np.ndarray, corpus: Passages) -> None:
    """RetrievalError where a vector is not finite and of length 1 (names the passage)."""
    bad = np.flatnonzero(~is_unit(vectors))
    if bad.size:
        raise RetrievalError(
            f'index: the vector of passage {bad[0]}, {short(corpus.passage(int(bad[0]))["title"])}, and '
            f'{bad.size - 1} more are not finite and of length 1; mend the encoder or leave the passages out'
        )


def _within(counts: np.ndarray) -> np.ndarray:
    """0 … c−1 for every c of counts, one after another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _group(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Passages by equal vector: (row numbers by group int64 [N], where each group starts int64 [G + 1]).

    Groups come in the order of their first row. 128 bits of a hash stand for a vector, so that 21 million take 0.3 GB.
    """
    digests = np.empty((len(vectors), 2), np.uint64)
    for row in range(len(vectors)):
        digests[row] = np.frombuffer(
            hashlib.blake2b(vectors[row].tobytes(), digest_size=16).digest(), np.uint64
        )
    _, first, member = np.unique(digests, axis=0, return_index=True, return_inverse=True)
    leader = first[member.ravel()]  # the lowest row with the same vector
    order = np.lexsort((np.arange(len(vectors)), leader))
    heads = np.flatnonzero(np.diff(leader[order], prepend=-1))
    return order.astype(np.int64), np.append(heads, len(vectors)).astype(np.int64)


def _load_groups(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    return np.load(folder / 'rows.npy', mmap_mode='r'), np.load(
        folder / 'starts.npy', mmap_mode='r'
    )


def _scann() -> Any:
    """ScaNN's module. Here and not above: it brings TensorFlow, which an exact index has no use for."""
    import tensorflow as tf
    from scann.scann_ops.py import scann_ops_pybind

    tf.config.set_visible_devices([], 'GPU')  # it would take all of their memory
    return scann_ops_pybind


def _load_searcher(folder: pathlib.Path) -> Any:
    if (folder / 'scann_docids.pkl').exists():  # ScaNN would unpickle it; `save` never writes one
        raise RetrievalError(f'{folder}/scann_docids.pkl: no part of an index; remove the file')
    with quiet():
        return _scann().load_searcher(str(folder))


def _searcher(
    vectors: np.ndarray,
    overfetch: int,
    reordered: int,
    leaves: int,
    leaves_searched: int,
    threshold: float,
    reorder: str,
) -> Any:
    """Trains ScaNN on distinct unit vectors, float32 [G, D]."""
    with quiet():
        scann = _scann()
    builder = scann.builder(vectors, overfetch, 'dot_product')
    # Reproducible to the bit, as measured (README.md): k-means++ from ScaNN's fixed seed on one thread builds
    # the same index every time, a random start does not; with SOAR distances vary from call to call.
    builder.tree(
        leaves,
        leaves_searched,
        training_sample_size=min(len(vectors), 100_000),
        min_partition_size=10,
        random_init=False,
    )
    builder.score_ah(2, anisotropic_quantization_threshold=threshold)
    builder.reorder(reordered, quantize=scann.scann_builder.ReorderType[reorder.upper()])
    with quiet():
        return builder.set_n_training_threads(1).build()
