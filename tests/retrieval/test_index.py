"""Indexes: recall against the exact one, answers that depend on the query alone, ties, bad input."""

import concurrent.futures
import os
import random
import subprocess
import sys

import jax
import numpy as np
import pytest

from zeroplay_jax.mini import world
from zeroplay_jax.retrieval import index as index_lib
from zeroplay_jax.retrieval.corpus import MemoryCorpus
from zeroplay_jax.retrieval.lexical import LexicalEncoder


class TableEncoder:
    """Looks vectors up: text 'i' has row i of a table."""

    def __init__(self, table):
        self.table = np.asarray(table, np.float32)
        self.dimension = self.table.shape[1]
        self.settings = {'kind': 'table'}

    def encode_passages(self, titles, texts):
        return self.encode_queries(titles)

    def encode(self, texts):
        raise AssertionError('these tests encode titles')

    def encode_queries(self, queries):
        return self.table[[int(query) for query in queries]]


def unit_rows(rng, rows, dimension):
    vectors = rng.normal(size=(rows, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope='module')
def built():
    """(ScaNN index, exact index, 2,500 queries of five kinds) over more than 5,000 passages."""
    found = [passage for seed in range(40) for passage in world.World(seed).passages]
    titles, texts = [passage.title for passage in found], [passage.text for passage in found]
    encoder, rng = LexicalEncoder(), random.Random(0)
    queries = []
    for number in range(2_500):
        title, text = rng.choice(titles), rng.choice(texts)
        forms = [
            title,
            title[:-1],
            f'the author of {title}',
            f'What is the mayor of {title}?',
            text.split('.')[0],
        ]
        queries.append(forms[number % 5])
    scann = index_lib.ScannIndex.build(encoder, titles, texts)
    return scann, index_lib.ExactIndex.build(encoder, titles, texts), queries


@pytest.fixture(scope='module')
def tied():
    """ScaNN and exact index whose vectors repeat: 1,500 distinct ones, some 60 times, in mixed order."""
    rng = np.random.default_rng(1)
    repeats = np.where(np.arange(1_500) % 50 == 0, 60, 1 + np.arange(1_500) % 3)
    table = np.repeat(unit_rows(rng, 1_500, 32), repeats, axis=0)[rng.permutation(repeats.sum())]
    encoder, names = TableEncoder(table), [str(row) for row in range(len(table))]
    return (
        index_lib.ScannIndex.build(encoder, names, names),
        index_lib.ExactIndex.build(encoder, names, names),
        [str(query) for query in rng.integers(0, len(table), 2_000)],
    )


def in_batches(index, queries, size, k=3):
    parts = [index.search(queries[at : at + size], k) for at in range(0, len(queries), size)]
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def test_exact_index_agrees_with_sorting_every_float64_score(built):
    _, exact, queries = built
    ids, scores = exact.search(queries[:300], 5)
    found = exact.passages(range(len(exact)))
    encoder, columns = exact.encoder, ([p['title'] for p in found], [p['text'] for p in found])
    queries = encoder.encode_queries(queries[:300]).astype(float)
    truth = (queries @ encoder.encode_passages(*columns).T.astype(float)).astype(np.float32)
    np.testing.assert_array_equal(ids, np.argsort(-truth, axis=1, kind='stable')[:, :5])
    np.testing.assert_allclose(scores, -np.sort(-truth, axis=1)[:, :5], atol=1e-7)
    assert ids.dtype == np.int64 and scores.dtype == np.float32


def test_scann_recall_and_exact_scores(built):
    scann, exact, queries = built
    assert (
        scann.parameters['kind'] == 'scann'
        and scann.parameters['leaves_searched'] < scann.parameters['leaves']
    )
    (ids, scores), (truth, true_scores) = scann.search(queries, 3), exact.search(queries, 3)
    recall = np.mean([np.isin(row, mine).mean() for row, mine in zip(truth, ids, strict=True)])
    print(
        f'recall@3 of ScaNN against exact: {recall:.4f}, same best: {(ids[:, 0] == truth[:, 0]).mean():.4f}'
    )
    assert recall >= 0.99
    same = ids == truth
    np.testing.assert_array_equal(scores[same], true_scores[same])


def test_exact_titles_come_first(built):
    scann = built[0]
    titles = [passage['title'] for passage in scann.passages(range(len(scann)))]
    assert (scann.search(titles, 3)[0][:, 0] == np.arange(len(titles))).mean() >= 0.995


@pytest.mark.parametrize('kind', [0, 1])
@pytest.mark.parametrize('case', ['built', 'tied'])
def test_answers_do_not_depend_on_the_batch(case, kind, request):
    found = request.getfixturevalue(case)
    index, queries = found[kind], found[2][: 2_500 if kind == 0 else 300]
    alone = in_batches(index, queries, 1)
    for size in (3, 32, 256):
        for mine, reference in zip(in_batches(index, queries, size), alone, strict=True):
            np.testing.assert_array_equal(mine, reference)
    order = np.random.default_rng(2).permutation(len(queries))
    for mine, reference in zip(
        in_batches(index, [queries[at] for at in order], 32), alone, strict=True
    ):
        np.testing.assert_array_equal(mine, reference[order])


@pytest.mark.parametrize('case', ['built', 'tied'])
def test_answers_do_not_depend_on_threads(case, request):
    scann, _, queries = request.getfixturevalue(case)
    reference = scann.search(queries, 3)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        parts = list(
            pool.map(lambda at: scann.search(queries[at : at + 7], 3), range(0, len(queries), 7))
        )
    for mine, whole in zip(zip(*parts, strict=True), reference, strict=True):
        np.testing.assert_array_equal(np.concatenate(mine), whole)


def test_equal_vectors_rank_by_lower_id(tied):
    scann, exact, queries = tied
    assert scann.parameters['kind'] == 'scann'
    for k in (1, 3, 80):  # 80: more than any group of equals, and more than the overfetch
        np.testing.assert_array_equal(
            scann.search(queries[:500], k)[0][:, :3], exact.search(queries[:500], k)[0][:, :3]
        )
    ids, scores = scann.search(queries, 3)
    table = exact.encoder.table
    for query, row in zip(queries[:200], ids[:200], strict=True):
        equal = np.flatnonzero((table == table[int(query)]).all(axis=1))[:3]
        np.testing.assert_array_equal(row[: len(equal)], equal)
    assert (np.diff(ids)[np.diff(scores) == 0] > 0).all() and (np.diff(scores) <= 0).all()


def test_more_asked_for_than_the_leaves_hold_falls_back_to_a_scan():
    rng = np.random.default_rng(3)
    encoder, names = TableEncoder(unit_rows(rng, 1_200, 16)), [str(row) for row in range(1_200)]
    scann = index_lib.ScannIndex.build(
        encoder, names, names, overfetch=4, leaves=40, leaves_searched=1
    )
    exact = index_lib.ExactIndex.build(encoder, names, names)
    for mine, truth in zip(
        scann.search(names[:20], 1_200), exact.search(names[:20], 1_200), strict=True
    ):
        np.testing.assert_array_equal(mine, truth)


def test_a_small_corpus_is_scanned_and_says_so(caplog):
    encoder, names = LexicalEncoder(), [f'name{row}' for row in range(140)]
    with caplog.at_level('INFO'):
        small = index_lib.ScannIndex.build(encoder, names, names)
    assert (
        small.parameters == {'kind': 'exact', 'passages': 140} and 'fewer than 1000' in caplog.text
    )
    exact = index_lib.ExactIndex.build(encoder, names, names)
    for mine, truth in zip(small.search(names, 3), exact.search(names, 3), strict=True):
        np.testing.assert_array_equal(mine, truth)
    assert (small.search(names, 3)[0][:, 0] == np.arange(140)).all()


PROGRAM = """
import hashlib, numpy as np
from zeroplay_jax.retrieval.index import ScannIndex
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.mini import world
found = [passage for seed in range(10) for passage in world.World(seed).passages]
titles = [passage.title for passage in found]
index = ScannIndex.build(LexicalEncoder(), titles, [passage.text for passage in found])
assert index.parameters['kind'] == 'scann'
ids, scores = index.search(titles + [t[:-1] for t in titles] + ['the author of ' + t for t in titles], 20)
print(hashlib.sha256(ids.tobytes() + scores.tobytes()).hexdigest())
"""


def test_two_processes_build_the_same_index():
    runs = [
        subprocess.Popen(
            [sys.executable, '-c', PROGRAM],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, 'PYTHONHASHSEED': seed, 'TF_CPP_MIN_LOG_LEVEL': '3'},
        )
        for seed in '12'
    ]
    results = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert results[0][0] == results[1][0] and len(results[0][0].strip()) == 64


