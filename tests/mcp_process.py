"""A real MCP server in a process of its own."""

import socket

from host_processes import free_port
from python_process import ROOT, start_python, wait_for

SERVER = ROOT / 'tests' / 'extras' / 'mcp' / 'mcp_server.py'


class Server:
    """The server on a port of its own, in a process that can be killed and started again.

    Args:
      waits: file that is written when a call of its tool `wait` begins.
    """

    def __init__(self, *waits):
        self.port = free_port()
        self._arguments = [SERVER, self.port, *waits]
        self.url = f'http://127.0.0.1:{self.port}/mcp'
        self.start()

    def start(self):
        self.process = start_python(*self._arguments)
        wait_for(self._is_up, self.process)

    def _is_up(self):
        with socket.socket() as probe:
            return probe.connect_ex(('127.0.0.1', self.port)) == 0

    def kill(self):
        self.process.kill()
        self.process.wait()
