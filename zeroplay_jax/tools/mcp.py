"""`mcp`: every tool of an MCP server, over streamable HTTP (optional dependency: the `mcp` package).

Every call opens its own connection, so a call that breaks its connection fails alone, and a server can be
restarted during a run. MCP sessions therefore keep no state between two calls; a server that needs a state
per rollout has to take an identifier as an argument.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Coroutine, Sequence
from typing import Any

from zeroplay_jax.tools.base import Invocation, Tool, ToolResult
from zeroplay_jax.types import Json, UserError

_MAX_DESCRIPTION = 300  # characters


class McpTool(Tool):
    """One tool of a server.

    Args:
      url: address of the server's endpoint, such as http://127.0.0.1:8000/mcp.
      name, description, parameters: as the server lists them.
      call_seconds: time limit of a call; also holds with `rollout.deterministic`, because a server
        may stop answering forever.
    """

    # Every call is a request of its own, so a slow one must not delay others by sharing a batch with them.
    max_batch = 1
    # Connections at the same time: a decode chunk can end with hundreds of calls.
    workers = 16

    def __init__(
        self, url: str, name: str, description: str, parameters: Json, call_seconds: float
    ):
        self.name = name
        self.description = description
        self.parameters = parameters
        self._url = url
        self._call_seconds = call_seconds

    def run(self, calls: Sequence[Invocation]) -> list[ToolResult]:
        """Returns the server's results; runs in a worker thread, which has no event loop of its own."""
        return asyncio.run(self._call_all([dict(call.arguments) for call in calls]))

    async def _call_all(self, arguments: Sequence[dict[str, Any]]) -> list[ToolResult]:
        pending = [self._call(call_arguments) for call_arguments in arguments]
        return list(await asyncio.gather(*pending))

    async def _call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns the result of one call, with an error code after any failure."""
        # Nothing is raised, because `run` would then be repeated, and MCP calls may have side effects.
        try:
            reply = await asyncio.wait_for(self._reply(arguments), self._call_seconds)
        except TimeoutError:
            self.failure_log.add(f'{self._url}: no result within {self._call_seconds:g} s')
            return ToolResult(error='timeout')
        except Exception as error:
            self.failure_log.add(f'{self._url}: {_reason(error)}')
            return ToolResult(error='failed')
        error_code = None
        if reply.is_error:
            error_code = 'tool_error'
        # The server's own error message tells the policy how to correct the call.
        return ToolResult(text=_text_of(reply), error=error_code)

    async def _reply(self, arguments: dict[str, Any]) -> Any:
        import mcp  # optional dependency

        # One connection per call, because a connection that breaks loses all calls on it.
        async with mcp.Client(self._url) as client:
            return await client.call_tool(self.name, arguments)


def list_tools(url: str, call_seconds: float) -> list[McpTool]:
    """Asks a server for its tools and returns all of them.

    Args:
      url: address of the server's endpoint.
      call_seconds: time limit of this request, and of every later call of the tools.

    Raises:
      UserError: the `mcp` package is missing, or the server does not answer.
    """
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise UserError(
            "config.tools.names has 'mcp', whose client is not installed; pip install mcp"
        ) from None
    try:
        specifications = _run_in_thread(_list(url, call_seconds))
    except Exception as error:
        raise UserError(
            f'config.tools.mcp_url={url}: the MCP server does not answer ({_reason(error)}); start it '
            'or correct the address'
        ) from None
    tools = []
    for specification in specifications:
        tool = McpTool(
            url=url,
            name=specification.name,
            description=_one_line(specification.description),
            parameters=specification.input_schema,
            call_seconds=call_seconds,
        )
        tools.append(tool)
    return tools


def _run_in_thread(coroutine: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    # The calling thread may already run an event loop, as in a notebook.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


async def _list(url: str, seconds: float) -> list[Any]:
    return await asyncio.wait_for(_all_pages(url), seconds)


async def _all_pages(url: str) -> list[Any]:
    """Returns the specifications of all tools of a server."""
    import mcp  # optional dependency

    async with mcp.Client(url) as client:
        # Servers may list their tools on several pages, linked by cursors.
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools


def _text_of(reply: Any) -> str:
    """Returns the text blocks of a result, joined by line feeds; its structured content as JSON if it has no text."""
    texts = []
    for block in reply.content:
        # Other blocks are images and audio, which a text policy cannot read.
        if getattr(block, 'type', '') == 'text':
            texts.append(block.text)
    if not texts and reply.structured_content is not None:
        return json.dumps(reply.structured_content, ensure_ascii=False)
    return '\n'.join(texts)


def _one_line(description: str | None) -> str:
    """Returns a description on one line, cut to `_MAX_DESCRIPTION` characters."""
    # Every prompt of the run contains the description, so a long manual would fill the context.
    words = (description or 'no description').split()
    return ' '.join(words)[:_MAX_DESCRIPTION]


def _reason(error: BaseException) -> str:
    """Returns the first line of the cause of an error."""
    # Task groups of the client wrap the cause, possibly several times.
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    lines = str(error).strip().splitlines()
    # Some exceptions, such as TimeoutError, have no text.
    if not lines:
        return type(error).__name__
    return lines[0]
