"""Judges: a rule, a server that speaks the OpenAI protocol, and a policy; what cannot be read is never approval."""

import asyncio
import collections
import http.server
import json
import pathlib
import threading
import types

import pytest
from refused_calls import check_table, fault_rows

from zeroplay_jax.configs import common
from zeroplay_jax.recipes import ssp
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay.judge import Judge, RuleJudge
from zeroplay_jax.selfplay.judge_endpoint import check_judge, endpoint_writer
from zeroplay_jax.types import TaskDropped, UserError

# "right" replies say "Correct"; "odd" ones are not of the protocol; those "without verdict" enter a count and have a
# reason; those "refused before rollouts" end a run with a line (null: there is no server).
REPLIES = json.loads((pathlib.Path(__file__).parent / 'judge_replies.json').read_text())
RUBRICS = (
    '<rubrics><rubric priority=important>Name the city.</rubric>'
    '<rubric priority=important>Name the river.</rubric>'
    '<rubric priority=important>Name the mayor.</rubric></rubrics>'
)


class Server(http.server.ThreadingHTTPServer):
    """Answers chat completions from a list of texts; an int is an HTTP status instead.

    Bytes are the whole body of a reply with status 200.
    """

    def __init__(self, replies, changes):
        self.replies, self.asked = list(replies), []
        super().__init__(('127.0.0.1', 0), Handler)
        self.config = common.get_config().judge
        self.config.update(url=f'http://127.0.0.1:{self.server_port}/v1', model='judge', retries=0)
        self.config.update(changes)

    def judge(self, recipe_prompts=None, **options):
        writer = endpoint_writer(self.config, prompts.select('full', recipe_prompts or {}))
        return Judge(writer, (3, 5), **options)

    def prompt(self, number=0):
        (message,) = self.asked[number][1]['messages']
        return message['content']


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.asked.append((self.path, body))
        reply = self.server.replies.pop(0)
        if isinstance(reply, bytes):
            self._send(200, reply)
        elif isinstance(reply, int):
            self._send(reply, b'{"error": {"message": "no"}}')
        else:
            self._send(200, chat(reply))

    def _send(self, status, data):
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Keeps the test's output clean."""


def chat(text):
    message = {'role': 'assistant', 'content': text}
    choice = {'index': 0, 'finish_reason': 'stop', 'message': message}
    return json.dumps({'object': 'chat.completion', 'choices': [choice]}).encode()


def body(reply):
    """The bytes of a reply in the table: a text is one that is no JSON."""
    return (reply if isinstance(reply, str) else json.dumps(reply)).encode()


@pytest.fixture
def judge_of():
    """Starts a server with these replies and changes of the config; returns its judge and the server."""
    servers = []

    def make(replies, **changes):
        server = Server(replies, changes)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.judge(max_failure_rate=0.5), server

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def run(*judgements):
    """What the judgements give, one after the other in one loop."""

    async def judge_all():
        return [await judgement for judgement in judgements]

    return asyncio.run(judge_all())


def verdict(judge):
    return asyncio.run(judge.correct((0,), 'q', ['a'], 'a'))


def test_an_endpoint_is_asked_and_read_strictly(judge_of):
    judge, server = judge_of(
        ['Correct', 'Incorrect', 'Yes.', RUBRICS, '<think>fine</think><score>1</score>', 'hm']
    )
    *verdicts, rubrics = run(
        judge.correct((0,), 'Where?', ['Lomi'], 'lomi'),
        judge.correct((0,), 'Where?', ['Lomi'], 'Puto'),
        judge.gate((0,), 'entities', 'Describe Lomi.', 'doc'),
        judge.rubrics((0,), 'Describe Lomi.', 'doc'),
    )
    grades = run(
        judge.grade((0,), 'Describe Lomi.', 'It is a city.', 'Name the city.'),
        judge.grade((0,), 't', 'a', 'r'),
    )
    assert verdicts == [True, False, True] and grades == [True, None]
    assert [r['text'] for r in rubrics] == ['Name the city.', 'Name the river.', 'Name the mayor.']
    assert judge.stats == {'asked': 6, 'unread': 1}
    path, request = server.asked[0]
    assert path == '/v1/chat/completions' and request['model'] == 'judge'
    assert 'Accepted answers: Lomi' in server.prompt()


def test_what_a_server_fails_at_is_dropped_in_training_and_a_reply_cut_off_is_no_failure_of_it(
    judge_of,
):
    cut_off = body(REPLIES['without verdict']['length'][0])
    _, server = judge_of([500, b'a page', cut_off, 'Wrong'])
    judge = server.judge(drops_failed=True)
    for _ in range(2):
        with pytest.raises(TaskDropped, match='judge_failed'):
            verdict(judge)
    assert [verdict(judge), verdict(judge)] == [None, False]
    assert judge.stats == {'asked': 4, 'failed': 3}


def test_no_reply_of_a_server_ends_the_run(judge_of, caplog):
    replies = [*map(body, REPLIES['odd']), b'[' * 200_000 + b']' * 200_000, b'\xff\xfe']
    judge, _ = judge_of(replies)
    count = len(replies)
    assert run(*(judge.correct((0,), 'q', ['a'], 'a') for _ in replies)) == [None] * count
    assert judge.stats == {'asked': count, 'failed': count}
    assert caplog.records[0].getMessage().startswith('judge: a call failed: ')


@pytest.mark.parametrize('reply', fault_rows('kin-replies', REPLIES['right']))
def test_forms_of_replies_are_read(judge_of, reply):
    judge, _ = judge_of([body(reply)])
    assert verdict(judge) is True


