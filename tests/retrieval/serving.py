"""A real server on the loopback interface, for the tests of server and client."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from zeroplay_jax.retrieval import server


@contextlib.contextmanager
def serving(load, **limits):
    """Runs the application in a thread; yields its URL and the application."""
    app = server.App(load, server.Limits(**limits))
    runner = server.uvicorn_server(app, port=0, timeout_graceful_shutdown=20)
    app.stop = lambda: setattr(runner, 'should_exit', True)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    while not runner.started:
        time.sleep(0.01)
    port = runner.servers[0].sockets[0].getsockname()[1]
    try:
        yield f'http://127.0.0.1:{port}', app
    finally:
        runner.should_exit = True
        thread.join(30)


@contextlib.contextmanager
def served(index, **limits):
    """The address of a server that answers from this index."""
    with serving(lambda: (index, 'fingerprint'), **limits) as (url, _):
        until_ready(url)
        yield url


def spawn(root, *args):
    """The command in a process of its own: (process, URL)."""
    command = [sys.executable, '-m', 'retrieval.server', '--port', '0', *args]
    process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if found := re.search(r'listening on (\S+)', line):
            return process, found[1]
    raise AssertionError(f'the server ended with status {process.wait()}')


def call(url, data=None, **headers):
    """(status, parsed reply, headers); `data` is sent as it is when bytes, else as JSON."""
    headers = {'Content_Type': 'application/json'} | headers
    headers = {name.replace('_', '-'): value for name, value in headers.items()}
    body = data if isinstance(data, bytes | None) else json.dumps(data).encode()
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, page, headers = reply.status, reply.read(), reply.headers
    except urllib.error.HTTPError as error:
        status, page, headers = error.code, error.read(), error.headers
    try:
        return status, json.loads(page), headers
    except ValueError:
        return status, page.decode(), headers


def until_ready(url):
    while call(f'{url}/health')[0] != 200:
        time.sleep(0.02)
