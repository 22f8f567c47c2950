"""`python -m zeroplay_jax.ask` from a user's view: in a pipe, as JSON, at a terminal with Ctrl-C, and when it is
called wrongly."""

import contextlib
import http.server
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tiny

from zeroplay_jax import ask
from zeroplay_jax.configs import quickstart
from zeroplay_jax.evaluation import agent, session, terminal
from zeroplay_jax.evaluation.open_corpus import OpenCorpus
from zeroplay_jax.evaluation.tag_stream import TagStream, UnreadCall
from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.retrieval import build
from zeroplay_jax.retrieval.client import Client
from zeroplay_jax.retrieval.types import SearchFailed
from zeroplay_jax.rollout.slot_programs import DecodeChunk
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay.library import SearchableCorpus
from zeroplay_jax.types import ToolCall, UserError

ROOT = pathlib.Path(__file__).parents[1]
CLEAN, BASE = ROOT / 'zeroplay_jax' / 'mini' / 'clean', ROOT / 'zeroplay_jax' / 'mini' / 'base'
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != 'NO_COLOR'} | {
    # Compiled in half the time; one device, as users have.
    'XLA_FLAGS': '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true',
    'JAX_PLATFORMS': 'cpu',
    'TERM': 'xterm',
}
WORLD = World(0, 'evaluation')
ONE, TWO = (item for h in (1, 2) for item in evaluation_questions([WORLD], 1, (h,)))
NAME, START = (
    re.search(r'of (\w+)\?', item['question'])[1] for item in (ONE, TWO)
)  # what is searched first
ATTACK = '\x1b[31m\x1b]0;owned\x07\x9b2J'
LABELS = ('think', 'search', 'answer')
# Tools only keep it; nothing is searched.
NO_CORPUS = SearchableCorpus(None, 3, 200)


def command(*arguments, **options):
    """The real command in a process of its own."""
    pipes = dict(
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    words = [sys.executable, '-m', 'zeroplay_jax.ask', *map(str, arguments)]
    return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, **pipes | options)


def finish(process, given=None):
    out, err = process.communicate(given, timeout=300)
    return process.returncode, out, err


def labels(text):
    """First words of labelled lines, in order."""
    return [word for line in text.splitlines() if (word := line.split(' ')[0]) in LABELS]


@pytest.fixture(scope='module')
def index(tmp_path_factory):
    """A folder of retrieval.build, from a corpus in which a page tries to steer the terminal."""
    folder = tmp_path_factory.mktemp('index')
    with (folder / 'corpus.jsonl').open('w') as file:
        for p in WORLD.passages:
            file.write(json.dumps({'id': p.id, 'contents': f'"{p.title}"\n{p.text}'}) + '\n')
        file.write(
            json.dumps({'id': 'evil', 'contents': f'"{START}x"\n{START}x makes {ATTACK}<search>.'})
            + '\n'
        )
    build.main(
        [f'--corpus={folder / "corpus.jsonl"}', '--encoder=lexical', f'--out={folder / "index"}']
    )
    return folder / 'index'


# The command


def test_plain_text_in_a_pipe_and_an_index_of_ones_own(index):
    code, out, err = finish(command('--policy', CLEAN, '--index', index, TWO['question']))
    assert code == 0 and not err
    assert labels(out) == ['think', 'search', 'think', 'search', 'think', 'answer']
    assert out.splitlines()[-1].split() == ['answer', *TWO['answers']]
    assert f'  [1]     {START}: ' in out
    # The page's control characters are shown, not obeyed.
    assert ascii(ATTACK)[1:-1] in out and not re.search(r'[^\n\x20-\x7e]', out)


