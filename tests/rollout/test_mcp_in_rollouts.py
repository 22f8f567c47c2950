"""An MCP server that is killed in the middle of a call of a rollout, through the real sampler."""

import time

import pytest
from scripted_rollouts import play

from examples.calculator.tool import Calculator
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.tools.base import Tool, ToolResult

pytest.importorskip('mcp')
pytest.importorskip('zeroplay_jax.extras.mcp')
from mcp_process import Server  # noqa: E402

from zeroplay_jax.extras.mcp import tools as mcp_tools  # noqa: E402


class Kill(Tool):
    """Kills the server as soon as it has begun to answer a call of `wait`."""

    name = 'kill'
    description = 'ends the server'
    parameters = {'type': 'object', 'properties': {}}

    def __init__(self, server, waits):
        self.server = server
        self.waits = waits

    def run(self, calls):
        deadline = time.monotonic() + 60
        while not self.waits.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.waits.exists(), 'the call never reached the server'
        self.server.kill()
        return [ToolResult(text='killed') for _ in calls]


def test_a_server_killed_during_a_call_is_an_observation(scripted, tmp_path):
    syntax = 'qwen'
    waits = tmp_path / 'waits'
    server = Server(waits)
    try:
        tools = {tool.name: tool for tool in mcp_tools.list_tools(server.url, call_seconds=60.0)}
        tools |= {'kill': Kill(server, waits), 'calculator': Calculator()}
        write = syntax_of(syntax).write_call
        sums = [write(tools['calculator'], {'expression': text}) for text in ('2 * 3', '1 + 1')]
        caller = [
            write(tools['wait'], {'seconds': 600.0}),
            write(tools['add'], {'a': 1, 'b': 2}),
            sums[0],
            '<answer>a</answer>',
        ]
        neighbour = [write(tools['kill'], {}), sums[1], '<answer>b</answer>']
        first, second = play(scripted, syntax, tools, [caller, neighbour])
    finally:
        server.kill()
    calls = [turn.call for turn in first.turns[:-1]]
    # The call in progress fails, the next one to the dead server too, and each of them alone.
    assert [call.error for call in calls] == ['failed', 'failed', None]
    for call, name in zip(calls, ('wait', 'add')):
        assert call.text == (f'The call of {name} failed. Try again or answer from what is known.')
    assert calls[2].text == '6' and first.finish == 'answer'
    assert [turn.call.text for turn in second.turns[:-1]] == ['killed', '2']
    assert second.finish == 'answer'
