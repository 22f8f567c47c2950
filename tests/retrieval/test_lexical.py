"""The lexical encoder: finds exact, misspelt and embedded names, and is the same everywhere."""

import numpy as np
import pytest

from zeroplay_jax.mini import world
from zeroplay_jax.retrieval.lexical import LexicalEncoder


@pytest.fixture(scope='module')
def corpus():
    """Titles and vectors of more than 5,000 passages, a part of them with near-miss titles."""
    passages = [passage for seed in range(40) for passage in world.World(seed).passages]
    titles, texts = zip(*((passage.title, passage.text) for passage in passages))
    assert len(titles) >= 5_000 and len(set(titles)) == len(titles)
    return titles, LexicalEncoder().encode_passages(titles, texts)


# Query of a title, how far down its passage may be, and the share of such queries that find it so.
QUERIES = [
    (str, 1, 0.995),
    ('the author of {}'.format, 3, 0.99),
    ('What is the birthplace of the teacher of {}?'.format, 3, 0.99),
    ('{} (river)'.format, 3, 0.99),
    # A letter is missing.
    (lambda title: title[:2] + title[3:], 3, 0.5),
]


@pytest.mark.parametrize(('query_of', 'most_rank', 'share'), QUERIES)
def test_titles_are_found_among_near_misses(corpus, query_of, most_rank, share):
    titles, vectors = corpus
    rows = np.arange(0, len(titles), 5)
    queries = [query_of(title) for title in titles[::5]]
    scores = LexicalEncoder().encode_queries(queries) @ vectors.T
    wanted = scores[np.arange(len(rows)), rows][:, None]
    ranks = (scores > wanted).sum(axis=1)
    assert (ranks < most_rank).mean() >= share


def test_shape_length_case_accents_and_punctuation():
    encoder = LexicalEncoder(dimension=128)
    vectors = encoder.encode_queries(['Élan Gumu', 'elan, GUMU!', 'gumu'])
    assert vectors.shape == (3, 128) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert np.abs(vectors[1] - vectors[2]).max() > 0.01


def test_whatever_is_not_blank_has_a_direction():
    encoder = LexicalEncoder()
    odd = ['?', '<<>>', '\u0301', '\ud800', 'the of', 'ß', '漢字', 'x' * 100_000, '\x00', '🙂']
    np.testing.assert_allclose(np.linalg.norm(encoder.encode_queries(odd), axis=1), 1, atol=1e-6)
