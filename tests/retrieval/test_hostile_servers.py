"""Search servers that answer badly: every failure is counted, none ends a run; each has a bound in time and size."""

import resource
import time
import zlib

import pytest
from refusals import refused

from zeroplay_jax.retrieval.client import Client, Http
from zeroplay_jax.retrieval.types import RetrievalError, SearchFailed


def http(fake, **options):
    defaults = dict(pause=0.001, timeout=10.0, retries=0, patience=0.0)
    return Http(fake.url, **(defaults | options))


def result_of(**fields):
    """A reply with one passage of these fields."""
    document = {'id': '7', 'title': 'T', 'text': 'x'}
    score = fields.pop('score', 0.5)
    return {'result': [[{'document': document | fields, 'score': score}]]}


def test_half_a_surrogate_pair_in_a_page_is_replaced(fake):
    fields = {'contents': '"T\ud83d"\nx', 'title': None}
    fake.script = [(200, result_of(**fields)), (200, result_of(id='\ud83d', text='😀\ud83d'))]
    backend = http(fake)
    assert backend.retrieve(['q'], 1)[0][0]['title'] == 'T\ufffd'
    passage = backend.retrieve(['r'], 1)[0][0]
    assert passage['id'] == '\ufffd' and passage['text'] == '😀\ufffd'


@pytest.mark.fault('kin-cut', 'a reply of a search server that ends in the middle')
def test_a_reply_that_ends_in_the_middle_is_named_as_such(fake):
    def cut(handler):
        handler.send_response(200)
        handler.send_header('Content-Length', '500')
        handler.end_headers()
        handler.wfile.write(b'{"result"')

    fake.script = [cut, 'ok', cut]
    assert http(fake, retries=1).retrieve(['q'], 1)[0][0]['id'] == '7'
    with refused('without sending complete message', SearchFailed):
        http(fake).retrieve(['q'], 1)


@pytest.mark.fault('kin-faces', 'a health page in gzip')
def test_a_health_page_that_is_compressed_is_named(fake):
    fake.health = (200, zlib.compress(b'{}', wbits=31), [('Content-Encoding', 'gzip')])
    with refused('a compressed reply, which was not asked for'):
        Client(http(fake)).wait_until_ready(60)


UNREADABLE = {
    'a text under another name': (
        {'result': [[{'document': {'id': '7', 'title': 'T', 'passage_text': 'x'}}]]},
        'no text: none of contents.*passage_text',
    ),
    'fewer results than queries': ({'result': []}, '0 results for 1 queries'),
}


@pytest.mark.parametrize('health', [200, 404])
@pytest.mark.parametrize('name', UNREADABLE)
def test_a_form_that_cannot_be_read_is_named_before_a_run_and_when_nothing_is_sent(
    fake, name, health
):
    reply, reason = UNREADABLE[name]
    fake.health = (health, b'')
    fake.script = [(200, reply)] * 10
    client = Client(http(fake))
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
    client = Client(http(fake))
    with refused(r'not ready after 0 s \(POST /retrieve: it reports.*index is loading'):
        client.wait_until_ready(0, pause=0.01)
    client.wait_until_ready(10, pause=0.01)
    assert not fake.script


def test_a_busy_server_with_a_health_page_is_ready(fake):
    fake.script = [(503, {})]
    assert http(fake).ready() and len(fake.seen) == 1
    fake.script = [lambda handler: time.sleep(2)]
    assert http(fake, timeout=0.3).ready() and len(fake.seen) == 2


def test_a_health_page_of_another_server_is_said(fake):
    fake.script = [(404, {})]
    with refused('POST /retrieve: status 404; give the address of a search server'):
        Client(http(fake)).wait_until_ready(60)


REDIRECT = (307, b'', [('Location', '/other/retrieve')])


@pytest.mark.fault('user-14', 'a search server that redirects')
@pytest.mark.parametrize('health', [REDIRECT, (404, b'')])
def test_a_redirect_is_named_at_once_with_its_target(fake, health):
    fake.health = health
    fake.script = [REDIRECT] * 2
    client = Client(http(fake, retries=9, pause=9))
    said = f'redirects to {fake.url}/other/retrieve; give that address'
    with refused(said):
        client.wait_until_ready()
    fake.script = [REDIRECT]
    assert client.retrieve(['q', 'r'], 1) == [None, None]
    with refused(said):
        client.check_failure_rate()


class Odd:
    """A backend of another package."""

    name = 'odd'

    def __init__(self, answer):
        self.retrieve = answer

    def ready(self):
        return True


def broken(queries, k):
    raise ZeroDivisionError('a bug')


ODD_ANSWERS = {
    'ZeroDivisionError: a bug': broken,
    '2 requests returned 1 answers': lambda queries, k: [[]],
    'TypeError': lambda queries, k: [None, []],
    'TypeError: ': lambda queries, k: None,
}


@pytest.mark.parametrize('cause', ODD_ANSWERS)
def test_whatever_a_backend_does_is_counted(cause):
    client = Client(Odd(ODD_ANSWERS[cause]))
    assert client.retrieve(['a', 'b'], 1) == [None, None]
    with refused(f'2 of 2 searches failed.*{cause}'):
        client.check_failure_rate()


def start_reply(handler, *headers):
    """Sends the beginning of a reply without a length, which lasts until the connection is closed."""
    handler.send_response(200)
    for name, value in headers:
        handler.send_header(name, value)
    handler.end_headers()


def never_ends(handler):
    start_reply(handler)
    while True:
        handler.wfile.write(b' ' * 65_536)


def test_an_endless_reply_takes_no_memory(fake):
    fake.script = [never_ends, 'ok']
    backend = http(fake)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((SearchFailed, RetrievalError), match='more than 16 MiB'):
        backend.retrieve(['q'], 1)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes < 80_000
    assert backend.retrieve(['q'], 1)[0][0]['id'] == '7'


@pytest.mark.fault('nov29-web-6', 'a batch of queries with a reply of more than 16 MiB')
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


@pytest.mark.parametrize('status', [b'[' * 200_000, b'\xff', {'index': ['x']}, [1]])
def test_an_odd_health_page_is_not_the_name_of_an_index(fake, status):
    fake.health = (200, status)
    backend = http(fake)
    assert backend.ready() and backend.name == fake.url
    assert Client(backend).retrieve(['q'], 1)[0][0]['id'] == '7'
