"""Approximate indexes of ScaNN and FAISS behind one call, each with a grid of settings to be tuned over.

An engine is built once per build setting; what can be set per search is swept without building again.
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

# Name: what ScaNN reorders with, threshold of anisotropic quantisation, λ of SOAR (None: every vector in one leaf).
VARIANTS: dict[str, tuple[str, float, float | None]] = {
    'float32': ('FLOAT32', 0.2, None),
    'bfloat16': ('BFLOAT16', 0.2, None),
    'bfloat16, threshold 0.1': ('BFLOAT16', 0.1, None),
    'bfloat16, SOAR': ('BFLOAT16', 0.2, 1.5),
    'float32, SOAR': ('FLOAT32', 0.2, 1.5),
}

Search = Callable[[np.ndarray, int], np.ndarray]  # unit vectors [B, D], k → ids [B, k]


@dataclasses.dataclass
class Engine:
    """One built index: `settings` to sweep, and `search(setting)` that returns the search function of one."""

    family: str
    build: str
    seconds: float
    memory: int
    size: int
    settings: list[tuple]
    search: Callable[..., Search]


def resident() -> int:
    """Bytes of memory this process holds."""
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE')


def _timed(make) -> tuple[Any, float, int]:
    before, start = resident(), time.perf_counter()
    made = make()
    return made, time.perf_counter() - start, resident() - before


def faiss_engines(vectors: np.ndarray, hnsw: bool) -> Iterator[Engine]:
    """IVF-Flat, IVF-PQ fast-scan with refinement, and (where asked for) HNSW, on one thread."""
    faiss.omp_set_num_threads(1)
    rows, dimension = vectors.shape
    lists = 1 << round(math.log2(4 * math.sqrt(rows)))
    probes = [p for p in (4, 8, 12, 16, 24, 32, 48, 64, 96, 128) if p <= lists]

    def built(recipe):
        found = faiss.index_factory(dimension, recipe, faiss.METRIC_INNER_PRODUCT)
        faiss.extract_index_ivf(found).cp.max_points_per_centroid = 64
        found.train(vectors[:: max(1, rows // 100_000)])
        found.add(vectors)
        return found

    recipe = f'IVF{lists},Flat'
    flat, seconds, memory = _timed(lambda: built(recipe))

    def flat_search(nprobe):
        def search(q, k):
            flat.nprobe = nprobe
            return flat.search(q, k)[1]

        return search

    size = len(faiss.serialize_index(flat))
    yield Engine(
        'FAISS IVF-Flat', recipe, seconds, memory, size, [(p,) for p in probes], flat_search
    )
    recipe = f'IVF{lists},PQ{dimension // 2}x4fs,RFlat'
    refined, seconds, memory = _timed(lambda: built(recipe))
    inner = faiss.extract_index_ivf(refined)

    def refined_search(nprobe, factor):
        def search(q, k):
            inner.nprobe, refined.k_factor = nprobe, factor
            return refined.search(q, k)[1]

        return search

    size = len(faiss.serialize_index(refined))
    grid = [(p, factor) for p in probes for factor in (4, 8, 16)]
    yield Engine('FAISS IVF-PQ fast-scan', recipe, seconds, memory, size, grid, refined_search)
    if hnsw:
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


def scann_engines(vectors: np.ndarray, names: tuple[str, ...]) -> Iterator[Engine]:
    """ScaNN's library call in the variants named (see `VARIANTS`), and our index over it."""
    scann = index_lib._scann()
    rows = len(vectors)
    leaves = max(16, 1 << round(math.log2(2 * math.sqrt(rows))))
    shares = [max(1, leaves * n // 1000) for n in (5, 10, 15, 20, 30, 40, 60, 80, 120, 160)]
    grid = [(searched, reorder) for searched in dict.fromkeys(shares) for reorder in (12, 24, 48)]
    for name in names:
        reorder, threshold, soar = VARIANTS[name]
        spilling = dict(soar_lambda=soar) if soar else {}

        def make(
            spilling=spilling, threshold=threshold, reorder=scann.scann_builder.ReorderType[reorder]
        ):
            builder = scann.builder(vectors, 10, 'dot_product')
            builder.tree(
                leaves,
                shares[2],
                training_sample_size=min(rows, 100_000),
                random_init=False,
                **spilling,
            )
            builder.score_ah(2, anisotropic_quantization_threshold=threshold)
            return builder.reorder(48, quantize=reorder).set_n_training_threads(1).build()

        searcher, seconds, memory = _timed(make)

        def library(searched, reorder, searcher=searcher):
            def search(q, k):
                if len(q) == 1:
                    return searcher.search(q[0], k, reorder, searched)[0][None]
                return searcher.search_batched(q, k, reorder, searched)[0]

            return search

        yield Engine(
            f'ScaNN {name}', f'{leaves} leaves', seconds, memory, _saved(searcher), grid, library
        )
    blanks, blind = [''] * rows, typing.cast(Any, _Blind(vectors.shape[1]))
    ours, seconds, memory = _timed(
        lambda: index_lib.ScannIndex(
            blind,
            MemoryCorpus(blanks, blanks),
            vectors,
            leaves=leaves,
            overfetch=8,
            reorder='bfloat16',
        )
    )

    def own(searched, reorder):
        def search(q, k):
            ours._leaves_searched, ours._reordered = searched, reorder
            return ours.search_vectors(q, k)[0]

        return search

    yield Engine(
        'retrieval.ScannIndex',
        f'{leaves} leaves',
        seconds,
        memory,
        _saved(ours._searcher),
        grid,
        own,
    )


class _Blind:
    """An encoder for searches by vector."""

    def __init__(self, dimension: int):
        self.dimension, self.settings = dimension, {}


def _saved(searcher) -> int:
    with tempfile.TemporaryDirectory() as folder:
        searcher.serialize(folder)
        return sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())
