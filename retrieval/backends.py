"""Backends of a search client: an index in this process, and a search server over HTTP."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

from . import replies
from .documents import DocumentPage, document_page
from .exchange import Exchange, NoReply, Reply
from .records import split
from .types import CannotOpen, Index, Passage, RetrievalError, SearchFailed, short

# Characters of a server's error text that are quoted.
_QUOTED_CHARACTERS = 200


@runtime_checkable
class Backend(Protocol):
    """Answers queries, from an index in this process or from a server.

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


@runtime_checkable
class DocumentBackend(Backend, Protocol):
    """A backend that also returns whole documents."""

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        """Returns per reference (passage id or exact title) a page of its document.

        None if there is no such document or page (see `documents.document_page`).

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
        try:
            return self._search(queries, k)
        except RetrievalError:
            # A query is at fault.
            raise
        except Exception as error:
            # Any other exception is a failure of the index or its corpus, which the client counts instead of ending
            # the run.
            raise SearchFailed(f'{type(error).__name__}: {error}') from error

    def _search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Returns the passages of each query; raises what the index or its corpus raises."""
        rows, scores = self.index.search(queries, k)
        results = []
        for query_rows, query_scores in zip(rows, scores):
            passages = []
            for row, score in zip(query_rows, query_scores):
                # BM25 pads its results with −1.
                if row >= 0:
                    record = self.index.corpus.record(int(row))
                    passages.append(_passage(record.id, record.contents, score))
            results.append(passages)
        return results

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        """Returns the requested page of each reference; see `DocumentBackend.open`."""
        opened_pages = []
        for reference, page in zip(references, pages, strict=True):
            try:
                opened_page = document_page(self.index.corpus, reference, page, words_per_page)
            except RetrievalError:
                # The reference or its page number is at fault.
                raise
            except Exception as error:
                raise SearchFailed(f'{type(error).__name__}: {error}') from error
            opened_pages.append(opened_page)
        return opened_pages

    def ready(self) -> bool:
        """Returns True: the index was loaded before this object was created."""
        return True


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

    def __init__(
        self,
        url: str,
        timeout: float = 30.0,
        retries: int = 4,
        pause: float = 0.2,
        longest_pause: float = 10.0,
        batch: int = 256,
        connections: int = 16,
        reply_bytes: int = 32 << 20,
        breaker: int = 5,
        breaker_seconds: float = 10.0,
    ):
        # Search-R1's configurations name the endpoint, ours the server.
        self._base = url.rstrip('/').removesuffix('/retrieve')
        # The scheme is checked here, because a missing one would be reported at the first query only.
        valid_url = self._base.startswith(('http://', 'https://'))
        if not valid_url or timeout <= 0 or retries < 0 or batch < 1 or breaker < 1:
            raise RetrievalError(
                f'search server {url!r}, timeout {timeout}, retries {retries}, batch {batch}, breaker {breaker}: '
                'give a URL (http://host:port), a timeout > 0, retries ≥ 0, a batch and a breaker ≥ 1'
            )
        self.name = self._base
        # Why `ready` has returned False, for people.
        self.problem = ''
        # Retries since the creation of this object; `Client.metrics` reports the increase.
        self.retried = 0
        self.connections = connections
        self._retries = retries
        self._pause = pause
        self._longest_pause = longest_pause
        self._batch = batch
        self._breaker = breaker
        self._breaker_seconds = breaker_seconds
        # Failed requests in a row, and the time (time.monotonic) until which nothing is sent.
        self._failures = 0
        self._paused_until = 0.0
        self._lock = threading.Lock()
        self._exchange = Exchange(timeout, reply_bytes, connections)

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Requests the passages of queries, at most `batch` queries at a time; see `Backend.retrieve`."""
        results = []
        # A server refuses requests above its own limit.
        for start in range(0, len(queries), self._batch):
            chunk = list(queries[start : start + self._batch])
            # Scores are always requested: without them the reference server (Search-R1's) unpacks its results wrongly.
            body = {'queries': chunk, 'topk': k, 'return_scores': True}
            results.extend(self._request('/retrieve', body, len(chunk), replies.passages))
        return results

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        """Requests pages of documents, at most `batch` references at a time; see `DocumentBackend.open`."""
        results = []
        # A server refuses requests above its own limit.
        for start in range(0, len(references), self._batch):
            end = start + self._batch
            chunk = list(references[start:end])
            body = {
                'references': chunk,
                # One number per reference, although the protocol's field is in the singular.
                'page': list(pages[start:end]),
                'words_per_page': words_per_page,
            }
            results.extend(self._request('/open', body, len(chunk), replies.page))
        return results

    def ready(self) -> bool:
        """Returns whether the server answers queries: whether GET /health succeeds.

        Also sets `name` to the name of the index in the reply (its fingerprint), or to the address if the reply has
        none. A server without /health (Search-R1's) gets a query instead, and `name` stays as it is.
        """
        request = 'GET /health'
        try:
            reply = self._exchange.send('GET', f'{self._base}/health')
            # FastAPI answers 404 for an unknown path, and 405 for a known path with another method.
            has_health = reply.status not in (404, 405)
            if not has_health:
                request = 'POST /retrieve'
                body = {'queries': ['ready'], 'topk': 1, 'return_scores': True}
                reply = self._exchange.send('POST', f'{self._base}/retrieve', body)
            self.problem = f'{request}: status {reply.status}'
            if reply.status != 200 or not has_health:
                return reply.status == 200
            status = reply.json()
        except (NoReply, ValueError, RecursionError) as error:
            self.problem = f'{request}: {short(str(error))}'
            return False
        # The client caches answers by this name: after a restart with another index it uses none of them.
        self.name = self._base
        if isinstance(status, dict) and isinstance(status.get('index'), str):
            self.name = status['index']
        return True

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
          SearchFailed: all attempts failed, or too many requests in a row did and nothing is sent for a while.
          RetrievalError: the server refuses the request, or it cannot be sent.
          CannotOpen: the server has no endpoint /open.
        """
        with self._lock:
            # While nothing is sent, the request fails at once instead of waiting for a server that is down.
            if time.monotonic() < self._paused_until:
                raise SearchFailed(
                    f'{self._base} failed {self._failures} times in a row; nothing is sent for a while'
                )
        for attempt in range(self._retries + 1):
            pause = min(self._longest_pause, self._pause * 2**attempt)
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
                        results = replies.results(reply.content, count, read)
                    except replies.MalformedReply as error:
                        reason = f'a reply that is not of the protocol ({error})'
                    else:
                        self._record_outcome(failed=False)
                        return results
                # Overload and server errors can be temporary, so the request is repeated.
                elif reply.status == 429 or reply.status >= 500:
                    reason = f'status {reply.status}'
                    pause = max(pause, self._retry_after(reply))
                else:
                    # The server works, so this does not count as a failure: it refuses this request only.
                    self._record_outcome(failed=False)
                    self._raise_refusal(path, reply)
            # No pause after the last attempt.
            if attempt < self._retries:
                self.retried += 1
                time.sleep(pause)
        self._record_outcome(failed=True)
        raise SearchFailed(f'{self._base}: {reason}, {self._retries + 1} attempts')

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
        return min(float(seconds), self._longest_pause)

    def _record_outcome(self, failed: bool) -> None:
        """Counts failed requests in a row; from the `breaker`-th on, each starts a pause of `breaker_seconds`."""
        with self._lock:
            if not failed:
                self._failures = 0
                return
            self._failures += 1
            if self._failures >= self._breaker:
                self._paused_until = time.monotonic() + self._breaker_seconds


def _passage(record_id: str, contents: str, score: Any) -> Passage:
    """Returns a search result from a passage in wire form."""
    title, text = split(contents)
    return {'id': record_id, 'title': title, 'text': text, 'score': float(score)}