def test_out_of_the_box_questions_from_a_pipe_become_json_lines():
    code, out, _ = finish(
        command('--json', stdin=subprocess.PIPE), f'{ONE["question"]}\n\n{TWO["question"]}\n'
    )
    first, second = (json.loads(line) for line in out.splitlines())
    assert code == 0
    assert [first['question'], second['question']] == [ONE['question'], TWO['question']]
    assert (
        first['policy'] == str(BASE)
        and first['answer'] in ONE['answers']
        and first['finish'] == 'answer'
    )
    for found in (first, second):
        assert [s['source'] for s in found['segments']] == [
            'prompt',
            *['policy', 'env'] * len(found['turns']),
        ][:-1]
        policy = [s for s in found['segments'] if s['source'] == 'policy']
        env = [s for s in found['segments'] if s['source'] == 'env']
        assert found['question'] in found['segments'][0]['text']
        assert [s['text'] for s in policy] == [turn['text'] for turn in found['turns']]
        for segment, turn in zip(env, found['turns']):
            call = turn['call']
            assert call['tool'] == 'search' and call['error'] is None
            assert call['text'] in segment['text']
            assert all(passage['title'] in segment['text'] for passage in call['documents'][0])
        assert all(len(s['tokens']) and s['text'] for s in found['segments'])


# A search server that can be held up


@pytest.fixture
def server():
    """(address, event that lets searches through, event that is set when one has come)."""
    go, came = threading.Event(), threading.Event()
    passages = {p.title: f'"{p.title}"\n{p.text}' for p in WORLD.passages}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({'status': 'ready', 'index': 'held'})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
            came.set()
            go.wait(120)
            found = [
                [{'document': {'id': q, 'contents': passages[q]}, 'score': 1.0}]
                if q in passages
                else []
                for q in body['queries']
            ]
            self.reply({'result': found})

        def reply(self, value):
            data = json.dumps(value).encode()
            with contextlib.suppress(OSError):  # whoever asked may have left
                self.send_response(200)
                self.send_header('Content-Length', str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    running = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{running.server_port}', go, came
    go.set()
    running.shutdown()
    running.server_close()


def test_ctrl_c_ends_a_single_answer_without_a_traceback(server):
    address, _, came = server
    process = command('--policy', CLEAN, '--index', address, TWO['question'])
    assert came.wait(240)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and not err
    assert labels(out) == ['think', 'search']  # what came before is there


class Terminal:
    """The command on a pseudo-terminal that controls it, so that Ctrl-C is a key."""

    def __init__(self, *arguments):
        take = 'import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)'
        run = 'runpy.run_module("zeroplay_jax.ask", run_name="__main__", alter_sys=True)'
        words = [sys.executable, '-c', f'{take}; {run}', *map(str, arguments)]
        self.keys, inside = pty.openpty()
        ends = dict(stdin=inside, stdout=inside, stderr=inside)
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=ENVIRONMENT, start_new_session=True, **ends
        )
        os.close(inside)
        self.seen = ''

    def type(self, text):
        os.write(self.keys, text.encode())

    def until(self, text):
        """What was shown since the last call, up to `text`."""
        deadline = time.monotonic() + 240
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.keys], [], [], 1)[0]:
                with contextlib.suppress(OSError):  # Linux says so when the other end is closed
                    data = os.read(self.keys, 1 << 16)
                    self.seen += data.decode(errors='replace')
                    continue
                assert text in self.seen, self.seen
        at = self.seen.index(text) + len(text)
        shown, self.seen = self.seen[:at], self.seen[at:]
        return shown


def test_a_session_at_a_terminal(server):
    address, go, came = server
    terminal = Terminal('--policy', CLEAN, '--index', address)
    try:
        greeting = terminal.until('ask> ')
        assert str(CLEAN) in greeting and address in greeting
        terminal.type(ONE['question'] + '\n')
        assert came.wait(240)
        terminal.type('\x03')
        stopped = terminal.until('ask> ')
        assert f'\x1b[1;36m{"search":10}{NAME}\x1b[0m' in stopped  # coloured
        assert (
            'stopped' in stopped
            and 'Traceback' not in stopped
            and 'answer' not in stopped.split('stopped')[0]
        )
        go.set()
        terminal.type('x' * 600 + '\n')
        assert 'the question is too long' in terminal.until('ask> ')
        terminal.type('nonsense\x15' + ONE['question'] + '\n')  # Ctrl-U: the line is edited
        answered = terminal.until('ask> ')
        assert f'\x1b[1;32m{"answer":10}{ONE["answers"][0]}\x1b[0m' in answered
        assert answered.count('\x1b[1;36msearch') == 1
        terminal.type('\x04')
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.keys)


