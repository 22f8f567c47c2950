"""The servers that docs/tools.md names, as it names them, where npm is there."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

from zeroplay_jax.tools.base import Invocation

pytest.importorskip('mcp')
from zeroplay_jax.extras.mcp import tools as mcp_tools  # noqa: E402

PAGE = (pathlib.Path(__file__).parents[3] / 'docs' / 'tools.md').read_text()


@pytest.mark.long
@pytest.mark.skipif(not shutil.which('npm'), reason='npm is not installed')
@pytest.mark.fault('F6', 'three public servers as processes')
def test_the_servers_of_the_page_answer(tmp_path, monkeypatch):
    packages = sorted(set(re.findall(r'@modelcontextprotocol/server-[a-z]+', PAGE)))
    done = subprocess.run(['npm', 'install', '--silent', *packages], cwd=tmp_path)
    if done.returncode:
        pytest.skip('npm cannot install the servers')
    monkeypatch.setenv('DATA', str(tmp_path))
    text = re.search(r'```json\n(.*?)```', PAGE, re.DOTALL)[1]
    servers = json.loads(text.replace('/tmp/memory.jsonl', str(tmp_path / 'memory.jsonl')))
    for server in servers['mcpServers'].values():
        _, package, *arguments = server['args']
        program = tmp_path / 'node_modules/.bin' / ('mcp-' + package.rpartition('/')[2])
        server.update(command=str(program), args=arguments)
    file = tmp_path / 'mcp.json'
    file.write_text(json.dumps(servers))
    tools = {tool.name: tool for tool in mcp_tools.list_tools(str(file), 60.0)}
    entity = {'name': 'Ada', 'entityType': 'person', 'observations': ['wrote programs']}
    calls = {
        'every_echo': ({'message': 'hello'}, 'hello'),
        'every_get-sum': ({'a': 2, 'b': 3}, '5'),
        'read': ({'path': str(file)}, 'mcpServers'),
        'list_directory': ({'path': str(tmp_path)}, 'mcp.json'),
        'create_entities': ({'entities': [entity]}, 'Ada'),
        'search_nodes': ({'query': 'programs'}, 'wrote programs'),
    }
    assert list(tools) == list(calls)
    for name, (arguments, words) in calls.items():
        tool = tools[name]
        tool.check()
        (result,) = tool.run([Invocation(arguments)])
        assert result.error is None and words in result.text, name
    for tool in tools.values():
        tool.connection.close()
