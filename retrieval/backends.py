"""Backends of a search client: an index in this process, and a search server over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from . import web
from .corpus import DocumentPage, document_page
from .masking import hide
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
class Http(web.Exchange):
    """Searches a server with the protocol of `retrieval.server`, which includes Search-R1's. Safe to use from threads.

    Args:
      url: address of the server, with or without '/retrieve'.
      timeout: seconds of one attempt, from the connection to the last byte of the reply.
      retries: further attempts after a failed connection, a timeout, 429 or 5xx.
      pause: seconds before the first retry (`web.Exchange`).
      batch: largest number of queries or references in one request.
      patience: seconds for which a server that has answered before may be away, as one that is started again, until
        requests to it fail.
      breaker: number of failed requests in a row (each with all its retries) after which nothing is sent for
        `breaker_seconds`; until a request succeeds, every further failure starts such a pause.
      breaker_seconds: length of that pause.

    Raises:
      RetrievalError: no URL, or a number outside its range.
    """

    batch: int = 256
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
        # For people.
        self.name = self.address = hide(self._base)
        # Why `ready` has returned False, for people.
        self.problem = ''
        # Failed requests in a row, why the last one failed, and the time (time.monotonic) until which nothing is sent.
        self._failed = 0
        self._failure = ''
        self._paused_until = 0.0
        self._lock = threading.Lock()
        super().__post_init__()

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
            reply = web.start(self.send(f'{self._base}/health')).result()
            # FastAPI answers 404 for an unknown path, and 405 for a known path with another method.
            has_health = reply.status_code not in (404, 405)
            self.problem = f'{request}: status {reply.status_code}'
            if has_health and reply.status_code != 200:
                return False
            if has_health:
                # The client caches answers by this name: after a restart with another index it uses none of them.
                self.name = self._name_in(reply)
                may_be_busy = True
            request = 'POST /retrieve'
            body = {'queries': ['ready'], 'topk': 1, 'return_scores': True}
            reply = web.start(self.send(f'{self._base}/retrieve', body)).result()
            self.problem = f'{request}: status {reply.status_code}'
            if may_be_busy and reply.status_code in (404, 405):
                raise SearchFailed(
                    f'{self.address}: {self.problem}; give the address of a search server'
                )
            if reply.status_code != 200:
                return may_be_busy
            parse_results(reply.content, 1, passages)
        except (web.NoReply, ValueError) as error:
            self.problem = f'{request}: {short(str(error))}'
            return may_be_busy
        except ReportedFailure as error:
            self.problem = f'{request}: {error}'
            return False
        except MalformedReply as error:
            # Unlike a failure, the form does not change while the caller waits.
            raise SearchFailed(
                f'{self.address}: a reply that is not of the protocol ({error}); serve one that is, or give another '
                'address'
            ) from None
        return True

    def _name_in(self, page: web.Reply) -> str:
        """Returns the name of the index in a page of /health, which may be no JSON; the address if there is none."""
        with contextlib.suppress(ValueError, RecursionError):
            status = page.json()
            if isinstance(status, dict) and isinstance(status.get('index'), str):
                return status['index']
        return self.address

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
                    f'{self._failure}; failed {self._failed} times in a row, so nothing is sent for a while'
                )

        def results(reply: web.Reply) -> list[Any]:
            if web.is_temporary(reply):
                raise web.NoReply(f'status {reply.status_code}')
            if reply.status_code >= 400:
                self._raise_refusal(path, reply)
            # A proxy can answer 200 with its own text.
            try:
                return parse_results(reply.content, count, read)
            except MalformedReply as error:
                raise web.NoReply(f'a reply that is not of the protocol ({error})') from None

        failure = ''
        try:
            return web.start(self.post(f'{self._base}{path}', body, results)).result()
        except web.NoReply as error:
            failure = hide(f'{self.address}: {error}')
            raise SearchFailed(failure) from None
        finally:
            # A server that refuses this request only has not failed.
            self._record_outcome(failure)

    def _raise_refusal(self, path: str, reply: web.Reply) -> NoReturn:
        """Raises CannotOpen if the server lacks /open, else RetrievalError; for replies with status 4xx but 429."""
        if path == '/open' and reply.status_code in (404, 405):
            raise CannotOpen(
                f'{self.address} has no endpoint /open for whole documents; serve the index with '
                'python -m zeroplay_jax.retrieval.server'
            )
        raise RetrievalError(f'{self.address} refused: {reply.text[:_QUOTED_CHARACTERS]}')

    def _record_outcome(self, failure: str) -> None:
        """Counts failed requests in a row; from the `breaker`-th on, each starts a pause of `breaker_seconds`.

        Args:
          failure: why the request failed; '' if it did not.
        """
        with self._lock:
            if not failure:
                self._failed = 0
                return
            self._failure = failure
            self._failed += 1
            if self._failed >= self.breaker:
                self._paused_until = time.monotonic() + self.breaker_seconds