def test_passages(built):
    scann = built[0]
    first, again = scann.passages(np.array([0, 0]))
    assert first == again and first['id'] == 0 and first['text'].startswith(first['title'])
    for bad in (-1, len(scann)):
        with pytest.raises(ValueError, match=f'no passage has row number {bad}'):
            scann.passages([bad])


def test_no_queries_is_no_error(built):
    ids, scores = built[0].search([], 3)
    assert ids.shape == scores.shape == (0, 3)


@pytest.mark.parametrize('blank', ['', '  \n'])
def test_a_blank_query_is_named(built, blank):
    for index in built[:2]:
        with pytest.raises(ValueError, match='query 1 of 3 is empty'):
            index.search(['Gumu', blank, 'Puto'], 3)


@pytest.mark.parametrize('value', [0.0, np.nan, np.inf, 3e38, 0.5])
def test_a_bad_query_vector_is_named(value):
    table = np.eye(70, 64, dtype=np.float32)
    table[64:] = np.eye(6, 64)
    encoder, names = TableEncoder(table), [str(row) for row in range(69)]
    index = index_lib.ScannIndex.build(encoder, names, names)
    encoder.table[69] = value
    with pytest.raises(ValueError, match="query 2 of 3, '69', is zero, not finite"):
        index.search(['1', '2', '69'], 3)