def test_ctrl_c_at_the_prompt_ends(monkeypatch, capsys):
    class Session:
        def greet(self, remark):
            print('hello')

    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr('builtins.input', interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert ask._run_prompt(Session(), '') == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ('hello\n\n', '')


# How a policy is asked


@pytest.fixture
def exported(tmp_path):
    """The folder of a run: its config and a policy."""
    config = quickstart.get_config()
    config.recipe, config.rollout.max_turns, config.world.train = 'scope', 3, (1, 2)
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'config.json').write_text(json.dumps(config.to_dict()))
    shutil.copytree(CLEAN, tmp_path / 'run' / 'policy' / 'solver')
    return tmp_path / 'run' / 'policy' / 'solver'


def test_a_policy_in_its_run_is_asked_as_it_was_trained(exported):
    config = ask.settings(exported)
    assert (config.recipe, config.rollout.max_turns, config.world.train) == ('scope', 3, (1, 2))
    role = agent.build_role(config, Codec(exported), NO_CORPUS)
    assert role.template == 'Task: {task}' and list(role.env.tools) == ['search']
    assert (
        role.env.codec.decode(role.prompt_ids('Describe Lomi.')).count('Task: Describe Lomi.') == 1
    )


def test_a_run_of_an_older_version_is_refused_with_the_new_name(exported):
    run = exported.parents[1] / 'config.json'
    stored = json.loads(run.read_text())
    stored['tools']['family'] = stored['tools'].pop('syntax')
    run.write_text(json.dumps(stored))
    with pytest.raises(
        UserError, match='tools.family: renamed; it is config.tools.syntax'
    ) as error:
        ask.settings(exported)
    assert str(run) in str(error.value) and '\n' not in str(error.value)


def test_a_prompt_that_needs_more_than_a_question_is_refused(exported, monkeypatch):
    config = ask.settings(exported)
    recipe = agent.recipe_class(config.recipe)
    monkeypatch.setattr(recipe, 'evaluated_role', 'proposer')
    with pytest.raises(UserError, match='its role proposer cannot be asked.*{hops}'):
        agent.build_role(config, Codec(exported), NO_CORPUS)


def test_a_run_of_another_version_is_refused(exported):
    run = exported.parents[1] / 'config.json'
    run.write_text(json.dumps(json.loads(run.read_text()) | {'unheard': 1}))
    with pytest.raises(UserError, match='unheard.*copy the policy elsewhere'):
        ask.settings(exported)


def test_without_index_it_searches_what_its_run_searched(exported, index, capsys, monkeypatch):
    run = exported.parents[1] / 'config.json'
    stored = json.loads(run.read_text())
    stored['retrieval'] |= {'kind': 'folder', 'path': str(index)}
    run.write_text(json.dumps(stored))
    searched = lambda *flags: (
        ask._with_flags(ask.settings(exported), ask._arguments(list(flags))).retrieval
    )
    assert (searched().kind, searched().path) == ('folder', str(index))
    served = searched('--index=http://127.0.0.1:9')
    assert (served.kind, served.url) == ('http', 'http://127.0.0.1:9')
    monkeypatch.setattr(session, 'Session', None)
    stored['retrieval']['path'] = 'gone'
    run.write_text(json.dumps(stored))
    assert 'gone (searched by its run): no index folder' in refused(
        capsys, '--policy', exported, 'q'
    )


def test_more_turns_and_passages_get_more_room(exported):
    before = ask.settings(exported)
    after = ask._with_flags(ask.settings(exported), ask._arguments(['--turns=4', '--topk=6']))
    assert after.rollout.observation_tokens == 2 * before.rollout.observation_tokens
    more = 4 * (64 + 256) - 3 * (64 + 128)
    assert after.sampler.context == before.sampler.context + more


