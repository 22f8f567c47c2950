"""A server under load: a large request does not hold up small ones, and slow or dead clients are left behind."""

import concurrent.futures
import json
import socket
import threading
import time

import pytest
from serving import call, served

from zeroplay_jax.retrieval.index import ExactIndex
from zeroplay_jax.retrieval.lexical import LexicalEncoder


class Paced:
    """An index that takes 5 ms per query, and remembers the calls."""

    def __init__(self):
        titles = [f'Name{i}' for i in range(20)]
        self.index = ExactIndex.build(LexicalEncoder(), titles, titles)
        self.corpus = self.index.corpus
        self.calls = []
        self.gate = threading.Event()

    def __len__(self):
        return len(self.index)

    def search(self, queries, k):
        self.gate.wait(30)
        self.calls.append(list(queries))
        time.sleep(0.005 * len(queries))
        if 'broken' in queries:
            raise RuntimeError('broken')
        return self.index.search(queries, k)


@pytest.fixture
def paced():
    index = Paced()
    yield index
    index.gate.set()


def wait_for_queries(url, count):
    """Waits until so many queries wait for an answer."""
    deadline = time.monotonic() + 10
    while f'retrieval_waiting {count}.0' not in call(f'{url}/metrics')[1]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(url, *queries, topk=1):
    """(status, ids of the documents of each query)."""
    status, reply, _ = call(f'{url}/retrieve', {'queries': queries, 'topk': topk})
    rows = reply.get('result', [])
    return status, [[document['id'] for document in documents] for documents in rows]


def test_a_small_request_does_not_wait_for_the_whole_of_a_large_one(paced):
    large = [f'Name{i % 20} large' for i in range(80)]
    with (
        served(paced, batch=8) as url,
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        first = pool.submit(ask, url, *large)
        wait_for_queries(url, 80)
        second = pool.submit(ask, url, 'Name7', 'Name8')
        wait_for_queries(url, 82)
        third = pool.submit(ask, url, 'Name9', topk=2)
        wait_for_queries(url, 83)
        paced.gate.set()
        assert second.result() == (200, [['7'], ['8']])
        assert len(third.result()[1][0]) == 2 and not first.done()
        assert first.result() == (200, [[str(i % 20)] for i in range(80)])
    # The first call had begun; the small requests were in the next two, with other queries of the large one.
    assert ['Name9'] in paced.calls[1:3]
    (call_of_two,) = [call for call in paced.calls[1:3] if 'Name7' in call]
    assert 'Name8' in call_of_two and len(call_of_two) == 8


def test_what_waits_goes_into_one_call_and_overload_is_refused(paced):
    with (
        served(paced, waiting=20, batch=16) as url,
        concurrent.futures.ThreadPoolExecutor(13) as pool,
    ):
        jobs = [pool.submit(ask, url, 'Name0', topk=2)]
        wait_for_queries(url, 1)
        jobs += [pool.submit(ask, url, f'Name{i}', topk=2 if i < 9 else 3) for i in range(1, 13)]
        wait_for_queries(url, 13)
        status, reply, headers = call(f'{url}/retrieve', {'queries': ['Name1'] * 8})
        assert (status, headers['Retry-After']) == (503, '1')
        assert '13 queries wait' in reply['error']
        paced.gate.set()
        for i, job in enumerate(jobs):
            status, (ids,) = job.result()
            assert (status, ids[0], len(ids)) == (200, str(i), 2 if i < 9 else 3)
        page = call(f'{url}/metrics')[1]
    assert sorted(map(len, paced.calls)) == [1, 4, 8]
    assert 'retrieval_requests_total{status="503"} 1.0' in page
    assert 'retrieval_queries_total 13.0' in page


def test_old_requests_end_early_under_overload(paced):
    """By turns alone all of many large requests would end at the same time, after the deadlines of their clients."""
    calls_at_end = []

    def request(url):
        ask(url, *(f'Name{i}' for i in range(16)))
        calls_at_end.append(len(paced.calls))

    with (
        served(paced, batch=8) as url,
        concurrent.futures.ThreadPoolExecutor(6) as pool,
    ):
        futures = [pool.submit(request, url) for _ in range(6)]
        wait_for_queries(url, 96)
        paced.gate.set()
        for future in futures:
            future.result()
    # 96 queries are 12 calls; half of each is for the oldest requests.
    assert min(calls_at_end) <= 6 and len(paced.calls) <= 13


def test_long_queries_make_a_smaller_call(paced):
    paced.gate.set()
    with served(paced, batch_characters=10_000) as url:
        assert ask(url, *['Name3 ' + 'x' * 3_000] * 10)[0] == 200
    assert [len(queries) for queries in paced.calls] == [4, 4, 2]


def test_a_request_that_failed_is_not_searched_for_any_more(paced):
    paced.gate.set()
    with served(paced, batch=8) as url:
        assert ask(url, *['broken'] * 80)[0] == 500
        wait_for_queries(url, 0)
        assert len(paced.calls) == 1
        assert ask(url, 'Name2')[0] == 200


def connect(url, *sent):
    client = socket.create_connection(('127.0.0.1', int(url.rpartition(':')[2])), timeout=10)
    for part in sent:
        client.sendall(part)
    return client


def request_of(body):
    content = json.dumps(body).encode()
    head = f'POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n'
    return head.encode() + content


def test_the_queries_of_a_client_that_has_left_are_not_searched_for(paced):
    with served(paced, batch=8) as url:
        client = connect(url, request_of({'queries': ['Name1'] * 80, 'topk': 1}))
        wait_for_queries(url, 80)
        client.close()
        wait_for_queries(url, 0)
        paced.gate.set()
        assert ask(url, 'Name2')[0] == 200
        assert [len(queries) for queries in paced.calls] == [8, 1]
        assert 'retrieval_requests_total{status="499"} 1.0' in call(f'{url}/metrics')[1]


def is_closed(client, seconds):
    """Whether the server ends a connection within so many seconds."""
    client.settimeout(seconds)
    try:
        while client.recv(4_096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


HALF_A_BODY = b'POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"queries"'


def test_a_client_that_is_slow_to_send_its_body_is_closed(paced):
    with served(paced, body_seconds=1) as url:
        client = connect(url, HALF_A_BODY)
        assert not is_closed(client, 0.4)
        assert is_closed(client, 3)


HEAD = b'POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n'


def test_a_body_without_an_end_is_not_read_to_its_end(paced):
    with served(paced, body_bytes=1_000) as url:
        client = connect(url, HEAD)
        started = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - started < 5:
                client.sendall(b'x' * 1_000)
                time.sleep(0.005)
        assert time.monotonic() - started < 5
