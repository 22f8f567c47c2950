"""What holds for the clients of search servers, MCP servers and judges alike (retrieval/web.py)."""

import asyncio
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading

import pytest
from web_servers import Web

from zeroplay_jax.configs import common
from zeroplay_jax.retrieval import web
from zeroplay_jax.retrieval.client import Client, Http
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay.judge import Judge
from zeroplay_jax.selfplay.judge_endpoint import endpoint_writer
from zeroplay_jax.tools.base import Invocation
from zeroplay_jax.types import UserError

pytest.importorskip('mcp')
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


def judge_at(address, seconds=SECONDS):
    config = common.get_config().judge
    config.update(url=f'{address}/v1', model='judge', retries=0, timeout=seconds)
    return Judge(endpoint_writer(config, prompts.select('full')), (3, 5))


def judge(address, folder, seconds=SECONDS):
    referee = judge_at(address, seconds)
    verdict = asyncio.run(referee.correct((0,), 'q', ['a'], 'a'))
    return verdict is True, referee.last_failure


# Served policies are asked as judges are.
CLIENTS = {'search': search, 'MCP': call, 'judge': judge}


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


proxy = server  # another one


PROXIES = ['http_proxy', 'HTTP_PROXY', 'ALL_PROXY']


@pytest.mark.parametrize('variable', PROXIES)
def test_the_proxy_of_the_environment_leads_to_a_server_outside(ask, proxy, variable, monkeypatch):
    monkeypatch.setenv(variable, proxy.address)
    assert ask('http://search.example') == (True, '')
    assert all('http://search.example/' in line for line in proxy.seen)


@pytest.mark.parametrize(
    'host',
    ['127.0.0.1', 'localhost', 'LOCALHOST', '127.1', '0.0.0.0', '[::ffff:127.0.0.1]'],
)
def test_a_server_of_this_machine_is_asked_without_a_proxy(ask, server, proxy, host, monkeypatch):
    for variable in PROXIES:
        monkeypatch.setenv(variable, proxy.address)
    assert ask(server.address.replace('127.0.0.1', host)) == (True, '')
    assert server.seen and not proxy.seen


def test_no_proxy_is_heeded(ask, proxy, monkeypatch):
    monkeypatch.setenv('http_proxy', proxy.address)
    monkeypatch.setenv('NO_PROXY', 'other.example, .invalid')
    answered, _ = ask('http://search.invalid', seconds=1.0)
    assert not answered and not proxy.seen


@pytest.mark.skipif(not shutil.which('openssl'), reason='openssl makes the certificate')
def test_a_private_authority_is_trusted_if_the_environment_says_so(ask, tmp_path, monkeypatch):
    file = str(tmp_path / 'key and certificate.pem')
    words = 'openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'.split()
    words += ['-subj', '/CN=authority', '-addext', 'subjectAltName=IP:127.0.0.1']
    subprocess.run([*words, '-keyout', file, '-out', file], check=True, capture_output=True)
    with Web(file) as encrypted:
        answered, line = ask(encrypted.address)
        assert not answered and not encrypted.seen and 'CERTIFICATE_VERIFY_FAILED' in line
        monkeypatch.setenv('SSL_CERT_FILE', file)
        assert ask(encrypted.address) == (True, '')


def test_a_redirect_is_not_followed_and_the_new_address_is_named(ask, server, proxy):
    server.mode = 'redirect'
    there = f'{proxy.address}/there'
    server.target = f'{there}?token={KEY}'
    answered, line = ask(server.address)
    # Some MCP servers have their key in the path.
    shown = f'{there.removesuffix("there")}…' if ask.func is call else f'{there}?token=***'
    assert not answered and f'redirects to {shown}; give that address' in line
    assert not proxy.seen
    assert '\n' not in line and KEY not in line


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


def test_a_key_that_a_server_quotes_is_hidden(ask, server, caplog):
    server.mode = 'echo'
    with caplog.at_level(logging.DEBUG):
        answered, line = ask(server.address)
    assert not answered and line
    assert KEY not in line and KEY not in caplog.text


def test_pauses_grow_and_are_as_long_as_the_server_asks():
    def pause(attempt, asked):
        reply = web.Reply(500, headers={'Retry-After': asked})
        return web.Exchange('http://127.0.0.1')._pause_after(attempt, reply)

    for attempt, longest in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]):
        # A header that is no number says nothing.
        assert longest / 2 <= pause(attempt, 'nan') <= longest
    assert pause(0, '1.5') == 1.5 and pause(0, '1e9') == 60.0


def test_connections_outlive_event_loops(server, caplog):
    at_once = 8
    server.together = threading.Barrier(at_once, timeout=SECONDS)
    referee = judge_at(server.address)

    async def judge_all():
        judgements = [referee.correct((n,), 'q', ['a'], 'a') for n in range(at_once)]
        return await asyncio.gather(*judgements)

    counts = []
    for _ in range(4):
        assert asyncio.run(judge_all()) == [True] * at_once
        counts.append(len(os.listdir('/proc/self/fd')))
    assert counts == counts[:1] * 4
    assert not caplog.records


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


def test_a_forked_process_has_connections_of_its_own(server):
    words = [sys.executable, '-c', FORKED, server.address]
    run = subprocess.run(words, capture_output=True, text=True, timeout=3 * SECONDS, check=False)
    assert run.stdout.split() == ['1'] * 3 and not run.stderr
