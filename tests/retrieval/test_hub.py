"""Files of datasets by hf://, from a stand-in of the Hub on loopback, and what is said where there is none."""

import hashlib

import pytest
from fake_server import Fake, fake_server
from python_process import run_python

NAME = 'data/test.jsonl'
CONTENT = b'{"question": "Who taught Ann?", "answers": ["Bob"]}\n'
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


class Hub(Fake):
    """Has one dataset with one file, and one that its owner has to open."""

    def do_GET(self):
        if '/gated' in self.path:
            self.answer(403, b'', [('X-Error-Code', 'GatedRepo')])
        elif '/tree/' in self.path:
            self.answer(200, [{'type': 'file', 'path': NAME, 'size': len(CONTENT), 'oid': '0'}])
        elif self.path.startswith('/api'):
            self.answer(200, {'id': 'owner/set', 'sha': 'a' * 40, 'siblings': []})
        else:
            tag = f'"{hashlib.sha1(CONTENT).hexdigest()}"'
            self.answer(200, CONTENT, [('ETag', tag), ('X-Repo-Commit', 'a' * 40)])

    do_HEAD = do_GET


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
    names = (
        'datasets/owner/set/data/test',
        'owner/set/data/test',
        'owner/set/other',
        'owner/gated/a',
    )
    with fake_server(Hub) as server:
        hub = dict(HF_ENDPOINT=server.url, HF_HUB_OFFLINE='0')
        lines = fetch(*(f'hf://{name}.jsonl' for name in names), 'hf://owner/set', **hub)
    assert lines[:2] == [fetched] * 2
    reasons = ('no such file', 'its owner grants access', 'names no file of a dataset')
    for line, reason in zip(lines[2:], reasons, strict=True):
        assert reason in line
    # What is in the cache needs no connection.
    lines = fetch(f'hf://owner/set/{NAME}', 'hf://owner/new/test.jsonl', **hub)
    assert lines[0] == fetched and 'refused); download it where there is a connection' in lines[1]
