"""MCP servers over HTTP that are hostile, of the earlier protocol, or start again; headers that hold a key."""

import http.server
import json
import threading

import pytest

from zeroplay_jax.tools.base import Invocation
from zeroplay_jax.types import UserError

pytest.importorskip('mcp')
from zeroplay_jax.extras.mcp import tools as mcp_tools  # noqa: E402

SECONDS = 20.0
ECHO = {'name': 'echo', 'inputSchema': {'type': 'object', 'properties': {}}}


class Handler(http.server.BaseHTTPRequestHandler):
    """A server with one tool, whose calls are answered as `server.mode` says."""

    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
        pass

    def reply(self, status, content=b'', kind='application/json', **headers):
        self.send_response(status)
        self.send_header('Content-Type', kind)
        headers = {'Content-Length': str(len(content)), **headers}
        for name, value in headers.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        if self.server.mode != 'sse':
            self.reply(405)
            return
        self.reply(200, b'event: endpoint\ndata: /messages\n\n', 'text/event-stream')

    def do_DELETE(self):
        self.reply(200)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.requests.append((request['method'], self.headers.get('Authorization')))
        if self.server.mode == 'sse':
            self.reply(405)
            return
        if 'id' not in request:
            self.reply(202)
            return
        self.answer(request)

    def answer(self, request):
        if self.server.mode == 'redirect':
            self.reply(307, Location=f'{self.path}/')
            return
        method = request['method']
        known = self.headers.get('Mcp-Session-Id') == self.server.session
        results = {
            'initialize': {
                'protocolVersion': '2025-06-18',
                'capabilities': {'tools': {}},
                'serverInfo': {'name': 'test', 'version': '1'},
            },
            'tools/list': {'tools': [ECHO]},
            'tools/call': {'content': [{'type': 'text', 'text': 'fine'}]},
        }
        if method not in results:
            self.reply(400)
            return
        if method != 'initialize' and not known:
            self.reply(404, self.server.unknown_session)
            return
        content = json.dumps({'jsonrpc': '2.0', 'id': request['id'], 'result': results[method]})
        mode = self.server.mode if method == 'tools/call' else 'good'
        self.send_in_mode(mode, content.encode())

    def send_in_mode(self, mode, content):
        session = {'Mcp_Session_Id': self.server.session}
        replies = {
            'good': ((200, content), {}),
            'cut': ((200, content[:30]), {'Content_Length': str(len(content))}),
            'not json': ((200, content[:30]), {}),
            'large': ((200, b'[' + b' ' * 17 * 2**20 + b']'), {}),
            'compressed': ((200, content), {'Content_Encoding': 'gzip'}),
            'html': ((200, b'<html>', 'text/html'), {}),
            'error': ((500,), {}),
        }
        arguments, headers = replies[mode]
        self.reply(*arguments, **headers, **session)
        self.close_connection = mode == 'cut'


@pytest.fixture
def server():
    running = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    running.mode, running.session, running.requests = 'good', 'first', []
    running.unknown_session = b''
    thread = threading.Thread(target=running.serve_forever, kwargs={'poll_interval': 0.02})
    thread.start()
    running.url = f'http://127.0.0.1:{running.server_port}/mcp'
    yield running
    running.shutdown()
    running.server_close()


def call(tool):
    (result,) = tool.run([Invocation({})])
    return result.text, result.error


@pytest.mark.parametrize('mode', ['cut', 'not json', 'large', 'compressed', 'html', 'error'])
@pytest.mark.fault(
    'new-mcp-http', 'replies over HTTP that are cut, large, compressed, of other kinds'
)
def test_a_bad_reply_over_http_fails_at_once_and_alone(server, mode, caplog):
    (tool,) = mcp_tools.list_tools(server.url, SECONDS)
    for _ in range(2):
        server.mode = mode
        assert call(tool) == (None, 'failed')
        server.mode = 'good'
        assert call(tool) == ('fine', None)
    assert 'no result within' not in caplog.text
    assert len(caplog.records) == 2


NO_SESSION = {'code': -32001, 'message': 'Session not found'}


@pytest.mark.fault('nov29-B10', 'status 404 for a session, with and without an error of JSON-RPC')
@pytest.mark.parametrize('body', [None, {'jsonrpc': '2.0', 'id': None, 'error': NO_SESSION}])
def test_a_session_that_the_server_has_forgotten_is_opened_again(server, body):
    server.unknown_session = json.dumps(body).encode() if body else b''
    (tool,) = mcp_tools.list_tools(server.url, SECONDS)
    assert call(tool) == call(tool) == ('fine', None)
    server.session = 'second'
    assert call(tool) == ('fine', None)
    methods = [method for method, _ in server.requests]
    assert methods.count('tools/list') == 2 and methods.count('tools/call') == 4


@pytest.mark.fault('F6', 'a server that speaks SSE alone')
def test_a_server_that_speaks_sse_is_named_as_such(server):
    server.mode = 'sse'
    with pytest.raises(UserError, match='speaks SSE'):
        mcp_tools.list_tools(server.url, SECONDS)


@pytest.mark.fault('F6', 'headers from the environment')
def test_headers_come_from_the_environment(server, tmp_path, monkeypatch):
    monkeypatch.setenv('THE_KEY', 'secret-value-1')
    file = tmp_path / 'mcp.json'
    entry = {'url': server.url, 'headers': {'Authorization': 'Bearer ${THE_KEY}'}}
    file.write_text(json.dumps({'mcpServers': {'a': entry}}))
    (tool,) = mcp_tools.list_tools(str(file), SECONDS)
    assert call(tool) == ('fine', None)
    assert {key for _, key in server.requests} == {'Bearer secret-value-1'}


@pytest.mark.fault('nov29-web-4', 'an MCP server with a key in the path of its address')
@pytest.mark.parametrize('url', ['{}/s/key-of-the-user/mcp', '${{WHOLE}}', '{}/${{PART}}/mcp'])
def test_a_key_in_the_path_stays_out_of_every_line(server, url, tmp_path, monkeypatch, caplog):
    host = server.url.removesuffix('/mcp')
    monkeypatch.setenv('WHOLE', f'{host}/s/key-of-the-user/mcp')
    monkeypatch.setenv('PART', 'key-of-the-user')
    file = tmp_path / 'mcp.json'
    file.write_text(json.dumps({'mcpServers': {'a': {'url': url.format(host)}}}))
    (tool,) = mcp_tools.list_tools(str(file), SECONDS)
    assert 'key-of-the-user' in tool.connection.server.url
    server.mode = 'redirect'
    assert call(tool) == (None, 'failed')
    line = caplog.records[0].getMessage()
    assert 'redirects to' in line and 'key-of' not in line
    if '{{' in url:
        assert tool.connection.server.secrets