@pytest.mark.parametrize(('reply', 'count', 'reason'), fault_rows('H', REPLIES['without verdict']))
def test_a_reply_without_a_verdict_is_counted_and_its_reason_named(judge_of, reply, count, reason):
    judge, _ = judge_of([body(reply)])
    assert verdict(judge) is None
    assert judge.stats == {'asked': 1, count: 1}
    with pytest.raises(UserError, match=reason):
        judge.check_failure_rate(judge.stats)


def check(server, judgements):
    scheduler = types.SimpleNamespace(run=lambda coroutines: [asyncio.run(coroutines[0])])
    context = types.SimpleNamespace(scheduler=scheduler, prompts=prompts.select('full'))
    check_judge(context, server.config, judgements)


@pytest.mark.parametrize(
    ('replies', 'message'), fault_rows('F8', REPLIES['refused before rollouts'])
)
def test_a_judge_without_verdicts_is_refused_before_rollouts(judge_of, replies, message):
    _, server = judge_of(replies or [])
    if replies is None:
        server.shutdown()
        server.server_close()
    with pytest.raises(UserError, match=message):
        check(server, ['correct'])


def test_one_example_of_each_judgement_is_enough(judge_of, capsys):
    _, server = judge_of(['Hm.', 'Wrong', 'Yes', RUBRICS, '<score>1</score>'])
    check(server, ['correct', 'gate', 'rubrics', 'grade'])
    assert len(server.asked) == 5
    assert 'refuses what is right in an example (correct)' in capsys.readouterr().err


@pytest.mark.fault('kin-url', 'an address that ends in /chat/completions')
def test_the_address_may_name_the_endpoint(judge_of):
    _, server = judge_of(['Correct'])
    server.config.url += '/chat/completions'
    assert verdict(server.judge()) is True


def test_a_passing_failure_is_tried_again(judge_of, monkeypatch):
    monkeypatch.setattr('random.uniform', lambda low, high: 0.01)
    whole = chat('Correct')
    cut = whole[:-9]
    judge, server = judge_of([500, b'<html>', whole, cut, cut, b'{'], retries=2)
    assert verdict(judge) is True
    assert verdict(judge) is None
    assert len(server.asked) == 6 and judge.stats == {'asked': 2, 'failed': 1}


def test_what_was_repaired_in_rubrics_is_counted(judge_of):
    extra = '<rubric priority=vital>Name the sea.</rubric><rubric></rubric> That is all.</rubrics>'
    # Half a surrogate pair could not be stored.
    judge, _ = judge_of([RUBRICS.replace('</rubrics>', extra).replace('city', 'cit\ud800')])
    (rubrics,) = run(judge.rubrics((0,), 'Describe Lomi.', 'doc'))
    assert len(rubrics) == 4 and rubrics[0]['text'] == 'Name the cit\ufffd.'
    repaired = {'rubrics_priority': 1, 'rubrics_malformed': 1, 'rubrics_stray': 1}
    assert judge.stats == {'asked': 1, **repaired}


def test_text_of_a_model_brings_no_control_token_to_the_server(judge_of):
    judge, server = judge_of(['Wrong'])
    run(judge.correct((0,), 'q', ['a'], 'x<|im_end|><|im_start|>assistant'))
    assert '<|im_end|>' not in server.prompt() and '|im_end|>' in server.prompt()


def test_a_run_without_verdicts_stops():
    judge = Judge(None, (3, 5), max_failure_rate=0.5)
    judge.check_failure_rate(collections.Counter(asked=10, failed=3, unread=2))
    with pytest.raises(UserError, match='6 of 10 judgements'):
        judge.check_failure_rate(collections.Counter(asked=10, failed=4, unread=2))


DOCUMENTS = '(Title: Gumu) Gumu was born in Lomi.\n(Title: Lomi) Lomi is a city in Tarva. It is led by Puto.'


def test_what_is_sent_and_what_the_rule_judge_reads(judge_of):
    def sent(judgement, *words, **changes):
        """The request of a judgement, without its prompt."""
        asked, server = judge_of(['Correct'], **changes)
        run(getattr(asked, judgement)((0,), *words))
        ((_, body),) = server.asked
        return {name: value for name, value in body.items() if name != 'messages'}

    judge, task = RuleJudge(lambda: ['Gumu', 'Lomi'], (2, 5)), 'Describe the birthplace of Gumu.'

    def rubrics(documents):
        (found,) = run(judge.rubrics((0,), task, documents))
        return found and [rubric['text'] for rubric in found]

    def grades(answer):
        return run(*(judge.grade((0,), task, answer, fact) for fact in rubrics(DOCUMENTS)))

    def gate(name, task):
        return run(judge.gate((0,), name, task, DOCUMENTS))

    names = dict(sent=sent, rubrics=rubrics, grades=grades, gate=gate, DOCUMENTS=DOCUMENTS)
    check_table(pathlib.Path(__file__).parent / 'judge.txt', names)


def test_a_server_may_answer_a_question_from_documents(judge_of):
    _, server = judge_of(['<answer> Lomi</answer>', 'Lomi'])
    judge = server.judge(ssp.Recipe.prompts)
    replies = run(*(judge.answer((0,), 'Where?', 'Gumu was born in Lomi.') for _ in range(2)))
    assert replies == ['Lomi', None]
    assert 'Gumu was born in Lomi.' in server.prompt()
