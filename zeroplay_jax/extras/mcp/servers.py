"""Reads which MCP servers a run uses: an address, or a file in the form that other MCP clients have.

    {"mcpServers": {
      "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/data"],
                "tools": ["read_text_file"], "rename": {"read_text_file": "read"}},
      "web": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer ${WEB_KEY}"}, "prefix": "web_"}}}

The file is read at the start of a process and stays outside of the run's records: it may hold secrets.
"""

from __future__ import annotations

import logging
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

import pydantic

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import json_text, masking
from zeroplay_jax.settings.kinds import ConfigError
from zeroplay_jax.types import Json

FIELD = 'config.tools.mcp_servers'
# Keys of other clients about their own windows and questions.
_IGNORED = 'type transport autoApprove alwaysAllow description'.split()
_LISTS_OF_TOOLS = (
    'exclude excludeTools excludedTools disabledTools disabled_tools include includeTools includedTools allowedTools '
    'allowed_tools enabledTools enabled_tools'
)
# Keys of other clients → what to write instead.
_UNSUPPORTED = {
    **dict.fromkeys(_LISTS_OF_TOOLS.split(), 'name the tools to use in "tools"'),
    'envFile': 'write its variables into "env"',
}
# Transport that an entry may name, in small letters without separators → the key that it belongs to.
_TRANSPORTS = {
    'stdio': 'command',
    'local': 'command',
    'http': 'url',
    'streamablehttp': 'url',
    'remote': 'url',
}
_VARIABLE = re.compile(r'\$\{([^}]*)\}')
_ENVIRONMENT = re.compile(r'(?:env:)?([A-Za-z_]\w*)(?::-(.*))?', re.DOTALL)


class McpServer(pydantic.BaseModel, frozen=True, strict=True):
    """How one server is reached, and which of its tools are used under which names.

    Attributes:
      name: in the file; 'mcp' for an address.
      where: what error messages call it.
      command, args, env, cwd: of a process that speaks over its standard input and output; '' for an address.
      url, headers: of a server with streamable HTTP; '' for a process.
      tools: names of the used tools; None: all.
      rename: name at the server → name in the run.
      prefix: begins the names of the other tools.
      disabled, enabled: whether it is used.
      secrets: values that no result and no log has (`masking.hide_known`).
    """

    name: str
    where: str
    command: str = ''
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str = ''
    headers: dict[str, str] = {}
    tools: list[str] | None = None
    rename: dict[str, str] = {}
    prefix: str = ''
    disabled: bool = False
    enabled: bool = True
    secrets: tuple[str, ...] = ()

    def expanded(self, environment: Mapping[str, str]) -> McpServer:
        """Returns the server with ${NAME}, ${env:NAME} and ${NAME:-default} replaced.

        Raises:
          ConfigError: a variable is not set, or of another kind.
        """
        read: dict[str, str] = {}

        def expand(value: Any) -> Any:
            if isinstance(value, list):
                return [expand(text) for text in value]
            if isinstance(value, dict):
                return {name: expand(text) for name, text in value.items()}
            return value and _VARIABLE.sub(replacement, value)

        def replacement(variable: re.Match[str]) -> str:
            match = _ENVIRONMENT.fullmatch(variable[1])
            if match is None:
                raise ConfigError(
                    f'{self.where}: {variable[0]} cannot be filled in; use environment variables, as ${{NAME}}'
                )
            text = environment.get(match[1], match[2])
            if text is None:
                raise ConfigError(
                    f'{self.where}: the environment variable {match[1]} is not set; export it'
                )
            read[match[1]] = text
            return text

        # Some addresses are a key as a whole, or end with one.
        url = expand(self.url)
        parts_of_url = [{'secret': text} for text in read.values()]
        texts = {name: expand(getattr(self, name)) for name in ('command', 'args', 'cwd')}
        env, headers = expand(self.env), expand(self.headers)
        for name, value in headers.items():
            if not value.isascii() or not value.isprintable():
                raise ConfigError(
                    f'{self.where}: the value of the header {name!r} has a character that is not printable ASCII; '
                    'correct it'
                )
        if url and not url.startswith(('http://', 'https://')):
            # The address may hold a key.
            raise ConfigError(f'{self.where}: "url" is not a web address such as https://host/mcp')
        if texts['cwd'] is not None:
            texts['cwd'] = os.path.expanduser(texts['cwd'])
            if not os.path.isdir(texts['cwd']):
                raise ConfigError(
                    f'{self.where}: "cwd" is {texts["cwd"]!r}, which is no folder; correct it'
                )
        secrets = masking.secrets_of(read, env, headers, *parts_of_url, address=url)
        changes = {**texts, 'url': url, 'env': env, 'headers': headers, 'secrets': secrets}
        return self.model_copy(update=changes)


