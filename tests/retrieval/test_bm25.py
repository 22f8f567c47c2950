"""BM25: the formula, ties by lower id, nothing where nothing matches."""

import math

import numpy as np
import pytest
from test_index import in_batches, same

from zeroplay_jax.retrieval.corpus import MemoryCorpus
from zeroplay_jax.retrieval.index import Bm25Index

WORDS = [f'w{number}' for number in range(60)]
TITLES = 'Gumu Puto Lomi Gumu Rivers'.split()
TEXTS = [
    'The town of Gumu.',
    'Puto wrote books in Gumu.',
    'Lomi wrote.',
    'The town of Gumu.',
    'Long river, wide river, old',
]


@pytest.fixture(scope='module')
def index():
    return Bm25Index(MemoryCorpus(TITLES, TEXTS))


def test_scores_follow_the_formula(index):
    """Lucene's: idf·tf / (tf + k1·(1 − b + b·len/mean)), idf = ln(1 + (N − df + ½)/(df + ½))."""
    passages = [
        'gumu town gumu',
        'puto puto wrote book gumu',
        'lomi lomi wrote',
        'gumu town gumu',
        'river long river wide river old',
    ]
    words = [passage.split() for passage in passages]
    mean = np.mean([len(row) for row in words])
    expected = np.zeros(5)
    for word in ('book', 'gumu'):
        df = sum(word in row for row in words)
        idf = math.log(1 + (5 - df + 0.5) / (df + 0.5))
        for number, row in enumerate(words):
            tf = row.count(word)
            expected[number] += idf * tf / (tf + 1.5 * (0.25 + 0.75 * len(row) / mean))
    ids, scores = index.search(['Books of Gumu'], 3)
    np.testing.assert_array_equal(ids[0], np.argsort(-expected, kind='stable')[:3])
    np.testing.assert_allclose(scores[0], -np.sort(-expected)[:3], rtol=1e-5)


def test_ties_and_what_does_not_match(index):
    ids, scores = index.search(['Gumu town', 'xyzzy', 'the of', 'rivers'], 4)
    nothing = [-1, -1, -1, -1]
    assert ids.tolist() == [[0, 3, 1, -1], nothing, nothing, [4, -1, -1, -1]]
    assert scores[0, 0] == scores[0, 1] > scores[0, 2] > 0 == scores[0, 3]
    assert not scores[1:3].any()


def test_answers_do_not_depend_on_the_batch():
    rng = np.random.default_rng(0)
    texts = [' '.join(words) for words in rng.choice(WORDS[:50], (500, 5))]
    index = Bm25Index(MemoryCorpus([''] * 500, texts))
    queries = [' '.join(words) for words in rng.choice(WORDS, (256, 3))]
    for size in (1, 32):
        same(in_batches(index, queries, size, 5), index.search(queries, 5))


@pytest.mark.parametrize(
    ('passage', 'query', 'place'),
    [
        ('Vitamin D is made in the skin.', 'vitamin d', 4),
        ('Malcolm X was born in Omaha.', 'X', 4),
        ('मुक्त विकिपीडिया लेख', 'विकिपीडिया', 4),
        ('The \ufb01rst \uff34own', 'first town', 4),
        ('A café by the river.', 'cafe\u0301', 4),
        ('10² towns', '102', -1),
    ],
)
def test_words_are_found_and_no_others(passage, query, place):
    others = ['Vitamin is a word', "A plan's malcolm", 'क ख ग', 'A sim card, ple']
    rows, _ = Bm25Index(MemoryCorpus([''] * 5, [*others, passage])).search([query], 1)
    assert rows.tolist() == [[place]]
