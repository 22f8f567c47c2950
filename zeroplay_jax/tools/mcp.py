"""`mcp`: every tool of an MCP server, over streamable HTTP (optional dependency: the `mcp` package).

Every batch of calls opens its own connection, so a server that was restarted is used again without
further ado, and a call that dies with the server fails alone. MCP sessions therefore keep nothing
between two batches; a server that needs a state per rollout takes an identifier as an argument.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from zeroplay_jax.tools.base import Invocation, Tool, ToolResult
from zeroplay_jax.types import Json, UserError

# The name becomes a tag or a function name in the text of a policy.
_USABLE_NAME = re.compile(r'[A-Za-z_][A-Za-z0-9_-]*')
_MAX_DESCRIPTION = 300  # characters


class McpTool(Tool):
    """One tool of a server.

    Args:
      url: address of the server's endpoint, such as http://127.0.0.1:8000/mcp.
      name, description, parameters: as the server lists them.
      call_seconds: time limit of a call; also holds with `rollout.deterministic`, because a server
        may stop answering for ever.
    """

    def __init__(
        self, url: str, name: str, description: str, parameters: Json, call_seconds: float
    ):
        self.name = name
        self.description = description
        self.parameters = parameters
        self._url = url
        self._call_seconds = call_seconds

    def run(self, calls: Sequence[Invocation]) -> list[ToolResult]:
        """Answers of the server; 'failed' for all calls where there is no connection."""
        arguments = [dict(call.arguments) for call in calls]
        # A worker thread has no event loop yet, so this one cannot disturb that of the rollouts.
        try:
            return asyncio.run(self._call_all(arguments))
        except Exception as error:
            # No connection. Raising would repeat every call, and MCP calls may have side effects.
            logging.warning('MCP server %s: %s', self._url, _reason(error))
            return [ToolResult(error='failed') for _ in calls]

    async def _call_all(self, arguments: Sequence[dict[str, Any]]) -> list[ToolResult]:
        import mcp  # optional dependency

        async with mcp.Client(self._url, read_timeout_seconds=self._call_seconds) as client:
            pending = [self._call(client, call_arguments) for call_arguments in arguments]
            # gather keeps the order of the calls, whatever the order of the answers.
            return list(await asyncio.gather(*pending))

    async def _call(self, client, arguments: dict[str, Any]) -> ToolResult:
        try:
            reply = await asyncio.wait_for(
                client.call_tool(self.name, arguments), self._call_seconds
            )
        except TimeoutError:
            return ToolResult(error='timeout')
        except Exception as error:
            logging.warning('MCP tool %s: %s', self.name, _reason(error))
            return ToolResult(error='failed')
        error_code = None
        if reply.is_error:
            error_code = 'tool_error'
        # The server's own error message tells the policy how to correct the call.
        return ToolResult(text=_text_of(reply), error=error_code)


def list_tools(url: str, call_seconds: float) -> list[McpTool]:
    """All tools of a server.

    Raises:
      UserError: the `mcp` package is missing, the server does not answer, or a name cannot be used.
    """
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise UserError(
            "config.tools.names has 'mcp', whose client is not installed; pip install mcp"
        ) from None
    try:
        specifications = asyncio.run(_list(url, call_seconds))
    except Exception as error:
        raise UserError(
            f'config.tools.mcp_url={url}: the MCP server does not answer ({_reason(error)}); start it '
            'or correct the address'
        ) from None
    tools = []
    for specification in specifications:
        # Refused, not renamed: the run's records would show a name that the server does not have.
        if not _USABLE_NAME.fullmatch(specification.name):
            raise UserError(
                f'config.tools.mcp_url={url}: the tool name {specification.name!r} cannot be written '
                'as a tag; rename it on the server (letters, digits, _ and -)'
            )
        tool = McpTool(
            url=url,
            name=specification.name,
            description=_one_line(specification.description),
            parameters=specification.input_schema,
            call_seconds=call_seconds,
        )
        tools.append(tool)
    return tools


async def _list(url: str, seconds: float) -> list[Any]:
    import mcp  # optional dependency

    async with mcp.Client(url, read_timeout_seconds=seconds) as client:
        # Servers may list their tools in several parts, linked by cursors.
        part = await asyncio.wait_for(client.list_tools(), seconds)
        tools: list[Any] = list(part.tools)
        while part.next_cursor:
            next_part = client.list_tools(cursor=part.next_cursor)
            part = await asyncio.wait_for(next_part, seconds)
            tools += part.tools
        return tools


def _text_of(reply: Any) -> str:
    """Text blocks of a result; structured content where there is no text."""
    texts = []
    for block in reply.content:
        # Other blocks are images and audio, which a text policy cannot read.
        if getattr(block, 'type', '') == 'text':
            texts.append(block.text)
    if not texts and reply.structured_content is not None:
        return json.dumps(reply.structured_content, ensure_ascii=False)
    return '\n'.join(texts)


def _one_line(description: str | None) -> str:
    # Every prompt of the run contains it: a server's whole manual would fill the context.
    words = (description or 'no description').split()
    return ' '.join(words)[:_MAX_DESCRIPTION]


def _reason(error: BaseException) -> str:
    # Task groups of the client wrap the cause, possibly several times.
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    lines = str(error).strip().splitlines()
    # Some exceptions, such as TimeoutError, have no text.
    if not lines:
        return type(error).__name__
    return lines[0]
