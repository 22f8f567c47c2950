"""The client: the same answers in-process and over HTTP, retries, breaker, cache, counters, a bound on failures."""

import time
import types

import pytest
from fake_server import cut, http
from refusals import refused
from serving import served

from zeroplay_jax.retrieval import web
from zeroplay_jax.retrieval.client import Client, Http, InProcess
from zeroplay_jax.retrieval.index import ExactIndex
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.retrieval.types import SearchFailed

TITLES = [f'Name{i}' for i in range(50)]
TEXTS = [f'Name{i} is a town near Name{i + 1}.' for i in range(50)]


@pytest.fixture(scope='module')
def index():
    return ExactIndex.build(LexicalEncoder(), TITLES, TEXTS)


@pytest.fixture(scope='module')
def url(index):
    with served(index) as url:
        yield url


@pytest.mark.parametrize('end', ['', '/retrieve', '/'])
def test_in_process_and_http_give_the_same(index, url, end):
    queries = ['Name3', 'a town near Name9', 'Name3', '', '\ud800']
    remote, local = Client(Http(url + end)), Client(InProcess(index))
    remote.wait_until_ready(10)
    theirs, ours = remote.retrieve(queries, 3), local.retrieve(queries, 3)
    assert theirs[:4] == ours[:4] and remote.backend.name == 'fingerprint'
    assert ours[0][0]['title'] == 'Name3'
    assert ours[0][0].keys() == {'id', 'title', 'text', 'score'}
    assert ours[0] == ours[2] and ours[3] == [] and theirs[4] is None


def test_large_calls_are_cut_into_batches(fake):
    queries = [str(number) for number in range(10)]
    assert len(http(fake, batch=4).retrieve(queries, 1)) == 10
    expected = [queries[:4], queries[4:8], queries[8:]]
    assert fake.seen == [{'queries': part, 'topk': 1, 'return_scores': True} for part in expected]


@pytest.mark.parametrize(
    'fault', ['close', cut, (500, {'error': 'broken'}), (429, b''), (200, b'<html>')]
)
def test_faults_are_retried_and_bounded(fake, fault):
    fake.script = [fault, fault]
    backend = http(fake, retries=2)
    assert backend.retrieve(['q'], 1)[0][0]['id'] == '7'
    assert len(fake.seen) == 3 and backend.retried == 2
    fake.script = [fault] * 3
    with pytest.raises(SearchFailed, match='3 attempts'):
        backend.retrieve(['q'], 1)
    assert len(fake.seen) == 6


def test_the_breaker_opens_and_closes_again(fake, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, 'monotonic', lambda: clock[0])
    fake.script = [(500, {})] * 2
    backend = http(fake, retries=0, breaker=2, breaker_seconds=5.0)
    for _ in range(2):
        with pytest.raises(SearchFailed, match='status 500'):
            backend.retrieve(['q'], 1)
    with pytest.raises(SearchFailed, match='2 times in a row'):
        backend.retrieve(['q'], 1)
    assert len(fake.seen) == 2  # nothing was sent
    clock[0] += 5.1
    assert backend.retrieve(['q'], 1)[0] and len(fake.seen) == 3


def test_a_server_that_has_answered_before_is_waited_for(fake, monkeypatch):
    monkeypatch.setattr(web, '_LONGEST_PAUSE', 0.001)
    monkeypatch.setattr(web, '_LONGEST_WAIT', 0.001)
    backend = http(fake, retries=1, patience=60.0)
    fake.script = ['close'] * 3
    with pytest.raises(SearchFailed, match='2 attempts'):
        backend.retrieve(['q'], 1)
    # It is away, or started again.
    loading = (503, {'error': 'the index is being loaded'}, [('Retry-After', '1')])
    fake.script = ['ok', *['close', (502, b''), loading, (504, b'')] * 10]
    assert backend.retrieve(['q'], 1) == backend.retrieve(['q'], 1)
    assert backend.retried == 1 + 40
    # A failure of its own is none of these.
    fake.script = [(500, b'')] * 2
    with pytest.raises(SearchFailed, match='status 500, 2 attempts'):
        backend.retrieve(['q'], 1)
    clock = [time.monotonic()]
    monkeypatch.setattr(web, 'time', types.SimpleNamespace(monotonic=lambda: clock[0]))

    def a_minute_later(handler):
        clock[0] += 61

    fake.script = ['close', 'close', a_minute_later, 'close']
    with pytest.raises(SearchFailed, match='3 attempts'):
        backend.retrieve(['q'], 1)
    # The minute of a server that is away does not begin again with each request.
    fake.script = ['close'] * 2
    with pytest.raises(SearchFailed, match='2 attempts'):
        backend.retrieve(['q'], 1)


def test_a_refused_query_does_not_take_its_neighbours_along(fake):
    refuse = (400, {'error': 'query too long'})
    fake.script = [refuse, 'ok', refuse, 'ok', refuse]
    client = Client(http(fake))
    answers = client.retrieve(list('abcd'), 1)
    assert [answer is not None for answer in answers] == [True, True, True, False]
    asked = [''.join(body['queries']) for body in fake.seen]
    assert asked == 'abcd ab cd c d'.split()
    assert client.metrics()['search/failed'] == 1


def test_the_cache_knows_index_query_and_k(fake):
    client = Client(http(fake), cache=2)
    first = client.retrieve(['a', 'a', 'b'], 1)
    assert fake.seen[0]['queries'] == ['a', 'b'] and first[0] == first[1]
    first[0][0].clear()  # what is handed out is the caller's
    assert client.retrieve(['a'], 1)[0][0]['id'] == '7' and len(fake.seen) == 1
    client.retrieve(['a'], 2)  # another k; 'b' is the least used and goes
    client.retrieve(['a'], 1)
    assert len(fake.seen) == 2
    client.retrieve(['b'], 1)
    assert len(fake.seen) == 3
    client.backend.name = 'another index'
    client.retrieve(['b'], 1)
    assert len(fake.seen) == 4


def test_counters_and_the_bound_on_failures(fake):
    client = Client(http(fake, retries=1, breaker=100), max_failure_rate=0.25)
    client.retrieve(['a', 'b', 'c', 'a'], 1)
    fake.script = ['close', 'close']
    client.retrieve(['d'], 1)
    client.check_failure_rate()  # one of five
    metrics = client.metrics()
    counts = [metrics[f'search/{name}'] for name in ('queries', 'failed', 'retries')]
    assert counts == [5, 1, 1] and metrics['search/cached_share'] == pytest.approx(1 / 5)
    assert client.metrics()['search/queries'] == 0
    fake.script = ['close', 'close']
    client.retrieve(['e', 'a'], 1)
    with refused('1 of 2 searches failed, more than 25 %'):
        client.check_failure_rate()


def test_waiting_for_a_server(fake):
    client = Client(http(fake))
    client.wait_until_ready(1)
    assert client.backend.name == 'x'
    fake.health = (503, {'status': 'loading'})
    with refused(r'not ready after 0 s \(GET /health: status 503\); start it'):
        client.wait_until_ready(0.05, pause=0.01)
    fake.health = (404, b'')  # Search-R1's server has no such page: it is asked a query
    client.wait_until_ready(1)
    assert fake.seen[-1]['queries'] == ['ready']
