"""BM25: the formula, ties by lower id, nothing where nothing matches."""

import collections
import math

import numpy as np
import pytest

from zeroplay_jax.retrieval.bm25 import Bm25Index
from zeroplay_jax.retrieval.corpus import MemoryCorpus
from zeroplay_jax.retrieval.types import RetrievalError

TITLES = ['Gumu', 'Puto', 'Lomi', 'Gumu', 'Rivers']
TEXTS = [
    'The town of Gumu.',
    'Puto wrote books in Gumu.',
    'Lomi wrote.',
    'The town of Gumu.',
    'Long river, wide river, old',
]


@pytest.fixture(scope='module')
def index():
    return Bm25Index.build(TITLES, TEXTS)


def test_scores_follow_the_formula(index):
    """Lucene's: idf·tf / (tf + k1·(1 − b + b·len/mean)), idf = ln(1 + (N − df + ½)/(df + ½))."""
    words = [
        ['gumu', 'town', 'gumu'],
        ['puto', 'puto', 'wrote', 'book', 'gumu'],
        ['lomi', 'lomi', 'wrote'],
    ]
    words += [words[0], ['river', 'long', 'river', 'wide', 'river', 'old']]
    counts, mean = [collections.Counter(w) for w in words], np.mean([len(w) for w in words])
    expected = np.zeros(5)
    for word in ('book', 'gumu'):
        df = sum(word in c for c in counts)
        idf = math.log(1 + (5 - df + 0.5) / (df + 0.5))
        for row, c in enumerate(counts):
            expected[row] += (
                idf * c[word] / (c[word] + 1.5 * (0.25 + 0.75 * len(words[row]) / mean))
            )
    ids, scores = index.search(['Books of Gumu'], 3)
    np.testing.assert_array_equal(ids[0], np.argsort(-expected, kind='stable')[:3])
    np.testing.assert_allclose(scores[0], -np.sort(-expected)[:3], rtol=1e-5)


def test_ties_and_what_does_not_match(index):
    ids, scores = index.search(['Gumu town', 'xyzzy', 'the of', 'rivers'], 4)
    assert (
        ids[0].tolist() == [0, 3, 1, -1]
        and scores[0, 0] == scores[0, 1] > scores[0, 2] > 0 == scores[0, 3]
    )
    assert (ids[1:3] == -1).all() and not scores[1:3].any() and ids[3].tolist() == [4, -1, -1, -1]


def test_answers_do_not_depend_on_the_batch():
    rng = np.random.default_rng(0)
    texts = [
        ' '.join(f'w{rng.integers(50)}' for _ in range(rng.integers(1, 9))) for _ in range(500)
    ]
    index = Bm25Index.build([''] * 500, texts)
    queries = [' '.join(f'w{n}' for n in rng.integers(0, 60, 3)) for _ in range(256)]
    whole = index.search(queries, 5)
    for size in (1, 3, 32):
        parts = [index.search(queries[at : at + size], 5) for at in range(0, 256, size)]
        for mine, theirs in zip(zip(*parts, strict=True), whole, strict=True):
            np.testing.assert_array_equal(np.concatenate(mine), theirs)
    assert (np.diff(whole[0])[(np.diff(whole[1]) == 0) & (whole[0][:, 1:] >= 0)] > 0).all()


def test_saved_and_opened(index, tmp_path):
    index.save(tmp_path)
    again = Bm25Index(index.corpus, saved=tmp_path)
    for mine, theirs in zip(
        again.search(['Gumu wrote'], 5), index.search(['Gumu wrote'], 5), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(RetrievalError, match='has 5 passages, the corpus 1'):
        Bm25Index(MemoryCorpus(['a'], ['b']), saved=tmp_path)


def test_bad_input_is_named(index):
    for bad in (0, 6):
        with pytest.raises(RetrievalError, match=f'k is {bad}'):
            index.search(['Gumu'], bad)
    with pytest.raises(RetrievalError, match='query 1 of 2 is empty'):
        index.search(['Gumu', ' '], 1)
    with pytest.raises(RetrievalError, match='no passage has a word that counts'):
        Bm25Index.build(['a'], ['the'])
    with pytest.raises(RetrievalError, match='no passage has row number 5'):
        index.passages([5])


@pytest.mark.fault('third-24', 'BM25 and a decomposed query')
def test_queries_are_composed_as_passages_are(user_reads):
    index = Bm25Index.build(['Café', 'Lomi'], ['A café by the river.', 'A town.'])
    rows, _ = index.search(['cafe\u0301'], 1)
    assert rows.tolist() == [[0]]
    user_reads('right: found as the composed query is')
