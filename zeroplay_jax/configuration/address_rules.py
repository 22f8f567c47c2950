"""Rules about the addresses of servers that a run calls."""

from __future__ import annotations

import urllib.parse

from ml_collections import ConfigDict

from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import fail
from zeroplay_jax.tools.mcp_servers import read_servers


def check_addresses(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses addresses in use that are no web addresses or hold a password."""
    if config.judge.kind == 'endpoint':
        fix = 'give one such as http://127.0.0.1:8001/v1'
        _check_address('judge.url', config.judge.url, fix, 'set OPENAI_API_KEY instead')
    if config.second_judge.kind == 'endpoint':
        fix = 'give one such as http://127.0.0.1:8002/v1'
        url = config.second_judge.url
        _check_address('second_judge.url', url, fix, 'set SECOND_JUDGE_API_KEY instead')
    if config.retrieval.kind == 'http':
        fix = 'give one such as http://127.0.0.1:8000'
        _check_address('retrieval.url', config.retrieval.url, fix, _TUNNEL)
    if 'mcp' in config.tools.names:
        servers = config.tools.mcp_servers
        # The keys of a server may be set on another machine only, so that they are not looked up here.
        if '://' not in servers:
            read_servers(servers)
        else:
            fix = 'give one such as http://127.0.0.1:8000/mcp'
            _check_address('tools.mcp_servers', servers, fix, 'give a file with headers instead')


_TUNNEL = 'give an address without one, such as that of a tunnel'


def _check_address(field: str, address: str, fix: str, password_fix: str) -> None:
    """Raises ConfigError for one address; the password is not in the error text.

    Args:
      field: name of the setting.
      fix: what to do about an address that cannot be read.
      password_fix: what to do about a password.
    """
    try:
        parts = urllib.parse.urlsplit(address)
        # `urlsplit` reads the port at the first access, and raises there.
        is_address = parts.scheme in ('http', 'https') and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        fail(field, address, 'not a web address', fix)
    # A run writes its config into its workdir and into its report.
    if '@' in parts.netloc:
        hidden = parts._replace(netloc='***@' + parts.netloc.rpartition('@')[2])
        fail(field, hidden.geturl(), 'the config must hold no password', password_fix)
