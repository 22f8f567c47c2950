"""A search server whose replies a test writes."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from zeroplay_jax.retrieval.client import Http


class Fake(BaseHTTPRequestHandler):
    """Answers as its server's script says: a status with a body, 'close', or a function that gets the handler."""

    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        self.answer(*self.server.health)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.seen.append(body)
        step = self.server.script.pop(0) if self.server.script else 'ok'
        if step == 'close':
            self.close_connection = True
            self.connection.close()
        elif step == 'ok':
            item = {'document': {'id': '7', 'contents': '"T"\ntext'}, 'score': 0.5}
            self.answer(200, {'result': [[item] for _ in body['queries']]})
        elif callable(step):
            self.close_connection = True
            # The client may leave before the reply ends.
            with contextlib.suppress(OSError):
                step(self)
        else:
            self.answer(*step)

    def answer(self, status, body, headers=()):
        page = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header('Content-Length', str(len(page)))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(page)

    def log_message(self, *args):
        """Says nothing."""


def cut(handler):
    """A reply that ends in the middle."""
    handler.send_response(200)
    handler.send_header('Content-Length', '500')
    handler.end_headers()
    handler.wfile.write(b'{"result"')


def http(server, **options):
    """A client of a server that does not wait long."""
    return Http(server.url, **(dict(pause=0.001, timeout=10.0, patience=0.0) | options))


@contextlib.contextmanager
def fake_server(handler=Fake):
    """Runs a server; yields it with its `url`, the `script` to fill, and the request bodies it has `seen`."""
    server = ThreadingHTTPServer(('127.0.0.1', 0), handler)
    server.script, server.seen, server.health = [], [], (200, {'index': 'x'})
    server.url = f'http://127.0.0.1:{server.server_address[1]}'
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
