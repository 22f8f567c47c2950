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
from python_process import FAST, PIPES, ROOT, wait_for

from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.retrieval import build

EXAMPLE = ROOT / 'examples' / 'inspect_search'
COMMANDS = re.search(r'```\n(.*?)```', (EXAMPLE / 'README.md').read_text(), re.DOTALL)[
    1
].splitlines()
PROGRAMS = ('inspect', 'lm_eval', 'transformers')
QUESTION, ANSWER = 'Who taught Ann?', 'Bob'
# Calls and results are messages, as in the templates of Qwen; shorter.
TEMPLATE = """\
{%- macro turn(role, content) %}{{ '<|im_start|>' + role + '\\n' + content + '<|im_end|>\\n' }}{% endmacro %}
{%- if tools %}{{ turn('system', 'Tools: ' + tools | map(attribute='function.name') | join(' ')) }}{% endif %}
{%- for message in messages %}
{%- set content = namespace(text=message.content or '') %}
{%- for call in message.tool_calls or [] %}
{%- set content.text = content.text + '<tool_call>\\n' + {'name': call.function.name, 'arguments':
    call.function.arguments} | tojson + '\\n</tool_call>' %}
{%- endfor %}
{{- turn(message.role, content.text) }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


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
    shutil.copytree(ROOT / 'zeroplay_jax/mini/clean', place / 'exported/solver')
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

    def start(self, part, *changes):
        """The process of the command of README that contains `part`, with (old, new) texts."""
        (command,) = [line for line in COMMANDS if part in line]
        for old, new in (*changes, *self._words.items()):
            command = command.replace(old, new)
        options = PIPES | {'cwd': self._place, 'env': self._environment, 'start_new_session': True}
        return subprocess.Popen(['bash', '-c', command], **options)

    def run(self, part, *changes):
        process = self.start(part, *changes)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out[-3000:] + err[-3000:]
        return out

    @contextlib.contextmanager
    def serving(self, *changes):
        """Both servers of README."""
        servers = [self.start('retrieval.server'), self.start('transformers serve', *changes)]
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


def test_a_policy_whose_tools_are_functions_calls_by_itself(programs, place):
    memorise(place / 'called/policy')
    (place / 'one.jsonl').write_text(json.dumps({'question': QUESTION, 'answers': [ANSWER]}))
    commands = Commands(programs, place)
    name = ('exported/solver', 'called/policy')
    with commands.serving(name):
        commands.run(
            'inspect eval',
            (' -T folder=$PWD/exported/solver', ''),
            ('api-completions', 'api'),
            ('questions.jsonl', 'one.jsonl'),
            name,
        )
    log = logged(place)
    (sample,) = log['samples']
    roles = [message['role'] for message in sample['messages']]
    assert roles == ['user', 'assistant', 'tool', 'assistant']
    assert sample['messages'][1]['tool_calls'][0]['arguments'] == {'query_list': ['Ann']}
    assert score(log) == 1.0


def memorise(folder):
    """Writes a policy that has learnt by heart one call and one answer, as messages of its template."""
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    import transformers

    start = ROOT / 'zeroplay_jax/mini/english/clean'
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer.chat_template = TEMPLATE
    function = {'name': 'search', 'arguments': {'query_list': ['Ann']}}
    messages = [
        {'role': 'user', 'content': f'Question: {QUESTION}'},
        {'role': 'assistant', 'content': '', 'tool_calls': [{'function': function}]},
        {'role': 'tool', 'content': 'No passage found.'},
        {'role': 'assistant', 'content': f'<answer>{ANSWER}</answer>'},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[{'function': function}], tokenize=False)
    ids = tokenizer(text, return_tensors='pt')
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):
        loss = model(**ids, labels=ids['input_ids']).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
