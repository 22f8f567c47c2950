"""Joins the queries of concurrent HTTP requests into calls of the index."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from typing import Any

import prometheus_client

from .types import Index

# Bounds of the histograms: 1 … 1,024 queries, and 1 ms … 16 s.
_BATCH_BUCKETS = [2**n for n in range(11)]
_SECONDS_BUCKETS = [0.001 * 2**n for n in range(15)]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the server, each described in `MEANINGS`: of one request, of all waiting ones, of an index call."""

    # About 1,024 queries of 4,096 ASCII characters.
    body_bytes: int = 4 << 20
    queries: int = 1_024
    query_characters: int = 4_096
    k: int = 100
    default_k: int = 3
    page_words: int = 10_000
    waiting: int = 8_192
    batch: int = 256


MEANINGS = {
    'body_bytes': 'bytes of a request',
    'queries': 'queries or references of a request',
    'query_characters': 'characters of a query or reference',
    'k': 'passages per query',
    'default_k': 'passages per query if a request does not say',
    'page_words': 'words of a page of /open',
    'waiting': 'queries that may wait',
    'batch': 'queries of one index call',
}


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


@dataclasses.dataclass(frozen=True)
class _Job:
    """The queries of one request, none blank, with k passages each; `future` is set to their results."""

    queries: list[str]
    k: int
    future: asyncio.Future


class Batcher:
    """Collects the queries of concurrent requests and searches for many of them in one call of the index.

    `search` and `run` belong to one event loop. `run` must be running there: it answers the searches, one index call
    at a time, each in a thread.
    """

    def __init__(self, index: Index, limits: Limits, metrics: Metrics):
        self._index = index
        self._limits = limits
        self._metrics = metrics
        self._jobs: collections.deque[_Job] = collections.deque()
        # Wakes `run`, which otherwise sleeps.
        self._job_added = asyncio.Event()
        self._waiting = 0

    async def search(self, queries: list[str], k: int) -> list[list[dict]]:
        """Returns per query its passages {'document': {'id', 'contents'}, 'score'}, best first; waits for `run`.

        Raises:
          Refused: too many queries wait (503), or the index failed (500).
        """
        # The bound limits the waiting time and the memory.
        if self._waiting + len(queries) > self._limits.waiting:
            raise Refused(
                503, f'{self._waiting} queries wait already; try again later', retry_after=1
            )
        future = asyncio.get_running_loop().create_future()
        self._jobs.append(_Job(queries, k, future))
        self._change_waiting(len(queries))
        self._job_added.set()
        return await future

    async def run(self) -> None:
        """Answers jobs until cancelled."""
        while True:
            await self._job_added.wait()
            # Cleared before the jobs are taken, so that none added afterwards is overlooked.
            self._job_added.clear()
            while self._jobs:
                await self._answer(self._next_jobs())

    async def _answer(self, jobs: list[_Job]) -> None:
        """Searches for the queries of some jobs together; sets the result or the exception of their futures."""
        # All jobs have one k (see `_next_jobs`), because the index takes one k per call.
        queries: list[str] = []
        for job in jobs:
            queries.extend(job.queries)
        try:
            # The search runs in a thread, so that further requests are received in the meantime.
            results = await asyncio.to_thread(self._search, queries, jobs[0].k)
        except Exception as error:
            # A failure of the index is reported to these requests only; the server continues.
            logging.exception('search failed')
            refused = Refused(500, f'the index failed: {type(error).__name__}')
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(refused)
        else:
            start = 0
            for job in jobs:
                end = start + len(job.queries)
                # The future of a client that has disconnected is cancelled.
                if not job.future.done():
                    job.future.set_result(results[start:end])
                start = end
        finally:
            # Counted down after a failure too, or the server would refuse requests forever.
            self._change_waiting(-len(queries))

    def _next_jobs(self) -> list[_Job]:
        """Removes and returns the oldest job and later ones with the same k, up to `limits.batch` queries in all.

        k is the number of passages per query. The oldest job is always taken, also if it is larger than a batch.
        """
        first = self._jobs.popleft()
        batch = [first]
        postponed = []
        size = len(first.queries)
        while self._jobs and size < self._limits.batch:
            job = self._jobs.popleft()
            # A job that does not fit does not end the loop: a later, smaller one may fill the batch.
            fits = size + len(job.queries) <= self._limits.batch
            if job.k == first.k and fits:
                batch.append(job)
                size += len(job.queries)
            else:
                postponed.append(job)
        # Put back in front, so that they come first in the next batch. `extendleft` reverses its argument, hence the
        # second reversal, with which the postponed jobs keep their order.
        self._jobs.extendleft(reversed(postponed))
        return batch

    def _search(self, queries: list[str], k: int) -> list[list[dict[str, Any]]]:
        """Returns per query its passages, as `search` does, and updates the metrics; runs in a thread."""
        started = time.perf_counter()
        row_numbers, scores = self._index.search(queries, k)
        results = []
        for query_rows, query_scores in zip(row_numbers, scores):
            items = []
            for row, score in zip(query_rows, query_scores):
                # BM25 pads its results with −1.
                if row >= 0:
                    record = self._index.corpus.record(int(row))
                    # The wire form of Search-R1 has these two fields only.
                    document = {'id': record.id, 'contents': record.contents}
                    items.append({'document': document, 'score': float(score)})
            results.append(items)
        # Observed after the search, so that failed calls do not count as answers.
        self._metrics.batch.observe(len(queries))
        self._metrics.search_seconds.observe(time.perf_counter() - started)
        self._metrics.queries.inc(len(queries))
        return results

    def _change_waiting(self, change: int) -> None:
        """Adds to the number of waiting queries and to its metric."""
        self._waiting += change
        self._metrics.waiting.set(self._waiting)
