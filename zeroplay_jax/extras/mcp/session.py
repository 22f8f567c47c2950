"""Sessions with an MCP server: opened once, kept open, and opened again after the server's death.

All sessions of a process live in the event loop of its requests. A server over HTTP gets a session per call
in progress, so that a reply that breaks its connection fails one call alone. A server that is a process gets one:
its pipe carries many calls at a time, and a second process would have another state.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, TypeVar

import httpx2
import mcp
import mcp_types
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from zeroplay_jax.extras.mcp.servers import McpServer
from zeroplay_jax.retrieval import web

_MAX_TOOLS = 10_000
_SSE_SECONDS = 2.0
# Kinds of blocks of a result.
_KINDS = 'text image audio resource resource_link'.split()
# The library gives a process four seconds to end.
_CLOSE_SECONDS = 6.0
# Calls in a row without a reply in time, after which the process of a server is started again.
_MOST_UNANSWERED = 2
# The library logs every bad message of a server, with its content; a failed call says what matters.
for _name in ('mcp', 'client'):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)

_Value = TypeVar('_Value')


class _NotSent(Exception):
    """The server cannot have seen the request."""


class Connection:
    """The sessions of one server. Its methods may be called from many threads.

    Args:
      server: with variables filled in.
    """

    def __init__(self, server: McpServer):
        self.server = server
        self._is_process = bool(server.command)
        self._begin()
        atexit.register(self.close)
        # The sessions of a process that is forked stay its own.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._idle: list[_Session] = []
        # Calls in a row that got no reply in time.
        self._unanswered = 0
        self._opening = asyncio.Lock()

    def list_tools(self, seconds: float) -> list[mcp_types.Tool]:
        """Returns the tools of the server; raises whatever the library does."""
        return _result_of(self._list_tools(), seconds)

    def call(
        self, tool: str, arguments: dict[str, Any], seconds: float
    ) -> mcp_types.CallToolResult:
        """Returns the result of one call.

        Raises:
          TimeoutError: no result within that many seconds.
          Exception: anything else; the call may have been run.
        """
        return _result_of(self._call(tool, arguments), seconds)

    def close(self) -> None:
        """Ends the sessions and the server's process."""
        with contextlib.suppress(Exception):
            _result_of(self._close_all(), _CLOSE_SECONDS)

    async def _close_all(self) -> None:
        sessions, self._idle = self._idle, []
        await asyncio.gather(*(session.close() for session in sessions))

    async def _list_tools(self) -> list[mcp_types.Tool]:
        session = await self._take()
        self._give_back(session)
        return session.tools

    async def _call(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        try:
            return await self._call_once(tool, arguments)
        except _NotSent:
            # A server that was started again does not know its earlier sessions.
            return await self._call_once(tool, arguments)

    async def _call_once(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        session = await self._take()
        try:
            reply = await session.run(session.call(tool, arguments))
        except BaseException as error:
            is_late = isinstance(error, asyncio.CancelledError)
            self._unanswered = self._unanswered + 1 if is_late else 0
            # A session over HTTP may still get the late reply. That of a process goes on with its other calls, unless
            # it answers none: then the process is started again.
            hangs = self._unanswered >= _MOST_UNANSWERED
            if not self._is_process or session.has_ended or hangs:
                self._unanswered = 0
                self._idle = [other for other in self._idle if other is not session]
                session.abandon()
            raise
        self._unanswered = 0
        self._give_back(session)
        return reply

    async def _take(self) -> _Session:
        """Returns an open session; raises the cause if none can be opened."""
        if not self._is_process:
            while self._idle:
                session = self._idle.pop()
                if not session.has_ended:
                    return session
            return await _Session.opened(self.server)
        async with self._opening:
            self._idle = [session for session in self._idle if not session.has_ended]
            if not self._idle:
                self._idle.append(await _Session.opened(self.server))
            return self._idle[0]

    def _give_back(self, session: _Session) -> None:
        if not self._is_process and not session.has_ended:
            self._idle.append(session)


_connections: dict[str, Connection] = {}


def connection_to(server: McpServer) -> Connection:
    """Returns the connection of this process to a server: training and evaluation use one, with one state."""
    # All fields, also secrets: another key is another server.
    key = repr(server)
    if key not in _connections:
        _connections[key] = Connection(server)
    return _connections[key]


def _result_of(coroutine: Coroutine[Any, Any, _Value], seconds: float) -> _Value:
    """Runs a coroutine in the loop of all sessions and returns its result."""
    return web.start(asyncio.wait_for(coroutine, seconds)).result()


class _Session:
    """One session. A task owns it from its beginning to its end, as the library demands.

    Attributes:
      tools: what the server listed when the session began.
    """

    def __init__(self, server: McpServer):
        self._server = server
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._is_closed = False
        self._client: mcp.Client
        self.tools: list[mcp_types.Tool] = []
        self._owner = asyncio.create_task(self._own())

    @classmethod
    async def opened(cls, server: McpServer) -> _Session:
        session = cls(server)
        try:
            await session.run(session._ready.wait())
        except BaseException:
            session.abandon()
            raise
        return session

    @property
    def has_ended(self) -> bool:
        return self._is_closed or self._owner.done()

    async def _own(self) -> None:
        async with mcp.Client(_transport(self._server), cache=None) as self._client:
            self.tools = await self._listed()
            self._ready.set()
            await self._closing.wait()

    async def _listed(self) -> list[mcp_types.Tool]:
        """Returns the tools of the server."""
        # Servers may list their tools on several pages, linked by cursors.
        page = await self._client.list_tools()
        tools = list(page.tools)
        # An empty cursor is one too.
        while page.next_cursor is not None:
            cursor = page.next_cursor
            page = await self._client.list_tools(cursor=cursor)
            # Some servers mean the end by it, and then begin again.
            if not cursor and page.tools == tools[: len(page.tools)]:
                break
            tools += page.tools
            if len(tools) > _MAX_TOOLS or not page.tools:
                raise ValueError(f'its list of tools has no end ({len(tools):,} so far)')
        return tools

    async def run(self, request: Awaitable[_Value]) -> _Value:
        """Returns the result of a request, or raises why the session ended meanwhile."""
        pending = asyncio.ensure_future(request)
        error = None
        try:
            await asyncio.wait({pending, self._owner}, return_when=asyncio.FIRST_COMPLETED)
            error = pending.exception() if pending.done() else None
            if isinstance(error, MCPError):
                self._is_closed |= error.code == mcp_types.CONNECTION_CLOSED
                # "Connection closed" says less than the session, which ends too, at the latest when its process has.
                await asyncio.wait({self._owner}, timeout=3.0 if self._is_closed else 0.2)
            elif pending.done():
                return pending.result()
        finally:
            pending.cancel()
        if self._owner.done() and not self._owner.cancelled() and self._owner.exception():
            cause = first_cause(self._owner.exception())
            raise _NotSent(str(cause)) if isinstance(cause, httpx2.ConnectError) else cause
        raise error or ConnectionError('the session ended')

    async def call(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        parameters = mcp_types.CallToolRequestParams(name=tool, arguments=arguments)
        request = mcp_types.CallToolRequest(params=parameters)
        # Not `call_tool`, which checks results against a schema of the server, and lists its tools for that.
        try:
            return await self._client.session.send_request(request, mcp_types.CallToolResult)
        except MCPError as error:
            if error.code != mcp_types.INVALID_PARAMS:
                raise
            # The server's own message tells the policy how to correct the call.
            text = mcp_types.TextContent(type='text', text=error.error.message)
            return mcp_types.CallToolResult(content=[text], is_error=True)

    def abandon(self) -> None:
        """Ends the session in the background."""
        self._closing.set()
        if not self._ready.is_set():
            self._owner.cancel()
        # Without this line asyncio would log an exception that nobody asks for.
        self._owner.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def close(self) -> None:
        """Ends the session and waits for it."""
        self.abandon()
        await asyncio.wait({self._owner})


def first_cause(error: BaseException | None) -> BaseException:
    """Returns the first error in groups of task groups; that a connection was closed only if there is no other."""
    causes: list[BaseException] = []
    pending = [error]
    while pending:
        cause = pending.pop()
        if isinstance(cause, BaseExceptionGroup):
            pending += reversed(cause.exceptions)
        elif cause is not None:
            causes.append(cause)
    causes.sort(key=lambda cause: isinstance(cause, MCPError))
    return causes[0] if causes else ConnectionError('the session ended')


@contextlib.asynccontextmanager
async def _transport(server: McpServer) -> AsyncIterator[tuple[Any, Any]]:
    """Yields the streams of a server, of which a process is started and ended."""
    async with contextlib.AsyncExitStack() as stack:
        errors = None
        if server.command:
            file = tempfile.TemporaryFile('w+', encoding='utf-8', errors='replace')
            errors = stack.enter_context(file)
            # It gets PATH, HOME and the like: secrets of this process are none of its business.
            parameters = StdioServerParameters(
                command=server.command, args=server.args, env=server.env, cwd=server.cwd
            )
            transport = stdio_client(parameters, errors)
        else:
            client = await stack.enter_async_context(web.open_client(server.headers, server.url))
            client.event_hooks['response'].append(_check_session)
            transport = streamable_http_client(
                server.url, http_client=client, max_sse_event_size=web.MAX_REPLY_BYTES
            )
        read_stream, write_stream = await stack.enter_async_context(transport)
        yield _Messages(read_stream, errors), write_stream


async def _check_session(response: httpx2.Response) -> None:
    """Raises _NotSent for a reply with which a server says that it does not know the session, whatever its body."""
    if response.status_code == 404 and 'Mcp-Session-Id' in response.request.headers:
        raise _NotSent('the server has ended the session')


def speaks_sse(server: McpServer) -> bool:
    """Returns whether a server speaks the earlier protocol, whose streams begin with an event 'endpoint'."""
    try:
        return 'event: endpoint' in _result_of(_first_event(server), _SSE_SECONDS)
    except Exception:
        return False


async def _first_event(server: McpServer) -> str:
    headers = {**server.headers, 'Accept': 'text/event-stream'}
    async with (
        web.open_client(headers, server.url) as client,
        client.stream('GET', server.url) as response,
    ):
        return await anext(response.aiter_text(), '')


class _Messages:
    """The messages of a server. Texts name blocks of other kinds in results, which the library would refuse.

    Args:
      stream: of the library.
      errors: file that a process writes its errors to; None: a server over HTTP.
    """

    def __init__(self, stream: Any, errors: Any):
        self._stream = stream
        self._errors = errors

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        """Returns the next message; raises ConnectionError for the end of a process, and for half a message."""
        try:
            item = await anext(self._stream)
        except StopAsyncIteration:
            if self._errors is None:
                raise
            self._errors.seek(0)
            lines = self._errors.read().strip('\0 \n').splitlines()
            raise ConnectionError(': '.join(['its process ended', *lines[-1:]])) from None
        if self._errors:
            # Errors before a reply are not those with which the process ends.
            self._errors.truncate(0)
        # Some servers print greetings. What looks like a reply would leave its call to the time limit.
        if isinstance(item, ValueError) and _input_of(item).startswith('{'):
            raise ConnectionError('a reply that is no JSON-RPC message')
        result = getattr(getattr(item, 'message', None), 'result', None)
        if isinstance(result, dict) and isinstance(result.get('content'), list):
            result['content'] = [_readable_block(block) for block in result['content']]
        return item

    async def __aenter__(self) -> _Messages:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stream.__aexit__(*error)


def _input_of(error: Any) -> str:
    """Returns the line that the library could not read, of a pydantic error."""
    return str(error.errors()[0]['input']).lstrip()


def _readable_block(block: Any) -> Any:
    kind = block.get('type') if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind in _KINDS:
        return block
    return {'type': 'text', 'text': f'[{kind[:40]}, not shown]'}
