"""`mcp`: the tools of MCP servers, over streamable HTTP or as processes (optional dependency: the `mcp` package).

Sessions are shared by all rollouts, so a server that needs a state per rollout has to take an identifier as an
argument. What a server sends is cut before it is kept: descriptions, and the texts of results.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from zeroplay_jax.extras.mcp.servers import McpServer, chosen_names, read_servers
from zeroplay_jax.retrieval import json_text, masking
from zeroplay_jax.tools.base import MAX_RESULT_CHARACTERS, Invocation, Tool, ToolResult
from zeroplay_jax.types import Json, UserError

_MAX_DESCRIPTION = 300  # characters; every prompt of a run has them
_MAX_NAME = 120  # characters of a name or an address within a result
# Behind the host of an address; some servers have their key there.
_PATH = re.compile(r'(https?://[^\s/?#]+)[/?#]\S*?(?=[;,.)]*(?:\s|$))')
# Keywords whose values are data, in which 'description' is an ordinary name.
_DATA = ('enum', 'const', 'examples', 'default')


@dataclasses.dataclass(eq=False)
class McpTool(Tool):
    """One tool of a server.

    Args:
      connection: to its server (`session.Connection`).
      server_name: name of the tool at the server.
      name: name of the tool in the run.
      description, parameters: as the server lists them, cut.
      call_seconds: time limit of a call; also holds with `rollout.deterministic`, because a server
        may stop answering forever.
    """

    # Every call is a request of its own, so a slow one must not delay others by sharing a batch with them.
    max_batch = 1
    # Calls at the same time: a decode chunk can end with hundreds of calls.
    workers = 16

    connection: Any
    server_name: str
    name: str
    description: str
    parameters: Json
    call_seconds: float

    def check(self) -> None:
        """Checks the tool as `Tool.check` does; the message names the server."""
        try:
            super().check()
        except ValueError as error:
            raise ValueError(
                f'{error}; {self.connection.server.where}: leave it out with "tools", or give another name with '
                '"rename"'
            ) from None

    def run(self, calls: Sequence[Invocation]) -> list[ToolResult]:
        """Returns the server's results; runs in a worker thread."""
        return [self._call(dict(call.arguments)) for call in calls]

    def _call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns the result of one call, with an error code after any failure."""
        server = self.connection.server
        # Nothing is raised, because `run` would then be repeated, and MCP calls may have side effects.
        try:
            reply = self.connection.call(self.server_name, arguments, self.call_seconds)
        except TimeoutError:
            self.failure_log.add(f'{server.where}: no result within {self.call_seconds:g} s')
            return ToolResult(error='timeout')
        except Exception as error:
            self.failure_log.add(f'{server.where}: {reason_of(server, error)}')
            return ToolResult(error='failed')
        error_code = 'tool_error' if reply.is_error else None
        return ToolResult(text=masking.hide_known(text_of(reply), server.secrets), error=error_code)


def list_tools(servers: str, call_seconds: float) -> list[McpTool]:
    """Asks servers for their tools and returns the chosen ones, in the order of the servers.

    Args:
      servers: `config.tools.mcp_servers`: a file or an address.
      call_seconds: time limit of this request, and of every later call of the tools.

    Raises:
      UserError: the `mcp` package is missing, the file cannot be used, a server does not answer, or names collide.
    """
    try:
        import mcp  # noqa: F401

        import zeroplay_jax.extras.mcp.session as session
    except ImportError:
        raise UserError(
            "config.tools.names has 'mcp', whose client is not installed; pip install mcp"
        ) from None
    tools: dict[str, McpTool] = {}
    for unexpanded in read_servers(servers):
        server = unexpanded.expanded(os.environ)
        connection = session.connection_to(server)
        try:
            listed = connection.list_tools(call_seconds)
        except Exception as error:
            raise UserError(_no_answer(server, error, call_seconds)) from None
        chosen = chosen_names(server, [specification.name for specification in listed])
        for specification in listed:
            name = chosen.get(specification.name)
            if name is None:
                continue
            if name in tools:
                raise UserError(
                    f'{server.where}: its tool {name!r} has the name of a tool of '
                    f'{tools[name].connection.server.where}; '
                    'give "prefix" or "rename"'
                )
            description = _one_line(specification.description or specification.title)
            parameters = _cut_descriptions(specification.input_schema)
            tool = McpTool(
                connection, specification.name, name, description, parameters, call_seconds
            )
            tools[name] = tool
    return list(tools.values())


def _no_answer(server: McpServer, error: Exception, seconds: float) -> str:
    """Returns one line about a server that did not list its tools."""
    import zeroplay_jax.extras.mcp.session as session

    if server.url and session.speaks_sse(server):
        return f'{server.where}: speaks SSE, an earlier protocol; give its address of streamable HTTP (often …/mcp)'
    if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
        cause = f'{error.strerror}: {error.filename}'
        return f'{server.where}: cannot be started ({cause}); install it or correct "command"'
    if isinstance(error, TimeoutError):
        reason = f'nothing within config.tools.mcp_seconds={seconds:g}'
    else:
        reason = reason_of(server, error)
    fix = 'correct its "command"' if server.command else 'start it or correct the address'
    if server.command and isinstance(error, TimeoutError):
        # The usual cause is a first download by npx or uvx.
        fix = 'run its "command" once by hand, or raise config.tools.mcp_seconds'
    return f'{server.where}: the MCP server does not answer ({reason}); {fix}'


def text_of(reply: Any) -> str:
    """Returns the text of a result, cut to `MAX_RESULT_CHARACTERS`.

    Args:
      reply: a result of the library with `content` and `structured_content`.

    Returns:
      Its blocks, joined by line feeds: texts, the texts of resources, links, and a placeholder for each picture,
      sound or binary resource. Behind them the structured content as JSON, unless the texts say it already.
    """
    blocks = list(_block_texts(reply.content))
    texts = [block.text for block in reply.content if block.type == 'text' and block.text.strip()]
    if reply.structured_content is not None and not _says(texts, reply.structured_content):
        blocks.append(json.dumps(reply.structured_content, ensure_ascii=False))
    text = '\n'.join(block[:MAX_RESULT_CHARACTERS] for block in blocks)
    return text[:MAX_RESULT_CHARACTERS] if text.strip() else 'The tool returned nothing.'


def _says(texts: Sequence[str], structured: Any) -> bool:
    """Returns whether the texts of a result are its structured content: as JSON, or an entry of a list each."""
    values = [structured]
    # The forms in which servers wrap a result that is no object.
    if isinstance(structured, dict) and len(structured) == 1:
        ((name, value),) = structured.items()
        if name == 'result' or isinstance(value, list):
            values.append(value)
    for value in values:
        if len(texts) == 1 and _is_text_of(texts[0], value):
            return True
        if isinstance(value, list) and len(texts) == len(value):
            if all(_is_text_of(text, entry) for text, entry in zip(texts, value, strict=True)):
                return True
    return False


def _is_text_of(text: str, value: Any) -> bool:
    """Returns whether a text is a value, or the value as JSON."""
    if text == str(value):
        return True
    try:
        return json_text.parse(text.encode()) == value
    except json_text.Unusable:
        return False


def _block_texts(blocks: Sequence[Any]) -> Iterator[str]:
    """Yields the text of each block of a result."""
    for block in blocks:
        if block.type == 'text':
            yield block.text
        elif block.type == 'resource' and hasattr(block.resource, 'text'):
            yield f'[resource {_short(block.resource.uri)}]\n{block.resource.text}'
        elif block.type == 'resource':
            kind = _short(block.resource.mime_type or 'binary')
            yield f'[resource {_short(block.resource.uri)} ({kind}), not shown]'
        elif block.type == 'resource_link':
            described = f': {_one_line(block.description)}' if block.description else ''
            yield f'[link {_short(block.name)} {_short(block.uri)}{described}]'
        else:
            # A picture or a sound, which a policy of text cannot read.
            yield f'[{block.type} ({_short(getattr(block, "mime_type", "unknown"))}), not shown]'


def _short(text: str) -> str:
    return ' '.join(str(text).split())[:_MAX_NAME]


def _one_line(description: str | None) -> str:
    """Returns a description on one line, cut to `_MAX_DESCRIPTION` characters."""
    # Only the beginning is split into words: a description may have a million characters.
    words = (description or 'no description')[: 4 * _MAX_DESCRIPTION].split()
    return ' '.join(words)[:_MAX_DESCRIPTION]


def _cut_descriptions(schema: Any) -> Any:
    """Returns a schema with its descriptions on one line, cut to `_MAX_DESCRIPTION` characters."""
    if isinstance(schema, list):
        return [_cut_descriptions(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    cut = {}
    for key, value in schema.items():
        if key in ('description', 'title', '$comment') and isinstance(value, str):
            value = _one_line(value)
        elif key not in _DATA:
            value = _cut_descriptions(value)
        cut[key] = value
    return cut


def reason_of(server: McpServer, error: BaseException) -> str:
    """Returns the first line of the cause of an error, without secrets."""
    import zeroplay_jax.extras.mcp.session as session

    lines = str(session.first_cause(error)).strip().splitlines()
    # Some exceptions have no text.
    if not lines:
        return type(error).__name__
    line = lines[0]
    if 'validation error' in line and len(lines) > 2:
        line = f'not of the protocol at {lines[1]}: {lines[2].partition(" [type=")[0].strip()}'
    line = _PATH.sub(r'\1/…', masking.hide(line))
    return masking.hide_known(line, server.secrets)[:300]
