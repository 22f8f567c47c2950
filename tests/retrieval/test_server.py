"""The server: the protocol in the shapes its clients use, limits, batching, overload, a graceful end."""

import asyncio
import concurrent.futures
import json
import pathlib
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
from refusals import refused
from refused_calls import check_table
from serving import call, serving, spawn, until_ready

from zeroplay_jax.retrieval import folder, server
from zeroplay_jax.retrieval.corpus import MemoryCorpus
from zeroplay_jax.retrieval.index import Bm25Index
from zeroplay_jax.retrieval.types import RetrievalError

ROOT = pathlib.Path(__file__).parents[2]
TITLES = [f'Name{i}' for i in range(50)]
TEXTS = [f'Name{i} is a town near Name{i + 1}.' for i in range(50)]


@pytest.fixture(scope='module')
def index():
    return Bm25Index(MemoryCorpus(TITLES, TEXTS))


@pytest.fixture(scope='module')
def url(index):
    limits = server.Limits(queries=100, waiting=200, page_words=1_000)
    with serving(lambda: (index, 'fingerprint'), limits) as (url, _):
        until_ready(url)
        yield url


def test_with_scores_as_search_r1_and_verl_ask(url, index):
    """Search-R1 and verl send these three fields and read document.contents of every item."""
    queries = ['Name3 town', 'Name7', 'Name9 Name10']
    body = {'queries': queries, 'topk': 3, 'return_scores': True}
    status, reply, _ = call(f'{url}/retrieve', body)
    assert status == 200 and list(reply) == ['result']
    assert [len(items) for items in reply['result']] == [3, 2, 3]
    ids, scores = index.search(queries, 3)
    for row, items in enumerate(reply['result']):
        for place, item in enumerate(items):
            number = ids[row, place]
            contents = f'"{TITLES[number]}"\n{TEXTS[number]}'
            assert item['document'] == {'id': str(number), 'contents': contents}
            assert item['score'] == pytest.approx(scores[row, place])


def test_requests_have_the_replies_of_the_table(url, tmp_path):
    """The reference server mixes up its lists without scores unless there are exactly two queries."""

    def post(path, body=None, **fields):
        body = {'queries': ['Name1']} | fields if body is None else body
        status, reply, _ = call(f'{url}/{path}', body)
        assert call(f'{url}/health')[0] == 200
        return f'{status} {json.dumps(reply, ensure_ascii=False)}'

    path = pathlib.Path(__file__).parent / 'requests.txt'
    check_table(path, {'post': post}, tmp_path)
    assert (call(f'{url}/nothing')[0], call(f'{url}/retrieve')[0]) == (404, 405)


class SlowIndex:
    """Answers when its gate is opened, and remembers what it was asked together."""

    def __init__(self, index):
        self.index, self.corpus = index, index.corpus
        self.gate = threading.Event()
        self.calls = []

    def __len__(self):
        return len(self.index)

    def search(self, queries, k):
        self.calls.append((len(queries), k))
        self.gate.wait(30)
        if 'Name13' in queries:
            raise RuntimeError('broken')
        return self.index.search(queries, k)


def wait_until(url, line):
    """Waits until this line is among the metrics."""
    while line not in call(f'{url}/metrics')[1]:
        time.sleep(0.01)


BODIES = {'retrieve': {'queries': ['a']}, 'open': {'references': ['a']}}


def posted(url, path, **headers):
    """(status, error) of a request with other headers than those of `call`."""
    names = {name.replace('_', '-'): value for name, value in headers.items()}
    body = json.dumps(BODIES[path]).encode()
    request = urllib.request.Request(f'{url}/{path}', body, names)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, ''
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)['error']


@pytest.mark.fault('nov29-C7', 'requests of pages of other sites, by their name or by their Origin')
@pytest.mark.parametrize('path', BODIES)
def test_pages_of_other_sites_are_refused(url, path):
    port = url.rpartition(':')[2]
    for name in ('evil.example', f'localhost.evil.example:{port}', '127.0.0.1.nip.example', '[x'):
        status, reason = posted(url, path, Host=name)
        assert status == 403 and 'ask localhost' in reason
    for site in ('http://evil.example', 'null', 'http://[', 'http://localhost.evil.example'):
        for kind in ('text/plain', 'application/json'):
            status, reason = posted(url, path, Origin=site, Content_Type=kind)
            assert status == 403 and 'page of another site' in reason
    # Programs, whatever type they name, and pages of this machine.
    for kind in ('text/plain', 'application/x-www-form-urlencoded', 'application/json'):
        assert posted(url, path, Content_Type=kind)[0] == 200
    for name in (f'localhost:{port}', '127.0.0.1', '[::1]:1', 'LocalHost'):
        assert posted(url, path, Host=name)[0] == 200
    assert posted(url, path, Origin='http://localhost:3000')[0] == 200


