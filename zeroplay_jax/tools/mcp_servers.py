"""Reads which MCP servers a run uses: an address, or a file in the form that other MCP clients have.

    {"mcpServers": {
      "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/data"],
                "tools": ["read_text_file"], "rename": {"read_text_file": "read"}},
      "web": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer ${WEB_KEY}"}, "prefix": "web_"}}}

The file is read at the start of a process and stays outside of the run's records: it may hold secrets.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.settings.errors import ConfigError
from zeroplay_jax.types import Json

FIELD = 'config.tools.mcp_servers'
_KEYS = ('command', 'args', 'env', 'cwd', 'url', 'headers', 'tools', 'rename', 'prefix')
# Keys of other clients about their own windows and questions.
_IGNORED = ('type', 'transport', 'disabled', 'enabled', 'autoApprove', 'alwaysAllow', 'description')
_VARIABLE = re.compile(r'\$\{([^}]*)\}')
_ENVIRONMENT = re.compile(r'(?:env:)?([A-Za-z_]\w*)(?::-(.*))?', re.DOTALL)
_MIN_SECRET = 8  # characters; shorter values are words such as 'true'


@dataclasses.dataclass(frozen=True)
class McpServer:
    """How one server is reached, and which of its tools are used under which names.

    Attributes:
      name: in the file; 'mcp' for an address.
      where: what error messages call it.
      command, args, env, cwd: of a process that speaks over its standard input and output; '' for an address.
      url, headers: of a server with streamable HTTP; '' for a process.
      tools: names of the used tools; None: all.
      rename: name at the server → name in the run.
      prefix: begins the names of the other tools.
    """

    name: str
    where: str
    command: str = ''
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str | None = None
    url: str = ''
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tools: tuple[str, ...] | None = None
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = ''
    secrets: tuple[str, ...] = ()

    def without_secrets(self, text: str) -> str:
        """Returns a text of the server without the values of its headers and environment."""
        for secret in self.secrets:
            text = text.replace(secret, '***')
        return text

    def expanded(self, environment: Mapping[str, str]) -> McpServer:
        """Returns the server with ${NAME}, ${env:NAME} and ${NAME:-default} replaced.

        Raises:
          ConfigError: a variable is not set, or of another kind.
        """

        values: set[str] = set()

        def expand(text: str) -> str:
            return _VARIABLE.sub(lambda match: replacement(match[1]), text)

        def replacement(expression: str) -> str:
            match = _ENVIRONMENT.fullmatch(expression)
            if match is None:
                raise ConfigError(
                    f'{self.where}: ${{{expression}}} cannot be filled in; use environment variables, as ${{NAME}}'
                )
            value = environment.get(match[1], match[2])
            if value is None:
                raise ConfigError(
                    f'{self.where}: the environment variable {match[1]} is not set; export it'
                )
            values.add(value)
            return value

        env = {name: expand(value) for name, value in self.env.items()}
        headers = {name: expand(value) for name, value in self.headers.items()}
        server = dataclasses.replace(
            self,
            command=expand(self.command),
            args=tuple(expand(argument) for argument in self.args),
            env=env,
            cwd=None if self.cwd is None else expand(self.cwd),
            url=expand(self.url),
            headers=headers,
        )
        if server.url and not server.url.startswith(('http://', 'https://')):
            # The address may hold a key.
            raise ConfigError(f'{self.where}: "url" is not a web address such as https://host/mcp')
        values |= {*env.values(), *headers.values()}
        # The longest first: one may be part of another, as the key of 'Bearer key'.
        secrets = sorted((value for value in values if len(value) >= _MIN_SECRET), key=len)
        return dataclasses.replace(server, secrets=tuple(reversed(secrets)))


def read_servers(value: str) -> list[McpServer]:
    """Returns the servers of `config.tools.mcp_servers`: an address, or the path of a file.

    Raises:
      ConfigError: the file cannot be read or says something else.
    """
    if '://' in value:
        return [McpServer('mcp', f'{FIELD}={value}', url=value)]
    path = pathlib.Path(value).expanduser()
    try:
        content: Any = json_text.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f'{FIELD}={value}: no such file ({error.strerror}); give a JSON file with "mcpServers", or the '
            'address of one server, such as http://127.0.0.1:8000/mcp'
        ) from None
    except json_text.Unusable as error:
        raise ConfigError(f'{FIELD}={value}: not a JSON file ({error})') from None
    # Some editors call the same table "servers".
    table = None
    if isinstance(content, dict):
        table = content.get('mcpServers', content.get('servers'))
    if not isinstance(table, dict) or not table:
        raise ConfigError(
            f'{FIELD}={value}: has no servers; its form is {{"mcpServers": {{"name": {{"command": …, '
            '"args": […]} or {"url": …}}}'
        )
    servers = []
    for name, entry in table.items():
        where = f'{value}: server {name!r}'
        if not isinstance(entry, dict):
            raise ConfigError(f'{where}: must be an object with "command" or "url"')
        if entry.get('disabled') is not True and entry.get('enabled') is not False:
            servers.append(_server(name, where, entry))
    if not servers:
        raise ConfigError(f'{FIELD}={value}: all of its servers are disabled')
    return servers


def _server(name: str, where: str, entry: Json) -> McpServer:
    """Returns the server of one entry of the file."""
    kind = str(entry.get('type', entry.get('transport', ''))).lower()
    if kind == 'sse':
        raise ConfigError(
            f'{where}: speaks SSE, an earlier protocol; give its address of streamable HTTP (often …/mcp)'
        )
    if ('command' in entry) == ('url' in entry):
        raise ConfigError(f'{where}: needs either "command" (a process) or "url" (streamable HTTP)')
    unknown = [key for key in entry if key not in (*_KEYS, *_IGNORED)]
    if unknown:
        logging.warning('%s: not used: %s', where, ', '.join(map(repr, unknown)))
    fields: dict[str, Any] = {}
    for key in ('command', 'url', 'prefix', 'cwd'):
        if key in entry:
            fields[key] = _checked(where, key, entry[key], 'a text', isinstance(entry[key], str))
    for key in ('args', 'tools'):
        if entry.get(key) is not None:
            is_list = isinstance(entry[key], list) and all(isinstance(i, str) for i in entry[key])
            fields[key] = tuple(_checked(where, key, entry[key], 'a list of texts', is_list))
    for key in ('env', 'headers', 'rename'):
        if entry.get(key) is not None:
            value = entry[key]
            is_map = isinstance(value, dict) and all(isinstance(i, str) for i in value.values())
            fields[key] = _checked(where, key, value, 'an object of texts', is_map)
    return McpServer(name, where, **fields)


def _checked(where: str, key: str, value: Any, form: str, is_valid: bool) -> Any:
    if not is_valid:
        # The value may be a secret.
        raise ConfigError(f'{where}: {key!r} must be {form}, not {type(value).__name__}')
    return value


def chosen_names(server: McpServer, listed: list[str]) -> dict[str, str]:
    """Returns {name at the server: name in the run} of the used tools, in the order of the server.

    Raises:
      ConfigError: the server lists none, a named tool is not there, or two get the same name.
    """
    if not listed:
        raise ConfigError(f'{server.where}: lists no tools; correct it or leave it out')
    for key, names in (('tools', server.tools or ()), ('rename', server.rename)):
        for name in names:
            if name not in listed:
                raise ConfigError(
                    f'{server.where}: {key!r} names {name!r}; it has {", ".join(listed)[:300]}'
                    f'{did_you_mean(name, listed)}'
                )
    chosen: dict[str, str] = {}
    for name in listed:
        if server.tools is not None and name not in server.tools:
            continue
        new_name = server.rename.get(name, _usable(server.prefix + name))
        for other, other_name in chosen.items():
            if other_name == new_name:
                raise ConfigError(
                    f'{server.where}: its tools {other!r} and {name!r} would both be called {new_name!r}; '
                    'give "rename" for one of them'
                )
        chosen[name] = new_name
    if not chosen:
        raise ConfigError(f'{server.where}: "tools" is empty; name some, or leave the server out')
    return chosen


def _usable(name: str) -> str:
    """Returns a name that can be a tag or the name of a function: other characters become '_'."""
    usable = re.sub(r'[^A-Za-z0-9_-]', '_', name)
    return usable if re.match(r'[A-Za-z_]', usable) else f'_{usable}'