def test_any_folder_of_a_family_is_heard_burst_by_burst(server, tmp_path, capsys, monkeypatch):
    address, go, _ = server
    go.set()
    heard, feed = [], TagStream.feed
    monkeypatch.setattr(
        TagStream, 'feed', lambda self, text: (heard.append(text), feed(self, text))
    )
    folder = tiny.make_folder(tmp_path / 'random', max_position_embeddings=1100)
    assert ask.settings(folder).sampler.context == 1100
    arguments = [
        '--policy',
        str(folder),
        '--index',
        address,
        '--json',
        '--turns=1',
        '--temperature=1',
        'ab\udcff',
    ]
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert ask.main(arguments) == 0
    finally:
        signal.signal(signal.SIGINT, handler)
    found = json.loads(capsys.readouterr().out)
    prompt, policy = found['segments']
    assert (
        prompt['source'] == 'prompt'
        and '<tool_call>' in prompt['text']
        and 'Question: ab\ufffd' in prompt['text']
    )
    assert policy['source'] == 'policy' and 0 < len(policy['tokens']) <= 256
    assert policy['text'].startswith(found['turns'][0]['text'])
    assert len(heard) == -(-len(policy['tokens']) // 4) and policy['text'].startswith(
        ''.join(heard)
    )


def test_searches_that_fail_are_told_once_with_their_reason():
    class Down:
        name = 'http://down'

        def ready(self):
            return True

        def retrieve(self, queries, k):
            raise SearchFailed('status 503')

    corpus = OpenCorpus(SearchableCorpus(Client(Down(), most_failed=0.0), 3, 200), 'nothing')
    assert corpus.warning() == ''
    assert corpus.source.search(['q']) == [None]
    assert 'status 503' in corpus.warning() and corpus.warning() == ''


# What is shown


SEARCH_TAG = {'search': 'search'}


def events_of(call_tags, *pieces, close=()):
    """Events of a text that arrives in pieces; pieces of one part are joined, and 'end' is left out."""
    events = []
    stream = TagStream(lambda kind, content: events.append((kind, content)), call_tags)
    for piece in pieces:
        stream.feed(piece)
    stream.close(*close)
    joined = []
    for kind, content in events:
        if kind != 'end' and joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + content)
        elif kind != 'end' or (joined and joined[-1][0] != 'end'):
            joined.append((kind, content))
    return [event for event in joined if event[0] != 'end']


def test_text_is_split_at_its_tags_however_it_is_cut():
    text = 'so <think>a < b </thin> c</think><answer>x<search>y</answer>'
    whole = events_of(SEARCH_TAG, text)
    assert whole == [
        ('text', 'so '),
        ('think', 'a < b </thin> c'),
        ('answer', 'x'),
        ('unread_call', UnreadCall('search', 'y')),
    ]
    assert all(
        events_of(SEARCH_TAG, text[:i], text[i:j], text[j:]) == whole
        for j in range(60)
        for i in range(j)
    )


def test_a_call_that_was_read_is_not_reported_twice():
    text = '<think>a</think><tool_call>{"name": 1}</tool_call>'
    tags = {'tool_call': ''}
    assert events_of(tags, text, close=[True]) == [('think', 'a')]
    unread = UnreadCall('', '{"name": 1}')
    assert events_of(tags, text) == [('think', 'a'), ('unread_call', unread)]


def test_an_unread_call_has_the_tool_of_its_tag():
    tags = {'search': 'search', 'open': 'open'}
    (event,) = events_of(tags, '<open>Lomi</search>')
    assert event == ('unread_call', UnreadCall('open', 'Lomi'))


def test_text_is_reported_before_its_tag_is_closed():
    events = []
    TagStream(lambda *event: events.append(event), {'tool_call': ''}).feed('<think>half a tho')
    assert ('think', 'half a tho') in events


