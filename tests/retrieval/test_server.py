"""The server: the protocol in the shapes its clients use, limits, batching, overload, a graceful end."""

import concurrent.futures
import json
import pathlib
import signal
import threading
import time
from unittest import mock

import pytest
from refusals import refused
from refused_calls import check_table, rounded
from serving import call, served, serving, spawn, until_ready

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
    with served(index, queries=100, waiting=200, page_words=1_000) as url:
        yield url


def test_requests_have_the_replies_of_the_table(url, tmp_path):
    """The reference server mixes up its lists without scores unless there are exactly two queries."""

    def post(path, body=None, **fields):
        body = {'queries': ['Name1']} | fields if body is None else body
        status, reply, _ = call(f'{url}/{path}', body)
        assert call(f'{url}/health')[0] == 200
        return f'{status} {json.dumps(reply, ensure_ascii=False)}'

    def scored(**fields):
        """(document, score) of every item, as Search-R1 and verl ask for them."""
        reply = call(f'{url}/retrieve', fields | {'return_scores': True})[1]
        return [
            [(item['document'], rounded(item['score'])) for item in row] for row in reply['result']
        ]

    path = pathlib.Path(__file__).parent / 'requests.txt'
    check_table(path, locals(), tmp_path)
    assert (call(f'{url}/nothing')[0], call(f'{url}/retrieve')[0]) == (404, 405)


BODIES = {'retrieve': {'queries': ['a']}, 'open': {'references': ['a']}}


def posted(url, path, **headers):
    """(status, error) of a request with such headers."""
    status, reply, _ = call(f'{url}/{path}', BODIES[path], **headers)
    return status, reply.get('error')


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


def test_a_page_that_cannot_be_read_fails_its_request_alone(url, monkeypatch):
    broken = mock.Mock(side_effect=OSError('the disk is gone'))
    with monkeypatch.context() as patch:
        patch.setattr(server, 'document_page', broken)
        assert posted(url, 'open') == (500, 'the index failed: OSError')
    assert posted(url, 'open')[0] == 200


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
    load = mock.Mock(side_effect=RetrievalError('no index'))
    with refused('no index'):
        server.serve(load, '127.0.0.1', 0)


def test_a_port_in_use_is_named(url, index):
    port = int(url.rpartition(':')[2])
    with refused('cannot listen there'):
        server.serve(lambda: (index, 'x'), '127.0.0.1', port)


def test_the_command_serves_loopback_and_stops_on_a_signal(tmp_path):
    lines = [json.dumps({'id': i, 'text': text}) for i, text in enumerate(TEXTS)]
    (tmp_path / 'c.jsonl').write_text('\n'.join(lines))
    built = tmp_path / 'index'
    folder.build(tmp_path / 'c.jsonl', built, 'bm25', None)
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
