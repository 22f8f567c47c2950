"""Approximate indexes of ScaNN and FAISS with one interface, each with a grid of search settings.

An index is built once per build setting. Settings that apply to a search are varied without building again.
"""

import dataclasses
import math
import os
import pathlib
import tempfile
import time
import typing
from collections.abc import Callable, Iterator
from typing import Any

import faiss
import numpy as np

from zeroplay_jax.retrieval import index as index_lib
from zeroplay_jax.retrieval.corpus import MemoryCorpus

# Name → λ of SOAR (None: every vector in one leaf). Candidates are scored again in bfloat16.
VARIANTS: dict[str, float | None] = {'bfloat16': None, 'bfloat16, SOAR': 1.5}

# Unit vectors [B, D], k → ids [B, k].
Search = Callable[[np.ndarray, int], np.ndarray]


@dataclasses.dataclass
class Engine:
    """A built index.

    Attributes:
      family, build: its kind and its build setting, for the tables.
      seconds: time of building.
      memory: bytes that building added to the process.
      size: bytes of the serialised index.
      settings: search settings to tune over, each a tuple of arguments of `search`.
      search: function from a setting to the search function with it. It shares the index with the other settings.
    """

    family: str
    build: str
    seconds: float
    memory: int
    size: int
    settings: list[tuple]
    search: Callable[..., Search]


def resident() -> int:
    """Returns the resident memory of this process in bytes."""
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE')


def _timed(make) -> tuple[Any, float, int]:
    """Returns (result of `make`, seconds, bytes of memory that it added)."""
    # Resident memory is compared, because both libraries allocate outside of Python.
    memory_before = resident()
    started = time.perf_counter()
    result = make()
    return result, time.perf_counter() - started, resident() - memory_before


