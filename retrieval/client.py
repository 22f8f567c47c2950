"""Searching: one interface over an index in this process and a server elsewhere, with a cache and counters.

    client = Client(Http('http://127.0.0.1:8000'))      # or Client(InProcess(index))
    client.wait_until_ready()
    client.retrieve(['who wrote it'], k=3)              # per query its passages, None for one that failed
    client.open(['Iliad'], pages=[1], words_per_page=500)  # per id or title a page of its document

A search that fails is no exception: the policy is told, the failure is counted, and `check` stops a run in which too
many failed before anything is learnt from them.
"""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import httpx2
import numpy as np

from .documents import DocumentPage, document_page
from .records import split
from .types import CannotOpen, Index, Passage, RetrievalError, SearchFailed


class Backend(Protocol):
    """Something that answers queries; `name` tells one index from another."""

    name: str

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Per query its passages {'id', 'title', 'text', 'score'}, best first.

        Raises:
          RetrievalError: the fault is the queries'.   SearchFailed: it is not.
        """
        ...

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        """Per reference the page of its document, None where there is none (see `documents.document_page`).

        Raises:
          CannotOpen: the server has no whole documents.
          RetrievalError: the fault is the references'.   SearchFailed: it is not.
        """
        ...

    def ready(self) -> bool:
        """Whether queries are answered now."""
        ...


class InProcess:
    """An index of this process; `name` as of `folder.fingerprint`."""

    def __init__(self, index: Index, name: str = 'index'):
        self.index, self.name = index, name

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        try:
            ids, scores = self.index.search(queries, k)
        except RetrievalError:
            raise
        except Exception as error:
            raise SearchFailed(f'{type(error).__name__}: {error}') from error
        record = self.index.corpus.record
        return [
            [
                _passage(record(int(at)).id, record(int(at)).contents, s)
                for at, s in zip(row, values)
                if at >= 0
            ]
            for row, values in zip(ids, scores)
        ]

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        opened = []
        for reference, page in zip(references, pages, strict=True):
            try:
                opened.append(document_page(self.index.corpus, reference, page, words_per_page))
            except RetrievalError:
                raise
            except Exception as error:
                raise SearchFailed(f'{type(error).__name__}: {error}') from error
        return opened

    def ready(self) -> bool:
        return True


class Http:
    """A server of the protocol of `retrieval.server`, which Search-R1's is as well.

    Args:
      url: of the server, with or without '/retrieve'.
      timeout: seconds of one attempt.
      retries: further attempts after a connection that failed, a timeout, 429 or 5xx.
      pause: seconds before the first retry; doubles, with jitter, up to `longest_pause`; Retry-After counts more.
      batch: queries of one request.   connections: kept open.
      breaker: after so many failed requests in a row nothing is sent for `breaker_seconds`.
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
        breaker: int = 5,
        breaker_seconds: float = 10.0,
    ):
        self._base = url.rstrip('/').removesuffix('/retrieve')
        if (
            not self._base.startswith(('http://', 'https://'))
            or timeout <= 0
            or retries < 0
            or batch < 1
            or breaker < 1
        ):
            raise RetrievalError(
                f'search server {url!r}, timeout {timeout}, retries {retries}, batch {batch}, breaker {breaker}: '
                'give a URL (http://host:port), a timeout > 0, retries ≥ 0, a batch and a breaker ≥ 1'
            )
        self.name = self._base
        self.retried = 0
        self._retries, self._pause, self._longest_pause, self._batch = (
            retries,
            pause,
            longest_pause,
            batch,
        )
        self._breaker, self._breaker_seconds = breaker, breaker_seconds
        self._failures, self._closed_until, self._lock = 0, 0.0, threading.Lock()
        # trust_env: proxies of the environment are for the outside, a search server is a neighbour.
        pool = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx2.Client(timeout=timeout, limits=pool, trust_env=False)

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        results = []
        for start in range(0, len(queries), self._batch):
            part = list(queries[start : start + self._batch])
            # Always with scores: the reference server unpacks its results wrongly without.
            body = {'queries': part, 'topk': k, 'return_scores': True}
            results.extend(self._request('/retrieve', body, len(part), _read_passages))
        return results

    def open(
        self, references: Sequence[str], pages: Sequence[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        results = []
        for start in range(0, len(references), self._batch):
            end = start + self._batch
            part = list(references[start:end])
            body = {
                'references': part,
                'page': list(pages[start:end]),
                'words_per_page': words_per_page,
            }
            results.extend(self._request('/open', body, len(part), _read_page))
        return results

    def ready(self) -> bool:
        """GET /health; a server that has no such page (Search-R1's) is asked a query."""
        try:
            reply = self._http.get(f'{self._base}/health')
            if reply.status_code in (404, 405):
                body = {'queries': ['ready'], 'topk': 1, 'return_scores': True}
                return self._http.post(f'{self._base}/retrieve', json=body).status_code == 200
            if reply.status_code == 200:
                about = reply.json()
                self.name = (
                    about.get('index', self._base) if isinstance(about, dict) else self._base
                )
            return reply.status_code == 200
        except (httpx2.HTTPError, ValueError):
            return False

    def _request(
        self, path: str, body: dict[str, Any], count: int, read: Callable[[Any], Any]
    ) -> list[Any]:
        """Posts a request and returns its `count` results, each read by `read`; retries what may pass."""
        with self._lock:
            if time.monotonic() < self._closed_until:
                raise SearchFailed(
                    f'{self._base} failed {self._failures} times in a row; nothing is sent for a while'
                )
        for attempt in range(self._retries + 1):
            wait = min(self._longest_pause, self._pause * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                reply = self._http.post(f'{self._base}{path}', json=body)
            except httpx2.TransportError as error:
                reason = f'{type(error).__name__}: {error}'
            except (httpx2.HTTPError, UnicodeEncodeError) as error:
                raise RetrievalError(f'{self._base}: {type(error).__name__}: {error}') from error
            else:
                if reply.status_code < 400:
                    results = _read_reply(reply, count, read)
                    if results is not None:
                        self._note(failed=False)
                        return results
                    reason = 'a reply that is not of the protocol'
                elif reply.status_code == 429 or reply.status_code >= 500:
                    reason = f'status {reply.status_code}'
                    wait = max(wait, self._retry_after(reply))
                elif path == '/open' and reply.status_code in (404, 405):
                    raise CannotOpen(
                        f'{self._base} has no endpoint /open for whole documents; serve the index with '
                        'python -m zeroplay_jax.retrieval.server'
                    )
                else:
                    self._note(failed=False)
                    raise RetrievalError(f'{self._base} refused: {reply.text[:200]}')
            if attempt < self._retries:
                self.retried += 1
                time.sleep(wait)
        self._note(failed=True)
        raise SearchFailed(f'{self._base}: {reason}, {self._retries + 1} attempts')

    def _retry_after(self, reply: httpx2.Response) -> float:
        """Returns the seconds that a reply asks to wait, at most the longest pause; 0 if it does not say."""
        seconds = reply.headers.get('Retry-After', '')
        if not seconds.isdigit():
            return 0.0
        return min(float(seconds), self._longest_pause)

    def _note(self, failed: bool) -> None:
        with self._lock:
            self._failures = self._failures + 1 if failed else 0
            if self._failures >= self._breaker:
                self._closed_until = time.monotonic() + self._breaker_seconds


_FAILED: Any = object()  # the answer of a request that failed; None is a valid answer of `open`


class Client:
    """Cache, counters and the bound on failures over a backend. Safe to call from several threads.

    Args:
      cache: answers kept, the least used go first; 0: none.
      most_failed: share of failed queries beyond which `check` stops the run.
    """

    def __init__(self, backend: Backend, cache: int = 100_000, most_failed: float = 0.1):
        self.backend, self._most, self._most_failed = backend, cache, most_failed
        # Keys are (index, endpoint, query or reference, …).
        self._cache: collections.OrderedDict[tuple, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._reset()

    def wait_until_ready(self, seconds: float = 600.0, pause: float = 1.0) -> None:
        """Returns once the backend answers; RetrievalError where it does not within `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.backend.ready():
            if time.monotonic() + pause > deadline:
                raise RetrievalError(
                    f'the search at {self.backend.name} is not ready after {seconds:.0f} s; start it with '
                    'python -m zeroplay_jax.retrieval.server, or give its address'
                )
            time.sleep(pause)

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage] | None]:
        """Per query its passages {'id', 'title', 'text', 'score'}, best first; None for a query that failed."""

        def search(requests: list[tuple]) -> list[Any]:
            return self.backend.retrieve([query for query, _ in requests], k)

        # A blank query finds nothing, as on the server.
        blank = {(query, k): [] for query in queries if not query.strip()}
        requests = [(query, k) for query in queries]
        answers = self._answers('retrieve', requests, blank, search)
        results: list[list[Passage] | None] = []
        for answer in answers:
            if answer is _FAILED:
                results.append(None)
            else:
                # Copies: the caller may change the passages, the cache must not.
                results.append([dict(passage) for passage in answer])
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
          Per reference the page; None where there is no such document or page, or where the call failed.

        Raises:
          RetrievalError: the search server has no endpoint for whole documents, or other numbers of references and
            pages are given.
        """
        if len(references) != len(pages):
            raise RetrievalError(
                f'open: {len(references)} references but {len(pages)} pages; give one page number for each'
            )

        def open_pages(requests: list[tuple]) -> list[Any]:
            texts = [reference for reference, _, _ in requests]
            numbers = [page for _, page, _ in requests]
            return self.backend.open(texts, numbers, words_per_page)

        requests = [(text, int(page), words_per_page) for text, page in zip(references, pages)]
        # A policy can name a page that no document has; that is no failure of the search.
        absent = {}
        for request in requests:
            reference, page, _ = request
            if page < 1 or not reference.strip():
                absent[request] = None
        answers = self._answers('open', requests, absent, open_pages)
        return [None if answer is _FAILED else answer for answer in answers]

    def _answers(
        self,
        endpoint: str,
        requests: list[tuple],
        known: dict[tuple, Any],
        ask: Callable[[list[tuple]], list[Any]],
    ) -> list[Any]:
        """Returns the answer of each request, from `known`, the cache or the backend; `_FAILED` for a failure.

        Every distinct request is asked once, and the counters are updated.
        """
        name = self.backend.name
        answers = dict(known)
        with self._lock:
            for request in set(requests) - known.keys():
                key = (name, endpoint, *request)
                if key in self._cache:
                    answers[request] = self._cache[key]
                    self._cache.move_to_end(key)
        new = [request for request in dict.fromkeys(requests) if request not in answers]
        started = time.perf_counter()
        new_answers = dict(zip(new, self._ask(new, ask))) if new else {}
        answers |= new_answers
        with self._lock:
            if new:
                self._seconds.append(time.perf_counter() - started)
            results = [answers[request] for request in requests]
            self._queries += len(requests)
            self._cached += len(requests) - len(new)
            self._failed += sum(result is _FAILED for result in results)
            for request, answer in new_answers.items():
                if answer is not _FAILED and self._most:
                    self._cache[name, endpoint, *request] = answer
            while len(self._cache) > self._most:
                self._cache.popitem(last=False)
        return results

    def _ask(self, requests: list[tuple], ask: Callable[[list[tuple]], list[Any]]) -> list[Any]:
        """Asks the backend; bisects a batch that is refused so that one bad request fails alone."""
        try:
            return list(ask(requests))
        except CannotOpen:
            raise
        except SearchFailed as error:
            self._reason = str(error)
            return [_FAILED] * len(requests)
        except RetrievalError as error:
            self._reason = str(error)
            half = len(requests) // 2
            if not half:
                return [_FAILED]
            return self._ask(requests[:half], ask) + self._ask(requests[half:], ask)

    def check(self) -> None:
        """Stops a run whose searches fail; to be called before a batch is learnt from.

        Raises:
          RetrievalError: more than the allowed share failed since `metrics` was last read.
        """
        with self._lock:
            share = self._failed / max(1, self._queries)
            if share > self._most_failed:
                raise RetrievalError(
                    f'{self._failed} of {self._queries} searches failed, more than {self._most_failed:.0%}; the last '
                    f'one: {self._reason[:200]}; mend the search at {self.backend.name} and start again'
                )

    def metrics(self) -> dict[str, float]:
        """Counters since the last call: queries, share of them cached and failed, retries, seconds of a call."""
        with self._lock:
            seconds, total = self._seconds or [0.0], max(1, self._queries)
            found = dict(
                queries=float(self._queries),
                cached_share=self._cached / total,
                failed=float(self._failed),
                retries=float(getattr(self.backend, 'retried', 0) - self._retried),
                seconds_p50=float(np.percentile(seconds, 50)),
                seconds_p95=float(np.percentile(seconds, 95)),
            )
            self._reset()
        return {f'search/{name}': value for name, value in found.items()}

    def _reset(self) -> None:
        self._queries = self._cached = self._failed = 0
        self._seconds: list[float] = []
        self._retried, self._reason = getattr(self.backend, 'retried', 0), ''


def _read_reply(reply: httpx2.Response, count: int, read: Callable[[Any], Any]) -> list[Any] | None:
    """Returns the `count` results of a reply, each read by `read`; None where it is not of the protocol."""
    try:
        results = [read(result) for result in reply.json()['result']]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if len(results) != count:
        return None
    return results


def _read_passages(items: list[dict[str, Any]]) -> list[Passage]:
    """Returns the passages of one query: [{'document': {…}, 'score'}, …] or the bare documents."""
    passages = []
    for item in items:
        document = item.get('document', item)
        score = item.get('score', 0.0)
        if 'contents' in document:
            passages.append(_passage(str(document['id']), document['contents'], score))
        else:
            passages.append(
                {
                    'id': str(document['id']),
                    'title': document['title'],
                    'text': document['text'],
                    'score': float(score),
                }
            )
    return passages


def _read_page(result: dict[str, Any] | None) -> DocumentPage | None:
    """Returns the page of one reference; ValueError where it is of other types."""
    if result is None:
        return None
    page = DocumentPage(
        result['title'], result['text'], result['page'], result['pages'], str(result['id'])
    )
    valid_texts = isinstance(page.title, str) and isinstance(page.text, str)
    if not valid_texts or not isinstance(page.page, int) or not isinstance(page.pages, int):
        raise ValueError('a page of other types')
    return page


def _passage(name: str, contents: str, score: float) -> Passage:
    title, text = split(contents)
    return {'id': name, 'title': title, 'text': text, 'score': float(score)}
