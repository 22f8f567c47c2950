"""The servers that docs/tools.md names, as it names them; they are installed once per session where npm is there."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

from zeroplay_jax.rollout.call_syntax import SYNTAXES
from zeroplay_jax.tools.base import Invocation
from zeroplay_jax.types import UserError

pytest.importorskip('mcp')
from zeroplay_jax.extras.mcp import tools as mcp_tools  # noqa: E402

PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'tools.md'
SECONDS = 60.0


@pytest.fixture(scope='session')
def packages(tmp_path_factory):
    """The folder of the installed packages."""
    if shutil.which('npm') is None:
        pytest.skip('npm is not installed')
    folder = tmp_path_factory.mktemp('npm')
    names = sorted(set(re.findall(r'@modelcontextprotocol/server-[a-z]+', PAGE.read_text())))
    install = ['npm', 'install', '--no-audit', '--no-fund', '--silent', *names]
    try:
        subprocess.run(install, cwd=folder, check=True, capture_output=True, timeout=120)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f'npm cannot install the servers ({error})')
    return folder


@pytest.fixture
def tools(packages, tmp_path, monkeypatch):
    """The tools of the file on the page, whose packages are not downloaded again."""
    monkeypatch.setenv('DATA', str(tmp_path))
    page_file = re.search(r'```json\n(.*?)```', PAGE.read_text(), re.DOTALL)[1]
    servers = json.loads(page_file.replace('/tmp/memory.jsonl', str(tmp_path / 'memory.jsonl')))
    for server in servers['mcpServers'].values():
        _, package, *arguments = server['args']
        program = 'mcp-' + package.rpartition('/')[2]
        server.update(command=str(packages / 'node_modules/.bin' / program), args=arguments)
    file = tmp_path / 'mcp.json'
    file.write_text(json.dumps(servers))
    tools = {tool.name: tool for tool in mcp_tools.list_tools(str(file), SECONDS)}
    yield tools
    for tool in tools.values():
        tool.connection.close()


def check_examples(tools):
    """The schemas are usable, and every syntax reads the example that it shows of each tool."""
    for tool in tools.values():
        tool.check()
        for syntax in SYNTAXES.values():
            example = tool.example_arguments
            read = syntax.read_call(syntax.write_call(tool, example), tools)
            assert read == (tool.name, example, None)


@pytest.mark.fault('F6', 'three public servers as processes')
def test_the_servers_of_the_page_answer_the_calls_that_prompts_show(tools, tmp_path):
    assert list(tools)[:4] == ['every_echo', 'every_get-sum', 'read', 'list_directory']
    assert list(tools)[4:] == ['create_entities', 'search_nodes']
    check_examples(tools)
    note = tmp_path / 'note.txt'
    note.write_text('written by the test')
    entity = {'name': 'Ada', 'entityType': 'person', 'observations': ['wrote programs']}
    steps = [
        ('every_echo', {'message': 'hello'}, 'hello'),
        ('every_get-sum', {'a': 2, 'b': 3}, '5'),
        ('read', {'path': str(note)}, 'written by the test'),
        ('list_directory', {'path': str(tmp_path)}, 'note.txt'),
        ('create_entities', {'entities': [entity]}, 'Ada'),
        ('search_nodes', {'query': 'programs'}, 'wrote programs'),
    ]
    for syntax in SYNTAXES.values():
        for name, arguments, text in steps[:4] if syntax.name != 'qwen' else steps:
            call = syntax.parse(syntax.write_call(tools[name], arguments), tools)
            (result,) = tools[name].run([Invocation(call.arguments)])
            assert result.error is None and text in result.text, (syntax.name, name)
    (refused,) = tools['read'].run([Invocation({'path': '/not/allowed'})])
    assert refused.error == 'tool_error' and 'denied' in refused.text


@pytest.fixture
def server_file(packages, tmp_path):
    """A function that writes the file of one server and returns its path."""

    def write(package, *arguments):
        program = str(packages / f'node_modules/.bin/mcp-server-{package}')
        servers = {package: {'command': program, 'args': arguments}}
        file = tmp_path / 'mcp.json'
        file.write_text(json.dumps({'mcpServers': servers}))
        return str(file)

    return write


def test_the_whole_lists_of_the_servers_can_be_explained(server_file, tmp_path):
    for package, *arguments in (('everything',), ('filesystem', str(tmp_path)), ('memory',)):
        listed = mcp_tools.list_tools(server_file(package, *arguments), SECONDS)
        assert len(listed) > 5
        check_examples({tool.name: tool for tool in listed})
        listed[0].connection.close()


def test_a_server_that_refuses_its_arguments_is_one_line_with_its_reason(server_file):
    message = r"server 'filesystem': the MCP server does not answer \(its proc"
    with pytest.raises(UserError, match=message):
        mcp_tools.list_tools(server_file('filesystem', '/not/there'), SECONDS)
