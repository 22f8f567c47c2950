"""Search client: one interface to an index in this process or to a server, with a cache and counters.

    client = Client(Http('http://127.0.0.1:8000'))      # or Client(InProcess(index))
    client.wait_until_ready()
    client.retrieve(['who wrote it'], k=3)              # per query its passages, None for one that failed
    client.open(['Iliad'], pages=[1], words_per_page=500)  # per id or title a page of its document

A failed search raises no exception: `retrieve` returns None for it, which the policy sees as a failed call, and it is
counted. In `open` None means that there is no such document or page; a failure raises SearchFailed.
`check_failure_rate` stops a run in which too many of either failed, before a policy is trained on their results.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from . import web
from .corpus import DocumentPage, document_page
from .json_text import Unusable, parse_object
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

# Characters of a failure or of a server's error text that an error quotes.
_QUOTED_CHARACTERS = 300

# Stands for the answer to a request that failed. None would not do, because it is a valid answer of `open`.
_FAILED: Any = object()


class Backend(Protocol):
    """Answers queries, from an index in this process or from a server.

    One without whole documents needs no `open`, which is as `InProcess.open`.

    Attributes:
      name: identity of the index; the client caches the answers of different names separately.
    """

    name: str

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Returns per query its k best passages {'id', 'title', 'text', 'score'}, best first; fewer if fewer match.

        Raises:
          RetrievalError: a query is invalid; the client then finds it by bisection.
          Exception: the search failed for another reason; all queries of the call count as failed.
        """
        ...

    def ready(self) -> bool:
        """Returns whether queries can be answered."""
        ...


