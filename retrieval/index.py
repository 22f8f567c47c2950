"""Indexes: dense search, exact and approximate by ScaNN (Guo et al. 2020, arXiv:1908.10396), and BM25.

The answer to a query depends on that query only. A first step selects candidates: `ExactIndex` by a float32 matrix
product over all passages, on the devices, `ScannIndex` by ScaNN. A second step scores them again in float64 in one
fixed order, and equal scores go to the lower row number. Neither the other queries of the call, nor their number, nor
the thread change an answer. BM25 has the interface of the dense indexes.

Letters: N passages, Q queries, D dimension, C candidates of one query, G distinct vectors.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import pathlib
import threading
import unicodedata
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import Stemmer
from jaxtyping import Array, Float, Float32, Int, Int32, Int64

from .command import import_scann, quiet
from .corpus import Corpus, MemoryCorpus
from .jax_options import all_devices
from .shards import is_unit
from .types import Encoder, RetrievalError, short
from .types import Index as Index

# Largest error of a float32 dot product of unit vectors, up to D ≈ 1,600 (rounding bound D·2⁻²⁴).
_MARGIN = 1e-4
# Queries that are scored in one device call, padded to a power of two.
_QUERIES_PER_CALL = 64
# Least number that they are padded to: most calls of a rollout bring fewer, and share a program.
_FEWEST_QUERIES = 16
# Candidates beyond k that the devices return; a query with more passages that nearly tie with its k-th needs a scan.
_SPARE_CANDIDATES = 16
# Queries whose candidates are scored together: their vectors fit into a core's cache.
_QUERIES_PER_RESCORING = 16
# Passages that a scan multiplies at a time, so that a memory-mapped matrix is never copied whole.
_SCANNED_ROWS = 1 << 16

# `ExactIndex` or its subclass (run-time type checkers do not support typing.Self).
_AnyIndex = TypeVar('_AnyIndex', bound='ExactIndex')


def check_queries(queries: Sequence[str], k: int, num_passages: int) -> None:
    """Raises RetrievalError if `queries` is a single text, k lies outside 1 … N, or a query is blank."""
    # A text is a sequence of texts as well: without this check each letter would be a query.
    if isinstance(queries, str):
        raise RetrievalError(
            f'search: queries is the single text {short(queries)}; give a list of texts'
        )
    if not 1 <= k <= num_passages:
        raise RetrievalError(
            f'search: k is {k}, but must lie between 1 and the number of passages, {num_passages}'
        )
    for number, query in enumerate(queries, 1):
        if not query.strip():
            raise RetrievalError(
                f'search: query {number} of {len(queries)} is empty: {short(query)}; leave it out'
            )


class ExactIndex:
    """Scores every passage on the devices: the reference for other indexes, and the best choice for a small corpus.

    The matrix of vectors is split by rows over all devices of this process.
    """

    def __init__(
        self,
        encoder: Encoder,
        corpus: Corpus,
        vectors: Float[np.ndarray, ' ...'],
    ):
        """Takes passages and their unit vectors; `build` encodes and checks them.

        Args:
          encoder: encodes the queries.
          corpus: N passages.
          vectors: unit vectors of the passages, [N, D], float32 or float16; may be memory-mapped.

        Raises:
          RetrievalError: no passages, or vectors of another shape.
        """
        if not len(corpus) or vectors.shape != (len(corpus), encoder.dimension):
            raise RetrievalError(
                f'index: {len(corpus)} passages and vectors of shape {vectors.shape} for dimension '
                f'{encoder.dimension}; give at least one passage and one vector each'
            )
        self.encoder = encoder
        self.corpus = corpus
        self.parameters: dict[str, Any] = {'kind': 'exact', 'passages': len(corpus)}
        self._vectors = vectors
        # Copied to the devices by the first search: `ScannIndex` rarely needs it.
        self._matrix: jax.Array | None = None

    @classmethod
    def build(
        cls: type[_AnyIndex],
        encoder: Encoder,
        titles: Sequence[str],
        texts: Sequence[str],
        **parameters: Any,
    ) -> _AnyIndex:
        """Encodes N passages and returns an index of them in memory; `parameters` go to the constructor.

        Raises:
          RetrievalError: no passages, or a vector that is not finite or whose norm is not 1.
        """
        corpus = MemoryCorpus(titles, texts)
        vectors = encoder.encode(corpus.record(row).contents for row in range(len(corpus)))
        bad_rows = np.flatnonzero(~is_unit(vectors))
        if bad_rows.size:
            title = corpus.passage(int(bad_rows[0]))['title']
            raise RetrievalError(
                f'index: the vector of passage {bad_rows[0]}, {short(title)}, and {bad_rows.size - 1} more are not '
                'finite and of length 1; correct the encoder or leave the passages out'
            )
        return cls(encoder, corpus, vectors, **parameters)

    def __len__(self) -> int:
        return len(self.corpus)

    def search(
        self, queries: Sequence[str], k: int
    ) -> tuple[Int64[np.ndarray, 'queries k'], Float32[np.ndarray, 'queries k']]:
        """Returns the k nearest passages of each query.

        Args:
          queries: Q texts, none blank.
          k: passages per query, 1 … N.

        Returns:
          (row numbers [Q, k], cosines [Q, k]), best first, equal scores by lower row number.

        Raises:
          RetrievalError: k outside 1 … N; a query that is blank, or whose vector is not finite or not of norm 1.
        """
        check_queries(queries, k, len(self))
        # An encoder may return a view or another precision.
        vectors = np.ascontiguousarray(self.encoder.encode_queries(queries), np.float32)
        bad_rows = np.flatnonzero(~is_unit(vectors))
        if bad_rows.size:
            query = queries[bad_rows[0]]
            raise RetrievalError(
                f'search: the vector of query {bad_rows[0] + 1} of {len(queries)}, {short(query)}, is '
                'zero, not finite or not of length 1; leave the query out or correct the encoder'
            )
        return self.search_vectors(vectors, k)

    def search_vectors(
        self, vectors: Float32[np.ndarray, 'queries dimension'], k: int
    ) -> tuple[Int64[np.ndarray, 'queries k'], Float32[np.ndarray, 'queries k']]:
        """Returns the same as `search` for unit vectors of queries. Neither vectors nor k are checked."""
        rows = np.empty((len(vectors), k), np.int64)
        scores = np.empty((len(vectors), k), np.float32)
        # The candidates are a superset of the answer; the exact scores decide.
        candidates = self._candidates(vectors, k)
        for start in range(0, len(vectors), _QUERIES_PER_RESCORING):
            chunk = slice(start, start + _QUERIES_PER_RESCORING)
            rows[chunk], scores[chunk] = self._rank(vectors[chunk], candidates[chunk], k)
        return rows, scores

    def _candidates(
        self, vectors: Float32[np.ndarray, 'queries dimension'], k: int
    ) -> list[Int64[np.ndarray, ' _']]:
        """Returns per query the rows of all passages that can be among its best k, given the error of float32 scores.

        Side effect: the first call copies the vectors to the devices. `ScannIndex` overrides this method.
        """
        if self._matrix is None:
            self._matrix = _on_devices(self._vectors)
        # Rounded up to a power of two, as the number of queries (`_FEWEST_QUERIES`), so that few programs are compiled.
        count = min(_next_power_of_two(k + _SPARE_CANDIDATES), len(self))
        candidates = []
        for start in range(0, len(vectors), _QUERIES_PER_CALL):
            chunk = vectors[start : start + _QUERIES_PER_CALL]
            rows_padded = _next_power_of_two(max(len(chunk), _FEWEST_QUERIES))
            padded = np.zeros((rows_padded, vectors.shape[1]), np.float32)
            padded[: len(chunk)] = chunk
            device_scores, device_rows = _nearest(self._matrix, padded, count, len(self))
            rough_scores = np.asarray(device_scores)
            rows = np.asarray(device_rows)
            for number, vector in enumerate(chunk):
                # Both scores of a comparison, that of a passage and that of the k-th, are rounded: twice the margin.
                lowest_score = rough_scores[number, k - 1] - 2 * _MARGIN
                is_candidate = rough_scores[number] >= lowest_score
                if is_candidate.all():
                    # Further passages, which the devices did not return, may be candidates too.
                    candidates.extend(self._scan(vector[None], k))
                else:
                    candidates.append(rows[number][is_candidate].astype(np.int64))
        return candidates

    def _scan(
        self, vectors: Float32[np.ndarray, 'queries dimension'], k: int
    ) -> list[Int64[np.ndarray, ' _']]:
        """Returns per query the rows of all passages that can be among its best k, by one scan on the CPU."""
        candidates = [np.empty(0, np.int64)] * len(vectors)
        scores_of = [np.empty(0, np.float32)] * len(vectors)
        for start in range(0, len(self), _SCANNED_ROWS):
            passages = self._vectors[start : start + _SCANNED_ROWS].astype(np.float32, copy=False)
            block_rows = np.arange(start, start + len(passages))
            # One product for all queries: reading the matrix takes most of the time of a single one.
            for number, block_scores in enumerate(vectors @ passages.T):
                rows = np.concatenate([candidates[number], block_rows])
                scores = np.concatenate([scores_of[number], block_scores])
                # Selecting the k-th score takes linear time; sorting would not.
                kth_score = np.partition(scores, -k)[-k] if len(scores) >= k else -np.inf
                is_candidate = scores >= kth_score - 2 * _MARGIN
                candidates[number], scores_of[number] = rows[is_candidate], scores[is_candidate]
        return candidates

    def _rank(
        self,
        vectors: Float32[np.ndarray, 'queries dimension'],
        candidates: list[Int64[np.ndarray, ' _']],
        k: int,
    ) -> tuple[Int64[np.ndarray, 'queries k'], Float32[np.ndarray, 'queries k']]:
        """Returns (rows, scores) of the best k candidates per query, by scores in float64; ties: lower row first.

        Args:
          vectors: unit vectors of the queries.
          candidates: per query the rows to rank, at least k.
          k: passages per query.
        """
        # Queries have different numbers of candidates; the shorter lists are padded.
        max_candidates = max(len(rows) for rows in candidates)
        # N is not a row number: it marks padding and sorts behind all real rows.
        padding = len(self)
        padded_rows = np.full((len(candidates), max_candidates), padding, np.int64)
        for number, rows in enumerate(candidates):
            padded_rows[number, : len(rows)] = rows
        passage_vectors = self._vectors[np.minimum(padded_rows, len(self) - 1)].astype(np.float64)
        # NumPy's own sum over the last axis of [Q, C, D] has a fixed order; a BLAS product does not.
        scores = (passage_vectors * vectors[:, None, :]).sum(axis=2).astype(np.float32)
        scores[padded_rows == padding] = -np.inf
        # The last key is the primary one: by descending score, then by row.
        best = np.lexsort((padded_rows, -scores), axis=1)[:, :k]
        return np.take_along_axis(padded_rows, best, 1), np.take_along_axis(scores, best, 1)


def _next_power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _on_devices(
    vectors: Float[np.ndarray, 'passages dimension'],
) -> Float32[Array, 'rows dimension']:
    """Returns the vectors split by rows over all local devices, padded with zero rows to equal shards."""
    all_devices()
    devices = jax.local_devices()
    mesh = jax.sharding.Mesh(np.array(devices), ('rows',))
    sharding = jax.NamedSharding(mesh, jax.P('rows'))
    rows_per_device = -(-len(vectors) // len(devices))
    shape = (rows_per_device * len(devices), vectors.shape[1])

    def device_shard(index):
        # `index` has one slice per axis. Only the rows of one device are copied at a time.
        rows = np.asarray(vectors[index[0]], np.float32)
        return np.pad(rows, ((0, rows_per_device - len(rows)), (0, 0)))

    return jax.make_array_from_callback(shape, sharding, device_shard)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _nearest(
    matrix: Float32[Array, 'rows dimension'],
    vectors: Float32[Array | np.ndarray, 'queries dimension'],
    count: int,
    num_passages: int,
) -> tuple[Float32[Array, 'queries count'], Int32[Array, 'queries count']]:
    """Returns (scores, rows) of the `count` nearest passages per query, highest score first; ties: lower row first.

    Args:
      matrix: vectors of the passages, padded with zero rows.
      vectors: vectors of the queries.
      count: passages per query.
      num_passages: N, rows of the matrix that are passages.
    """
    # 'highest': TPU and GPU otherwise round the inputs to bfloat16 or TF32, an error larger than `_MARGIN`.
    scores = jnp.matmul(vectors, matrix.T, precision='highest')
    is_passage = jnp.arange(len(matrix)) < num_passages
    best_scores, best_rows = jax.lax.top_k(jnp.where(is_passage, scores, -jnp.inf), count)
    return best_scores, best_rows


# ScaNN learns √N leaves and 16 hash centres per block: too few passages make both noise, and a scan is faster.
SCANN_MINIMUM = 1_000

# Parameters of `ScannIndex`.
SCANN_PARAMETERS = ('leaves', 'leaves_searched', 'reorder')
# Vectors that the leaves are trained on.
_TRAINING_SAMPLE = 100_000
# Leaves with fewer vectors are merged by ScaNN.
_SMALLEST_LEAF = 10
# Dimensions that one hash code of 4 bits covers, and the threshold of anisotropic quantisation (Guo et al. 2020).
_DIMENSIONS_PER_BLOCK = 2
_THRESHOLD = 0.2
# Least number of candidates per query to score exactly; a search takes twice k if that is more. And how many of them
# ScaNN scores a second time before.
_OVERFETCH = 32
_REORDERED = 128
# A build measures the share of the best passages of an exact search that ScaNN returns: queries are words from the
# middle of this many passages, as few as a name has, and more leaves are read until the share is large enough.
_TRIALS = 128
_TRIAL_WORDS = 3
_TRIAL_K = 3
_LEAST_RECALL = 0.98


class ScannIndex(ExactIndex):
    """ScaNN selects candidates by tree, asymmetric hashing and reordering; these are scored again exactly.

    ScaNN holds every distinct vector once, so that hashing cannot decide which of several equal passages is found.
    The same corpus gives the same index in every process on one machine; on another one the number of leaves that are
    read may differ with the rounding of floats, unless `leaves_searched` is given. With fewer than `SCANN_MINIMUM`
    distinct vectors ScaNN is not trained: the index scores all passages exactly, `parameters['kind']` is 'exact', and
    this is logged.
    """

    def __init__(
        self,
        encoder: Encoder,
        corpus: Corpus,
        vectors: Float[np.ndarray, ' ...'],
        leaves: int | None = None,
        leaves_searched: int | None = None,
        reorder: str = 'float32',
        saved: pathlib.Path | None = None,
    ):
        """Trains the index on the vectors of passages, or loads it from `saved`; `build` encodes the passages.

        Args:
          encoder: see `ExactIndex`.
          corpus: see `ExactIndex`.
          vectors: see `ExactIndex`.
          leaves: partitions of the tree; None: √G, rounded down.
          leaves_searched: partitions read per query; None: the first of √leaves, 2·√leaves, … and all of them with
            recall@3 ≥ .98 of exact search, for words of the passages as queries; √leaves if no such query has a vector.
          reorder: dtype of ScaNN's own copy of the vectors, with which the reordered candidates are scored; float32 or
            bfloat16.
          saved: a folder that `save` wrote, with the same settings: nothing is trained.

        Raises:
          RetrievalError: no passages, vectors of another shape, or a parameter outside its range.
        """
        super().__init__(encoder, corpus, vectors)
        if saved:
            self._rows = np.load(saved / 'rows.npy', mmap_mode='r')
            self._starts = np.load(saved / 'starts.npy', mmap_mode='r')
        else:
            self._rows, self._starts = _group(vectors)
        distinct = len(self._starts) - 1
        leaves = leaves or max(1, math.isqrt(distinct))
        is_given = leaves_searched is not None
        leaves_searched = leaves_searched or math.isqrt(leaves)
        valid_leaves = 1 <= leaves_searched <= leaves <= distinct
        # A small corpus is checked too, so that a bad setting fails early rather than when the corpus grows.
        if not valid_leaves or reorder not in ('float32', 'bfloat16'):
            raise RetrievalError(
                f'ScannIndex: leaves {leaves}, leaves_searched {leaves_searched} with {distinct} distinct vectors, '
                f'reorder {reorder!r}: needs 1 ≤ leaves_searched ≤ leaves ≤ vectors, and float32 or bfloat16'
            )
        self._leaves_searched = leaves_searched
        self._searcher: Any = None
        if distinct < SCANN_MINIMUM:
            logging.info(
                'search: %d distinct passages, fewer than %d: scanned exactly, without ScaNN',
                distinct,
                SCANN_MINIMUM,
            )
            return
        self.parameters.update(kind='scann', distinct=distinct, leaves=leaves, reorder=reorder)
        if saved:
            self._searcher = _load_searcher(saved)
        else:
            vectors = self._distinct_vectors()
            self._searcher = _train_searcher(vectors, leaves, leaves_searched, reorder)
            if not is_given:
                self._tune(leaves)
        self.parameters['leaves_searched'] = self._leaves_searched

    def _tune(self, leaves: int) -> None:
        """Sets how many of the leaves are read, and the parameter `recall`: recall@3 of exact search."""
        k = min(_TRIAL_K, len(self))
        queries = []
        for row in np.linspace(0, len(self) - 1, _TRIALS).astype(int):
            passage = self.corpus.passage(int(row))
            words = (passage['text'] or passage['title']).split()
            start = max(0, (len(words) - _TRIAL_WORDS) // 2)
            queries.append(' '.join(words[start : start + _TRIAL_WORDS]))
        vectors = np.ascontiguousarray(self.encoder.encode_queries(queries), np.float32)
        vectors = vectors[is_unit(vectors)]
        # The lexical encoder has no vector for words of letters that it does not know.
        if not len(vectors):
            return
        best, _ = self._rank(vectors, self._scan(vectors, k), k)
        while True:
            found, _ = self.search_vectors(vectors, k)
            recall = float((best[:, :, None] == found[:, None]).any(2).mean())
            self.parameters['recall'] = round(recall, 4)
            if recall >= _LEAST_RECALL or self._leaves_searched == leaves:
                return
            self._leaves_searched = min(leaves, 2 * self._leaves_searched)

    def _distinct_vectors(self) -> Float32[np.ndarray, 'groups dimension']:
        """Returns the first vector of each group of equal vectors."""
        first_rows = self._rows[self._starts[:-1]]
        all_distinct = len(first_rows) == len(self._vectors)
        if all_distinct and self._vectors.dtype == np.float32:
            # Not copied: the vectors of a large corpus take tens of gigabytes.
            return self._vectors
        return self._vectors[first_rows].astype(np.float32)

    def save(self, folder: pathlib.Path) -> None:
        """Writes the trained index into an empty folder."""
        np.save(folder / 'rows.npy', self._rows)
        np.save(folder / 'starts.npy', self._starts)
        if self._searcher is not None:
            self._searcher.serialize(str(folder), relative_path=True)

    def _candidates(
        self, vectors: Float32[np.ndarray, 'queries dimension'], k: int
    ) -> list[Int64[np.ndarray, ' _']]:
        """Returns per query at least k rows, those that ScaNN finds nearest; of equal vectors the k lowest rows.

        Unlike those of `ExactIndex` they may lack a passage of the exact answer.
        """
        if self._searcher is None:
            return super()._candidates(vectors, k)
        # More groups than k are requested, because ScaNN's own scores are approximate.
        count = max(_OVERFETCH, 2 * k)
        reordered = max(_REORDERED, 2 * count)
        candidates = []
        for vector in vectors:
            # One query per call: in a batched call the rounding of a score can depend on the other queries.
            groups, _ = self._searcher.search(vector, count, reordered, self._leaves_searched)
            starts = self._starts[groups]
            counts = np.minimum(self._starts[groups + 1] - starts, k)
            # Only the first k passages of a group are taken, because no more of them can be in the answer.
            positions = np.repeat(starts, counts) + _offsets_within(counts)
            rows = self._rows[positions]
            if rows.size < k:
                # The leaves that ScaNN read hold too few passages, so all passages are scored instead.
                (rows,) = self._scan(vector[None], k)
            candidates.append(rows)
        return candidates


def _offsets_within(counts: Int[np.ndarray, ' groups']) -> Int[np.ndarray, ' total']:
    """Returns 0 … c−1 for each count c, concatenated."""
    firsts = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(firsts, counts)


def _group(
    vectors: Float[np.ndarray, 'passages dimension'],
) -> tuple[Int64[np.ndarray, ' passages'], Int64[np.ndarray, ' groups_plus_1']]:
    """Groups passages with equal vectors.

    Returns:
      rows: int64 [N], all row numbers, group after group. Groups are in the order of their first row, and rows ascend
        within a group.
      starts: int64 [G + 1], position in `rows` at which each group starts, and N at the end.
    """
    # A hash of 128 bits represents a vector, so that 21 million vectors take 0.3 GB.
    digests = np.empty((len(vectors), 2), np.uint64)
    for row in range(len(vectors)):
        digest = hashlib.blake2b(vectors[row].tobytes(), digest_size=16).digest()
        digests[row] = np.frombuffer(digest, np.uint64)
    _, first_rows, group = np.unique(digests, axis=0, return_index=True, return_inverse=True)
    # The lowest row with the same vector identifies a group. NumPy 2.0 returns the inverse as a column.
    leader = first_rows[group.ravel()]
    order = np.lexsort((np.arange(len(vectors)), leader))
    heads = np.flatnonzero(np.diff(leader[order], prepend=-1))
    return order.astype(np.int64), np.append(heads, len(vectors)).astype(np.int64)


def _load_searcher(folder: pathlib.Path) -> Any:
    """Returns the ScaNN searcher in a folder; RetrievalError if the folder has a pickle file."""
    # ScaNN would unpickle this file, which can run any code; `save` never writes it.
    if (folder / 'scann_docids.pkl').exists():
        raise RetrievalError(f'{folder}/scann_docids.pkl: not part of an index; remove the file')
    with quiet():
        return import_scann().load_searcher(str(folder))


def _train_searcher(
    vectors: Float32[np.ndarray, 'groups dimension'],
    leaves: int,
    leaves_searched: int,
    reorder: str,
) -> Any:
    """Returns a ScaNN searcher trained on distinct unit vectors."""
    with quiet():
        scann = import_scann()
    builder = scann.builder(vectors, _OVERFETCH, 'dot_product')
    # These options make the index reproducible bit for bit, as measured (README.md): k-means++ from ScaNN's fixed seed
    # on one thread builds the same index every time. A random start does not, and with SOAR distances vary by call.
    builder.tree(
        leaves,
        leaves_searched,
        training_sample_size=min(len(vectors), _TRAINING_SAMPLE),
        min_partition_size=_SMALLEST_LEAF,
        random_init=False,
    )
    builder.score_ah(_DIMENSIONS_PER_BLOCK, anisotropic_quantization_threshold=_THRESHOLD)
    builder.reorder(_REORDERED, quantize=scann.scann_builder.ReorderType[reorder.upper()])
    with quiet():
        return builder.set_n_training_threads(1).build()


# BM25 by means of bm25s (Lù 2024, arXiv:2407.03618): Lucene's formula with k1 1.5 and b 0.75; lower case, English stop
# words and Snowball stems, over passages in wire form.
_METHOD = 'lucene'
_K1 = 1.5
_B = 0.75
# Name of the rule of `_normalized` and `_word_pattern`, which is stored with an index: change both together.
_WORDS = 'NFC without ligatures and full-width forms, letters with marks'
# Soft hyphens, ligatures and full-width forms. NFKC of other characters makes other words: 10² would be 102.
_FOLDED = {0xAD: None} | {
    code: unicodedata.normalize('NFKC', chr(code))
    for code in (*range(0xFB00, 0xFB07), *range(0xFF01, 0xFF5F))
}


@functools.cache
def _word_pattern() -> str:
    """Returns the pattern of a word: letters and digits with combining marks."""
    # Ranges, because `re` needs three times as long with single characters.
    marks = ''
    is_mark = False
    # Behind these are variants of Chinese characters only.
    for code in range(0x20000):
        was_mark, is_mark = is_mark, unicodedata.category(chr(code)).startswith('M')
        if is_mark and not was_mark:
            marks += f'{chr(code)}-'
        elif was_mark and not is_mark:
            marks += chr(code - 1)
    # The s of "Gumu's" is a word, too. Its cost: "Model S" also finds passages with it. Without a single letter behind
    # an apostrophe title recall (README.md) is 0.3 points lower on hotpotqa and musique, and the same elsewhere.
    return rf'\w+(?:[{marks}]\w*)*'


def _normalized(text: str) -> str:
    """Returns a text with composed characters, without ligatures, full-width forms and soft hyphens."""
    return unicodedata.normalize('NFC', text.translate(_FOLDED))


def _import_bm25s() -> ModuleType:
    """Returns the module `bm25s`."""
    # Not imported at the top of this file: the import of bm25s runs a JAX program and thereby starts the devices. JAX's
    # settings could not be changed after an import of this package, even in a process without a BM25 index.
    import bm25s

    # It shows its own messages down to those for debugging.
    logging.getLogger('bm25s').setLevel(logging.WARNING)
    return bm25s


class Bm25Index:
    """Ranks by common words. Scores are positive without an upper bound, not cosines."""

    def __init__(self, corpus: Corpus, saved: pathlib.Path | None = None):
        """Indexes the texts of N passages, or reads an index that `save` wrote.

        Raises:
          RetrievalError: no passage with a word, or a saved index of another number of passages.
        """
        self.corpus = corpus
        self._stemmer = Stemmer.Stemmer('english')
        # A stemmer is not safe to use from several threads.
        self._lock = threading.Lock()
        if saved:
            # Maps the files into memory and leaves out bm25s's own copy of the texts.
            self._bm25 = _import_bm25s().BM25.load(
                str(saved), load_corpus=False, mmap=True, show_progress=False
            )
        else:
            self._bm25 = self._train()
        indexed = self._bm25.scores['num_docs']
        if indexed != len(corpus):
            raise RetrievalError(
                f'bm25: the index has {indexed} passages, the corpus {len(corpus)}; build it again'
            )
        self.parameters: dict[str, Any] = {
            'kind': 'bm25',
            'passages': len(corpus),
            'method': _METHOD,
            'k1': _K1,
            'b': _B,
            'words': _WORDS,
        }

    def _train(self) -> Any:
        """Returns bm25s's index of all passages; RetrievalError if no passage has a word that is not a stop word."""
        # The title is indexed with the text, because queries often name it.
        texts = [self.corpus.record(row).contents for row in range(len(self.corpus))]
        tokens = self._tokenize(texts, return_ids=True)
        # bm25s gives a corpus without words the single word ''.
        if not tokens.vocab or set(tokens.vocab) == {''}:
            raise RetrievalError(
                'bm25: no passage has a word that counts; give a corpus of English text'
            )
        bm25 = _import_bm25s().BM25(method=_METHOD, k1=_K1, b=_B)
        bm25.index(tokens, show_progress=False, leave_progress=False)
        return bm25

    def _tokenize(self, texts: Sequence[str], return_ids: bool) -> Any:
        """Returns the stems of each text.

        The stemmer is not thread-safe: callers hold the lock, except in the constructor.

        Args:
          texts: passages or queries.
          return_ids: True: bm25s's object of ids and vocabulary, from which an index is built. False: a list of strings
            per text.
        """
        return _import_bm25s().tokenize(
            [_normalized(text) for text in texts],
            token_pattern=_word_pattern(),
            stopwords='en',
            stemmer=self._stemmer,
            return_ids=return_ids,
            show_progress=False,
        )

    def __len__(self) -> int:
        return len(self.corpus)

    def save(self, folder: pathlib.Path) -> None:
        """Writes the index into an empty folder."""
        self._bm25.save(str(folder), show_progress=False)

    def search(
        self, queries: Sequence[str], k: int
    ) -> tuple[Int64[np.ndarray, 'queries k'], Float32[np.ndarray, 'queries k']]:
        """Returns the k best passages of each query.

        Args:
          queries: Q texts, none blank.
          k: passages per query, 1 … N.

        Returns:
          (row numbers [Q, k], scores [Q, k]), best first, equal scores by lower row number; −1 and 0 where fewer than
          k passages share a word with the query.

        Raises:
          RetrievalError: k outside 1 … N; a blank query.
        """
        # A blank query is refused as by dense indexes, although BM25 could return no passages for it.
        check_queries(queries, k, len(self))
        rows = np.full((len(queries), k), -1, np.int64)
        scores = np.zeros((len(queries), k), np.float32)
        with self._lock:
            stems_by_query = self._tokenize(queries, return_ids=False)
        # Each query is scored alone, so that its scores do not depend on the others.
        for number, stems in enumerate(stems_by_query):
            # Stems that no passage contains have no id.
            stem_ids = self._bm25.get_tokens_ids([stem for stem in stems if stem])
            if not stem_ids:
                continue
            all_scores = self._bm25.get_scores_from_ids(stem_ids)
            best = _best_rows(all_scores, k)
            rows[number, : len(best)] = best
            scores[number, : len(best)] = all_scores[best]
        return rows, scores


def _best_rows(scores: Float32[np.ndarray, ' passages'], k: int) -> Int64[np.ndarray, ' best']:
    """Returns up to k rows with positive scores, best first, equal scores by lower row."""
    # Passages that share no word are discarded first: NumPy's selection is slow among so many equal values.
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > k:
        candidate_scores = scores[candidates]
        # All candidates that tie with the k-th best remain; the sort below decides by row.
        kth_score = np.partition(candidate_scores, -k)[-k]
        candidates = candidates[candidate_scores >= kth_score]
    order = np.lexsort((candidates, -scores[candidates]))
    return candidates[order[:k]]
