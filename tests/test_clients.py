"""What holds for the clients of search servers, MCP servers, judges and served policies alike (retrieval/web.py)."""

import asyncio
import concurrent.futures
import functools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import types

import httpx2
import numpy as np
import pytest
import web_servers
from web_servers import Web

from zeroplay_jax.configs import common
from zeroplay_jax.retrieval import web
from zeroplay_jax.retrieval.client import Client, Http
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.environment import Limits
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.selfplay.judge import Judge
from zeroplay_jax.selfplay.judge_endpoint import endpoint_writer
from zeroplay_jax.tools.base import Invocation
from zeroplay_jax.types import UserError

pytest.importorskip('mcp')
pytest.importorskip('zeroplay_jax.extras.mcp')
ServedModel = pytest.importorskip('zeroplay_jax.extras.served_policy').ServedModel
from zeroplay_jax.extras.mcp import tools as mcp_tools  # noqa: E402

KEY = 'key-of-the-user'
SECONDS = 20.0


def search(address, folder, seconds=SECONDS):
    """Whether a search through this client succeeds, and what a user reads if not; as the following functions."""
    url = address.replace('://', f'://user:{KEY}@')
    client = Client(Http(url, timeout=seconds, retries=0))
    (passages,) = client.retrieve(['q'], 1)
    return passages is not None, client.last_failure


def call(address, folder, seconds=SECONDS):
    file = folder / 'mcp.json'
    entry = {'url': f'{address}/mcp', 'headers': {'Authorization': f'Bearer {KEY}'}}
    file.write_text(json.dumps({'mcpServers': {'a': entry}}))
    try:
        (tool,) = mcp_tools.list_tools(str(file), seconds)
    except UserError as error:
        return False, str(error)
    (result,) = tool.run([Invocation({})])
    return result.text == 'fine', ''


def settings(address, seconds=SECONDS):
    config = common.get_config()
    config.policy.path = f'{address}/v1#model'
    config.judge.update(url=f'{address}/v1', model='judge', retries=0, timeout=seconds, at_once=8)
    return config


def judge(address, folder, seconds=SECONDS):
    writer = endpoint_writer(settings(address, seconds).judge, prompts.select('full'))
    referee = Judge(writer, (3, 5))
    verdict = asyncio.run(referee.correct((0,), 'q', ['a'], 'a'))
    return verdict is True, referee.last_failure


def policy(address, folder, seconds=SECONDS):
    model = ServedModel(settings(address, seconds), most_failures=1)
    env = types.SimpleNamespace(limits=Limits(1, 64, 100), tools={}, stops=())
    request = Request('policy', np.zeros(0, np.int32), (0,), env)
    message = {'role': 'user', 'content': ('Who?',)}
    try:
        (trajectory,) = asyncio.run(model.sample(None, request, [message]))
    except UserError as error:
        return False, str(error)
    return trajectory.turns[0].text == 'Correct', ''


CLIENTS = {'search': search, 'MCP': call, 'judge': judge, 'policy': policy}


@pytest.fixture(params=CLIENTS)
def ask(request, tmp_path, monkeypatch):
    """One of the clients, in an environment without proxies and certificates."""
    for variable in list(os.environ):
        if variable.lower().endswith('_proxy') or variable.startswith('SSL_CERT'):
            monkeypatch.delenv(variable)
    monkeypatch.setenv('OPENAI_API_KEY', KEY)
    return functools.partial(CLIENTS[request.param], folder=tmp_path)


@pytest.fixture
def server():
    with Web() as running:
        yield running


@pytest.fixture
def proxy():
    with Web() as running:
        yield running


@pytest.fixture(scope='module')
def certificate(tmp_path_factory):
    """A file with the certificate of a private authority, and its key."""
    if not shutil.which('openssl'):
        pytest.skip('openssl makes the certificate')
    file = tmp_path_factory.mktemp('authority') / 'certificate.pem'
    names = 'subjectAltName=IP:127.0.0.1,DNS:search.example'
    words = 'openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2'
    more = ['-subj', '/CN=authority', '-addext', names, '-keyout', str(file), '-out']
    subprocess.run([*words.split(), *more, f'{file}.crt'], check=True, capture_output=True)
    with open(file, 'a', encoding='utf-8') as both:
        both.write((file.parent / f'{file.name}.crt').read_text(encoding='utf-8'))
    return file


@pytest.fixture
def encrypted(certificate):
    with Web(certificate) as running:
        yield running


PROXIES = ['http_proxy', 'HTTP_PROXY', 'ALL_PROXY']


@pytest.mark.fault('nov29-B4', 'a server outside and a proxy in the environment')
@pytest.mark.parametrize('variable', PROXIES)
def test_the_proxy_of_the_environment_leads_to_a_server_outside(ask, proxy, variable, monkeypatch):
    monkeypatch.setenv(variable, proxy.address)
    assert ask('http://search.example') == (True, '')
    assert all('http://search.example/' in line for line in proxy.seen)


