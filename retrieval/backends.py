"""Backends of a search client: an index in this process, and a search server over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import httpx2

from .corpus import DocumentPage, document_page
from .replies import MalformedReply, ReportedFailure, page, parse_results, passages
from .types import (
    CannotOpen,
    Index,
    Passage,
    RetrievalError,
    SearchFailed,
    search_records,
    short,
    split,
)

# Characters of a server's error text that are quoted.
_QUOTED_CHARACTERS = 200


class Backend(Protocol):
    """Answers queries, from an index in this process or from a server. One without whole documents needs no `open`.

    Attributes:
      name: identity of the index; the client caches the answers of different names separately.
    """

    name: str

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Returns per query its k best passages {'id', 'title', 'text', 'score'}, best first; fewer if fewer match.

        Raises:
          RetrievalError: a query is invalid; the client then finds it by bisection.
          SearchFailed: the search failed for another reason; all queries of the call count as failed.
        """
        ...

    def ready(self) -> bool:
        """Returns whether queries can be answered."""
        ...

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        """Returns per reference (passage id or exact title) a page of its document.

        None if there is no such document or page (see `corpus.document_page`).

        Args:
          references: any number.
          pages: page number of each reference, from 1.
          words_per_page: words of every page but a document's last one.

        Raises:
          CannotOpen: the search server has no whole documents.
          RetrievalError: a reference is invalid.
          SearchFailed: the call failed for another reason.
        """
        ...


class InProcess:
    """Searches an index of this process.

    Args:
      index: the index.
      name: its identity, such as `folder.fingerprint`.
    """

    def __init__(self, index: Index, name: str = 'index'):
        self.index = index
        self.name = name

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Returns the passages of each query; see `Backend.retrieve`."""
        with _failures():
            results: list[list[Passage]] = []
            for records in search_records(self.index, queries, k):
                results.append([])
                for record, score in records:
                    title, text = split(record.contents)
                    passage = {'id': record.id, 'title': title, 'text': text, 'score': score}
                    results[-1].append(passage)
            return results

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        """Returns the requested page of each reference; see `Backend.open`."""
        corpus = self.index.corpus
        with _failures():
            opened_pages = []
            for reference, page in zip(references, pages, strict=True):
                opened_pages.append(document_page(corpus, reference, page, words_per_page))
            return opened_pages

    def ready(self) -> bool:
        """Returns True: the index was loaded before this object was created."""
        return True


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turns exceptions of an index or its corpus into SearchFailed, which the client counts instead of ending the run.

    A RetrievalError stays: a query, a reference or its page number is at fault.
    """
    try:
        yield
    except RetrievalError:
        raise
    except Exception as error:
        raise SearchFailed(f'{type(error).__name__}: {error}') from error


