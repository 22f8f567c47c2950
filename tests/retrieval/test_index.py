"""Indexes: recall against the exact one, answers that depend on the query alone, ties, bad input."""

import concurrent.futures
import pathlib
import random
import unittest.mock

import jax
import numpy as np
import pytest
from python_process import finish, start_python
from refusals import refused
from refused_calls import check_table

from zeroplay_jax.mini import world
from zeroplay_jax.retrieval import index as index_lib
from zeroplay_jax.retrieval.corpus import MemoryCorpus
from zeroplay_jax.retrieval.downloads import cache_folder
from zeroplay_jax.retrieval.kept_index import trained_once
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.retrieval.types import split


class TableEncoder:
    """Looks vectors up: text 'i' has row i of a table."""

    def __init__(self, table):
        self.table = np.asarray(table, np.float32)
        self.dimension = self.table.shape[1]
        self.settings = {'kind': 'table'}

    def encode(self, texts):
        return self.encode_queries([split(text)[0] for text in texts])

    def encode_queries(self, queries):
        return self.table[[int(query) for query in queries]]


def unit_rows(rng, rows, dimension):
    vectors = rng.normal(size=(rows, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope='module')
def built():
    """(ScaNN index, exact index, 1,000 queries of five kinds) over more than 5,000 passages."""
    passages = [passage for seed in range(40) for passage in world.World(seed).passages]
    titles, texts = zip(*((passage.title, passage.text) for passage in passages))
    encoder, rng = LexicalEncoder(), random.Random(0)
    forms = ('{0}', '{0}x', 'the author of {0}', 'What is the mayor of {0}?', '{1}')
    queries = []
    for number in range(1_000):
        title, text = rng.choice(titles), rng.choice(texts)
        queries.append(forms[number % 5].format(title, text.split('.')[0]))
    scann = index_lib.ScannIndex.build(encoder, titles, texts)
    return scann, index_lib.ExactIndex.build(encoder, titles, texts), queries


def same(answers, others):
    """Checks that (ids, scores) of two searches are equal."""
    for mine, theirs in zip(answers, others, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def numbered(count):
    """Names whose vectors are the rows of a table."""
    return [str(row) for row in range(count)]


def random_table(rows):
    """(encoder, names) of so many random vectors."""
    return TableEncoder(unit_rows(np.random.default_rng(3), rows, 16)), numbered(rows)


@pytest.fixture(scope='module')
def tied():
    """ScaNN and exact index whose vectors repeat: 1,500 distinct ones, some 60 times, in mixed order."""
    rng = np.random.default_rng(1)
    repeats = np.where(np.arange(1_500) % 50 == 0, 60, 1 + np.arange(1_500) % 3)
    table = np.repeat(unit_rows(rng, 1_500, 32), repeats, axis=0)[rng.permutation(repeats.sum())]
    encoder, names = TableEncoder(table), numbered(len(table))
    scann = index_lib.ScannIndex.build(encoder, names, names, leaves=38, leaves_searched=38)
    queries = [str(query) for query in rng.integers(0, len(table), 1_000)]
    return scann, index_lib.ExactIndex.build(encoder, names, names), queries


def in_batches(index, queries, size, k=3):
    parts = [index.search(queries[at : at + size], k) for at in range(0, len(queries), size)]
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def test_exact_index_agrees_with_sorting_every_float64_score(tied):
    _, exact, queries = tied
    ids, scores = exact.search(queries[:300], 5)
    table = exact.encoder.table.astype(float)
    truth = (table[[int(query) for query in queries[:300]]] @ table.T).astype(np.float32)
    np.testing.assert_array_equal(ids, np.argsort(-truth, axis=1, kind='stable')[:, :5])
    np.testing.assert_allclose(scores, -np.sort(-truth, axis=1)[:, :5], atol=1e-7)
    assert ids.dtype == np.int64 and scores.dtype == np.float32


def test_scann_recall_and_exact_scores(built):
    scann, exact, queries = built
    assert scann.parameters['kind'] == 'scann'
    assert scann.parameters['leaves_searched'] < scann.parameters['leaves']
    assert scann.parameters['recall'] >= 0.98
    (ids, scores), (truth, true_scores) = scann.search(queries, 3), exact.search(queries, 3)
    recall = np.mean([np.isin(row, mine).mean() for row, mine in zip(truth, ids, strict=True)])
    assert recall >= 0.99
    equal = ids == truth
    np.testing.assert_array_equal(scores[equal], true_scores[equal])


@pytest.mark.parametrize('kind,count', [(0, 1_000), (1, 300)], ids=['scann', 'exact'])
@pytest.mark.parametrize('case', ['built', 'tied'])
def test_answers_do_not_depend_on_the_batch(case, kind, count, request):
    *indexes, queries = request.getfixturevalue(case)
    index, queries = indexes[kind], queries[:count]
    ids, scores = in_batches(index, queries, 1)
    for size in (3, 32, 256):
        same(in_batches(index, queries, size), (ids, scores))
    order = np.random.default_rng(2).permutation(len(queries))
    mixed = [queries[place] for place in order]
    same(in_batches(index, mixed, 32), (ids[order], scores[order]))


@pytest.mark.parametrize('case', ['built', 'tied'])
def test_answers_do_not_depend_on_threads(case, request):
    scann, _, queries = request.getfixturevalue(case)
    parts = [queries[place : place + 7] for place in range(0, len(queries), 7)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda part: scann.search(part, 3), parts))
    same(map(np.concatenate, zip(*answers, strict=True)), scann.search(queries, 3))


def test_equal_vectors_rank_by_lower_id(tied):
    scann, exact, queries = tied
    assert scann.parameters['kind'] == 'scann'
    for k in (1, 3, 80):  # 80: more than any group of equals, and more than the overfetch
        best, truth = (index.search(queries[:500], k)[0][:, :3] for index in (scann, exact))
        np.testing.assert_array_equal(best, truth)


def test_more_asked_for_than_the_leaves_hold_falls_back_to_a_scan(monkeypatch):
    monkeypatch.setattr(index_lib, '_OVERFETCH', 4)
    encoder, names = random_table(1_200)
    scann = index_lib.ScannIndex.build(encoder, names, names, leaves=40, leaves_searched=1)
    exact = index_lib.ExactIndex.build(encoder, names, names)
    same(scann.search(names[:20], 1_200), exact.search(names[:20], 1_200))


PROGRAM = """
import hashlib, numpy as np
from zeroplay_jax.retrieval.index import ScannIndex
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.retrieval.types import split
from zeroplay_jax.mini import world
found = [passage for seed in range(10) for passage in world.World(seed).passages]
titles = [passage.title for passage in found]
index = ScannIndex.build(LexicalEncoder(), titles, [passage.text for passage in found])
assert index.parameters['kind'] == 'scann'
ids, scores = index.search(titles + [t[:-1] for t in titles] + ['the author of ' + t for t in titles], 20)
print(hashlib.sha256(ids.tobytes() + scores.tobytes()).hexdigest())
"""


def test_two_processes_build_the_same_index():
    processes = [start_python('-c', PROGRAM, PYTHONHASHSEED=seed) for seed in '12']
    one, other = (finish(process)[0] for process in processes)
    assert one == other and len(one.strip()) == 64


@pytest.mark.parametrize('value', [0.0, np.nan, 3e38])
def test_a_bad_query_vector_is_named(value):
    table = np.eye(70, 64, dtype=np.float32)
    table[64:] = np.eye(6, 64)
    encoder, names = TableEncoder(table), numbered(69)
    index = index_lib.ScannIndex.build(encoder, names, names)
    encoder.table[69] = value
    with refused("query 3 of 3, '69', is zero, not finite", ValueError):
        index.search(['1', '2', '69'], 3)


def test_exact_index_is_split_over_the_devices_and_divides_by_none(built):
    exact = built[1]
    exact.search(['Gumu'], 3)
    assert len(exact._matrix.sharding.device_set) == len(jax.local_devices()) == 8
    encoder, names = random_table(101)  # 101 rows do not divide by 8
    ids, _ = index_lib.ExactIndex.build(encoder, names, names).search(names, 101)
    assert (ids[:, 0] == np.arange(101)).all() and (np.sort(ids, axis=1) == np.arange(101)).all()


def test_vectors_of_half_precision_are_scored_as_they_are():
    encoder, names = random_table(1_200)
    half = encoder.table.astype(np.float16)
    parts = (encoder, MemoryCorpus(names, names), half)
    truth = (encoder.table.astype(float) @ half.T.astype(float)).astype(np.float32)
    scann = index_lib.ScannIndex(*parts, leaves=10, leaves_searched=10)
    for index in (scann, index_lib.ExactIndex(*parts)):
        ids, scores = index.search(names[:200], 3)
        np.testing.assert_allclose(scores, -np.sort(-truth[:200], axis=1)[:, :3], atol=1e-7)
        assert (ids[:, 0] == np.arange(200)).all()


@pytest.fixture
def trainings(tmp_path, monkeypatch):
    """Counts the trainings of ScaNN, with an empty cache."""
    train = unittest.mock.Mock(side_effect=index_lib._train_searcher)
    monkeypatch.setattr(index_lib, '_train_searcher', train)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return train


def test_an_index_is_trained_once_for_the_same_passages(trainings):
    encoder, names = random_table(1_200)
    first, kept = (trained_once(encoder, names, names) for _ in '12')
    assert trainings.call_count == 1 and kept.parameters == first.parameters
    same(kept.search(names, 5), first.search(names, 5))
    encoder.table[0] *= -1
    trained_once(encoder, names, names)
    trained_once(encoder, names, names[::-1])
    assert trainings.call_count == 3


def test_a_damaged_cache_and_one_that_cannot_be_written_cost_time_alone(trainings, monkeypatch):
    encoder, names = random_table(1_200)
    first = trained_once(encoder, names, names)
    (folder,) = (cache_folder() / 'worlds').iterdir()
    for path in sorted(folder.iterdir()):
        path.write_bytes(path.read_bytes()[:-1] + b'~')
        same(trained_once(encoder, names, names).search(names, 5), first.search(names, 5))
    assert trainings.call_count == 1 + len([*folder.iterdir()])
    full = unittest.mock.Mock(side_effect=RuntimeError('Failed to write proto'))
    monkeypatch.setattr(index_lib.ScannIndex, 'save', full)
    assert trained_once(encoder, names[::-1], names).parameters['kind'] == 'scann'
    assert full.called


def test_what_cannot_be_searched_or_built_has_the_reason_of_the_table(built, tmp_path):
    scann, exact, _ = built
    spoilt = np.eye(64, dtype=np.float32)
    spoilt[9] = np.nan
    names = globals() | {'scann': scann, 'exact': exact, 'spoilt': TableEncoder(spoilt)}
    names |= {'corpus': MemoryCorpus(['a', 'b'], ['', '']), 'small': LexicalEncoder(dimension=64)}
    check_table(pathlib.Path(__file__).parent / 'bad_searches.txt', names, tmp_path, ValueError)
    for index in (scann, exact):
        ids, scores = index.search([], 3)
        assert ids.shape == scores.shape == (0, 3)