def faiss_engines(vectors: np.ndarray, hnsw: bool) -> Iterator[Engine]:
    """Yields IVF-Flat, IVF-PQ fast-scan with refinement, and with `hnsw` HNSW, on one thread."""
    # All engines get one thread: libraries divide work differently, and cores differ between machines.
    faiss.omp_set_num_threads(1)
    rows, dimension = vectors.shape
    # About 4·√rows lists, the lower end of what FAISS's guidelines recommend, as a power of two.
    lists = 1 << round(math.log2(4 * math.sqrt(rows)))
    probes = [p for p in (4, 8, 12, 16, 24, 32, 48, 64, 96, 128) if p <= lists]

    def build(factory):
        """Returns a trained index of FAISS that holds all vectors; `factory` is FAISS's description of it."""
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
        # More training points per centroid change the recall little and the time of training a lot.
        faiss.extract_index_ivf(index).cp.max_points_per_centroid = 64
        # A sample of 100,000 vectors, as many as ScaNN's tree is trained on below.
        index.train(vectors[:: max(1, rows // 100_000)])
        index.add(vectors)
        return index

    factory = f'IVF{lists},Flat'
    flat, seconds, memory = _timed(lambda: build(factory))

    def flat_search(nprobe):
        def search(q, k):
            flat.nprobe = nprobe
            return flat.search(q, k)[1]

        return search

    # The size on disk is compared as well: an index is copied to every host of a run.
    size = len(faiss.serialize_index(flat))
    yield Engine(
        'FAISS IVF-Flat', factory, seconds, memory, size, [(p,) for p in probes], flat_search
    )
    # 4-bit codes of two dimensions each, as ScaNN's asymmetric hashing has, and exact rescoring.
    factory = f'IVF{lists},PQ{dimension // 2}x4fs,RFlat'
    refined, seconds, memory = _timed(lambda: build(factory))
    # `nprobe` belongs to the index inside the refinement, `k_factor` to the refinement.
    inner = faiss.extract_index_ivf(refined)

    def refined_search(nprobe, factor):
        def search(q, k):
            inner.nprobe, refined.k_factor = nprobe, factor
            return refined.search(q, k)[1]

        return search

    size = len(faiss.serialize_index(refined))
    grid = [(p, factor) for p in probes for factor in (4, 8, 16)]
    yield Engine('FAISS IVF-PQ fast-scan', factory, seconds, memory, size, grid, refined_search)
    if hnsw:
        # A graph needs no training, but building it takes far longer, so it is built for the smaller corpus only.
        graph = faiss.IndexHNSWFlat(dimension, 24, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = 100
        _, seconds, memory = _timed(lambda: graph.add(vectors))

        def graph_search(ef):
            def search(q, k):
                graph.hnsw.efSearch = ef
                return graph.search(q, k)[1]

            return search

        size = len(faiss.serialize_index(graph))
        efs = [(ef,) for ef in (12, 16, 24, 32, 48, 64, 96, 128)]
        yield Engine(
            'FAISS HNSW', 'M 24, efConstruction 100', seconds, memory, size, efs, graph_search
        )


def _scann_settings(leaves: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns numbers of leaves that a search reads, and all settings (leaves read, candidates scored again)."""
    # From half a percent to a sixth of all leaves. Small trees give equal numbers, which `dict.fromkeys` removes.
    leaf_counts = [max(1, leaves * n // 1000) for n in (5, 10, 15, 20, 30, 40, 60, 80, 120, 160)]
    grid = []
    for searched in dict.fromkeys(leaf_counts):
        for reorder_count in (12, 24, 48):
            grid.append((searched, reorder_count))
    return leaf_counts, grid


def scann_engines(vectors: np.ndarray, names: tuple[str, ...]) -> Iterator[Engine]:
    """Yields ScaNN in the named variants (keys of `VARIANTS`), and our index, which uses ScaNN."""
    scann = index_lib._scann()
    rows = len(vectors)
    # About 2·√rows leaves as a power of two, for ScaNN and for our index, so that both trees are equally fine.
    leaves = max(16, 1 << round(math.log2(2 * math.sqrt(rows))))
    leaf_counts, grid = _scann_settings(leaves)
    for name in names:
        spilling = dict(soar_lambda=VARIANTS[name]) if VARIANTS[name] else {}

        # The default argument binds the value of this variant; a closure would read that of the last one.
        def make(spilling=spilling):
            """Returns a trained searcher. The counts given here are defaults that every search overrides."""
            builder = scann.builder(vectors, 10, 'dot_product')
            builder.tree(
                leaves,
                leaf_counts[2],
                training_sample_size=min(rows, 100_000),
                random_init=False,
                **spilling,
            )
            builder.score_ah(2, anisotropic_quantization_threshold=0.2)
            kind = scann.scann_builder.ReorderType.BFLOAT16
            return builder.reorder(48, quantize=kind).set_n_training_threads(1).build()

        searcher, seconds, memory = _timed(make)

        def scann_search(searched, reorder, searcher=searcher):
            def search(q, k):
                # ScaNN has a separate function for one query, which skips the set-up of batches.
                if len(q) == 1:
                    return searcher.search(q[0], k, reorder, searched)[0][None]
                return searcher.search_batched(q, k, reorder, searched)[0]

            return search

        yield Engine(
            f'ScaNN {name}',
            f'{leaves} leaves',
            seconds,
            memory,
            _serialised_size(searcher),
            grid,
            scann_search,
        )
    # Our index needs a corpus and an encoder, but these searches are by vector and use neither.
    no_texts = [''] * rows
    no_encoder = typing.cast(Any, _NoEncoder(vectors.shape[1]))
    ours, seconds, memory = _timed(
        lambda: index_lib.ScannIndex(
            no_encoder,
            MemoryCorpus(no_texts, no_texts),
            vectors,
            leaves=leaves,
            overfetch=8,
            reorder='bfloat16',
        )
    )

    def search_ours(searched, reorder):
        def search(q, k):
            # The grid changes private fields between searches; a user sets them when the index is opened.
            ours._leaves_searched, ours._reordered = searched, reorder
            return ours.search_vectors(q, k)[0]

        return search

    yield Engine(
        'retrieval.ScannIndex',
        f'{leaves} leaves',
        seconds,
        memory,
        _serialised_size(ours._searcher),
        grid,
        search_ours,
    )


class _NoEncoder:
    """Replaces the encoder in an index that is searched by vector only."""

    def __init__(self, dimension: int):
        self.dimension = dimension
        self.settings: dict[str, Any] = {}


def _serialised_size(searcher) -> int:
    """Returns the bytes of the serialised searcher."""
    with tempfile.TemporaryDirectory() as folder:
        searcher.serialize(folder)
        return sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())
