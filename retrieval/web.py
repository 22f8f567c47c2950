"""Requests over HTTP, with one set of rules for every client and every server.

- Proxies are those of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY); this machine has none.
- Certificates are trusted as the system, SSL_CERT_FILE or SSL_CERT_DIR says.
- No redirect is followed, because requests hold keys and texts: the error names the new address.
- A reply is read up to `MAX_REPLY_BYTES`, and not if it is compressed: a few kilobytes could have gigabytes.
- Connections live in one event loop of the process, which outlives those of callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import os
import random
import re
import socket
import threading
import time
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from .masking import hide, secrets_of
from .types import RetrievalError, SearchFailed, first_line

MAX_REPLY_BYTES = 16 << 20
TOO_LONG = f'a reply of more than {MAX_REPLY_BYTES >> 20} MiB'
# Reads have no limit of their own: a request has one for its whole reply.
_TIMEOUT = httpx2.Timeout(30.0, read=None)
_COMPRESSION = re.compile('gzip|deflate|br|zstd|compress', re.IGNORECASE)
# Seconds between two attempts, and if the server asks for more.
_LONGEST_PAUSE = 10.0
_LONGEST_WAIT = 60.0
# What a proxy, or a server that loads, says of a server that is away.
_AWAY = (502, 503, 504)
_THIS_MACHINE = re.compile(
    r'https?://([^/?#]*@)?(localhost|127(\.\d+){1,3}|0\.0\.0\.0|\[::(1|ffff:127\.[\d.]+|ffff:7f[\da-f:]+)?\]|'
    rf'{re.escape(socket.gethostname())})\.?(:\d*)?([/?#]|$)',
    re.IGNORECASE,
)
_NO_PROXIES = dict.fromkeys(('http://', 'https://', 'all://'))


class NoReply(Exception):
    """There is no reply that could be read; another attempt may bring one."""


# A whole reply.
Reply = httpx2.Response
_Value = TypeVar('_Value')


def is_temporary(reply: Reply) -> bool:
    """Returns whether a status tells of overload or of an error of the server."""
    return reply.status_code in (408, 409, 429) or reply.status_code >= 500


@dataclasses.dataclass(eq=False)
class Exchange:
    """Sends requests to a server; its methods run in the event loop of all requests (`start`).

    httpx limits the time of every single read, so a server that sends a byte now and then could hold a request forever.
    asyncio can end a request at any point; hence an event loop, in a thread of its own, sends the requests.

    Args:
      url: address of the server.
      timeout: seconds of one attempt, from the connection to the last byte of the reply.
      retries: further attempts of a request that brought no reply, or one that its reader refuses for now.
      at_once: largest number of attempts in progress; further ones wait before their time begins.
      pause: seconds before the first retry; doubled for each further one up to `_LONGEST_PAUSE`, with jitter.
      patience: seconds for which a server that has answered before may be away, as one that is started again, until a
        request without retries left fails.
      headers: of every request.

    Attributes:
      retried: number of retries.

    Raises:
      RetrievalError: see `open_client`.
    """

    url: str
    timeout: float = 30.0
    retries: int = 4
    at_once: int = 16
    pause: float = 0.5
    patience: float = 60.0
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._secrets = secrets_of(self.headers, address=self.url)
        self.retried = 0
        # Until when (time.monotonic) a server that does not answer is waited for; 0: it has never answered.
        self._patient_until = 0.0
        self._open()

    def _open(self) -> None:
        process = self._process = os.getpid()
        self._limit = asyncio.Semaphore(self.at_once)
        client = self._client = open_client(self.headers, self.url)

        def close() -> None:
            # A forked process must not touch the connections of the first one.
            if os.getpid() == process:
                start(client.aclose())

        # At the end of the process the system closes the connections.
        weakref.finalize(self, close).atexit = False

    async def post(self, url: str, body: Any, read: Callable[[Reply], _Value]) -> _Value:
        """Returns what `read` makes of the reply to a request, with retries.

        Args:
          url, body: as of `send`.
          read: raises NoReply for a reply after which another attempt may bring a better one.

        Raises:
          NoReply: all attempts failed.
          Exception: as `send`, and what else `read` raises; not tried again.
        """
        patient_until = time.monotonic() + self.patience
        attempt = 0
        while True:
            reply = None
            try:
                reply = await self.send(url, body)
                return read(reply)
            except NoReply as error:
                end = min(patient_until, self._patient_until)
                is_away = reply is None or reply.status_code in _AWAY
                is_patient = is_away and time.monotonic() < end
                if attempt >= self.retries and not is_patient:
                    raise NoReply(f'{error}, {attempt + 1} attempts') from None
            self.retried += 1
            await asyncio.sleep(self._pause_after(attempt, reply))
            attempt += 1

    def _note(self, is_away: bool) -> None:
        end = time.monotonic() + self.patience
        self._patient_until = min(self._patient_until, end) if is_away else math.inf

    def _pause_after(self, attempt: int, reply: Reply | None) -> float:
        """Returns the seconds to wait after the failed attempt of this number, from 0."""
        # Jitter spreads the retries of clients that failed at the same time.
        pause = min(_LONGEST_PAUSE, self.pause * 2**attempt) * random.uniform(0.5, 1.0)
        asked = reply.headers.get('Retry-After', '') if reply is not None else ''
        # The header can also be a date, which is rare.
        with contextlib.suppress(ValueError):
            pause = max(pause, min(float(asked), _LONGEST_WAIT))
        return pause

    async def send(self, url: str, body: Any = None) -> Reply:
        """Returns the whole reply to one attempt, without the secrets of the request: some servers quote them.

        Args:
          url: whole address.
          body: JSON value, which is posted; None: the page is got.

        Raises:
          NoReply: the deadline passed, or the connection failed.
          SearchFailed: the reply is compressed, or names another address.
          RetrievalError: the reply is too long, or the request cannot be sent: an invalid address or header, or a body
            that is not Unicode.
        """
        if self._process != os.getpid():
            self._open()
        method = 'GET' if body is None else 'POST'
        try:
            async with self._limit, asyncio.timeout(self.timeout):
                response = await self._client.request(method, url, json=body)
        except (
            httpx2.InvalidURL,
            httpx2.LocalProtocolError,
            httpx2.UnsupportedProtocol,
            UnicodeError,
        ) as error:
            line = f'{url}: cannot be sent ({type(error).__name__}: {error})'
            raise RetrievalError(hide(line, self._secrets)) from None
        except SearchFailed as error:
            # Of `_check`: an address may quote the request.
            raise SearchFailed(hide(str(error), self._secrets)) from None
        except (TimeoutError, httpx2.HTTPError) as error:
            self._note(is_away=True)
            reason = hide(f'{type(error).__name__}: {error}', self._secrets)
            if isinstance(error, TimeoutError):
                reason = f'no whole reply within {self.timeout:g} s'
            raise NoReply(reason) from None
        self._note(response.status_code in _AWAY)
        content = response.content
        for secret in self._secrets:
            content = content.replace(secret.encode(), b'***')
        reply = Reply(response.status_code, headers=response.headers, content=content)
        # Whatever charset the server names: Python has some that are none.
        reply.encoding = 'utf-8'
        return reply


def open_client(headers: Mapping[str, str], url: str) -> httpx2.AsyncClient:
    """Returns an HTTP client with the rules of this module, for use in the event loop of all requests.

    Args:
      headers: of every request.
      url: address of the server of all requests.

    Raises:
      RetrievalError: proxies, certificates or keys that the environment names cannot be used.
    """
    try:
        return httpx2.AsyncClient(
            headers={**headers, 'Accept-Encoding': 'identity'},
            timeout=_TIMEOUT,
            limits=httpx2.Limits(),
            mounts=_NO_PROXIES if _THIS_MACHINE.match(url) else None,
            event_hooks={'response': [_check]},
        )
    except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
        # An error about an address quotes parts of its password.
        reason = 'no address' if isinstance(error, httpx2.InvalidURL) else hide(first_line(error))
        raise RetrievalError(
            f'the proxies (HTTP_PROXY and the like), certificates (SSL_CERT_FILE) or keys of the environment cannot be '
            f'used: {reason}; correct these variables'
        ) from None


async def _check(response: httpx2.Response) -> None:
    """Raises for a reply that is not read, and bounds the size of another one, whose text is UTF-8."""
    response.encoding = 'utf-8'
    address = str(response.request.url)
    if response.has_redirect_location:
        location = urllib.parse.urljoin(address, response.headers['Location'])
        raise SearchFailed(hide(f'{address} redirects to {location}; give that address'))
    if _COMPRESSION.search(response.headers.get('Content-Encoding', '')):
        raise SearchFailed(hide(f'{address}: a compressed reply, which was not asked for'))
    # A stream of events, if one was asked for, has no end; its reader bounds each event.
    kind = 'text/event-stream'
    is_stream = response.headers.get('Content-Type', '').startswith(kind)
    if not is_stream or kind not in response.request.headers.get('Accept', ''):
        response.stream = _Bounded(response.stream, address)


@dataclasses.dataclass
class _Bounded(httpx2.AsyncByteStream):
    """The bytes of a reply; raises RetrievalError behind `MAX_REPLY_BYTES`: another attempt would bring as many."""

    stream: Any
    address: str

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self.stream:
            size += len(chunk)
            if size > MAX_REPLY_BYTES:
                raise RetrievalError(f'{self.address}: {TOO_LONG}')
            yield chunk

    async def aclose(self) -> None:
        await self.stream.aclose()


def start(coroutine: Coroutine[Any, Any, _Value]) -> Future[_Value]:
    """Runs a coroutine in the event loop of all requests, for threads and, by `asyncio.wrap_future`, other loops."""
    with _lock:
        loop = _event_loop(os.getpid())
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


# The first requests of several threads may come at the same time, and a fork between them.
_lock = threading.Lock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Returns the event loop of all requests, which runs in a daemon thread until the process ends.

    Args:
      process: number of this one: a process that is forked has no such thread.
    """
    # It logs the address of every request.
    logging.getLogger('httpx2').setLevel(logging.WARNING)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name='requests', daemon=True).start()
    return loop
