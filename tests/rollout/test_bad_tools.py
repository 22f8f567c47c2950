"""Tools that are broken, slow or hostile: their calls fail alone, and nothing of them ends a run."""

import asyncio
import json
import threading
import time

import pytest

from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.foreign_text import without_surrogates
from zeroplay_jax.rollout.tool_workers import ToolWorkers
from zeroplay_jax.tools.base import Invocation, Tool, ToolResult, string_parameter
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import ToolCall, UserError


class Named(Tool):
    """A tool of a given name whose results are given by a function."""

    description = 'a tool of this test'
    parameters = string_parameter('text', 'any text')

    def __init__(self, run=None, name='echo'):
        self.name = name
        self._function = run or (lambda call: ToolResult(text=call.arguments['text']))

    def run(self, calls):
        return [self._function(call) for call in calls]


class Fragile(Named):
    def prepare(self, arguments):
        raise KeyError('a bug of the tool')


def make_workers():
    return ToolWorkers(deterministic=True, timeout=1.0)


def results_of(run, *texts):
    return make_workers()._run(Named(run), [Invocation({'text': text}) for text in texts])


@pytest.mark.parametrize(
    'result',
    [
        'a text',
        ToolResult(text=3),
        ToolResult(documents=(({'id': 1, 'text': 'x'},),)),
        SystemExit(),
        asyncio.CancelledError(),
    ],
    ids=repr,
)
def test_a_result_of_another_kind_or_any_exception_fails_its_call_alone(result):
    def run(call):
        if call.arguments['text'] != 'bad':
            return ToolResult(text='fine')
        if isinstance(result, BaseException):
            raise result
        return result

    fine, bad, other = results_of(run, 'a', 'bad', 'b')
    assert bad == ToolResult(error='failed') and fine == other == ToolResult(text='fine')


def test_arguments_that_break_the_tool_are_an_observation_and_stop_the_run(caplog):
    tool = Fragile()
    for _ in range(10):
        call = syntax_of('search_r1').parse('<echo>x</echo>', {'echo': tool})
        assert call.error == 'failed' and call.arguments is None and 'echo' in call.text
    # Whenever their number has doubled.
    assert len(caplog.records) == 4 and 'a bug of the tool' in caplog.records[0].getMessage()
    workers = make_workers()
    with pytest.raises(UserError, match="10 of 10 calls of the tool 'echo'"):
        workers.check_failure_rate(0.5, tools=[tool])
    workers.check_failure_rate(0.5, tools=[tool])


@pytest.mark.parametrize('syntax', ['qwen', 'olmo'])
def test_half_a_surrogate_pair_can_be_stored(syntax):
    text = {
        'qwen': '<tool_call>{"name": "echo", "arguments": {"text": "caf\\ud83d"}}</tool_call>',
        'olmo': '<function_calls>echo(text="caf\\ud83d")</function_calls>',
    }[syntax]
    call = syntax_of(syntax).parse(text, {'echo': Named()})
    assert call.arguments == {'text': 'caf\ufffd'}
    json.dumps(call.arguments, ensure_ascii=False).encode()
    unknown = syntax_of(syntax).parse(text.replace('echo', 'ec\\ud83d'), {'echo': Named()})
    json.dumps([unknown.tool, unknown.text], ensure_ascii=False).encode()
    assert without_surrogates({'a': ['\ud83d', 'é😀']}) == {'a': ['\ufffd', 'é😀']}


class FakeRollout:
    """What the workers need of a rollout."""

    def __init__(self, tool):
        self.identity = (0, 0)
        self.tool_state = {}
        self.env = self
        self.tools = {tool.name: tool}

    def with_result(self, call, result):
        return ToolCall(call.tool, call.arguments, result.text or '', error=result.error)


def test_after_a_timeout_queued_calls_do_not_run_and_later_ones_do():
    release, ran = threading.Event(), []

    def run(call):
        ran.append(call.arguments['text'])
        if call.arguments['text'] == 'slow':
            release.wait(20)
        return ToolResult(text='done')

    tool = Named(run)
    workers = ToolWorkers(deterministic=False, timeout=0.2)

    async def play():
        for text in ('slow', 'queued'):
            workers.submit(None, [(FakeRollout(tool), ToolCall('echo', {'text': text}))])
        await asyncio.sleep(0.4)
        ended = [call.error for _, call in workers.finished()]
        workers.submit(None, [(FakeRollout(tool), ToolCall('echo', {'text': 'later'}))])
        until = time.monotonic() + 10
        later = []
        while not later and time.monotonic() < until:
            await asyncio.sleep(0.02)
            later = workers.finished()
        return ended, [call.error for _, call in later]

    try:
        ended, later = asyncio.run(play())
    finally:
        release.set()
    assert ended == ['timeout', 'timeout'] and later == [None]
    assert ran == ['slow', 'later'], 'a call that was given up must not run afterwards'


def test_a_tool_that_fails_too_often_stops_the_run():
    bad, good = [ToolResult(error='failed')], [ToolResult(text='x')]
    workers = make_workers()
    workers._count(Named(), bad * 6 + good * 5)
    with pytest.raises(UserError, match="6 of 11 calls of the tool 'echo'"):
        workers.check_failure_rate(0.5)
    workers._count(Named(), bad * 6 + good * 6)
    workers.check_failure_rate(0.5)
    # The limit of the built-in search is that of the retrieval; a tool of another package may have its name.
    workers._count(search := SearchTool(None), bad * 3 + good * 17)
    with pytest.raises(UserError, match=r'3 of 20 calls .*config.retrieval.max_failure_rate=0.1'):
        workers.check_failure_rate(0.5, search_limit=0.1, tools=[search])
    workers._count(other := Named(name='search'), bad * 3 + good * 17)
    workers.check_failure_rate(0.5, search_limit=0.1, tools=[other])
    # So may one that is called as the roles' model is.
    workers._count(Named(name='policy'), bad * 6 + good * 5)
    with pytest.raises(UserError, match=r"calls of the tool 'policy' .*config.tools.max_failure"):
        workers.check_failure_rate(0.5, search_limit=0.1)
