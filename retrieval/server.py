"""Serves an index over HTTP, in the protocol that Search-R1, verl and their descendants speak.

    python -m retrieval.server --index indexes/wiki --port 8000

POST /retrieve {"queries": [text, …], "topk": 3, "return_scores": true}
  → {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}, a list per query; without scores bare documents.
  A blank query finds nothing.
POST /open {"references": [id or title, …], "page": [1, …], "words_per_page": 500}
  → {"result": [{"id", "title", "text", "page", "pages"} or null, …]}: a page of the document with each passage id or
  exact title, null where there is none; "page" (1 each) and "words_per_page" (500) may be left out.
GET /health     200 once the index answers, 503 before; names the index.
GET /metrics    Prometheus.

Requests that wait while the index is busy go into its next call together; since an answer depends on its query alone,
nobody can tell. Beyond the bound on waiting queries the answer is 503 with Retry-After. Errors are {"error": reason}.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import pathlib
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import prometheus_client
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import documents, folder
from .command import Parser, one_line
from .documents import DocumentPage
from .types import Index, RetrievalError


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request, and all waiting ones together, may ask for."""

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
    'queries': 'queries of a request',
    'query_characters': 'characters of a query',
    'k': 'passages per query',
    'default_k': 'passages per query where a request does not say',
    'page_words': 'words of a page of /open',
    'waiting': 'queries that may wait',
    'batch': 'queries of one index call',
}


class Refused(Exception):
    """A request that is not served: status, reason, and seconds after which to try again."""

    def __init__(self, status: int, reason: str, retry_after: int | None = None):
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after


class Metrics:
    """What /metrics shows; one registry per server."""

    def __init__(self):
        self.registry = prometheus_client.CollectorRegistry()
        take = dict(registry=self.registry)
        self.requests = prometheus_client.Counter(
            'retrieval_requests', 'Requests by status', ['status'], **take
        )
        self.queries = prometheus_client.Counter('retrieval_queries', 'Queries answered', **take)
        self.waiting = prometheus_client.Gauge(
            'retrieval_waiting', 'Queries that wait for the index', **take
        )
        sizes = [2**n for n in range(11)]
        self.batch = prometheus_client.Histogram(
            'retrieval_batch', 'Queries per index call', buckets=sizes, **take
        )
        times = [0.001 * 2**n for n in range(15)]
        self.seconds = prometheus_client.Histogram(
            'retrieval_seconds', 'Seconds from request to answer', buckets=times, **take
        )
        self.search_seconds = prometheus_client.Histogram(
            'retrieval_search_seconds', 'Seconds of an index call', buckets=times, **take
        )


