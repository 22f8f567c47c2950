"""Files of datasets by hf://, from a stand-in of the Hub on loopback, and what is said where there is none."""

import contextlib
import hashlib
import http.server
import json
import threading

import pytest
from python_process import run_python

NAME = 'data/test.jsonl'
CONTENT = b'{"question": "Who taught Ann?", "answers": ["Bob"]}\n'
# What it answers for these datasets: the status and the code of its error.
REFUSED = {'gated': (403, 'GatedRepo'), 'private': (401, 'RepoNotFound')}
SCRIPT = """
import sys
from zeroplay_jax.data import files
from zeroplay_jax.retrieval import downloads
for name in sys.argv[1:]:
    try:
        path = downloads.fetch_file(name)
        print(downloads.name_of(path), downloads.name_in_path(path), files.questions(path)[0].text)
    except downloads.RetrievalError as error:
        print(error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        dataset = self.path.removeprefix('/api').split('/')[3:4]
        status, code = REFUSED.get(*dataset, (200, '')) if dataset else (404, '')
        headers = {'X-Error-Code': code} if code else {}
        body = b''
        if '/tree/' in self.path:
            body = json.dumps([{'type': 'file', 'path': NAME, 'size': len(CONTENT), 'oid': '0'}])
        elif self.path.startswith('/api'):
            body = json.dumps({'id': 'owner/set', 'sha': 'a' * 40, 'siblings': []})
        else:
            body = CONTENT
            headers |= {'ETag': f'"{hashlib.sha1(CONTENT).hexdigest()}"'}
            headers |= {'X-Repo-Commit': 'a' * 40}
        body = body if isinstance(body, bytes) else body.encode()
        self.send_response(status)
        for name, value in {'Content-Length': len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        """Keeps the test's output clean."""


@contextlib.contextmanager
def serving():
    """The address of the stand-in."""
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f'http://127.0.0.1:{server.server_port}'
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def fetch(tmp_path):
    """The lines that fetching prints, with a cache of its own."""

    def fetch(*names, **environment):
        environment |= {'HF_HOME': str(tmp_path), 'HF_TOKEN': ''}
        done = run_python('-c', SCRIPT, *names, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return fetch


def test_a_set_has_two_addresses_and_every_refusal_its_reason(fetch):
    fetched = 'hf://owner/set/data/test.jsonl hf://owner/set/data/test.jsonl Who taught Ann?'
    with serving() as address:
        names = ('set/data/test', 'set/data/other', 'gated/test', 'private/test')
        hub = dict(HF_ENDPOINT=address, HF_HUB_OFFLINE='0')
        lines = fetch(
            f'hf://datasets/owner/set/{NAME}',
            *(f'hf://owner/{name}.jsonl' for name in names),
            **hub,
        )
    assert lines == [
        fetched,
        fetched,
        'hf://owner/set/data/other.jsonl: the dataset has no such file; look at its list of files',
        'hf://owner/gated/test.jsonl could not be fetched (its owner grants access); ask for it on its page, and set '
        'HF_TOKEN to your token',
        'hf://owner/private/test.jsonl could not be fetched (there is none of this name, or it is private); correct '
        'the name, or set HF_TOKEN to your token',
    ]
    # What is in the cache needs no connection.
    lines = fetch(f'hf://owner/set/{NAME}', 'hf://owner/new/test.jsonl', **hub)
    assert lines[0] == fetched and 'refused); download it where there is a connection' in lines[1]
    (line,) = fetch('hf://owner/new/test.jsonl', HF_HUB_OFFLINE='1')
    assert 'could not be fetched (HF_HUB_OFFLINE is set); unset it, or give the path' in line


def test_an_address_without_a_file_is_refused_before_anything_is_asked(fetch):
    names = ('hf://datasets/owner/set', 'hf://owner/set')
    lines = fetch(*names)
    assert lines == [
        f'{name}: names no file of a dataset; give hf://owner/dataset/path/file.jsonl'
        for name in names
    ]
