"""Searching: one interface over an index in this process and a server elsewhere, with a cache and counters.

    client = Client(Http('http://127.0.0.1:8000'))      # or Client(InProcess(index))
    client.wait_until_ready()
    client.retrieve(['who wrote it'], k=3)              # per query its passages, None for one that failed

A search that fails is no exception: the policy is told, the failure is counted, and `check` stops a run in which too
many failed before anything is learnt from them.
"""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import httpx2
import numpy as np

from .corpus import split
from .types import Index, Passage, RetrievalError, SearchFailed


class Backend(Protocol):
    """Something that answers queries; `name` tells one index from another."""

    name: str

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Per query its passages {'id', 'title', 'text', 'score'}, best first.

        Raises:
          RetrievalError: the fault is the queries'.   SearchFailed: it is not.
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
        found = []
        for at in range(0, len(queries), self._batch):
            found += self._request(list(queries[at : at + self._batch]), k)
        return found

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

    def _request(self, queries: list[str], k: int) -> list[list[Passage]]:
        with self._lock:
            if time.monotonic() < self._closed_until:
                raise SearchFailed(
                    f'{self._base} failed {self._failures} times in a row; nothing is sent for a while'
                )
        # Always with scores: the reference server unpacks its results wrongly without.
        body = {'queries': queries, 'topk': k, 'return_scores': True}
        for attempt in range(self._retries + 1):
            wait = min(self._longest_pause, self._pause * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                reply = self._http.post(f'{self._base}/retrieve', json=body)
            except httpx2.TransportError as error:
                reason = f'{type(error).__name__}: {error}'
            except (httpx2.HTTPError, UnicodeEncodeError) as error:
                raise RetrievalError(f'{self._base}: {type(error).__name__}: {error}') from error
            else:
                if reply.status_code < 400:
                    found = _parsed(reply, queries)
                    if found is not None:
                        self._note(failed=False)
                        return found
                    reason = 'a reply that is not of the protocol'
                elif reply.status_code == 429 or reply.status_code >= 500:
                    reason = f'status {reply.status_code}'
                    asked = reply.headers.get('Retry-After', '')
                    wait = (
                        max(wait, min(float(asked), self._longest_pause))
                        if asked.isdigit()
                        else wait
                    )
                else:
                    self._note(failed=False)
                    raise RetrievalError(f'{self._base} refused: {reply.text[:200]}')
            if attempt < self._retries:
                self.retried += 1
                time.sleep(wait)
        self._note(failed=True)
        raise SearchFailed(f'{self._base}: {reason}, {self._retries + 1} attempts')

    def _note(self, failed: bool) -> None:
        with self._lock:
            self._failures = self._failures + 1 if failed else 0
            if self._failures >= self._breaker:
                self._closed_until = time.monotonic() + self._breaker_seconds


class Client:
    """Cache, counters and the bound on failures over a backend. Safe to call from several threads.

    Args:
      cache: answers kept, the least used go first; 0: none.
      most_failed: share of failed queries beyond which `check` stops the run.
    """

    def __init__(self, backend: Backend, cache: int = 100_000, most_failed: float = 0.1):
        self.backend, self._most, self._most_failed = backend, cache, most_failed
        self._cache: collections.OrderedDict[tuple[str, str, int], list[Passage]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()
        self._reset()

    def wait_until_ready(self, seconds: float = 600.0, pause: float = 1.0) -> None:
        """Returns once the backend answers; RetrievalError where it does not within `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.backend.ready():
            if time.monotonic() + pause > deadline:
                raise RetrievalError(
                    f'the search at {self.backend.name} is not ready after {seconds:.0f} s; start it with '
                    'python -m retrieval.server, or give its address'
                )
            time.sleep(pause)

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage] | None]:
        """Per query its passages {'id', 'title', 'text', 'score'}, best first; None for a query that failed."""
        name = self.backend.name
        with self._lock:
            known = {
                q: self._cache[name, q, k] for q in set(queries) if (name, q, k) in self._cache
            }
            for query in known:
                self._cache.move_to_end((name, query, k))
        known |= {
            q: [] for q in queries if not q.strip()
        }  # nothing is found for nothing, as a server has it
        new = [query for query in dict.fromkeys(queries) if query not in known]
        started = time.perf_counter()
        found = dict(zip(new, self._ask(new, k))) if new else {}
        with self._lock:
            if new:
                self._seconds.append(time.perf_counter() - started)
            answers: list[list[Passage] | None] = [known.get(q, found.get(q)) for q in queries]
            self._queries += len(queries)
            self._cached += len(queries) - len(new)
            self._failed += answers.count(None)
            for query, passages in found.items():
                if passages is not None and self._most:
                    self._cache[name, query, k] = passages
            while len(self._cache) > self._most:
                self._cache.popitem(last=False)
        return [
            None if answer is None else [dict(passage) for passage in answer] for answer in answers
        ]

    def _ask(self, queries: list[str], k: int) -> list[list[Passage] | None]:
        """Answers; a query that is refused must not take its neighbours along, so they are asked in halves."""
        try:
            return list(self.backend.retrieve(queries, k))
        except SearchFailed as error:
            self._reason = str(error)
            return [None] * len(queries)
        except RetrievalError as error:
            self._reason = str(error)
            half = len(queries) // 2
            return self._ask(queries[:half], k) + self._ask(queries[half:], k) if half else [None]

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


def _parsed(reply: httpx2.Response, queries: list[str]) -> list[list[Passage]] | None:
    """Passages of a reply in either shape, or None where it is of another."""
    try:
        result = reply.json()['result']
        found = [[_item(item) for item in items] for items in result]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if len(found) == len(queries) else None


def _item(item: dict[str, Any]) -> Passage:
    """{'document': {…}, 'score'} or the bare document."""
    document = item.get('document', item)
    if 'contents' in document:
        return _passage(str(document['id']), document['contents'], item.get('score', 0.0))
    return {'id': str(document['id']), 'title': document['title'], 'text': document['text'],
            'score': float(item.get('score', 0.0))}  # fmt: skip


def _passage(name: str, contents: str, score: float) -> Passage:
    title, text = split(contents)
    return {'id': name, 'title': title, 'text': text, 'score': float(score)}
