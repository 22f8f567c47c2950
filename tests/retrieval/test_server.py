"""The server: the protocol in the shapes its clients use, limits, batching, overload, a graceful end."""

import concurrent.futures
import json
import pathlib
import signal
import threading
import time

import pytest
from serving import call, serving, spawn, until_ready

from zeroplay_jax.retrieval import folder, server
from zeroplay_jax.retrieval.bm25 import Bm25Index
from zeroplay_jax.retrieval.types import RetrievalError

ROOT = pathlib.Path(__file__).parents[2]
TITLES = [f'Name{i}' for i in range(50)]
TEXTS = [f'Name{i} is a town near Name{i + 1}.' for i in range(50)]


@pytest.fixture(scope='module')
def index():
    return Bm25Index.build(TITLES, TEXTS)


@pytest.fixture(scope='module')
def url(index):
    with serving(lambda: (index, 'fingerprint'), server.Limits(queries=100, waiting=200)) as (
        url,
        _,
    ):
        until_ready(url)
        yield url


def test_with_scores_as_search_r1_and_verl_ask(url, index):
    """Search-R1 and verl send these three fields and read document.contents of every item."""
    queries = ['Name3 town', 'Name7', 'Name9 Name10']
    status, reply, _ = call(
        f'{url}/retrieve', {'queries': queries, 'topk': 3, 'return_scores': True}
    )
    assert (
        status == 200
        and list(reply) == ['result']
        and [len(items) for items in reply['result']] == [3, 2, 3]
    )
    ids, scores = index.search(queries, 3)
    for row, items in enumerate(reply['result']):
        for place, item in enumerate(items):
            at = ids[row, place]
            assert item == {
                'document': {'id': str(at), 'contents': f'"{TITLES[at]}"\n{TEXTS[at]}'},
                'score': pytest.approx(scores[row, place]),
            }


@pytest.mark.parametrize('count', [1, 2, 3])
def test_without_scores_the_documents_are_bare(url, count):
    """The reference server mixes up its lists here unless there are exactly two queries."""
    status, reply, _ = call(
        f'{url}/retrieve', {'queries': [f'Name{i}' for i in range(count)], 'topk': 1}
    )
    assert status == 200 and [[d['id'] for d in items] for items in reply['result']] == [
        [str(i)] for i in range(count)
    ]
    assert reply['result'][0][0].keys() == {'id', 'contents'}


def test_defaults_blank_queries_and_none(url):
    assert len(call(f'{url}/retrieve', {'queries': ['town'], 'topk': None})[1]['result'][0]) == 3
    assert call(f'{url}/retrieve', {'queries': []})[1] == {'result': []}
    reply = call(f'{url}/retrieve', {'queries': ['', 'Name4', ' \n'], 'topk': 1})[1]
    assert [[d['id'] for d in items] for items in reply['result']] == [[], ['4'], []]


BAD = [
    (b'{"queries": [', 400, 'not JSON'),
    (b'', 400, 'not JSON'),
    (b'[' * 100_000, 400, 'nested too deeply'),
    (b'{"queries": ["\xff"]}', 400, 'not UTF-8 at byte 14'),
    ([1], 400, 'no JSON object with "queries": a JSON list'),
    ({}, 400, 'not a list of strings'),
    ({'queries': 'Name1'}, 400, 'not a list of strings'),
    ({'queries': ['Name1', 2]}, 400, 'not a list of strings'),
    ({'queries': ['Name1'], 'topk': 0}, 400, 'from 1 to 50'),
    ({'queries': ['Name1'], 'topk': 51}, 400, 'from 1 to 50'),
    ({'queries': ['Name1'], 'topk': '3'}, 400, 'whole number'),
    ({'queries': ['Name1'], 'topk': True}, 400, 'whole number'),
    ({'queries': ['Name1'], 'topk': 10**400}, 400, 'too many digits'),
    ({'queries': ['Name1'], 'topk': '\ud800'}, 400, r"topk. is '.ud800'; it must be a whole"),
    ({'queries': ['Name1'], 'topk': ['\ud800']}, 400, 'whole number'),
    (b'{"queries": ["a"], "topk": %s}' % (b'[' * 100 + b']' * 100), 400, 'of type list'),
    ({'queries': ['Name1'], 'return_scores': 1}, 400, 'neither true nor false'),
    ({'queries': ['Name1', 'x' * 2**20]}, 400, 'query 1 is longer'),
    ({'queries': ['\ud800']}, 400, 'surrogate'),
    ({'queries': ['Name1'] * 101}, 413, '101 queries'),
    ({'queries': ['Name1'] * 100_000}, 413, '100000 queries'),
    ({'queries': ['x' * 5 * 2**20]}, 413, 'longer than'),
]


