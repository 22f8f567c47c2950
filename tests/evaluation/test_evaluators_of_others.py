"""inspect-ai and lm-eval ask exported policies as examples/inspect_search/README.md says, where they are installed."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import urllib.request

import pytest
from host_processes import free_port
from page_commands import as_module
from python_process import FAST, PIPES, ROOT, wait_for

from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.retrieval import build

EXAMPLE = ROOT / 'examples' / 'inspect_search'
COMMANDS = re.search(r'```\n(.*?)```', (EXAMPLE / 'README.md').read_text(), re.DOTALL)[
    1
].splitlines()
PROGRAMS = ('inspect', 'lm_eval', 'transformers')


@pytest.fixture(scope='module')
def programs():
    """The folder of the programs of an environment of their own."""
    place = shutil.which('inspect') and pathlib.Path(shutil.which('inspect')).parent
    if not place or not all((place / name).is_file() for name in PROGRAMS):
        pytest.skip("inspect-ai, lm-eval and 'transformers[serving]' are not on PATH")
    return place


@pytest.fixture(scope='module')
def place(programs, tmp_path_factory):
    """A folder as README has it: an index, questions of one and two hops, and a policy."""
    place = tmp_path_factory.mktemp('evaluators')
    world = World(0, 'evaluation')
    passages = [{'id': p.id, 'title': p.title, 'text': p.text} for p in world.passages]
    questions = evaluation_questions([world], 4, (1, 2))
    for name, lines in (('corpus', passages), ('questions', questions)):
        (place / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    build.main([f'--corpus={place}/corpus.jsonl', '--kind=bm25', f'--out={place}/index'])
    shutil.copytree(ROOT / 'zeroplay_jax/mini/base', place / 'exported/solver')
    (place / 'examples').symlink_to(ROOT / 'examples')
    return place


class Commands:
    """Runs commands of README in a folder, at free ports."""

    def __init__(self, programs, place):
        self._place = place
        self._search, self._policy = free_port(), free_port()
        self._words = {
            'evaluators/bin/': f'{programs}/',
            '.venv/bin/python': sys.executable,
            'localhost:8000': f'localhost:{self._search}',
            'localhost:8001': f'localhost:{self._policy}',
            'port 8000': f'port {self._search}',
            'port 8001': f'port {self._policy}',
        }
        (place / 'hub').mkdir(exist_ok=True)
        self._environment = os.environ | FAST | {
            'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1', 'HF_HUB_CACHE': str(place / 'hub'),
            'LOCAL_API_KEY': 'none', 'SEARCH_URL': f'http://localhost:{self._search}',
            'INSPECT_LOG_DIR': str(place / 'logs'), 'INSPECT_LOG_FORMAT': 'json',
        }  # fmt: skip

    def start(self, part):
        """The process of the command of README that contains `part`."""
        (command,) = [line for line in COMMANDS if part in line]
        command = as_module(command)
        for old, new in self._words.items():
            command = command.replace(old, new)
        options = PIPES | {'cwd': self._place, 'env': self._environment, 'start_new_session': True}
        return subprocess.Popen(['bash', '-c', command], **options)

    def run(self, part):
        process = self.start(part)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out[-3000:] + err[-3000:]
        return out

    @contextlib.contextmanager
    def serving(self):
        """Both servers of README."""
        servers = [self.start('zeroplay serve'), self.start('transformers serve')]
        try:
            for port in (self._search, self._policy):
                wait_for(lambda port=port: is_up(port), *servers)
            yield
        finally:
            for server in servers:
                os.killpg(server.pid, signal.SIGTERM)
                server.communicate(timeout=60)


def is_up(port):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f'http://localhost:{port}/health', timeout=2).status == 200


def logged(place):
    """The newest log of inspect-ai."""
    return json.loads(max((place / 'logs').glob('*.json')).read_text())


def score(log):
    return log['results']['scores'][0]['metrics']['mean']['value']


def test_a_policy_with_tags_is_asked_by_both(programs, place):
    commands = Commands(programs, place)
    with commands.serving():
        commands.run('inspect eval')
        table = commands.run('lm_eval ')
    log = logged(place)
    assert log['status'] == 'success'
    assert score(log) >= 0.5
    for sample in log['samples']:
        roles = [message['role'] for message in sample['messages']]
        assert roles.count('tool') == roles.count('assistant') - 1 >= 1
        assert (
            'Doc 1(Title: ' in next(m for m in sample['messages'] if m['role'] == 'tool')['content']
        )
    # One search finds the answers of one hop.
    assert re.search(r'exact_match\|↑ +\| +0\.5', table), table