@pytest.mark.fault('nov29-B4', 'a server outside with TLS, a proxy and a private authority')
def test_a_proxy_leads_to_a_server_with_tls(ask, proxy, encrypted, certificate, monkeypatch):
    proxy.target = encrypted.server_port
    monkeypatch.setenv('HTTPS_PROXY', proxy.address)
    monkeypatch.setenv('SSL_CERT_FILE', str(certificate))
    assert ask('https://search.example') == (True, '')
    assert proxy.seen[0].startswith('CONNECT search.example:443') and encrypted.seen


@pytest.mark.fault('nov29-B5', 'a server of this machine and a proxy in the environment')
@pytest.mark.parametrize(
    'host',
    ['127.0.0.1', 'localhost', 'LOCALHOST', '127.1', '0.0.0.0', '[::ffff:127.0.0.1]'],
)
def test_a_server_of_this_machine_is_asked_without_a_proxy(ask, server, proxy, host, monkeypatch):
    for variable in PROXIES:
        monkeypatch.setenv(variable, proxy.address)
    assert ask(server.address.replace('127.0.0.1', host)) == (True, '')
    assert server.seen and not proxy.seen


def test_no_proxy_is_heeded(ask, server, proxy, monkeypatch):
    monkeypatch.setenv('http_proxy', proxy.address)
    monkeypatch.setenv('NO_PROXY', 'other.example, .search.example')
    addresses = socket.getaddrinfo

    def here(host, *arguments, **options):
        is_example = host in ('www.search.example', b'www.search.example')
        return addresses('127.0.0.1' if is_example else host, *arguments, **options)

    monkeypatch.setattr(socket, 'getaddrinfo', here)
    assert ask(f'http://www.search.example:{server.server_port}') == (True, '')
    assert server.seen and not proxy.seen


@pytest.mark.fault('nov29-B6', 'a server with a certificate of a private authority')
@pytest.mark.parametrize('variable', ['SSL_CERT_FILE', 'SSL_CERT_DIR'])
def test_a_private_authority_is_trusted_if_the_environment_says_so(
    ask, encrypted, certificate, variable, monkeypatch
):
    answered, line = ask(encrypted.address)
    assert not answered and not encrypted.seen and 'CERTIFICATE_VERIFY_FAILED' in line
    words = ['openssl', 'x509', '-hash', '-noout', '-in', f'{certificate}.crt']
    name = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    shutil.copy(f'{certificate}.crt', certificate.parent / f'{name}.0')
    is_file = variable == 'SSL_CERT_FILE'
    monkeypatch.setenv(variable, str(certificate if is_file else certificate.parent))
    assert ask(encrypted.address) == (True, '')


@pytest.mark.fault('nov29-C2', 'status 307 to the same and to another host')
@pytest.mark.parametrize('is_same', [True, False])
def test_a_redirect_is_not_followed_and_the_new_address_is_named(ask, server, proxy, is_same):
    server.mode = 'redirect'
    there = f'{(server if is_same else proxy).address}/there'
    server.target = f'{there}?token={KEY}'
    answered, line = ask(server.address)
    # Some MCP servers have their key in the path.
    shown = f'{there.removesuffix("there")}…' if ask.func is call else f'{there}?token=***'
    assert not answered and f'redirects to {shown}; give that address' in line
    assert not any('there' in seen for seen in server.seen) and not proxy.seen
    assert '\n' not in line and KEY not in line


@pytest.mark.fault('nov29-C6', 'replies that are too long, compressed or slow')
@pytest.mark.parametrize(
    'mode, seconds, words',
    [
        ('long', SECONDS, 'a reply of more than 16 MiB'),
        ('compressed', SECONDS, 'a compressed reply, which was not asked for'),
        ('drip', 0.5, 'no whole reply within 0.5 s'),
    ],
)
def test_a_reply_has_bounds(ask, server, mode, seconds, words):
    server.mode = mode
    answered, line = ask(server.address, seconds=seconds)
    if ask.func is call and mode == 'drip':
        words = 'nothing within config.tools.mcp_seconds=0.5'
    assert not answered and words in line and '\n' not in line


@pytest.mark.fault('nov29-C4', 'status 401 that quotes the key')
def test_a_key_that_a_server_quotes_is_hidden(ask, server, caplog):
    server.mode = 'echo'
    with caplog.at_level(logging.DEBUG):
        answered, line = ask(server.address)
    assert not answered and line
    assert KEY not in line and KEY not in caplog.text


@pytest.mark.fault('nov29-web-9', 'charset=hex in the head of an error')
def test_the_charset_that_a_server_names_is_not_used(ask, server):
    server.mode = 'charset'
    answered, line = ask(server.address)
    assert not answered and 'Assertion' not in line
    assert ask.func is call or 'gone: \ufffdé' in line