def test_a_server_of_the_network_has_any_name(index):
    with serving(lambda: (index, 'x')) as (url, app):
        until_ready(url)
        app.is_local = False
        assert posted(url, 'retrieve', Host='search.example')[0] == 200
        site = 'https://search.example'
        assert posted(url, 'retrieve', Host='search.example:8000', Origin=site)[0] == 200
        assert (
            posted(url, 'retrieve', Host='search.example', Origin='http://evil.example')[0] == 403
        )


def test_a_page_that_cannot_be_read_fails_its_request_alone(index, monkeypatch):
    def broken(*_):
        raise OSError('the disk is gone')

    monkeypatch.setattr(server, 'document_page', broken)
    app = server.App(lambda: (index, 'x'), server.Limits())
    with pytest.raises(server.Refused, match='the index failed'):
        asyncio.run(app._open(index, json.dumps({'references': ['a']}).encode()))


def test_what_waits_goes_into_one_call_and_overload_is_refused(index):
    slow = SlowIndex(index)
    limits = server.Limits(waiting=20, batch=16)
    with (
        serving(lambda: (slow, 'x'), limits) as (url, _),
        concurrent.futures.ThreadPoolExecutor(32) as pool,
    ):
        until_ready(url)

        def ask(i, k=2, count=1):
            body = {'queries': [f'Name{i}'] * count, 'topk': k, 'return_scores': True}
            return pool.submit(call, f'{url}/retrieve', body)

        first = ask(0)
        wait_until(url, 'retrieval_waiting 1.0')
        jobs = [first] + [ask(i) for i in range(1, 9)] + [ask(i, k=3) for i in range(9, 13)]
        wait_until(url, 'retrieval_waiting 13.0')
        status, reply, headers = ask(20, count=8).result()
        assert status == 503 and '13 queries wait' in reply['error']
        assert headers['Retry-After'] == '1'
        slow.gate.set()
        for i, job in enumerate(jobs):
            status, reply, _ = job.result()
            (items,) = reply['result']
            assert status == 200 and items[0]['document']['id'] in (str(i), str(i - 1))
            assert len(items) <= (2 if i < 9 else 3)
        assert slow.calls[0] == (1, 2) and sorted(slow.calls[1:]) == [(4, 3), (8, 2)]
        # A failure is not the end.
        assert ask(13).result()[0] == 500 and ask(14).result()[0] == 200
        page = call(f'{url}/metrics')[1]
    assert 'retrieval_requests_total{status="503"} 1.0' in page
    assert 'retrieval_queries_total 14.0' in page and 'retrieval_waiting 0.0' in page
    assert 'retrieval_seconds_bucket' in page


def test_health_is_true_only_when_ready(index):
    gate = threading.Event()

    def load():
        gate.wait(30)
        return index, 'x'

    with serving(load) as (url, _):
        assert call(f'{url}/health')[:2] == (503, {'status': 'loading'})
        status, _, headers = call(f'{url}/retrieve', {'queries': ['a']})
        assert status == 503 and headers['Retry-After'] == '1'
        gate.set()
        until_ready(url)
        assert call(f'{url}/health')[1] == {'status': 'ready', 'index': 'x', 'passages': 50}


def test_an_index_that_cannot_be_opened_ends_the_server():
    def load():
        raise RetrievalError('no index')

    with refused('no index'):
        server.serve(load, '127.0.0.1', 0)


def test_a_port_in_use_is_named(url, index):
    port = int(url.rpartition(':')[2])
    with refused('cannot listen there'):
        server.serve(lambda: (index, 'x'), '127.0.0.1', port)


@pytest.fixture
def built(tmp_path):
    passages = enumerate(zip(TITLES, TEXTS))
    lines = [json.dumps({'id': i, 'title': title, 'text': text}) for i, (title, text) in passages]
    (tmp_path / 'c.jsonl').write_text('\n'.join(lines))
    folder.build(tmp_path / 'c.jsonl', tmp_path / 'index', 'bm25', None)
    return tmp_path / 'index'


def test_the_command_serves_loopback_and_stops_on_a_signal(built):
    process, url = spawn(ROOT, '--index', str(built))
    try:
        assert url.startswith('http://127.0.0.1:')
        until_ready(url)
        assert call(f'{url}/health')[1]['index'] == folder.fingerprint(built)
        body = {'queries': [f'Name{i} town near' for i in range(1_000)], 'topk': 3}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            job = pool.submit(call, f'{url}/retrieve', body)
            while 'retrieval_waiting 0.0' in call(f'{url}/metrics')[1] and not job.done():
                time.sleep(0.001)
            process.send_signal(signal.SIGTERM)
            assert len(job.result()[1]['result']) == 1_000
        assert process.wait(30) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.stderr.close()
