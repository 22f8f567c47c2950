"""Tools of a real MCP server in another process, which is slow, raises, dies and comes back."""

import concurrent.futures
import pathlib
import socket
import time

import pytest
from host_processes import free_port
from python_process import start_python, wait_for

from zeroplay_jax.extras.mcp import tools as mcp_tools
from zeroplay_jax.tools.base import Invocation

pytest.importorskip('mcp')
SECONDS = 3.0  # time limit of a call


class Server:
    """The server in a process that can be killed and started again."""

    def __init__(self):
        self.port = free_port()
        self.url = f'http://127.0.0.1:{self.port}/mcp'
        self.start()

    def start(self):
        script = pathlib.Path(__file__).parent / 'mcp_server.py'
        self.process = start_python(script, self.port)
        wait_for(self._is_up, self.process)

    def _is_up(self):
        with socket.socket() as probe:
            return probe.connect_ex(('127.0.0.1', self.port)) == 0

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope='module')
def server():
    running = Server()
    yield running
    running.kill()


@pytest.fixture(scope='module')
def tools(server):
    return {tool.name: tool for tool in mcp_tools.list_tools(server.url, SECONDS)}


def call(tool, *arguments):
    """(text, error) of each call of a batch."""
    results = tool.run([Invocation(each) for each in arguments])
    return [(result.text, result.error) for result in results]


def add(tools, *pairs):
    return call(tools['add'], *({'a': a, 'b': b} for a, b in pairs))


def test_the_servers_tools_are_listed_with_their_schemas(tools):
    assert set(tools) == {'add', 'wait'}
    assert tools['add'].description == 'Adds two numbers. And explains itself at length.'
    assert tools['add'].validated({'a': 1, 'b': 2}) == {'a': 1, 'b': 2}
    with pytest.raises(ValueError):
        tools['add'].validated({'a': 'x', 'b': 2})


def test_a_call_that_hits_the_limit_fails_alone(tools):
    started = time.monotonic()
    slow, quick = call(tools['wait'], {'seconds': 60.0}, {'seconds': 0.01})
    assert time.monotonic() - started < 4 * SECONDS
    assert (slow, quick) == ((None, 'timeout'), ('waited 0.01', None))
    assert add(tools, (1, 1)) == [('2', None)], 'later calls work'


def test_a_server_that_dies_in_the_middle_of_a_call(server, tools):
    """That call fails; a restart is noticed by itself."""
    (patient,) = (tool for tool in mcp_tools.list_tools(server.url, 60.0) if tool.name == 'wait')
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, patient, {'seconds': 60.0})
        time.sleep(1)
        server.kill()
        assert waiting.result() == [(None, 'failed')]
    assert time.monotonic() - started < 50
    assert [error for _, error in add(tools, (1, 1), (2, 2))] == ['failed', 'failed']
    server.start()
    assert add(tools, (1, 1), (2, 2)) == [('2', None), ('4', None)]