def read_servers(value: str) -> list[McpServer]:
    """Returns the servers of `config.tools.mcp_servers`: an address, or the path of a file.

    Raises:
      ConfigError: the file cannot be read or says something else.
    """
    if '://' in value:
        return [McpServer(name='mcp', where=f'{FIELD}={masking.hide(value)}', url=value)]
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
        if 'mcpServers' in content and 'servers' in content:
            raise ConfigError(
                f'{FIELD}={value}: has "mcpServers" and "servers"; put all servers into "mcpServers"'
            )
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
        given = {key: entry[key] for key in entry if entry[key] is not None}
        if given.get('disabled') is not True and given.get('enabled') is not False:
            servers.append(_server(name, where, given))
    if not servers:
        raise ConfigError(f'{FIELD}={value}: all of its servers are disabled')
    return servers


def check_program(server: McpServer) -> None:
    """Raises ConfigError if there is no program of the "command" that a run would start."""
    program = server.command
    if os.path.dirname(program):
        # Relative to the folder in which the process starts.
        program = os.path.join(pathlib.Path(server.cwd or '').expanduser(), program)
    path = server.env.get('PATH')
    is_known = program and not _VARIABLE.search(f'{program}{path}')
    if is_known and shutil.which(program, path=path) is None:
        raise ConfigError(
            f'{server.where}: cannot be started (no such program: {server.command}); install it or correct "command"'
        )


def _server(name: str, where: str, entry: Json) -> McpServer:
    """Returns the server of one entry of the file."""
    if bool(entry.get('command')) == bool(entry.get('url')):
        given = ', '.join(map(repr, entry)) or 'nothing'
        raise ConfigError(
            f'{where}: needs either "command" (a process) or "url" (streamable HTTP); it has {given}'
        )
    _check_transport(where, entry)
    for key, fix in _UNSUPPORTED.items():
        if entry.get(key):
            raise ConfigError(f'{where}: {key!r} is not supported; {fix}')
    unknown = [key for key in entry if key not in (*McpServer.model_fields, *_IGNORED)]
    if unknown:
        logging.warning('%s: not used: %s', where, ', '.join(map(repr, unknown)))
    try:
        server = McpServer.model_validate({**entry, 'name': name, 'where': where})
    except pydantic.ValidationError as error:
        # Without the value, which may be a secret.
        problem = error.errors()[0]
        key = '.'.join(map(str, problem['loc']))
        raise ConfigError(f'{where}: {key!r}: {problem["msg"]}') from None
    # Another client's form of all tools.
    if server.tools == ['*']:
        server = server.model_copy(update={'tools': None})
    unused = [name for name in server.rename if name not in (server.tools or server.rename)]
    if unused:
        raise ConfigError(
            f'{where}: "rename" names {unused[0]!r}, which "tools" leaves out; add it there'
        )
    return server


def _check_transport(where: str, entry: Json) -> None:
    """Raises ConfigError if an entry names a transport that is unknown, or that its other keys contradict."""
    for key in ('type', 'transport'):
        value = entry.get(key)
        if isinstance(value, dict):
            value = value.get('type')
        if value is None:
            continue
        transport = re.sub(r'[^a-z]', '', str(value).lower())
        if transport == 'sse':
            raise ConfigError(
                f'{where}: speaks SSE, an earlier protocol; give its address of streamable HTTP (often …/mcp)'
            )
        belongs_to = _TRANSPORTS.get(transport)
        if belongs_to is None:
            raise ConfigError(
                f'{where}: {key}={value!r} is not supported; give stdio or streamable-http'
            )
        if not entry.get(belongs_to):
            raise ConfigError(f'{where}: {key}={value!r} needs {belongs_to!r}; correct one of them')


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
