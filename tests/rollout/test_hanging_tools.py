"""A tool that never returns: the process ends all the same, and results of other tools are not lost."""

import signal
import sys

import pytest
from python_process import start

# A run in small: one call that never returns, one that does, then the end of the process.
PROGRAM = """
import asyncio, sys, threading
from zeroplay_jax.rollout.tool_workers import ToolWorkers
from zeroplay_jax.tools.base import Tool, ToolResult
from zeroplay_jax.types import ToolCall

class Echo(Tool):
    name, description, parameters = 'echo', 'repeats', {'type': 'object'}
    def run(self, calls):
        return [ToolResult(text=call.arguments['text']) for call in calls]

class Hanging(Echo):
    name = 'hanging'
    def run(self, calls):
        threading.Event().wait()

class Rollout:
    def __init__(self, *tools):
        self.identity, self.tool_state, self.env = (0, 0), {}, self
        self.tools = {tool.name: tool for tool in tools}
    def with_result(self, call, result):
        return result

async def play(ending):
    workers = ToolWorkers(deterministic=ending != 'timeout', timeout=0.2)
    rollout = Rollout(Echo(), Hanging())
    calls = [ToolCall('hanging', {}), ToolCall('hanging', {}), ToolCall('echo', {'text': 'healthy'})]
    workers.submit(None, [(rollout, call) for call in calls])
    expected = 3 if ending == 'timeout' else 1
    results = []
    while len(results) < expected:
        await asyncio.sleep(0.01)
        results += [result for _, result in workers.finished()]
    print(*[result.text or result.error for result in results], flush=True)
    try:
        if ending == 'error':
            raise RuntimeError('the run failed')
        if ending == 'interrupt':
            await asyncio.wait(workers.futures)
    finally:
        workers.abandon()

asyncio.run(play(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ('ending', 'status'), [('timeout', 0), ('error', 1), ('interrupt', -signal.SIGINT)]
)
def test_a_call_that_never_returns_does_not_keep_the_process(ending, status):
    # Where the tests run in the background, their children would ignore SIGINT.
    command = ['env', '--default-signal=INT', sys.executable, '-c', PROGRAM, ending]
    process = start(command)
    try:
        line = process.stdout.readline()
        if ending == 'interrupt':
            process.send_signal(signal.SIGINT)
        # Without the waiting room of a slow machine: a joined thread would hang for ever.
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert 'healthy' in line.split(), errors
    assert process.returncode == status, errors
    assert line.split().count('timeout') == (2 if ending == 'timeout' else 0)
