"""Tools of MCP servers: which servers (`servers`), their tools (`tools`), connections to them (`session`)."""

from zeroplay_jax.extras.mcp.servers import check_program, read_servers
from zeroplay_jax.extras.mcp.tools import list_tools

__all__ = ['check_program', 'list_tools', 'read_servers']
