"""A real MCP server for tests: python mcp_server.py PORT [FILE written when a call of `wait` begins]."""

import asyncio
import pathlib
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer('test', log_level='ERROR')


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers.

    And explains itself at length.
    """
    return str(a + b)


@server.tool()
def refuse(reason: str) -> str:
    """Always an error."""
    raise ToolError(f'refused: {reason}')


@server.tool()
async def wait(seconds: float) -> str:
    """Answers late."""
    for path in sys.argv[2:]:
        pathlib.Path(path).touch()
    await asyncio.sleep(seconds)
    return f'waited {seconds}'


if __name__ == '__main__':
    server.run('streamable-http', port=int(sys.argv[1]))