@pytest.mark.parametrize(('body', 'status', 'reason'), BAD, ids=range(len(BAD)))
def test_bad_requests_are_refused_with_a_reason(url, body, status, reason):
    import re

    found, reply, _ = call(f'{url}/retrieve', body)
    assert found == status and re.search(reason, reply['error'])
    assert call(f'{url}/health')[0] == 200


def test_other_paths_and_methods(url):
    assert call(f'{url}/nothing')[0] == 404
    assert call(f'{url}/retrieve')[0] == 405


class SlowIndex:
    """Takes its time, and remembers what it was asked together."""

    def __init__(self, index, gate):
        self.index, self.gate, self.calls, self.corpus = index, gate, [], index.corpus

    def __len__(self):
        return len(self.index)

    def search(self, queries, k):
        self.calls.append((len(queries), k))
        self.gate.wait(30)
        if 'Name13' in queries:
            raise RuntimeError('broken')
        return self.index.search(queries, k)

    def passages(self, rows):
        return self.index.passages(rows)


def test_what_waits_goes_into_one_call_and_overload_is_refused(index):
    gate = threading.Event()
    slow = SlowIndex(index, gate)
    with serving(lambda: (slow, 'x'), server.Limits(waiting=20, batch=16)) as (url, _):
        until_ready(url)
        with concurrent.futures.ThreadPoolExecutor(32) as pool:

            def ask(i, k=2, count=1):
                body = {'queries': [f'Name{i}'] * count, 'topk': k, 'return_scores': True}
                return pool.submit(call, f'{url}/retrieve', body)

            def wait_for(waiting):
                while f'retrieval_waiting {waiting}.0' not in call(f'{url}/metrics')[1]:
                    time.sleep(0.01)

            first = ask(0)
            wait_for(1)
            jobs = [ask(i) for i in range(1, 9)] + [ask(i, k=3) for i in range(9, 13)]
            wait_for(13)
            status, reply, headers = ask(20, count=8).result()
            assert (
                status == 503
                and '13 queries wait' in reply['error']
                and headers['Retry-After'] == '1'
            )
            gate.set()
            for i, job in enumerate([first, *jobs]):
                status, reply, _ = job.result()
                assert status == 200 and reply['result'][0][0]['document']['id'] in (
                    str(i),
                    str(i - 1),
                )
                assert len(reply['result'][0]) <= (2 if i < 9 else 3)
            assert slow.calls[0] == (1, 2) and sorted(slow.calls[1:]) == [(4, 3), (8, 2)]
            assert (
                ask(13).result()[0] == 500 and ask(14).result()[0] == 200
            )  # a failure is not the end
        page = call(f'{url}/metrics')[1]
        assert (
            'retrieval_requests_total{status="503"} 1.0' in page
            and 'retrieval_queries_total 14.0' in page
        )
        assert 'retrieval_seconds_bucket' in page and 'retrieval_waiting 0.0' in page


def test_a_graceful_end_finishes_what_was_taken(index):
    gate = threading.Event()
    with (
        serving(lambda: (SlowIndex(index, gate), 'x')) as (url, app),
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        until_ready(url)
        job = pool.submit(call, f'{url}/retrieve', {'queries': ['Name5'], 'topk': 1})
        while 'retrieval_waiting 1.0' not in call(f'{url}/metrics')[1]:
            time.sleep(0.01)
        app.stop()
        time.sleep(0.3)  # nothing new is taken by now
        with pytest.raises(OSError):
            call(f'{url}/health', timeout=2)
        gate.set()
        assert job.result()[1]['result'][0][0]['id'] == '5'


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


def test_an_index_that_cannot_be_opened_ends_the_server(tmp_path):
    def load():
        raise RetrievalError('no index')

    with pytest.raises(RetrievalError, match='no index'):
        server.serve(load, '127.0.0.1', 0, server.Limits())


def test_a_folder_without_an_index_is_refused_before_anything_listens(tmp_path, caplog, capsys):
    caplog.set_level('INFO')
    with pytest.raises(SystemExit) as stopped:
        server.main(['--index', str(tmp_path), '--port', '0'])
    assert stopped.value.code == 2 and 'manifest.json: cannot be read' in capsys.readouterr().err
    assert not caplog.records


def test_a_port_in_use_is_named(url, index):
    with pytest.raises(RetrievalError, match='cannot listen there'):
        server.serve(
            lambda: (index, 'x'), '127.0.0.1', int(url.rpartition(':')[2]), server.Limits()
        )


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    home = tmp_path_factory.mktemp('served')
    lines = [
        json.dumps({'id': str(i), 'contents': f'"{t}"\n{x}'})
        for i, (t, x) in enumerate(zip(TITLES, TEXTS))
    ]
    (home / 'c.jsonl').write_text('\n'.join(lines))
    folder.build(home / 'c.jsonl', home / 'index', 'bm25', None)
    return home / 'index'


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
