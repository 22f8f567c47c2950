"""Search servers that answer badly: every failure is counted, none ends a run; each has a bound in time and size."""

import time
import types

import pytest
from fake_server import http
from refusals import refused

from zeroplay_jax.retrieval.client import Client


def test_another_form_is_named_before_a_run_and_when_nothing_is_sent(fake):
    fake.script = [(200, {'result': []})] * 10
    client = Client(http(fake, retries=0))
    reason = '0 results for 1 queries'
    with refused(f'not of the protocol .*{reason}.*serve one that is'):
        client.wait_until_ready(1, pause=0.01)
    for query in map(str, range(7)):
        assert client.retrieve([query], 1) == [None]
    assert len(fake.seen) == 6
    with refused(f'7 of 7 .*{reason}.*failed 5 times in a row, so nothing is sent'):
        client.check_failure_rate()


def test_a_server_that_reports_a_failure_is_waited_for(fake):
    loading = (200, {'error': 'index is loading'})
    fake.script = [loading, loading, 'ok']
    client = Client(http(fake, retries=0))
    with refused(r'not ready after 0 s \(POST /retrieve: it reports.*index is loading'):
        client.wait_until_ready(0, pause=0.01)
    client.wait_until_ready(10, pause=0.01)
    assert not fake.script


def test_a_busy_server_with_a_health_page_is_ready(fake):
    fake.script = [(503, {})]
    assert http(fake, retries=0).ready() and len(fake.seen) == 1
    fake.script = [lambda handler: time.sleep(2)]
    assert http(fake, retries=0, timeout=0.3).ready() and len(fake.seen) == 2


def test_a_health_page_of_another_server_is_said(fake):
    fake.script = [(404, {})]
    with refused('POST /retrieve: status 404; give the address of a search server'):
        Client(http(fake, retries=0)).wait_until_ready(60)


def test_a_redirect_of_the_health_page_is_named_at_once(fake):
    fake.health = (307, b'', [('Location', '/other/retrieve')])
    with refused(f'redirects to {fake.url}/other/retrieve; give that address'):
        Client(http(fake, retries=9, pause=9)).wait_until_ready()


def broken(queries, k):
    raise OSError('the disk is gone')


@pytest.mark.parametrize(
    ('answer', 'cause'),
    [
        (broken, 'OSError: the disk is gone'),
        (lambda queries, k: [[]], '2 requests returned 1 answers'),
        (lambda queries, k: [None, []], 'TypeError'),
    ],
)
def test_whatever_a_backend_does_is_counted(answer, cause):
    backend = types.SimpleNamespace(name='odd', retrieve=answer)
    client = Client(backend)
    assert client.retrieve(['a', 'b'], 1) == [None, None]
    with refused(f'2 of 2 searches failed.*{cause}'):
        client.check_failure_rate()


def never_ends(handler):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b' ' * 65_536)


def test_an_endless_reply_is_not_read_to_its_end(fake):
    fake.script = [never_ends, 'ok']
    client = Client(http(fake, retries=0))
    assert client.retrieve(['q'], 1) == [None] and 'more than 16 MiB' in client.last_failure
    assert client.retrieve(['q'], 1)[0][0]['id'] == '7'


def test_a_batch_whose_reply_is_too_long_is_answered_in_parts(fake):
    passage = {'document': {'id': '7', 'contents': '"T"\n' + 'x' * (5 << 20)}, 'score': 0.5}
    two = (200, {'result': [[passage]] * 2})
    fake.script = [(200, {'result': [[passage]] * 4}), two, two]
    client = Client(http(fake, retries=4))
    assert None not in client.retrieve(list('abcd'), 1)
    assert [''.join(body['queries']) for body in fake.seen] == ['abcd', 'ab', 'cd']
    assert client.metrics()['search/retries'] == 0
    fake.script = [(200, b' ' * (17 << 20))]
    assert client.retrieve(['e'], 1) == [None] and len(fake.seen) == 4
    assert client.last_failure == f'{fake.url}/retrieve: a reply of more than 16 MiB'


def test_an_odd_health_page_is_not_the_name_of_an_index(fake):
    fake.health = (200, {'index': ['x']})
    backend = http(fake, retries=0)
    assert backend.ready() and backend.name == fake.url
