"""A real MCP server in a process of its own."""

import pathlib
import socket
import subprocess
import sys
import time

SERVER = pathlib.Path(__file__).parent / 'extras' / 'mcp' / 'mcp_server.py'


class Server:
    """The server on a port of its own, in a process that can be killed and started again.

    Args:
      waits: file that is written when a call of its tool `wait` begins.
    """

    def __init__(self, waits=None):
        self._arguments = [] if waits is None else [str(waits)]
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            self.port = free.getsockname()[1]
        self.url = f'http://127.0.0.1:{self.port}/mcp'
        self.start()

    def start(self):
        command = [sys.executable, str(SERVER), str(self.port), *self._arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, 'the server ended'
            try:
                socket.create_connection(('127.0.0.1', self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError('the server did not come up')

    def kill(self):
        self.process.kill()
        self.process.wait()