@dataclasses.dataclass(eq=False)
class Http:
    """Searches a server with the protocol of `retrieval.server`, which includes Search-R1's. Safe to use from threads.

    Args:
      url: address of the server, with or without '/retrieve'.
      timeout: seconds of one attempt, from the connection to the last byte of the reply.
      retries: further attempts after a failed connection, a timeout, 429 or 5xx.
      pause: seconds before the first retry; doubled for each further one, with jitter. A longer Retry-After is obeyed.
      longest_pause: upper bound of a pause in seconds.
      batch: largest number of queries or references in one request.
      connections: largest number of connections, all of which are kept open.
      reply_bytes: largest reply that is read; a longer one is a failed attempt.
      breaker: number of failed requests in a row (each with all its retries) after which nothing is sent for
        `breaker_seconds`; until a request succeeds, every further failure starts such a pause.
      breaker_seconds: length of that pause.

    Raises:
      RetrievalError: no URL, or a number outside its range.
    """

    url: str
    timeout: float = 30.0
    retries: int = 4
    pause: float = 0.2
    longest_pause: float = 10.0
    batch: int = 256
    connections: int = 16
    reply_bytes: int = 32 << 20
    breaker: int = 5
    breaker_seconds: float = 10.0

    def __post_init__(self) -> None:
        # Search-R1's configurations name the endpoint, ours the server.
        self._base = self.url.rstrip('/').removesuffix('/retrieve')
        # The scheme is checked here, because a missing one would be reported at the first query only.
        valid_url = self._base.startswith(('http://', 'https://'))
        valid_numbers = self.timeout > 0 and self.retries >= 0 and min(self.batch, self.breaker) > 0
        if not valid_url or not valid_numbers:
            raise RetrievalError(
                f'search server {self.url!r}, timeout {self.timeout}, retries {self.retries}, batch {self.batch}, '
                f'breaker {self.breaker}: give a URL (http://host:port), a timeout > 0, retries ≥ 0, a batch and a '
                'breaker ≥ 1'
            )
        self.name = self._base
        # Why `ready` has returned False, for people.
        self.problem = ''
        # Retries since the creation of this object; `Client.metrics` reports the increase.
        self.retried = 0
        # Failed requests in a row, why the last one failed, and the time (time.monotonic) until which nothing is sent.
        self._failures = 0
        self._failure = ''
        self._paused_until = 0.0
        self._lock = threading.Lock()
        self._exchange = Exchange(self.timeout, self.reply_bytes, self.connections)

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Requests the passages of queries, at most `batch` queries at a time; see `Backend.retrieve`."""
        results = []
        # A server refuses requests above its own limit.
        for start in range(0, len(queries), self.batch):
            chunk = list(queries[start : start + self.batch])
            # Scores are always requested: without them the reference server (Search-R1's) unpacks its results wrongly.
            body = {'queries': chunk, 'topk': k, 'return_scores': True}
            results.extend(self._request('/retrieve', body, len(chunk), passages))
        return results

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        """Requests pages of documents, at most `batch` references at a time; see `Backend.open`."""
        results = []
        # A server refuses requests above its own limit.
        for start in range(0, len(references), self.batch):
            end = start + self.batch
            chunk = list(references[start:end])
            body = {
                'references': chunk,
                # One number per reference, although the protocol's field is in the singular.
                'page': list(pages[start:end]),
                'words_per_page': words_per_page,
            }
            results.extend(self._request('/open', body, len(chunk), page))
        return results

    def ready(self) -> bool:
        """Returns whether the server answers queries: whether GET /health, if it has that page, and a query succeed.

        Also sets `name` to the name of the index in the page (its fingerprint), or to the address if it has none.
        Without the page, as on Search-R1's server, `name` stays as it is.

        Raises:
          SearchFailed: the server redirects to another address, or its reply to the query is not of the protocol.
        """
        request = 'GET /health'
        # A server with that page may be too busy for a query.
        may_be_busy = False
        try:
            reply = self._exchange.send('GET', f'{self._base}/health')
            # FastAPI answers 404 for an unknown path, and 405 for a known path with another method.
            has_health = reply.status not in (404, 405)
            self.problem = f'{request}: status {reply.status}'
            if has_health and reply.status != 200:
                return False
            if has_health:
                # The client caches answers by this name: after a restart with another index it uses none of them.
                self.name = self._name_in(reply)
                may_be_busy = True
            request = 'POST /retrieve'
            body = {'queries': ['ready'], 'topk': 1, 'return_scores': True}
            reply = self._exchange.send('POST', f'{self._base}/retrieve', body)
            self.problem = f'{request}: status {reply.status}'
            if may_be_busy and reply.status in (404, 405):
                raise SearchFailed(
                    f'{self._base}: {self.problem}; give the address of a search server'
                )
            if reply.status != 200:
                return may_be_busy
            parse_results(reply.content, 1, passages)
        except (NoReply, ValueError) as error:
            self.problem = f'{request}: {short(str(error))}'
            return may_be_busy
        except ReportedFailure as error:
            self.problem = f'{request}: {error}'
            return False
        except MalformedReply as error:
            # Unlike a failure, the form does not change while the caller waits.
            raise SearchFailed(
                f'{self._base}: a reply that is not of the protocol ({error}); serve one that is, or give another '
                'address'
            ) from None
        return True

    def _name_in(self, page: Reply) -> str:
        """Returns the name of the index in a page of /health, which may be no JSON; the address if there is none."""
        with contextlib.suppress(ValueError, RecursionError):
            status = page.json()
            if isinstance(status, dict) and isinstance(status.get('index'), str):
                return status['index']
        return self._base

    def _request(
        self, path: str, body: dict[str, Any], count: int, read: Callable[[Any], Any]
    ) -> list[Any]:
        """Posts a request, with retries, and returns its results.

        Args:
          path: endpoint, '/retrieve' or '/open'.
          body: JSON object.
          count: expected number of results.
          read: function that converts one JSON result to the value that is returned for it (`replies`).

        Raises:
          SearchFailed: all attempts failed, the server redirects, or too many requests in a row failed and nothing is
            sent for a while.
          RetrievalError: the server refuses the request, or it cannot be sent.
          CannotOpen: the server has no endpoint /open.
        """
        with self._lock:
            # While nothing is sent, the request fails at once instead of waiting for a server that is down.
            if time.monotonic() < self._paused_until:
                raise SearchFailed(
                    f'{self._failure}; failed {self._failures} times in a row, so nothing is sent for a while'
                )
        for attempt in range(self.retries + 1):
            pause = min(self.longest_pause, self.pause * 2**attempt)
            # Jitter spreads the retries of clients that failed at the same time.
            pause *= random.uniform(0.5, 1.0)
            try:
                reply = self._exchange.send('POST', f'{self._base}{path}', body)
            except NoReply as error:
                reason = str(error)
            except ValueError as error:
                # A lone surrogate cannot be sent; a retry would not help.
                raise RetrievalError(f'{self._base}: {type(error).__name__}: {error}') from error
            else:
                if reply.status < 400:
                    # A proxy can answer 200 with its own text.
                    try:
                        results = parse_results(reply.content, count, read)
                    except MalformedReply as error:
                        reason = f'a reply that is not of the protocol ({error})'
                    else:
                        self._record_outcome('')
                        return results
                # Overload and server errors can be temporary, so the request is repeated.
                elif reply.status == 429 or reply.status >= 500:
                    reason = f'status {reply.status}'
                    pause = max(pause, self._retry_after(reply))
                else:
                    # The server works, so this does not count as a failure: it refuses this request only.
                    self._record_outcome('')
                    self._raise_refusal(path, reply)
            # No pause after the last attempt.
            if attempt < self.retries:
                self.retried += 1
                time.sleep(pause)
        failure = f'{self._base}: {reason}, {self.retries + 1} attempts'
        self._record_outcome(failure)
        raise SearchFailed(failure)

    def _raise_refusal(self, path: str, reply: Reply) -> NoReturn:
        """Raises CannotOpen if the server lacks /open, else RetrievalError; for replies with status 4xx but 429."""
        if path == '/open' and reply.status in (404, 405):
            raise CannotOpen(
                f'{self._base} has no endpoint /open for whole documents; serve the index with '
                'python -m zeroplay_jax.retrieval.server'
            )
        raise RetrievalError(f'{self._base} refused: {reply.text()[:_QUOTED_CHARACTERS]}')

    def _retry_after(self, reply: Reply) -> float:
        """Returns the seconds that a reply asks to wait, at most the longest pause; 0 if it does not ask."""
        seconds = reply.headers.get('Retry-After', '')
        # The header can also be a date, which no search server sends.
        # `isdecimal` and not `isdigit`, which accepts '²' as well.
        if not seconds.isdecimal():
            return 0.0
        return min(float(seconds), self.longest_pause)

    def _record_outcome(self, failure: str) -> None:
        """Counts failed requests in a row; from the `breaker`-th on, each starts a pause of `breaker_seconds`.

        Args:
          failure: why the request failed; '' if it did not.
        """
        with self._lock:
            if not failure:
                self._failures = 0
                return
            self._failure = failure
            self._failures += 1
            if self._failures >= self.breaker:
                self._paused_until = time.monotonic() + self.breaker_seconds


# ---- HTTP requests ---------------------------------------------------------------------------------
#
# They end in time: one deadline and one size limit for each, whatever the server sends.


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
          SearchFailed: the server redirects to another address, so that no further attempt would help.
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
            if reply.next_request:
                raise SearchFailed(
                    f'{url} redirects to {reply.next_request.url}; give that address'
                )
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