def test_control_characters_reach_no_terminal(capsys):
    printer = terminal.Printer(True)
    passages = ({'title': 'T' + ATTACK, 'text': 'a\u202eb\rc'},)
    call = ToolCall('search', {'query_list': [ATTACK]}, documents=(passages,))
    printer.report('result', call)
    printer.report('think', ATTACK)
    printer.report('call', call)
    printer.report('call', ToolCall('x' + ATTACK, {'a': ATTACK, 'b': 1}))
    printer.report('result', ToolCall('open', {'document': ATTACK}, text=ATTACK))
    printer.report('result', ToolCall('open', {'document': ATTACK}, text=ATTACK, error='failed'))
    printer.report('unread_call', UnreadCall('', ATTACK))
    printer.report('end', None)
    out = capsys.readouterr().out
    assert set(re.findall(r'\x1b\[([\d;]*m|.)', out)) == {'0m', '34m', '2m', '31m', '1;36m'}
    assert not re.search('[\x00-\x09\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e]', out)
    page = terminal.one_line_json({'text': ATTACK + '\u202e\nü'})
    assert not re.search('[\x00-\x1f\x7f-\x9f\u202e]', page) and 'ü' in page
    assert json.loads(page) == {'text': ATTACK + '\u202e\nü'}


# All tools


class ScriptedSampler:
    """In the place of rollout/sampler.py's: writes the next of these turns whenever it decodes after a `put`."""

    turns: list[str] = []

    def __init__(self, model, config, mesh):
        self.config, self.state, self.codec = config, None, Codec(CLEAN)
        self.remaining = list(self.turns)
        self.pending = []

    def put(self, rows):
        self.pending = self.codec.encode(self.remaining.pop(0)) if self.remaining else []

    def extend(self, params, slots):
        """Nothing is computed."""

    def rewind(self, slots, lengths):
        self.pending = []

    def decode(self, params):
        piece = self.pending[: self.config.burst]
        self.pending = self.pending[self.config.burst :]
        tokens = np.zeros((1, self.config.burst), np.int32)
        tokens[0, : len(piece)] = piece
        logp = np.full(tokens.shape, -0.5, np.float32)
        return DecodeChunk(tokens, logp, np.array([len(piece)], np.int32))


@pytest.fixture
def ask_scripted(capsys, monkeypatch):
    """Runs the command with a policy that writes these turns; returns its output."""
    monkeypatch.setattr(agent, 'Sampler', ScriptedSampler)

    def run(turns, *arguments, policy=CLEAN):
        monkeypatch.setattr(ScriptedSampler, 'turns', turns)
        handler = signal.getsignal(signal.SIGINT)
        try:
            assert ask.main([f'--policy={policy}', *map(str, arguments), 'q']) == 0
        finally:
            signal.signal(signal.SIGINT, handler)
        return capsys.readouterr().out

    return run


def test_every_tool_is_called_and_its_result_is_printed(ask_scripted, index):
    turns = [
        f'<think>look</think><search>{NAME}</search>',
        f'<open>{NAME}</open>',
        '<open>nowhere</open>',
        '<calculator>(1998 - 1934) / 4</calculator>',
        '<calculator>import os</calculator>',
        '<answer>16</answer>',
    ]
    tools = '--tools=search, open,calculator'
    lines = ask_scripted(turns, f'--index={index}', tools, '--turns=6', '--topk=1').splitlines()
    assert lines[:2] == ['think     look', f'search    {NAME}']
    assert lines[2].startswith(f'  [1]     {NAME}: ')
    assert lines[3:5] == [f'open      {NAME}', f'          {NAME} (page 1 of 1)']
    assert lines[5].startswith(f'          {NAME} ') and lines[6] == 'open      nowhere'
    assert lines[7].startswith('error     There is no such document.')
    assert lines[8:11] == [
        'calculator (1998 - 1934) / 4',
        '          16',
        'calculator import os',
    ]
    assert lines[11].startswith('error     The arguments of calculator are not valid')
    assert lines[12:] == ['answer    16']


def test_calls_are_named_by_their_tool_in_json(ask_scripted, server, exported):
    address, go, _ = server
    run = exported.parents[1] / 'config.json'
    stored = json.loads(run.read_text())
    stored['recipe'] = 'drzero'
    stored['rollout']['turn_tokens'] = 200  # the built-in tokenizer knows no JSON
    run.write_text(json.dumps(stored))
    go.set()
    turns = [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>',
        '<tool_call>{"name": "bing", "arguments": {}}</tool_call>',
        '<answer>42</answer>',
    ]
    arguments = ['--syntax=qwen', '--tools=search,calculator', f'--index={address}', '--json']
    record = json.loads(ask_scripted(turns, *arguments, policy=exported))
    first, second, last = (turn['call'] for turn in record['turns'])
    assert (first['tool'], first['arguments'], first['text']) == (
        'calculator',
        {'expression': '6 * 7'},
        '42',
    )
    assert (second['tool'], second['arguments'], second['error']) == ('bing', None, 'unknown_tool')
    assert last is None and record['answer'] == '42'


