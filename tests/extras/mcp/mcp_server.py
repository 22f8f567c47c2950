"""A real MCP server for tests: python mcp_server.py PORT."""

import asyncio
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer('test', log_level='ERROR')


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers.

    And explains itself at length.
    """
    return str(a + b)


@server.tool()
async def wait(seconds: float) -> str:
    """Answers late."""
    await asyncio.sleep(seconds)
    return f'waited {seconds}'


if __name__ == '__main__':
    server.run('streamable-http', port=int(sys.argv[1]))