def test_a_bad_passage_vector_is_named():
    table = np.eye(64, dtype=np.float32)
    table[9] = np.nan
    names = [str(row) for row in range(64)]
    with pytest.raises(ValueError, match=r"passage 9, '9', and 0 more"):
        index_lib.ExactIndex.build(TableEncoder(table), names, names)


@pytest.mark.parametrize('k', [0, -1, 10**6])
def test_a_bad_k_is_named(built, k):
    with pytest.raises(ValueError, match=f'k is {k}, but must lie between 1 and'):
        built[0].search(['Gumu'], k)


def test_exact_index_is_split_over_the_devices_and_divides_by_none(built):
    exact = built[1]
    exact.search(['Gumu'], 3)
    assert len(exact._matrix.sharding.device_set) == len(jax.local_devices()) == 8
    table = unit_rows(np.random.default_rng(4), 101, 16)  # 101 rows do not divide by 8
    index = index_lib.ExactIndex.build(
        TableEncoder(table), [str(row) for row in range(101)], [''] * 101
    )
    ids, _ = index.search([str(row) for row in range(101)], 101)
    assert (ids[:, 0] == np.arange(101)).all() and (np.sort(ids, axis=1) == np.arange(101)).all()


def test_a_wrong_dimension_is_named():
    corpus, encoder = MemoryCorpus(['a', 'b'], ['', '']), LexicalEncoder(dimension=64)
    for shape in ((2, 65), (3, 64), (2,)):
        with pytest.raises(ValueError, match='2 passages and vectors of shape .* for dimension 64'):
            index_lib.ExactIndex(encoder, corpus, np.zeros(shape, np.float32))


def test_vectors_of_half_precision_are_scored_as_they_are():
    table = unit_rows(np.random.default_rng(5), 1_200, 16)
    names = [str(row) for row in range(1_200)]
    corpus = MemoryCorpus(names, names)
    half = table.astype(np.float16)
    scann = index_lib.ScannIndex(TableEncoder(table), corpus, half, leaves=10, leaves_searched=10)
    exact = index_lib.ExactIndex(TableEncoder(table), corpus, half)
    truth = (table.astype(float) @ half.T.astype(float)).astype(np.float32)
    for index in (scann, exact):
        ids, scores = index.search(names[:200], 3)
        np.testing.assert_allclose(scores, -np.sort(-truth[:200], axis=1)[:, :3], atol=1e-7)
        assert (ids[:, 0] == np.arange(200)).all()


def test_a_saved_index_answers_the_same(built, tmp_path):
    scann, _, queries = built
    scann.save(tmp_path)
    names = ('overfetch', 'reordered', 'leaves', 'leaves_searched', 'threshold', 'reorder')
    settings = {name: scann.parameters[name] for name in names}
    again = index_lib.ScannIndex(
        scann.encoder, scann.corpus, scann._vectors, **settings, saved=tmp_path
    )
    for mine, theirs in zip(
        again.search(queries[:300], 5), scann.search(queries[:300], 5), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    (tmp_path / 'scann_docids.pkl').write_bytes(b'x')
    with pytest.raises(ValueError, match='scann_docids.pkl'):
        index_lib.ScannIndex(
            scann.encoder, scann.corpus, scann._vectors, **settings, saved=tmp_path
        )


def test_other_misuse_is_named(built):
    with pytest.raises(ValueError, match='single text'):
        built[0].search('Gumu', 3)
    with pytest.raises(ValueError, match='0 titles and 0 texts'):
        index_lib.ExactIndex.build(LexicalEncoder(), [], [])
    names = [f'name{row}' for row in range(40)]
    for bad in (dict(overfetch=0), dict(leaves=4, leaves_searched=5), dict(leaves=41)):
        with pytest.raises(ValueError, match='needs 1 ≤ overfetch'):
            index_lib.ScannIndex.build(LexicalEncoder(), names, names, **bad)