def test_a_call_that_cannot_be_read_is_printed_as_it_was_written(ask_scripted, server):
    turns = ['<search>a</search>', '<search>a<search>b</search>', '<answer>x</answer>']
    server[1].set()
    lines = ask_scripted(turns, f'--index={server[0]}').splitlines()
    assert lines[0] == 'search    a' and lines[1].strip() == 'no passage found'
    assert lines[2:4] == ['search    a', 'search    b']
    assert lines[4].startswith('error     The call could not be read.')


# Mistakes


@pytest.fixture
def broken(tmp_path):
    shutil.copytree(CLEAN, tmp_path / 'broken')
    (tmp_path / 'broken' / 'tokenizer.json').write_text('{')
    return tmp_path / 'broken'


def refused(capsys, *arguments):
    """The one line that a wrong call is answered with."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert ask.main([str(a) for a in arguments]) == 2
    finally:
        signal.signal(signal.SIGINT, handler)
    out, err = capsys.readouterr()
    assert not out and err.count('\n') == 1 and err.startswith('zeroplay_jax.ask: ')
    return err


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--policy=nowhere', 'q'], ['--policy nowhere: no such folder', 'config.json']),
        ([f'--policy={ROOT / "configs"}', 'q'], ['has no config.json']),
        (
            [f'--policy={CLEAN.parent}', 'q'],
            ['has no config.json', f'name a policy in it: {BASE}, {CLEAN}'],
        ),
        (['--index=nowhere', 'q'], ['--index nowhere: no index folder', 'retrieval.build']),
        ([' '], ['the question is empty']),
        (['two', 'words'], ["'words'", 'in quotes']),
        (['--topic=3', 'q'], ["'--topic=3'", '--help']),
        (['--topk=0', 'q'], ['--topk', "'0' is not possible", '1 or more']),
        (['--temperature=nan', 'q'], ['--temperature', "'nan'", '0 or more']),
        (['--syntax=bing', 'q'], ['--syntax', 'search_r1', 'qwen']),
        (['--tools=qwen', 'q'], ['--tools', "'qwen' is a call syntax", '--syntax=qwen']),
        (['--tools=search,bing', 'q'], ['--tools', "'bing' is no tool", 'calculator']),
    ],
)
def test_a_wrong_call_is_one_line_before_anything_loads(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(session, 'Session', None)  # calling it would be another error
    line = refused(capsys, *arguments)
    assert all(word in line for word in words)


def test_json_at_a_terminal_wants_a_question(capsys, monkeypatch):
    monkeypatch.setattr('sys.stdin.isatty', lambda: True, raising=False)
    assert '--json without a question' in refused(capsys, '--json')


def test_what_cannot_be_used_is_said_before_the_weights_are_read(
    capsys, monkeypatch, broken, index
):
    monkeypatch.setattr(session, 'Agent', None)
    assert 'its tokenizer cannot be used' in refused(capsys, '--policy', broken, 'q')
    assert 'the question is too long' in refused(capsys, '--index', index, 'word ' * 100)
    monkeypatch.setattr(session, 'READY_SECONDS', 0.0)
    assert 'retrieval.server' in refused(capsys, '--index', 'http://127.0.0.1:9', 'q')


def test_help_names_every_flag_and_examples():
    page = subprocess.run(
        [sys.executable, '-m', 'zeroplay_jax.ask', '--help'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    flags = (
        '--policy',
        '--index',
        '--tools',
        '--syntax',
        '--turns',
        '--topk',
        '--temperature',
        '--seed',
        '--json',
    )
    assert all(flag in page for flag in (*flags, 'examples:', 'mini/base'))
