"""A server that speaks the protocols of all clients, in good and bad ways."""

import contextlib
import http.server
import json
import ssl
import threading
import time

PASSAGE = {'document': {'id': '7', 'contents': '"T"\ntext'}, 'score': 0.5}
TOOL = {'name': 'echo', 'inputSchema': {'type': 'object', 'properties': {}}}
MCP = {
    'initialize': {
        'protocolVersion': '2025-06-18',
        'capabilities': {'tools': {}},
        'serverInfo': {'name': 'test', 'version': '1'},
    },
    'tools/list': {'tools': [TOOL]},
    'tools/call': {'content': [{'type': 'text', 'text': 'fine'}]},
}


def completion(message):
    """The reply of the OpenAI protocol; the message stays as it is: several requests may be answered with it."""
    content = dict(message)
    ending = content.pop('finish_reason', 'stop')
    choice = {'index': 0, 'finish_reason': ending, 'message': {'role': 'assistant'} | content}
    return {'choices': [choice], 'usage': {'prompt_tokens': 10, 'completion_tokens': 3}}


class Web(http.server.ThreadingHTTPServer):
    """Answers searches, chats and MCP as `mode` says.

    `seen` are the lines of its requests, `bodies` and `keys` those of posts. `chat` replies to the body of a
    chat: a message, or (status, bytes).

    Args:
      certificate: file with a certificate and its key; None: without TLS.
    """

    daemon_threads = True

    def __init__(self, certificate=None):
        super().__init__(('127.0.0.1', 0), Handler)
        self.mode, self.seen, self.target, self.together = 'good', [], '', None
        self.chat, self.bodies, self.keys = lambda body: {'content': 'Correct'}, [], []
        self.scheme = 'http'
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.scheme = 'https'

    @property
    def address(self):
        return f'{self.scheme}://127.0.0.1:{self.server_port}'

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Says nothing of clients that leave in the middle."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
        """Says nothing."""

    def do_GET(self):
        self.server.seen.append(self.requestline)
        if self.path.endswith('/health'):
            self.reply(404)
        elif self.server.mode == 'sse':
            self.reply(
                200, b'event: endpoint\ndata: /messages\n\n', Content_Type='text/event-stream'
            )
        else:
            self.reply(405)

    def do_DELETE(self):
        self.reply(200)

    def do_POST(self):
        self.server.seen.append(self.requestline)
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers['Authorization'])
        if self.server.together:
            self.server.together.wait()
        result = self.result(body)
        if isinstance(result, tuple):
            self.reply(*result)
        else:
            getattr(self, self.server.mode)(json.dumps(result).encode())

    def result(self, body):
        if 'queries' in body:
            return {'result': [[PASSAGE] for _ in body['queries']]}
        if 'messages' in body:
            reply = self.server.chat(body)
            return reply if isinstance(reply, tuple) else completion(reply)
        return {'jsonrpc': '2.0', 'id': body.get('id'), 'result': MCP.get(body['method'])}

    def reply(self, status, content=b'', **headers):
        self.send_response(status)
        length = {'Content_Length': str(len(content))}
        for name, value in {'Content_Type': 'application/json', **length, **headers}.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        self.wfile.write(content)

    def good(self, content):
        # A notification of MCP, which has no result.
        self.reply(202 if b'"id": null' in content else 200, content)

    def redirect(self, content):
        self.reply(307, Location=self.server.target)

    def long(self, content):
        self.reply(200, content + b' ' * (17 << 20))

    def compressed(self, content):
        self.reply(200, content, Content_Encoding='gzip')

    def drip(self, content):
        self.reply(200, content[:1], Content_Length='500')
        with contextlib.suppress(OSError):
            for _ in range(100):
                time.sleep(0.05)
                self.wfile.write(b' ')

    def echo(self, content):
        key = self.headers['Authorization']
        self.reply(401, json.dumps({'error': f'{key} is not a key'}).encode())

    def charset(self, content):
        self.reply(400, b'gone: \xff\xc3\xa9', Content_Type='text/plain; charset=hex')

    def html(self, content):
        self.reply(200, b'<html>', Content_Type='text/html')

    def cut(self, content):
        self.reply(200, content[:30], Content_Length=str(len(content)))
        self.close_connection = True

    def sse(self, content):
        self.reply(405)
