"""A transport to an MCP server that is a process: one JSON message a line, over its standard input and output.

The library has such a transport, without a limit on the length of a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import anyio
import mcp_types
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from zeroplay_jax.tools.mcp_servers import McpServer

_END_SECONDS = 1.0  # for a process to end by itself, and again after SIGTERM
_MAX_ERRORS = 2_000  # bytes of its standard error that are kept


def too_long(limit: int) -> str:
    """Returns what is said of a message that is longer than `limit` bytes."""
    return f'a reply of more than {limit // 2**20} MiB'


@contextlib.asynccontextmanager
async def process_transport(server: McpServer, limit: int) -> AsyncIterator[tuple[Any, Any]]:
    """Starts the process and yields its streams of messages; ends the process at the end.

    Args:
      limit: bytes of a message.

    Raises:
      OSError: the process cannot be started.
      ConnectionError: it ended, or its message is too long; in an exception group.
    """
    process = await asyncio.create_subprocess_exec(
        server.command,
        *server.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Secrets of this process are none of the server's business: it gets PATH, HOME and the like.
        env={**get_default_environment(), **server.env},
        cwd=server.cwd,
        limit=limit,
        # Ctrl-C ends the run, which ends the server after its last calls.
        start_new_session=True,
    )
    errors = bytearray()
    to_session, read_stream = anyio.create_memory_object_stream[Any](0)
    write_stream, from_session = anyio.create_memory_object_stream[Any](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read_errors, process, errors)
            tasks.start_soon(_read, process, to_session, limit, errors)
            tasks.start_soon(_write, process, from_session)
            yield read_stream, write_stream
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
            for stream in (to_session, read_stream, write_stream, from_session):
                await stream.aclose()


async def _read(
    process: asyncio.subprocess.Process, to_session: Any, limit: int, errors: bytearray
) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:
            raise ConnectionError(too_long(limit)) from None
        if not line:
            status = await process.wait()
            lines = errors.decode(errors='replace').strip().splitlines()
            last = f': {lines[-1]}' if lines else ''
            raise ConnectionError(f'its process ended with status {status}{last}')
        try:
            message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            # Some servers print greetings. What looks like a reply would leave its call to the time limit.
            if line.lstrip().startswith(b'{'):
                raise ConnectionError('a reply that is no JSON-RPC message') from None
            continue
        await to_session.send(SessionMessage(message))


async def _write(process: asyncio.subprocess.Process, from_session: Any) -> None:
    assert process.stdin is not None
    async for session_message in from_session:
        text = session_message.message.model_dump_json(by_alias=True, exclude_unset=True)
        process.stdin.write(f'{text}\n'.encode())
        # The reader says why a process ended.
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()


async def _read_errors(process: asyncio.subprocess.Process, errors: bytearray) -> None:
    assert process.stderr is not None
    while chunk := await process.stderr.read(65_536):
        errors += chunk
        del errors[:-_MAX_ERRORS]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closes the input of the process, which asks it to end, then ends it with all that it has started."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
    await process.wait()
