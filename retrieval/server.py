"""Serves an index over HTTP, with the protocol of Search-R1, verl and their descendants.

    zeroplay serve --index indexes/wiki --port 8000

POST /retrieve {"queries": [text, …], "topk": 3, "return_scores": true}
  → {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}, a list per query; without scores only documents.
  A blank query finds nothing. A "document" here is one passage.
POST /open {"references": [id or title, …], "page": [1, …], "words_per_page": 500}
  → {"result": [{"id", "title", "text", "page", "pages"} or null, …]}: a page of the whole document with each passage id
  or exact title, null if there is none. "page" (1 for each) and "words_per_page" (500) are optional.
GET /health     200 if the index is loaded, with its fingerprint; 503 before.
GET /metrics    Prometheus.

While the index is busy, queries of several requests collect and are searched for together in its next call. An answer
depends on its query only, so this does not change results. If too many queries wait, the answer is 503 with
Retry-After. Requests take turns, so that a large one does not hold up small ones. Errors are {"error": reason}.
The server has no passwords: whoever reaches its address can search. Pages of other sites in a browser
cannot, where it listens on the loopback interface.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import prometheus_client
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import corpus, folder, json_text, loopback
from .batching import Batcher, Metrics, Refused
from .batching import Limits as Limits
from .command import Parser, number_type, one_line, show_messages
from .corpus import DocumentPage, document_page
from .types import Index, RetrievalError

# Connections that wait for the server to accept them.
_BACKLOG = 2_048
# Seconds that requests have to finish after SIGTERM.
_SHUTDOWN_SECONDS = 60
# Status of a request whose client has left (nginx's); only the metrics see it.
_CLIENT_LEFT = 499
# A request that may be refused before its body was read to the end; the connection is then closed.
_BODY_UNREAD = (408, 413)
# Descriptors of the process that are no connections.
_OTHER_FILES = 64
# A body that is too long is read up to this multiple of its limit, because a client that is still sending when the
# connection is closed gets a connection reset instead of the reason.
_DISCARDED_LIMITS = 16


class App:
    """The HTTP application: receives requests, validates them, answers them."""

    def __init__(self, load: Callable[[], tuple[Index, str]], limits: Limits):
        """Creates the application.

        Args:
          load: returns (index, its fingerprint); runs in a thread while /health returns 503.
          limits: limits of requests.
        """
        self._load = load
        self.limits = limits
        self.metrics = Metrics()
        self._index: Index | None = None
        self._fingerprint = ''
        # The exception of `load`, or of the task that answers queries, which ended the server; `serve` raises it.
        self.failure: BaseException | None = None
        # Whether it listens on the loopback interface alone; set by `serve`.
        self.is_local = True
        # Stops the server; set by `serve`. In tests that run the application without `serve` it does nothing.
        self.stop: Callable[[], None] = lambda: None
        routes = [
            Route('/retrieve', self.retrieve, methods=['POST']),
            Route('/open', self.open, methods=['POST']),
            Route('/health', self.health),
            Route('/metrics', self.show_metrics),
        ]
        self.asgi = Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Loads and serves the index in a background task, from the application's start to its end."""
        # Not awaited: loading takes minutes, and /health must answer in the meantime.
        task = asyncio.create_task(self._serve())
        yield
        task.cancel()

    async def _serve(self) -> None:
        """Loads the index and answers queries until cancelled; an exception is stored and stops the server."""
        try:
            index, self._fingerprint = await asyncio.to_thread(self._load)
            self.batcher = Batcher(index, self.limits, self.metrics)
            # Set last, because requests are accepted from now on.
            self._index = index
            logging.info('ready: %d passages, index %s', len(index), self._fingerprint[:12])
            await self.batcher.run()
        except Exception as error:
            self.failure = error
            self.stop()

    async def health(self, request: Request) -> Response:
        """Answers GET /health."""
        if self._index is None:
            return JSONResponse({'status': 'loading'}, 503, {'Retry-After': '1'})
        return JSONResponse(
            {'status': 'ready', 'index': self._fingerprint, 'passages': len(self._index)}
        )

    async def show_metrics(self, request: Request) -> Response:
        """Answers GET /metrics."""
        text = prometheus_client.generate_latest(self.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def retrieve(self, request: Request) -> Response:
        """Answers POST /retrieve."""
        return await self._respond(request, self._retrieve, stops_with_client=True)

    async def open(self, request: Request) -> Response:
        """Answers POST /open."""
        return await self._respond(request, self._open)

    async def _respond(
        self,
        request: Request,
        answer: Callable[[Index, bytes], Coroutine[Any, Any, list]],
        stops_with_client: bool = False,
    ) -> Response:
        """Returns {"result": answer(index, body)} or {"error": reason}, and counts the request in the metrics.

        Args:
          request: its body is read here.
          answer: function that returns the JSON results of a body, one per query or reference; raises Refused.
          stops_with_client: whether to cancel `answer` when the client disconnects.
        """
        started = time.perf_counter()
        try:
            reason = loopback.refusal(request.headers, self.is_local)
            if reason:
                raise Refused(403, reason)
            if self._index is None:
                raise Refused(503, 'the index is being loaded', retry_after=1)
            answering = answer(self._index, await self._read_body(request))
            if stops_with_client:
                result = await _while_connected(request, answering)
            else:
                result = await answering
            response = JSONResponse({'result': result})
        except Refused as refused:
            # Only a temporary refusal has a Retry-After.
            headers = {}
            if refused.retry_after:
                headers['Retry-After'] = str(refused.retry_after)
            if refused.status in _BODY_UNREAD:
                headers['Connection'] = 'close'
            response = JSONResponse({'error': refused.reason}, refused.status, headers)
        self.metrics.requests.labels(status=response.status_code).inc()
        self.metrics.seconds.observe(time.perf_counter() - started)
        return response

    async def _read_body(self, request: Request) -> bytes:
        """Returns the body.

        Raises:
          Refused: it exceeds its limit (413), whatever its headers say, or does not arrive in time (408).
        """
        body = bytearray()
        length = 0
        most_bytes = self.limits.body_bytes
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.stream():
                    length += len(chunk)
                    if length <= most_bytes:
                        body += chunk
                    elif length > _DISCARDED_LIMITS * most_bytes:
                        break
        except TimeoutError:
            reason = f'the body did not arrive within {self.limits.body_seconds} s'
            raise Refused(408, reason) from None
        except ClientDisconnect:
            raise Refused(_CLIENT_LEFT, 'the client has left') from None
        if length > most_bytes:
            raise Refused(413, f'the body is longer than {most_bytes} bytes')
        return bytes(body)

    async def _retrieve(self, index: Index, body: bytes) -> list:
        """Returns the JSON list of passages of each query of a /retrieve body; raises Refused."""
        fields = _json_object(body, 'queries')
        queries = _texts(fields, 'queries', 'query', self.limits)
        # An index cannot return more passages than it has.
        k = _number(fields, 'topk', self.limits.default_k, min(self.limits.k, len(index)))
        with_scores = fields.get('return_scores', False)
        # The string 'false' would count as true.
        if not isinstance(with_scores, bool):
            raise Refused(400, '"return_scores" is neither true nor false')
        # A blank query finds nothing: policies do write blank queries, and the clients in use cannot handle a refusal.
        searched = [query for query in queries if query.strip()]
        items_of_query: dict[str, list[dict]] = {}
        if searched:
            answers = await self.batcher.search(searched, k)
            items_of_query = dict(zip(searched, answers, strict=True))
        results = []
        for query in queries:
            items = items_of_query.get(query, [])
            results.append(items if with_scores else [item['document'] for item in items])
        return results

    async def _open(self, index: Index, body: bytes) -> list:
        """Returns the JSON object of a page, or None, for each reference of an /open body; raises Refused."""
        fields = _json_object(body, 'references')
        references = _texts(fields, 'references', 'reference', self.limits)
        pages = _page_numbers(fields, len(references))
        words = _number(fields, 'words_per_page', corpus.WORDS_PER_PAGE, self.limits.page_words)

        def open_pages() -> list[DocumentPage | None]:
            requested = zip(references, pages, strict=True)
            return [document_page(index.corpus, text, page, words) for text, page in requested]

        # Reading from disk runs in a thread, so that it does not block the other requests.
        try:
            opened = await asyncio.to_thread(open_pages)
        except RetrievalError as error:
            raise Refused(400, str(error)) from error
        except Exception as error:
            # A failure of the index is reported to this request only; the server continues.
            logging.exception('open failed')
            raise Refused(500, f'the index failed: {type(error).__name__}') from error
        return [None if page is None else dataclasses.asdict(page) for page in opened]


async def _while_connected(request: Request, answering: Coroutine[Any, Any, list]) -> list:
    """Returns what a coroutine returns; cancels it and raises Refused if the client disconnects before.

    Args:
      request: a request whose body was read.
      answering: the coroutine.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())['type'] != 'http.disconnect':
            pass

    task = asyncio.ensure_future(answering)
    left = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(_CLIENT_LEFT, 'the client has left')
        return task.result()
    finally:
        # Also if the server cancels this request.
        task.cancel()
        left.cancel()


def _json_object(body: bytes, key: str) -> dict[str, Any]:
    """Returns the JSON object of a body; errors name the key that it must have."""
    try:
        return json_text.parse_object(body)
    except json_text.Unusable as error:
        raise Refused(400, f'the body is no JSON object with "{key}": {error}') from error


def _texts(fields: dict[str, Any], key: str, noun: str, limits: Limits) -> list[str]:
    """Returns the list of texts under a key of the body; `noun` names one text in errors. Raises Refused."""
    texts = fields.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refused(400, f'"{key}" is not a list of strings')
    # 413 tells a client to send smaller requests.
    if len(texts) > limits.queries:
        raise Refused(413, f'{len(texts)} {key}; at most {limits.queries} at a time')
    for row, text in enumerate(texts):
        if len(text) > limits.query_characters:
            raise Refused(400, f'{noun} {row} is longer than {limits.query_characters} characters')
        # JSON can contain lone surrogates, but encoders cannot convert them to UTF-8.
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused(
                400, f'{noun} {row + 1} has a lone surrogate (half a character)'
            ) from None
    return texts


def _number(fields: dict[str, Any], key: str, default: int, maximum: int) -> int:
    """Returns the whole number from 1 to `maximum` under a key of the body; `default` if it is absent or null.

    Raises:
      Refused: the value is something else, or the default exceeds the maximum.
    """
    number = fields.get(key)
    if number is None:
        number = default
    if not _is_number(number) or number > maximum:
        raise Refused(400, f'"{key}" must be a whole number from 1 to {maximum}')
    return number


def _page_numbers(fields: dict[str, Any], count: int) -> list[int]:
    """Returns the page number of each of `count` references of an /open body; raises Refused."""
    pages = fields.get('page')
    if pages is None:
        # Most requests open the first page.
        return [1] * count
    is_list = isinstance(pages, list) and len(pages) == count
    if not is_list or not all(map(_is_number, pages)):
        raise Refused(400, f'"page" must be a list of {count} whole numbers from 1')
    return pages


def _is_number(value: Any) -> bool:
    """Returns whether a JSON value is a whole number from 1; `true` is not one, although bool is a subclass of int."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def uvicorn_server(app: App, **options: Any) -> uvicorn.Server:
    """Returns the HTTP server of an application; `options` are further settings of `uvicorn.Config`."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings: dict[str, Any] = {
        # Each connection is a file; the index and the requests need some too.
        'limit_concurrency': max(1, min(app.limits.connections, most_files - _OTHER_FILES)),
        'timeout_graceful_shutdown': _SHUTDOWN_SECONDS,
        'log_level': 'warning',
        'access_log': False,
    }
    return uvicorn.Server(uvicorn.Config(app.asgi, **(settings | options)))


def serve(load: Callable[[], tuple[Index, str]], host: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM, then finishes the requests it has accepted.

    Args:
      load: returns (index, its fingerprint).
      host: address to listen on.
      port: 0 chooses a free one, which is logged.

    Raises:
      RetrievalError: the port cannot be listened on.
      Exception: whatever `load` raised.
    """
    app = App(load, Limits())
    # Only IPv6 addresses contain colons.
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    listener = socket.socket(family)
    # Without this option a restart fails for a minute, while old connections time out.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # From now on connections wait instead of being refused.
        listener.listen(_BACKLOG)
    except OSError as error:
        raise RetrievalError(
            f'{host}:{port}: cannot listen there ({error.strerror}); choose another --port'
        ) from error
    app.is_local = host in loopback.NAMES
    logging.info('listening on http://%s:%d', *listener.getsockname()[:2])
    server = uvicorn_server(app)
    # A signal and a failure end the server in the same way.
    app.stop = lambda: setattr(server, 'should_exit', True)
    server.run(sockets=[listener])
    if app.failure:
        raise app.failure


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    show_messages()
    one_line(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog='zeroplay serve',
        description=__doc__,
    )
    add = parser.add_argument
    add('--index', type=pathlib.Path, required=True, help='folder that zeroplay index wrote')
    add('--encoder', help='checkpoint folder, if it has moved since the build')
    add('--host', default='127.0.0.1', help='address to listen on; 0.0.0.0 opens it to the network')
    add(
        '--port',
        type=number_type(int, 0, 65_535),
        default=8000,
        help='0: any free one, named in the log',
    )
    return parser


def _run(args: argparse.Namespace) -> None:
    """Serves the index that the arguments name, until a signal."""
    # Before the port is opened.
    folder.check_encoder_flag(args.index, args.encoder)

    def load() -> tuple[Index, str]:
        index = folder.open_index(args.index, encoder_folder=args.encoder)
        # Compiles the programs, and fails here rather than at the first request.
        index.search(['ready'], 1)
        return index, folder.fingerprint(args.index)

    serve(load, args.host, args.port)


if __name__ == '__main__':
    main()
