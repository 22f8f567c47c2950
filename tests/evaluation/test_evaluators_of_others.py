"""inspect-ai and lm-eval ask exported policies as examples/inspect_search/README.md says, where they are installed."""

import contextlib
import json
import os
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

PAGE = (ROOT / 'examples' / 'inspect_search' / 'README.md').read_text()
COMMANDS = re.search(r'```\n(.*?)```', PAGE, re.DOTALL)[1].splitlines()


@pytest.fixture
def place(tmp_path):
    """A folder as README has it: an index, questions of one and two hops, and a policy."""
    world = World(0, 'evaluation')
    passages = [{'id': p.id, 'title': p.title, 'text': p.text} for p in world.passages]
    questions = evaluation_questions([world], 4, (1, 2))
    for name, lines in (('corpus', passages), ('questions', questions)):
        (tmp_path / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    build.main([f'--corpus={tmp_path}/corpus.jsonl', '--kind=bm25', f'--out={tmp_path}/index'])
    shutil.copytree(ROOT / 'zeroplay_jax/mini/base', tmp_path / 'exported/solver')
    (tmp_path / 'examples').symlink_to(ROOT / 'examples')
    return tmp_path


def is_up(port):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f'http://localhost:{port}/health', timeout=2).status == 200


@pytest.mark.long
@pytest.mark.skipif(
    not all(map(shutil.which, ('inspect', 'lm_eval', 'transformers'))), reason='not on PATH'
)
def test_a_policy_with_tags_is_asked_by_both(place):
    ports = {'8000': str(free_port()), '8001': str(free_port())}
    environment = os.environ | FAST | {
        'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1', 'LOCAL_API_KEY': 'none',
        'SEARCH_URL': f'http://localhost:{ports["8000"]}',
        'INSPECT_LOG_DIR': str(place / 'logs'), 'INSPECT_LOG_FORMAT': 'json',
    }  # fmt: skip

    def start(part):
        """The process of the command of README that contains `part`, at a free port."""
        (command,) = [as_module(line) for line in COMMANDS if part in line]
        words = {'evaluators/bin/': '', '.venv/bin/python': sys.executable} | ports
        for old, new in words.items():
            command = command.replace(old, new)
        options = PIPES | {'cwd': place, 'env': environment, 'start_new_session': True}
        return subprocess.Popen(['bash', '-c', command], **options)

    servers = [start('zeroplay serve'), start('transformers serve')]
    try:
        for port in ports.values():
            wait_for(lambda port=port: is_up(port), *servers)
        for part in ('inspect eval', 'lm_eval '):
            process = start(part)
            table, err = process.communicate(timeout=300)
            assert process.returncode == 0, table[-3000:] + err[-3000:]
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGTERM)
            server.communicate(timeout=60)
    (path,) = (place / 'logs').glob('*.json')
    log = json.loads(path.read_text())
    assert log['results']['scores'][0]['metrics']['mean']['value'] >= 0.5
    for sample in log['samples']:
        roles = [message['role'] for message in sample['messages']]
        assert roles.count('tool') == roles.count('assistant') - 1 >= 1
    # One search finds the answers of one hop.
    assert re.search(r'exact_match\|↑ +\| +0\.5', table), table
