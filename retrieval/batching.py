"""Joins the queries of concurrent HTTP requests into calls of the index."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Set
from typing import Any

import prometheus_client

from .types import Index, search_records

# Bounds of the histograms: 1 … 1,024 queries, and 1 ms … 16 s.
_BATCH_BUCKETS = [2**n for n in range(11)]
_SECONDS_BUCKETS = [0.001 * 2**n for n in range(15)]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Attributes:
      body_bytes, queries, query_characters: of one request: about 1,024 queries of 4,096 ASCII characters.
      k: passages per query.
      default_k: passages per query if a request does not say.
      page_words: words of a page of /open.
      waiting: queries that may wait.
      batch, batch_characters: of one index call.
      connections: that are open.
      body_seconds: until the body of a request has arrived.
    """

    body_bytes: int = 4 << 20
    queries: int = 1_024
    query_characters: int = 4_096
    k: int = 100
    default_k: int = 3
    page_words: int = 10_000
    waiting: int = 8_192
    batch: int = 256
    batch_characters: int = 65_536
    connections: int = 4096
    body_seconds: int = 30


class Refused(Exception):
    """Raised when a request is not served; the server turns it into an HTTP error.

    Attributes:
      status: HTTP status.
      reason: text for the client.
      retry_after: seconds after which the client may try again; None if that is useless.
    """

    def __init__(self, status: int, reason: str, retry_after: int | None = None):
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class Metrics:
    """The Prometheus metrics of one server, in a registry of their own."""

    def __init__(self):
        registry = prometheus_client.CollectorRegistry()
        self.registry = registry
        self.requests = prometheus_client.Counter(
            'retrieval_requests', 'Requests by status', ['status'], registry=registry
        )
        self.queries = prometheus_client.Counter(
            'retrieval_queries', 'Queries answered', registry=registry
        )
        self.waiting = prometheus_client.Gauge(
            'retrieval_waiting', 'Queries that wait for the index', registry=registry
        )
        self.batch = prometheus_client.Histogram(
            'retrieval_batch', 'Queries per index call', buckets=_BATCH_BUCKETS, registry=registry
        )
        self.seconds = prometheus_client.Histogram(
            'retrieval_seconds',
            'Seconds from request to answer',
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.search_seconds = prometheus_client.Histogram(
            'retrieval_search_seconds',
            'Seconds of an index call',
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )


@dataclasses.dataclass(eq=False)
class _Query:
    """A query that waits for the index, or that it searches for.

    Attributes:
      text: the query.
      k: passages that are asked for.
      request: number of its request; older ones have smaller numbers.
      turn: its place in the request, from 0.
      answer: gets its passages.
    """

    text: str
    k: int
    request: int
    turn: int
    answer: asyncio.Future


class Batcher:
    """Collects the queries of all requests while the index is busy, and searches for them in its next call.

    Args:
      index: the index.
      limits: bounds of an index call and of all waiting queries.
      metrics: counts calls and queries.
    """

    def __init__(self, index: Index, limits: Limits, metrics: Metrics):
        self._index = index
        self._limits = limits
        self._metrics = metrics
        # In the order of arrival, with those that the index searches for.
        self._waiting: list[_Query] = []
        # Wakes `run`, which otherwise sleeps.
        self._added = asyncio.Event()
        self._requests = 0
        self._last_k = 0

    async def search(self, queries: list[str], k: int) -> list[list[dict]]:
        """Returns per query its passages {'document': {'id', 'contents'}, 'score'}, best first; waits for `run`.

        If it is cancelled, its queries that no index call has taken are not searched for.

        Raises:
          Refused: too many queries wait (503), or the index failed (500).
        """
        # The bound limits the waiting time and the memory.
        if len(self._waiting) + len(queries) > self._limits.waiting:
            raise Refused(
                503, f'{len(self._waiting)} queries wait already; try again later', retry_after=1
            )
        self._requests += 1
        number = self._requests
        loop = asyncio.get_running_loop()
        asked = []
        for turn, text in enumerate(queries):
            asked.append(_Query(text, k, number, turn, loop.create_future()))
        self._set_waiting([*self._waiting, *asked])
        self._added.set()
        try:
            return await asyncio.gather(*(query.answer for query in asked))
        finally:
            # After a cancellation some still wait.
            self._drop({number})

    async def run(self) -> None:
        """Answers queries until cancelled."""
        while True:
            await self._added.wait()
            # Cleared before the queries are taken, so that none added afterwards is overlooked.
            self._added.clear()
            while self._waiting:
                await self._answer(self._next_batch())

    async def _answer(self, batch: list[_Query]) -> None:
        """Searches for queries together, and sets their answers or the exception of their requests."""
        texts = [query.text for query in batch]
        try:
            # The search runs in a thread, so that further requests are received in the meantime.
            results = await asyncio.to_thread(self._search, texts, self._last_k)
        except Exception as error:
            # A failure of the index is reported to these requests only; the server continues.
            logging.exception('search failed')
            refused = Refused(500, f'the index failed: {type(error).__name__}')
            for query in batch:
                if not query.answer.done():
                    query.answer.set_exception(refused)
            self._drop({query.request for query in batch})
            return
        for query, result in zip(batch, results, strict=True):
            # Of a client that has disconnected it is cancelled.
            if not query.answer.done():
                query.answer.set_result(result)
        self._set_waiting([query for query in self._waiting if not query.answer.done()])

    def _next_batch(self) -> list[_Query]:
        """Returns the next queries up to the limits of an index call, which takes one k; at least one query.

        Half of the limits is for the oldest requests: by turns alone all of many large ones would end late, after the
        deadlines of their clients. In the other half the first queries of all requests come first.
        """
        # Those of another k take turns.
        others = [query for query in self._waiting if query.k != self._last_k]
        self._last_k = (others or self._waiting)[0].k
        oldest = [query for query in self._waiting if query.k == self._last_k]
        by_turn = sorted(oldest, key=lambda query: query.turn)
        batch: dict[_Query, None] = {}
        characters = 0
        limits = self._limits
        for queries, share in ((oldest, 2), (by_turn, 1)):
            most_characters = limits.batch_characters // share
            for query in queries:
                if len(batch) >= limits.batch // share or characters >= most_characters:
                    break
                if query not in batch:
                    batch[query] = None
                    characters += len(query.text)
        return list(batch)

    def _search(self, queries: list[str], k: int) -> list[list[dict[str, Any]]]:
        """Returns per query its passages, as `search` does, and updates the metrics; runs in a thread."""
        started = time.perf_counter()
        results = []
        for records in search_records(self._index, queries, k):
            items = []
            for record, score in records:
                # The wire form of Search-R1 has these two fields only.
                document = {'id': record.id, 'contents': record.contents}
                items.append({'document': document, 'score': score})
            results.append(items)
        # Observed after the search, so that failed calls do not count as answers.
        self._metrics.batch.observe(len(queries))
        self._metrics.search_seconds.observe(time.perf_counter() - started)
        self._metrics.queries.inc(len(queries))
        return results

    def _drop(self, requests: Set[int]) -> None:
        """Forgets the queries of these requests."""
        self._set_waiting([query for query in self._waiting if query.request not in requests])

    def _set_waiting(self, queries: list[_Query]) -> None:
        self._waiting = queries
        self._metrics.waiting.set(len(queries))
