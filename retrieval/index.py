"""Approximate search: ScaNN (Guo et al. 2020, arXiv:1908.10396) selects candidates, `ExactIndex` ranks them.

The answer to a query depends on that query only (see `exact`).

Letters: N passages, Q queries, D dimension, C candidates of one query, G distinct vectors.
"""

from __future__ import annotations

import hashlib
import logging
import math
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int, Int64

from .command import import_tensorflow, quiet
from .corpus import AnyCorpus
from .exact import ExactIndex as ExactIndex
from .types import Encoder, RetrievalError
from .types import Index as Index

# ScaNN learns √N leaves and 16 hash centres per block: too few passages make both noise, and a scan is faster.
SCANN_MINIMUM = 1_000

# Vectors that the leaves are trained on.
_TRAINING_SAMPLE = 100_000
# Leaves with fewer vectors are merged by ScaNN.
_SMALLEST_LEAF = 10
# Dimensions that one hash code of 4 bits covers.
_DIMENSIONS_PER_BLOCK = 2


class ScannIndex(ExactIndex):
    """ScaNN selects candidates by tree, asymmetric hashing and reordering; these are scored again exactly.

    ScaNN holds every distinct vector once, so that hashing cannot decide which of several equal passages is found.
    The same corpus gives the same index in every process. With fewer than `SCANN_MINIMUM` distinct vectors ScaNN is not
    trained: the index scores all passages exactly, `parameters['kind']` is 'exact', and this is logged.
    """

    def __init__(
        self,
        encoder: Encoder,
        corpus: AnyCorpus,
        vectors: Float[np.ndarray, ' ...'],
        overfetch: int = 32,
        reordered: int | None = None,
        leaves: int | None = None,
        leaves_searched: int | None = None,
        threshold: float = 0.2,
        reorder: str = 'float32',
        saved: pathlib.Path | None = None,
    ):
        """Trains the index on the vectors of passages, or loads it from `saved`; `build` encodes the passages.

        Args:
          encoder: see `ExactIndex`.
          corpus: see `ExactIndex`.
          vectors: see `ExactIndex`.
          overfetch: least number of candidates per query to score exactly; a search takes max(overfetch, 2·k).
          reordered: number of candidates per query that ScaNN scores a second time, before it returns `overfetch` of
            them; None: 4·overfetch.
          leaves: partitions of the tree; None: √G, rounded down.
          leaves_searched: partitions read per query; None: min(leaves, 8·√leaves), which is all of them at
            G = 1,000, nine in ten at 6,000, four in ten at 200,000, one in eight at 20 million.
          threshold: anisotropic quantisation threshold of ScaNN (Guo et al. 2020, section 3).
          reorder: dtype of ScaNN's own copy of the vectors, with which the `reordered` candidates are scored; float32
            or bfloat16.
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
        leaves_searched = leaves_searched or min(leaves, math.ceil(8 * math.sqrt(leaves)))
        reordered = reordered or 4 * overfetch
        valid_candidates = 1 <= overfetch <= reordered
        valid_leaves = 1 <= leaves_searched <= leaves <= distinct
        # A small corpus is checked too, so that a bad setting fails early rather than when the corpus grows.
        if not valid_candidates or not valid_leaves or reorder not in ('float32', 'bfloat16'):
            raise RetrievalError(
                f'ScannIndex: overfetch {overfetch}, reordered {reordered}, leaves {leaves}, leaves_searched '
                f'{leaves_searched} with {distinct} distinct vectors, reorder {reorder!r}: needs 1 ≤ overfetch ≤ '
                'reordered, 1 ≤ leaves_searched ≤ leaves ≤ vectors, and float32 or bfloat16'
            )
        self._overfetch = overfetch
        self._reordered = reordered
        self._leaves_searched = leaves_searched
        self._searcher: Any = None
        if distinct < SCANN_MINIMUM:
            logging.info(
                'search: %d distinct passages, fewer than %d: scanned exactly, without ScaNN',
                distinct,
                SCANN_MINIMUM,
            )
            return
        settings: dict[str, Any] = {
            'leaves': leaves,
            'leaves_searched': leaves_searched,
            'overfetch': overfetch,
            'reordered': reordered,
            'threshold': threshold,
            'reorder': reorder,
        }
        if saved:
            self._searcher = _load_searcher(saved)
        else:
            self._searcher = _train_searcher(self._distinct_vectors(), **settings)
        self.parameters.update(kind='scann', distinct=distinct, **settings)

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
        count = max(self._overfetch, 2 * k)
        reordered = max(self._reordered, 2 * count)
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
                rows = self._scan(vector, k)
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


def _scann() -> Any:
    """Imports and returns ScaNN's module; hides all GPUs from TensorFlow in this process."""
    # Imported here, because ScaNN imports TensorFlow, which an exact index does not need.
    tf = import_tensorflow()
    from scann.scann_ops.py import scann_ops_pybind

    # TensorFlow would reserve all memory of the GPUs.
    tf.config.set_visible_devices([], 'GPU')
    return scann_ops_pybind


def _load_searcher(folder: pathlib.Path) -> Any:
    """Returns the ScaNN searcher in a folder; RetrievalError if the folder has a pickle file."""
    # ScaNN would unpickle this file, which can run any code; `save` never writes it.
    if (folder / 'scann_docids.pkl').exists():
        raise RetrievalError(f'{folder}/scann_docids.pkl: not part of an index; remove the file')
    with quiet():
        return _scann().load_searcher(str(folder))


def _train_searcher(
    vectors: Float32[np.ndarray, 'groups dimension'],
    overfetch: int,
    reordered: int,
    leaves: int,
    leaves_searched: int,
    threshold: float,
    reorder: str,
) -> Any:
    """Returns a ScaNN searcher trained on distinct unit vectors."""
    with quiet():
        scann = _scann()
    builder = scann.builder(vectors, overfetch, 'dot_product')
    # These options make the index reproducible bit for bit, as measured (README.md): k-means++ from ScaNN's fixed seed
    # on one thread builds the same index every time. A random start does not, and with SOAR distances vary by call.
    builder.tree(
        leaves,
        leaves_searched,
        training_sample_size=min(len(vectors), _TRAINING_SAMPLE),
        min_partition_size=_SMALLEST_LEAF,
        random_init=False,
    )
    builder.score_ah(_DIMENSIONS_PER_BLOCK, anisotropic_quantization_threshold=threshold)
    builder.reorder(reordered, quantize=scann.scann_builder.ReorderType[reorder.upper()])
    with quiet():
        return builder.set_n_training_threads(1).build()