class Batcher:
    """Collects the queries of concurrent requests and asks the index about many at a time, in one thread."""

    def __init__(self, index: Index, limits: Limits, metrics: Metrics):
        self._index, self._limits, self._metrics = index, limits, metrics
        self._jobs: collections.deque[tuple[list[str], int, asyncio.Future]] = collections.deque()
        self._news = asyncio.Event()
        self._waiting = 0

    async def search(self, queries: list[str], k: int) -> list[list[dict]]:
        """Per query its documents {'document': {'id', 'contents'}, 'score'}.

        Raises:
          Refused: 503 where too many queries wait.
        """
        if self._waiting + len(queries) > self._limits.waiting:
            raise Refused(
                503, f'{self._waiting} queries wait already; try again later', retry_after=1
            )
        future = asyncio.get_running_loop().create_future()
        self._jobs.append((queries, k, future))
        self._count(len(queries))
        self._news.set()
        return await future

    async def run(self) -> None:
        """Serves until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._jobs:
                jobs = self._take()
                queries = [query for job in jobs for query in job[0]]
                try:
                    found = await asyncio.to_thread(self._search, queries, jobs[0][1])
                except Exception as error:  # whatever an index raises is the requests' to hear, not the server's death
                    logging.exception('search failed')
                    refused = Refused(500, f'the index failed: {type(error).__name__}')
                    for _, _, future in jobs:
                        if not future.done():
                            future.set_exception(refused)
                else:
                    for asked, _, future in jobs:
                        part, found = found[: len(asked)], found[len(asked) :]
                        if not future.done():  # its client may have gone
                            future.set_result(part)
                finally:
                    self._count(-len(queries))

    def _take(self) -> list[tuple[list[str], int, asyncio.Future]]:
        """The next jobs of one k, in the order they came, up to a batch; one job may be larger."""
        first = self._jobs.popleft()
        taken, rest, size = [first], [], len(first[0])
        while self._jobs and size < self._limits.batch:
            job = self._jobs.popleft()
            if job[1] == first[1] and size + len(job[0]) <= self._limits.batch:
                taken.append(job)
                size += len(job[0])
            else:
                rest.append(job)
        self._jobs.extendleft(reversed(rest))
        return taken

    def _search(self, queries: list[str], k: int) -> list[list[dict]]:
        started = time.perf_counter()
        ids, scores = self._index.search(queries, k)
        record = self._index.corpus.record
        found = [
            [
                {'document': dataclasses.asdict(record(int(at))), 'score': float(score)}
                for at, score in zip(row, values)
                if at >= 0
            ]
            for row, values in zip(ids, scores)
        ]
        self._metrics.batch.observe(len(queries))
        self._metrics.search_seconds.observe(time.perf_counter() - started)
        self._metrics.queries.inc(len(queries))
        return found

    def _count(self, change: int) -> None:
        self._waiting += change
        self._metrics.waiting.set(self._waiting)


class App:
    """The HTTP side: reads and checks requests, answers them."""

    def __init__(self, load: Callable[[], tuple[Index, str]], limits: Limits):
        """`load` returns the index and its name, and runs in a thread while /health says 503."""
        self._load, self.limits, self.metrics = load, limits, Metrics()
        self._index: Index | None = None
        self._name = ''
        self._opening = 0  # references of /open requests that are being answered
        self.failure: BaseException | None = None
        self.stop: Callable[[], None] = lambda: None
        routes = [
            Route('/retrieve', self.retrieve, methods=['POST']),
            Route('/open', self.open, methods=['POST']),
            Route('/health', self.health),
            Route('/metrics', self.show_metrics),
        ]
        self.asgi = Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app):
        task = asyncio.create_task(self._serve())
        yield
        task.cancel()

    async def _serve(self) -> None:
        try:
            index, self._name = await asyncio.to_thread(self._load)
            self.batcher = Batcher(index, self.limits, self.metrics)
            self._index = index
            logging.info('ready: %d passages, index %s', len(index), self._name[:12])
            await self.batcher.run()
        except Exception as error:
            self.failure = error
            self.stop()

    async def health(self, request: Request) -> Response:
        """True only when queries are answered."""
        if self._index is None:
            return JSONResponse({'status': 'loading'}, 503, {'Retry-After': '1'})
        return JSONResponse({'status': 'ready', 'index': self._name, 'passages': len(self._index)})

    async def show_metrics(self, request: Request) -> Response:
        """Prometheus text."""
        page = prometheus_client.generate_latest(self.metrics.registry)
        return Response(page, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def retrieve(self, request: Request) -> Response:
        """Answers one search request."""
        return await self._respond(request, self._retrieve)

    async def open(self, request: Request) -> Response:
        """Answers one request for pages of documents."""
        return await self._respond(request, self._open)

    async def _respond(
        self, request: Request, answer: Callable[[bytes], Awaitable[list]]
    ) -> Response:
        """Returns {"result": answer(body)} or {"error": reason}, and counts the request."""
        started = time.perf_counter()
        try:
            result = await answer(await self._body(request))
            response = JSONResponse({'result': result})
        except Refused as refused:
            headers = {}
            if refused.retry_after:
                headers['Retry-After'] = str(refused.retry_after)
            response = JSONResponse({'error': refused.reason}, refused.status, headers)
        self.metrics.requests.labels(status=response.status_code).inc()
        self.metrics.seconds.observe(time.perf_counter() - started)
        return response

    async def _retrieve(self, body: bytes) -> list:
        """Returns the documents of each query of a /retrieve body."""
        queries, k, with_scores = self._checked(body)
        # Policies do send blank queries, and the clients in use cannot handle a refusal: such a query finds nothing.
        searched = [query for query in queries if query.strip()]
        answers = iter([])
        if searched:
            answers = iter(await self.batcher.search(searched, k))
        results = []
        for query in queries:
            items = next(answers) if query.strip() else []
            if not with_scores:
                items = [item['document'] for item in items]
            results.append(items)
        return results

    async def _open(self, body: bytes) -> list:
        """Returns the page of each reference of an /open body."""
        references, pages, words_per_page = self._checked_open(body)
        if self._opening + len(references) > self.limits.waiting:
            raise Refused(
                503, f'{self._opening} references wait already; try again later', retry_after=1
            )
        self._opening += len(references)
        try:
            # Reads from disk, so not in the thread that answers requests.
            found = await asyncio.to_thread(self._pages, references, pages, words_per_page)
        except RetrievalError as error:
            raise Refused(400, str(error)) from error
        except Exception as error:
            logging.exception('open failed')
            raise Refused(500, f'the index failed: {type(error).__name__}') from error
        finally:
            self._opening -= len(references)
        results = []
        for page in found:
            results.append(None if page is None else dataclasses.asdict(page))
        return results

    def _pages(
        self, references: list[str], pages: list[int], words_per_page: int
    ) -> list[DocumentPage | None]:
        assert self._index is not None  # `_body` refuses requests before the index is loaded
        corpus = self._index.corpus
        found = []
        for reference, page in zip(references, pages):
            found.append(documents.document_page(corpus, reference, page, words_per_page))
        return found

    async def _body(self, request: Request) -> bytes:
        if self._index is None:
            raise Refused(503, 'the index is being loaded', retry_after=1)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.limits.body_bytes:
                raise Refused(413, f'the body is longer than {self.limits.body_bytes} bytes')
        return bytes(body)

    def _checked(self, body: bytes) -> tuple[list[str], int, bool]:
        """Returns (queries, k, whether scores are wanted) of a /retrieve body."""
        fields = _json_object(body, 'queries')
        queries = self._checked_texts(fields, 'queries', 'query')
        k = self._checked_number(fields, 'topk', self.limits.default_k, self._most_passages())
        with_scores = fields.get('return_scores', False)
        if not isinstance(with_scores, bool):
            raise Refused(400, '"return_scores" is neither true nor false')
        return queries, k, with_scores

    def _checked_open(self, body: bytes) -> tuple[list[str], list[int], int]:
        """Returns (references, pages, words per page) of an /open body."""
        fields = _json_object(body, 'references')
        references = self._checked_texts(fields, 'references', 'reference')
        pages = fields.get('page')
        if pages is None:
            pages = [1] * len(references)
        if not isinstance(pages, list) or not all(_is_whole(page) for page in pages):
            raise Refused(400, '"page" is not a list of whole numbers')
        if len(pages) != len(references):
            raise Refused(400, f'"page" has {len(pages)} numbers for {len(references)} references')
        for row, page in enumerate(pages):
            if page < 1:
                raise Refused(400, f'page {row} is {str(page)[:20]}; pages count from 1')
        words_per_page = self._checked_number(
            fields, 'words_per_page', documents.WORDS_PER_PAGE, self.limits.page_words
        )
        return references, pages, words_per_page

    def _most_passages(self) -> int:
        """Returns the largest `topk` that a request may ask for."""
        return min(self.limits.k, len(self._index or ()))

    def _checked_texts(self, fields: dict, key: str, noun: str) -> list[str]:
        """Returns the list of texts under a key of a request."""
        texts = fields.get(key)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise Refused(400, f'"{key}" is not a list of strings')
        limits = self.limits
        if len(texts) > limits.queries:
            raise Refused(413, f'{len(texts)} {key}; at most {limits.queries} at a time')
        for row, text in enumerate(texts):
            if len(text) > limits.query_characters:
                raise Refused(
                    400, f'{noun} {row} is longer than {limits.query_characters} characters'
                )
            if not text.isascii() and any('\ud800' <= c <= '\udfff' for c in text):
                raise Refused(400, f'{noun} {row} has a lone surrogate (half a character)')
        return texts

    def _checked_number(self, fields: dict, key: str, default: int, most: int) -> int:
        """Returns the whole number from 1 to `most` under a key of a request, the default where it is null."""
        number = fields.get(key)
        if number is None:
            number = default
        if not _is_whole(number) or not 1 <= number <= most:
            raise Refused(
                400, f'"{key}" is {str(number)[:20]}; it must be a whole number from 1 to {most}'
            )
        return number


def _json_object(body: bytes, key: str) -> dict:
    """Returns the JSON object of a request body; `key` is named to a client that sends something else."""
    try:
        fields = json.loads(body.decode('utf-8'))
    except UnicodeDecodeError as error:
        raise Refused(400, f'the body is not UTF-8 (byte {error.start})') from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, f'the body is not JSON: {str(error)[:80]}') from error
    if not isinstance(fields, dict):
        raise Refused(400, f'the body is not a JSON object with "{key}"')
    return fields


def _is_whole(value: object) -> bool:
    """Returns whether a JSON value is a whole number; in Python `true` is an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def serve(load: Callable[[], tuple[Index, str]], host: str, port: int, limits: Limits) -> None:
    """Serves until SIGINT or SIGTERM, then finishes what it took.

    Raises:
      RetrievalError: the port is taken, or what `load` raises.
    """
    app = App(load, limits)
    listener = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # from here on connections wait instead of being refused
    except OSError as error:
        raise RetrievalError(
            f'{host}:{port}: cannot listen there ({error.strerror}); choose another --port'
        ) from error
    logging.info('listening on http://%s:%d', *listener.getsockname()[:2])
    config = uvicorn.Config(
        app.asgi, log_level='warning', access_log=False, timeout_graceful_shutdown=60
    )
    server = uvicorn.Server(config)
    app.stop = lambda: setattr(server, 'should_exit', True)
    server.run(sockets=[listener])
    if app.failure:
        raise app.failure


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stderr)
    one_line(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog='python -m retrieval.server',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('--index', type=pathlib.Path, required=True, help='folder that retrieval.build made')
    add('--encoder', help='checkpoint folder, where it is no longer at its place of the build')
    add('--host', default='127.0.0.1', help='address to listen on; 0.0.0.0 opens it to the network')
    add('--port', type=int, default=8000, help='0: any free one, named in the log')
    for field in dataclasses.fields(Limits):
        add(f'--max-{field.name.replace("_", "-")}' if field.name != 'default_k' else '--default-k', type=int,
            default=field.default, dest=field.name, help=f'{MEANINGS[field.name]} ({field.default})')  # fmt: skip
    return parser


def _run(args: argparse.Namespace) -> None:
    folder.read_manifest(args.index)  # before anybody is told that something listens
    limits = Limits(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(Limits)}
    )

    def load():
        index = folder.open_index(args.index, encoder_folder=args.encoder)
        index.search(['ready'], 1)  # compiles, and fails here rather than at the first request
        return index, folder.fingerprint(args.index)

    serve(load, args.host, args.port, limits)


if __name__ == '__main__':
    main()
