"""HTTP requests that end in time: one deadline and one size limit for each, whatever the server sends."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import httpx2

# Seconds after its deadline in which a request must have been cancelled.
_GRACE_SECONDS = 5.0
_COMPRESSIONS = frozenset(('gzip', 'x-gzip', 'deflate', 'br', 'zstd', 'compress'))


class NoReply(Exception):
    """There is no whole reply that could be read; another attempt may bring one."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """A whole HTTP reply."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        """Returns the JSON value of the reply; raises ValueError, or RecursionError if it is nested too deeply."""
        return json.loads(self.content)

    def text(self) -> str:
        """Returns the reply as text."""
        return self.content.decode('utf-8', 'replace')


class Exchange:
    """Sends requests to a server. Safe to use from threads.

    httpx limits the time of every single read, so a server that sends a byte now and then could hold a request forever.
    asyncio can end a request at any point; hence an event loop, in a thread of its own, sends the requests.

    Args:
      seconds: deadline of a request, from the connection to the last byte of the reply.
      reply_bytes: largest reply that is read.
      connections: largest number of connections, all of which are kept open.
    """

    def __init__(self, seconds: float, reply_bytes: int, connections: int):
        self._seconds = seconds
        self._reply_bytes = reply_bytes
        self._connections = connections
        self._open()

    def _open(self) -> None:
        """Makes the HTTP client of this process."""
        self._process = os.getpid()
        self._loop = _event_loop(self._process)
        connections = self._connections
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        # trust_env=False ignores proxies of the environment, because a search server is in the local network. A
        # compressed reply of a few kilobytes could have gigabytes, so none is asked for.
        self._client = httpx2.AsyncClient(
            timeout=None, limits=limits, trust_env=False, headers={'Accept-Encoding': 'identity'}
        )
        closing = weakref.finalize(self, _close, self._client, self._loop)
        # At the end of the process the system closes the connections.
        closing.atexit = False

    def send(self, method: str, url: str, body: Any = None) -> Reply:
        """Returns the reply to a request.

        Args:
          method: 'GET' or 'POST'.
          url: whole address.
          body: JSON value; None sends no body.

        Raises:
          NoReply: the deadline passed, the connection failed, or the reply is compressed or too long.
          ValueError: the request cannot be sent: an invalid address, or a body that is not Unicode.
        """
        # A forked process has no thread of the loop, and must not share sockets with its parent.
        if self._process != os.getpid():
            self._open()
        request = self._send(method, url, body)
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        try:
            return future.result(self._seconds + _GRACE_SECONDS)
        except TimeoutError:
            raise NoReply(f'no whole reply within {self._seconds:g} s') from None
        except httpx2.TransportError as error:
            raise NoReply(f'{type(error).__name__}: {error}') from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ValueError(f'{type(error).__name__}: {error}') from error

    async def _send(self, method: str, url: str, body: Any) -> Reply:
        """As `send`; raises TimeoutError and httpx's exceptions."""
        content = bytearray()
        async with (
            asyncio.timeout(self._seconds),
            self._client.stream(method, url, json=body) as reply,
        ):
            codings = reply.headers.get('Content-Encoding', '').lower().replace(' ', '').split(',')
            if not _COMPRESSIONS.isdisjoint(codings):
                raise NoReply('a compressed reply, which was not asked for')
            async for chunk in reply.aiter_raw():
                content += chunk
                if len(content) > self._reply_bytes:
                    raise NoReply(f'a reply of more than {self._reply_bytes} bytes')
        return Reply(reply.status_code, reply.headers, bytes(content))


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Returns the event loop of the process with this id, which runs in a daemon thread until the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name='search-requests', daemon=True).start()
    return loop


def _close(client: httpx2.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
    """Closes the connections of a client; does not wait for it."""
    asyncio.run_coroutine_threadsafe(client.aclose(), loop)
