"""Approximate indexes of ScaNN and FAISS with one interface, each with a grid of search settings.

An index is built once per build setting. Settings that apply to a search are varied without building again.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import faiss
import numpy as np

from zeroplay_jax.retrieval import index as index_lib
from zeroplay_jax.retrieval.corpus import MemoryCorpus

# Unit vectors [B, D], k → ids [B, k].
Search = Callable[[np.ndarray, int], np.ndarray]


@dataclasses.dataclass
class Engine:
    """A built index.

    Attributes:
      family, build: its kind and its build setting, for the tables.
      seconds: time of building.
      size: bytes of the serialised index.
      settings: search settings to tune over, each a tuple of arguments of `search`.
      search: function from a setting to the search function with it, until another setting is asked for.
    """

    family: str
    build: str
    seconds: float
    size: int
    settings: list[tuple]
    search: Callable[..., Search]


def _built(family: str, build: str, make, size_of, settings: list[tuple], search) -> Engine:
    """Returns the engine of the index that `make` returns.

    Args:
      family, build, settings: see `Engine`.
      make: builds the index, which is measured.
      size_of: function from the index to the bytes that it has when it is serialised.
      search: function from the index and a setting to the search function.
    """
    started = time.perf_counter()
    index = make()
    seconds = time.perf_counter() - started
    search_index = functools.partial(search, index)
    return Engine(family, build, seconds, size_of(index), settings, search_index)


def faiss_engines(vectors: np.ndarray) -> Iterator[Engine]:
    """Yields IVF-Flat, and IVF-PQ fast-scan with refinement, on one thread."""
    # All engines get one thread: libraries divide work differently, and cores differ between machines.
    faiss.omp_set_num_threads(1)
    rows, dimension = vectors.shape
    # About 4·√rows lists, the lower end of what FAISS's guidelines recommend, as a power of two.
    lists = 1 << round(math.log2(4 * math.sqrt(rows)))
    probes = [p for p in (4, 8, 12, 16, 24, 32, 48, 64, 96, 128) if p <= lists]

    def trained(factory):
        """Returns a trained index of FAISS that holds all vectors; `factory` is FAISS's description of it."""
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
        # More training points per centroid change the recall little and the time of training a lot.
        faiss.extract_index_ivf(index).cp.max_points_per_centroid = 64
        # A sample of 100,000 vectors, as many as ScaNN's tree is trained on below.
        index.train(vectors[:: max(1, rows // 100_000)])
        index.add(vectors)
        return index

    def engine(family, build, make, settings, apply) -> Engine:
        """Returns the engine of an index of FAISS, in which `apply` sets a search setting."""

        def search(index, *setting):
            apply(index, *setting)
            return lambda queries, k: index.search(queries, k)[1]

        # The size on disk is compared as well: an index is copied to every host of a run.
        return _built(
            family, build, make, lambda index: len(faiss.serialize_index(index)), settings, search
        )

    def probe(index, nprobe):
        # It belongs to the index inside a refinement.
        faiss.extract_index_ivf(index).nprobe = nprobe

    factory = f'IVF{lists},Flat'
    probes_only = [(p,) for p in probes]
    yield engine('FAISS IVF-Flat', factory, lambda: trained(factory), probes_only, probe)

    def refine(index, nprobe, factor):
        probe(index, nprobe)
        index.k_factor = factor

    # 4-bit codes of two dimensions each, as ScaNN's asymmetric hashing has, and exact rescoring.
    codes = f'IVF{lists},PQ{dimension // 2}x4fs,RFlat'
    grid = list(itertools.product(probes, (4, 8, 16)))
    yield engine('FAISS IVF-PQ fast-scan', codes, lambda: trained(codes), grid, refine)


def scann_engines(vectors: np.ndarray) -> Iterator[Engine]:
    """Yields ScaNN, which scores candidates again in bfloat16, and our index, which uses it."""
    scann = index_lib._scann()
    rows = len(vectors)
    # About 2·√rows leaves as a power of two, for ScaNN and for our index, so that both trees are equally fine.
    leaves = max(16, 1 << round(math.log2(2 * math.sqrt(rows))))
    build = f'{leaves} leaves'
    # Leaves that a search reads, from half a percent to a sixth of all. Small trees give equal numbers, which
    # `dict.fromkeys` removes.
    searched = [max(1, leaves * n // 1000) for n in (5, 10, 15, 20, 30, 40, 60, 80, 120, 160)]
    # A setting is a number of leaves, and one of candidates that are scored again.
    grid = list(itertools.product(dict.fromkeys(searched), (12, 24, 48)))

    def make():
        """Returns a trained searcher. The counts given here are defaults that every search overrides."""
        builder = scann.builder(vectors, 10, 'dot_product')
        builder.tree(
            leaves,
            searched[2],
            training_sample_size=min(rows, 100_000),
            random_init=False,
        )
        builder.score_ah(2, anisotropic_quantization_threshold=0.2)
        kind = scann.scann_builder.ReorderType.BFLOAT16
        return builder.reorder(48, quantize=kind).set_n_training_threads(1).build()

    def search_scann(searcher, leaves_searched, reordered):
        def search(queries, k):
            # ScaNN has a separate function for one query, which skips the set-up of batches.
            if len(queries) == 1:
                return searcher.search(queries[0], k, reordered, leaves_searched)[0][None]
            return searcher.search_batched(queries, k, reordered, leaves_searched)[0]

        return search

    yield _built('ScaNN', build, make, _serialised_size, grid, search_scann)
    # Our index needs a corpus and an encoder, but these searches are by vector and use neither.
    no_texts = [''] * rows
    no_encoder: Any = types.SimpleNamespace(dimension=vectors.shape[1], settings={})

    def ours():
        return index_lib.ScannIndex(
            no_encoder,
            MemoryCorpus(no_texts, no_texts),
            vectors,
            leaves=leaves,
            reorder='bfloat16',
        )

    def search_ours(index, leaves_searched, reordered):
        # The grid changes between searches what is fixed for users, or set when the index is opened.
        index._leaves_searched = leaves_searched
        index_lib._OVERFETCH, index_lib._REORDERED = 8, reordered
        return lambda queries, k: index.search_vectors(queries, k)[0]

    def size_of_ours(index):
        return _serialised_size(index._searcher)

    yield _built('retrieval.ScannIndex', build, ours, size_of_ours, grid, search_ours)


def _serialised_size(searcher) -> int:
    """Returns the bytes of the serialised searcher."""
    with tempfile.TemporaryDirectory() as folder:
        searcher.serialize(folder)
        return sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())
