"""Joins the queries of concurrent HTTP requests into calls of the index."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from typing import Any

import prometheus_client

from .types import Index, search_records

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
    batch_characters: int = 65_536
    connections: int = 4096
    head_seconds: int = 10
    body_seconds: int = 30


MEANINGS = {
    'body_bytes': 'bytes of a request',
    'queries': 'queries or references of a request',
    'query_characters': 'characters of a query or reference',
    'k': 'passages per query',
    'default_k': 'passages per query if a request does not say',
    'page_words': 'words of a page of /open',
    'waiting': 'queries that may wait',
    'batch': 'queries of one index call',
    'batch_characters': 'characters of their texts together',
    'connections': 'open connections',
    'head_seconds': 'seconds until the head of a request has arrived',
    'body_seconds': 'seconds until its body has arrived',
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


@dataclasses.dataclass(eq=False)
class _Job:
    """A request with k passages per query.

    Attributes:
      number: ascending in the order of arrival.
      waiting: its queries that no index call has taken yet, none blank.
      results: of the others, in order.
      future: is set to the results of all.
    """

    number: int
    waiting: collections.deque[str]
    k: int
    future: asyncio.Future
    results: list[list[dict]] = dataclasses.field(default_factory=list)


class Batcher:
    """Collects the queries of concurrent requests and searches for many of them in one call of the index.

    Requests take turns: a large one is split over many calls, in which small ones are answered too. `search` and `run`
    belong to one event loop. `run` must be running there: it answers the searches, one index call at a time, each in a
    thread.
    """

    def __init__(self, index: Index, limits: Limits, metrics: Metrics):
        self._index = index
        self._limits = limits
        self._metrics = metrics
        # Jobs with waiting queries; the one whose last turn was the longest ago comes first.
        self._jobs: collections.deque[_Job] = collections.deque()
        # Wakes `run`, which otherwise sleeps.
        self._job_added = asyncio.Event()
        self._waiting = 0
        self._job_count = 0

    async def search(self, queries: list[str], k: int) -> list[list[dict]]:
        """Returns per query its passages {'document': {'id', 'contents'}, 'score'}, best first; waits for `run`.

        If it is cancelled, its queries that no index call has taken are not searched for.

        Raises:
          Refused: too many queries wait (503), or the index failed (500).
        """
        # The bound limits the waiting time and the memory.
        if self._waiting + len(queries) > self._limits.waiting:
            raise Refused(
                503, f'{self._waiting} queries wait already; try again later', retry_after=1
            )
        future = asyncio.get_running_loop().create_future()
        self._job_count += 1
        job = _Job(self._job_count, collections.deque(queries), k, future)
        self._jobs.append(job)
        self._change_waiting(len(queries))
        self._job_added.set()
        try:
            return await future
        finally:
            # Counted down after a failure too, or the server would refuse requests forever. Answered queries were
            # counted down before.
            self._change_waiting(len(job.results) - len(queries))
            # After a cancellation or a failure it may still have waiting queries.
            if job.waiting:
                self._jobs.remove(job)

    async def run(self) -> None:
        """Answers jobs until cancelled."""
        while True:
            await self._job_added.wait()
            # Cleared before the jobs are taken, so that none added afterwards is overlooked.
            self._job_added.clear()
            while self._jobs:
                await self._answer(self._next_batch())

    async def _answer(self, batch: dict[_Job, list[str]]) -> None:
        """Searches for queries of some jobs together; adds their results, or sets the exception of the futures."""
        queries = []
        for taken in batch.values():
            queries.extend(taken)
        # All jobs have one k (see `_next_batch`), because the index takes one k per call.
        k = next(iter(batch)).k
        try:
            # The search runs in a thread, so that further requests are received in the meantime.
            results = await asyncio.to_thread(self._search, queries, k)
        except Exception as error:
            # A failure of the index is reported to these requests only; the server continues.
            logging.exception('search failed')
            refused = Refused(500, f'the index failed: {type(error).__name__}')
            for job in batch:
                if not job.future.done():
                    job.future.set_exception(refused)
            # The requests that failed leave the queue before the next batch is taken.
            await asyncio.sleep(0)
            return
        start = 0
        for job, taken in batch.items():
            end = start + len(taken)
            answers = results[start:end]
            start = end
            # The future of a client that has disconnected is cancelled.
            if job.future.done():
                continue
            job.results.extend(answers)
            self._change_waiting(-len(taken))
            if not job.waiting:
                job.future.set_result(job.results)

    def _next_batch(self) -> dict[_Job, list[str]]:
        """Removes and returns the next queries, by job, up to the limits of an index call.

        Half of the limits is for the oldest jobs: by turns alone all of many large jobs would end late, after the
        deadlines of their clients. The other half takes one query of each job in turn. All have the k of the first job.
        At least one query is returned, also if it is longer than the limit.
        """
        k = self._jobs[0].k
        jobs = [job for job in self._jobs if job.k == k]
        batch: dict[_Job, list[str]] = {}
        count = 0
        characters = 0

        def take(job: _Job) -> None:
            nonlocal count, characters
            query = job.waiting.popleft()
            batch.setdefault(job, []).append(query)
            count += 1
            characters += len(query)

        limits = self._limits
        for job in sorted(jobs, key=lambda job: job.number):
            while (
                job.waiting
                and count < limits.batch // 2
                and characters < limits.batch_characters // 2
            ):
                take(job)
        turns = collections.deque(job for job in jobs if job.waiting)
        while turns and count < limits.batch and characters < limits.batch_characters:
            job = turns.popleft()
            take(job)
            if job.waiting:
                turns.append(job)
        # Jobs that had a turn go to the end, so that those of another k and those without a turn come first.
        unserved = [job for job in self._jobs if job not in batch]
        unfinished = [job for job in batch if job.waiting]
        self._jobs = collections.deque(unserved + unfinished)
        return batch

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

    def _change_waiting(self, change: int) -> None:
        """Adds to the number of waiting queries and to its metric."""
        self._waiting += change
        self._metrics.waiting.set(self._waiting)