class Client:
    """Cache, counters and a bound on failures for a backend. Safe to call from several threads.

    Args:
      backend: answers the requests.
      cache: number of cached answers, of which the least recently used are dropped; 0: no cache.
      max_failure_rate: share of failed requests (queries or references) above which `check_failure_rate` raises.

    Attributes:
      last_failure: why a request last failed since the last call of `metrics`; '' if none did.
    """

    def __init__(
        self,
        backend: Backend,
        cache: int = 100_000,
        max_failure_rate: float = 0.1,
    ):
        self.backend = backend
        # The name of a server becomes the fingerprint of its index.
        self._place = getattr(backend, 'address', backend.name)
        self._cache_size = cache
        self._max_failure_rate = max_failure_rate
        # Keys are (name of the index, endpoint, query or reference, …).
        self._cache: collections.OrderedDict[tuple, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._reset()

    def wait_until_ready(self, seconds: float = 600.0, pause: float = 1.0) -> None:
        """Waits until the backend is ready.

        Args:
          seconds: longest time to wait.
          pause: seconds between two attempts.

        Raises:
          RetrievalError: it does not answer within `seconds`, or redirects or replies in another form.
        """
        # The monotonic clock, because the time of day can be set back.
        deadline = time.monotonic() + seconds
        try:
            while not self.backend.ready():
                if time.monotonic() + pause > deadline:
                    reason = getattr(self.backend, 'problem', '')
                    problem = f' ({reason})' if reason else ''
                    raise RetrievalError(
                        f'the search at {self._place} is not ready after {seconds:.0f} s{problem}; start it '
                        'with zeroplay serve, or give its address'
                    )
                time.sleep(pause)
        except SearchFailed as error:
            raise RetrievalError(str(error)) from None

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage] | None]:
        """Returns the best passages of each query.

        Args:
          queries: any texts; a blank one finds nothing.
          k: passages per query.

        Returns:
          Per query its passages {'id', 'title', 'text', 'score'}, best first; None for a query that failed.
        """

        def search(requests: list[tuple]) -> list[Any]:
            answers = self.backend.retrieve([query for query, _ in requests], k)
            # Copied here, so that an answer that is not a list of passages counts as a failure of the backend. A server
            # may send more passages than were asked for.
            return [[dict(passage) for passage in passages[:k]] for passages in answers]

        # k is part of a request, so that answers of another k are cached separately.
        requests = [(query, k) for query in queries]
        # A blank query finds nothing, as on the server.
        blank_answers = {(query, k): [] for query in queries if not query.strip()}
        results: list[list[Passage] | None] = []
        for answer in self._answers('retrieve', requests, blank_answers, search):
            if answer is _FAILED:
                results.append(None)
            else:
                # Copied, so that a caller who changes a passage does not change the cache.
                results.append([dict(passage) for passage in answer])
        with self._lock:
            self._answered += sum(passages is not None for passages in results)
            self._empty += sum(passages == [] for passages in results)
        return results

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        """Returns one page of the document of each reference.

        Args:
          references: ids of passages as `retrieve` returns them, or exact titles.
          pages: number of the page of each reference, from 1.
          words_per_page: words of every page but a document's last one.

        Returns:
          Per reference the page; None if there is no such document or page.

        Raises:
          RetrievalError: the numbers of references and pages differ.
          CannotOpen: the backend or its search server has no whole documents.
          SearchFailed: some reference could not be looked up; the answers to the others are cached.
        """
        if len(references) != len(pages):
            raise RetrievalError(
                f'open: {len(references)} references but {len(pages)} pages; give one page number for each'
            )
        backend = self.backend
        if not hasattr(backend, 'open'):
            raise CannotOpen(f'{backend.name} has no whole documents; use Http or InProcess')

        def open_pages(requests: list[tuple]) -> list[Any]:
            texts = [reference for reference, _, _ in requests]
            numbers = [page for _, page, _ in requests]
            return backend.open(texts, numbers, words_per_page)

        requests = [(text, int(page), words_per_page) for text, page in zip(references, pages)]
        # A policy can ask for a page that no document has. The backend would refuse it and the request would count as
        # failed; therefore it is answered here.
        absent_answers = {}
        for request in requests:
            reference, page, _ = request
            if page < 1 or not reference.strip():
                absent_answers[request] = None
        answers = self._answers('open', requests, absent_answers, open_pages)
        # Raised instead of returning None, which would tell the policy that the document does not exist.
        if any(answer is _FAILED for answer in answers):
            raise SearchFailed(f'documents could not be opened: {self.last_failure}')
        return answers

    def _answers(
        self,
        endpoint: str,
        requests: list[tuple],
        trivial_answers: dict[tuple, Any],
        ask: Callable[[list[tuple]], list[Any]],
    ) -> list[Any]:
        """Returns the answer to each request, `_FAILED` for one that failed; updates the cache and the counters.

        Args:
          endpoint: 'retrieve' or 'open', part of the cache key.
          requests: hashable requests, (query, k) or (reference, page, words per page); equal ones are asked once.
          trivial_answers: request → answer, for requests that need neither cache nor backend.
          ask: function that returns the backend's answers to a list of requests.
        """
        # The name is read once, because `backend.ready` may change it in another thread.
        name = self.backend.name
        answers = dict(trivial_answers)
        with self._lock:
            for request in set(requests) - trivial_answers.keys():
                key = (name, endpoint, *request)
                if key in self._cache:
                    answers[request] = self._cache[key]
                    self._cache.move_to_end(key)
        # `dict.fromkeys` removes repeated requests and keeps their order.
        new_requests = [request for request in dict.fromkeys(requests) if request not in answers]
        new_answers: dict[tuple, Any] = {}
        started = time.perf_counter()
        # The lock is not held here, so that other threads can search at the same time.
        if new_requests:
            new_answers = dict(zip(new_requests, self._ask(new_requests, ask)))
        seconds = time.perf_counter() - started
        answers |= new_answers
        # Repeated requests share one answer.
        results = [answers[request] for request in requests]
        with self._lock:
            if new_requests:
                self._seconds.append(seconds)
            self._queries += len(requests)
            # Repeated and trivial requests count as cached.
            self._cached += len(requests) - len(new_requests)
            self._failed += sum(result is _FAILED for result in results)
            for request, answer in new_answers.items():
                # A failure may be temporary, so it is not cached.
                if answer is not _FAILED:
                    self._cache[name, endpoint, *request] = answer
            # The least recently used ones are dropped.
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return results

    def _ask(self, requests: list[tuple], ask: Callable[[list[tuple]], list[Any]]) -> list[Any]:
        """Returns the backend's answer to each request, `_FAILED` for one that failed; stores the last error's text.

        If the backend refuses the requests (RetrievalError), each half is asked separately, down to a single one, so
        that one bad request fails alone. After any other exception all requests fail.

        Raises:
          CannotOpen: the search server has no whole documents, so no request of this run can succeed.
        """
        try:
            answers = list(ask(requests))
            if len(answers) != len(requests):
                raise SearchFailed(f'{len(requests)} requests returned {len(answers)} answers')
            return answers
        except CannotOpen:
            raise
        except RetrievalError as error:
            self.last_failure = str(error)
            half = len(requests) // 2
            if not half:
                return [_FAILED]
            return self._ask(requests[:half], ask) + self._ask(requests[half:], ask)
        except SearchFailed as error:
            self.last_failure = str(error)
        except Exception as error:
            # Of an index, its corpus or another backend. It must not leave here uncounted: tools turn exceptions into
            # observations, and the run would train on searches that all failed.
            self.last_failure = f'{type(error).__name__}: {error}'
        return [_FAILED] * len(requests)

    def check_failure_rate(self) -> None:
        """Raises RetrievalError if more than `max_failure_rate` of the requests failed.

        Counts the requests since the last call of `metrics`, which alone resets the counters.
        """
        with self._lock:
            # `max` avoids a division by zero: without any request the share is 0.
            share = self._failed / max(1, self._queries)
            if share > self._max_failure_rate:
                raise RetrievalError(
                    f'{self._failed} of {self._queries} searches failed, more than '
                    f'{100 * self._max_failure_rate:g} %; the last one: {self.last_failure[:_QUOTED_CHARACTERS]}; '
                    f'repair the search at {self._place} and start again'
                )

    def metrics(self) -> dict[str, float]:
        """Returns the counters since the last call and resets them.

        They are: requests of `retrieve` and `open` together, the share that needed no backend call, failed requests,
        queries that were answered, those of them that found no passage, retries, and percentiles of the seconds of a
        backend call.
        """
        with self._lock:
            # Percentiles of an empty list are undefined; with 0 the metric stays a number.
            seconds = self._seconds or [0.0]
            retried = getattr(self.backend, 'retried', 0)
            values = {
                'search/queries': float(self._queries),
                'search/cached_share': self._cached / max(1, self._queries),
                'search/failed': float(self._failed),
                'search/answered': float(self._answered),
                'search/empty': float(self._empty),
                'search/retries': float(retried - self._retried_before),
                'search/seconds_p50': float(np.percentile(seconds, 50)),
                'search/seconds_p95': float(np.percentile(seconds, 95)),
            }
            self._reset()
        return values

    def _reset(self) -> None:
        """Sets the counters to zero; the caller holds the lock."""
        self._queries = 0
        self._cached = 0
        self._failed = 0
        self._answered = 0
        self._empty = 0
        self._seconds: list[float] = []
        # Backends count retries from their creation.
        self._retried_before = getattr(self.backend, 'retried', 0)
        self.last_failure = ''


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
        """Returns per reference (passage id or exact title) a page of its document; None if there is none.

        Args:
          references: any number.
          pages: page number of each reference, from 1.
          words_per_page: words of every page but a document's last one.

        Raises:
          CannotOpen: the search server has no whole documents.
          RetrievalError: a reference is invalid.
          Exception: the corpus cannot be read.
        """
        corpus = self.index.corpus
        return [
            document_page(corpus, reference, page, words_per_page)
            for reference, page in zip(references, pages, strict=True)
        ]

    def ready(self) -> bool:
        """Returns True: the index was loaded before this object was created."""
        return True


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
        for chunk in self._batches(queries):
            # Scores are always requested: without them the reference server (Search-R1's) unpacks its results wrongly.
            body = {'queries': chunk, 'topk': k, 'return_scores': True}
            results += self._request('/retrieve', body, len(chunk), passages)
        return results

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        """Requests pages of documents, at most `batch` references at a time; see `InProcess.open`."""
        results = []
        chunks = zip(self._batches(references), self._batches(pages), strict=True)
        for chunk, numbers in chunks:
            # One number per reference, although the protocol's field is in the singular.
            body = {'references': chunk, 'page': numbers, 'words_per_page': words_per_page}
            results += self._request('/open', body, len(chunk), page)
        return results

    def _batches(self, items: Sequence[Any]) -> list[list[Any]]:
        """Returns the items in lists of at most `batch`: a server refuses requests above its own limit."""
        starts = range(0, len(items), self.batch)
        return [list(items[start : start + self.batch]) for start in starts]

    def ready(self) -> bool:
        """Returns whether the server answers queries: whether GET /health, if it has that page, and a query succeed.

        Also sets `name` to the name of the index in the page (its fingerprint), or to the address if it has none.
        Without the page, as on Search-R1's server, `name` stays as it is.

        Raises:
          SearchFailed: the server redirects to another address, or its reply to the query is not of the protocol.
        """
        request = 'GET /health'
        # A server with that page may be too busy for a query.
        has_health = False
        try:
            reply = web.start(self.send(f'{self._base}/health')).result()
            self.problem = f'{request}: status {reply.status_code}'
            # FastAPI answers 404 for an unknown path, and 405 for a known path with another method.
            has_health = reply.status_code == 200
            if not has_health and reply.status_code not in (404, 405):
                return False
            if has_health:
                # The client caches answers by this name: after a restart with another index it uses none of them.
                self.name = _name_in(reply.content) or self.address
            request = 'POST /retrieve'
            body = {'queries': ['ready'], 'topk': 1, 'return_scores': True}
            reply = web.start(self.send(f'{self._base}/retrieve', body)).result()
            self.problem = f'{request}: status {reply.status_code}'
            if has_health and reply.status_code in (404, 405):
                raise SearchFailed(
                    f'{self.address}: {self.problem}; give the address of a search server'
                )
            if reply.status_code != 200:
                return has_health
            parse_results(reply.content, 1, passages)
        except web.NoReply as error:
            self.problem = f'{request}: {short(str(error))}'
            return has_health
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
            if path == '/open' and reply.status_code in (404, 405):
                raise CannotOpen(
                    f'{self.address} has no endpoint /open for whole documents; serve the index with '
                    'zeroplay serve'
                )
            if reply.status_code >= 400:
                raise RetrievalError(f'{self.address} refused: {reply.text[:_QUOTED_CHARACTERS]}')
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


def _name_in(page: bytes) -> str:
    """Returns the name of the index in a page of /health, which may be no JSON; '' if there is none."""
    with contextlib.suppress(Unusable):
        name = parse_object(page).get('index')
        return name if isinstance(name, str) else ''
    return ''