@pytest.mark.fault('nov29-web-12', 'OPENAI_ORG_ID and OPENAI_PROJECT_ID')
def test_the_account_of_the_environment_is_sent_with_its_key(server, monkeypatch):
    monkeypatch.setenv('OPENAI_ORG_ID', 'org-1')
    monkeypatch.setenv('OPENAI_PROJECT_ID', 'project-1')
    assert judge(server.address, None) == (True, '')
    sent = server.headers
    assert (sent['OpenAI-Organization'], sent['OpenAI-Project']) == ('org-1', 'project-1')


@pytest.mark.fault('nov29-web-11', 'Retry-After of fractions, pauses that grow')
def test_the_pauses_between_attempts(monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(web.asyncio, 'sleep', sleep)
    replies = iter([None] * 6 + ['0', '1.5', '30', '1e9', 'nan', 'Fri, 31 Dec 1999 23:59:59 GMT'])

    async def send(url, body):
        return web.Reply(500, headers={'Retry-After': next(replies) or ''})

    def read(reply):
        raise web.NoReply('no')

    exchange = web.Exchange('http://127.0.0.1', retries=11)
    monkeypatch.setattr(exchange, 'send', send)
    with pytest.raises(web.NoReply, match='12 attempts'):
        web.start(exchange.post('', {}, read)).result(SECONDS)
    doubled = [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert all(end / 2 <= pause <= end for pause, end in zip(pauses, doubled, strict=False))
    assert len(set(pauses[5:8])) == 3
    assert pauses[8:10] == [30.0, 60.0] and 5.0 <= pauses[10] <= 10.0
    replies = iter(['1.5', None])
    exchange.retries = 1
    with pytest.raises(web.NoReply):
        web.start(exchange.post('', {}, read)).result(SECONDS)
    assert pauses[-1] == 1.5


@pytest.mark.fault('nov29-C3', 'a judge that is asked in several event loops')
def test_connections_outlive_event_loops(server, caplog):
    at_once = 8
    server.together = threading.Barrier(at_once, timeout=SECONDS)
    writer = endpoint_writer(settings(server.address).judge, prompts.select('full'))
    referee = Judge(writer, (3, 5))

    async def judge_all():
        judgements = [referee.correct((n,), 'q', ['a'], 'a') for n in range(at_once)]
        return await asyncio.gather(*judgements)

    counts = []
    for _ in range(4):
        assert asyncio.run(judge_all()) == [True] * at_once
        counts.append(len(os.listdir('/proc/self/fd')))
    assert counts == counts[:1] * 4
    assert not caplog.records


@pytest.mark.fault('nov29-web-1', 'first requests of many threads at once')
def test_the_first_requests_of_many_threads_share_one_event_loop(server, monkeypatch):
    threads, first_use = 16, web._event_loop.__wrapped__
    names = lambda: [thread.name for thread in threading.enumerate()]
    running = names().count('requests')
    for loops in range(running + 1, running + 6):
        monkeypatch.setattr(web, '_event_loop', functools.cache(first_use))
        begin = threading.Barrier(threads, timeout=SECONDS)
        backend = Http(server.address, retries=0)

        def search_first(name, begin=begin, backend=backend):
            begin.wait()
            return backend.retrieve([name], 1)

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            assert len(list(pool.map(search_first, map(str, range(threads))))) == threads
        assert names().count('requests') == loops


class Crowd:
    """In place of an HTTP client: counts the requests in progress, of which the first ones wait for 512."""

    def __init__(self):
        self.now = self.most = 0
        self.is_full = asyncio.Event()

    async def request(self, method, url, json):
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now >= 512:
            self.is_full.set()
        await self.is_full.wait()
        await asyncio.sleep(0.05)
        self.now -= 1
        return httpx2.Response(200, json=web_servers.CHAT)

    async def aclose(self):
        """Has no connections."""


@pytest.mark.fault('nov29-web-5', 'hundreds of judgements in training at once')
def test_the_requests_of_a_judge_at_once_are_bounded(monkeypatch):
    crowd = Crowd()
    monkeypatch.setattr(web, 'open_client', lambda *_: crowd)
    writer = endpoint_writer(settings('http://127.0.0.1').judge, prompts.select('full'))
    referee = Judge(writer, (3, 5))

    async def judge_all():
        return await asyncio.gather(*[referee.correct((n,), 'q', ['a'], 'a') for n in range(600)])

    assert asyncio.run(judge_all()) == [True] * 600
    assert crowd.most == 512


FORKED = """
import os, sys
from zeroplay_jax.retrieval.client import Http

backend = Http(sys.argv[1], retries=0, timeout=10.0)
print(len(backend.retrieve(['q'], 1)), flush=True)
if os.fork() == 0:
    print(len(backend.retrieve(['q'], 1)), flush=True)
    del backend
    os._exit(0)
os.wait()
print(len(backend.retrieve(['q'], 1)), flush=True)
"""


@pytest.mark.fault('nov29-web-2', 'a search in a forked process')
def test_a_forked_process_has_connections_of_its_own(server):
    words = [sys.executable, '-c', FORKED, server.address]
    run = subprocess.run(words, capture_output=True, text=True, timeout=3 * SECONDS, check=False)
    assert run.stdout.split() == ['1'] * 3 and not run.stderr
