"""Servers of `config.tools.mcp_servers`: processes, several at once, keys, choices and names, and hostile replies."""

import json
import logging
import os
import pathlib
import sys

import pytest
from refused_calls import refused
from web_servers import Web

from zeroplay_jax.tools.base import Invocation
from zeroplay_jax.types import UserError

pytest.importorskip('mcp')
from zeroplay_jax.extras.mcp import tools as mcp_tools  # noqa: E402

FOLDER = pathlib.Path(__file__).parent
SERVER = FOLDER / 'stdio_server.py'
SCHEMA = {'type': 'object', 'properties': {'text': {'type': 'string'}}, 'required': ['text']}
SECONDS = 10.0
# "blocks": name → result of a tool and the text of it that the policy reads; "bad replies": a result and the cause of
# its failure; "unusable lists": tools of a server, further fields of its entry, words of the refusal; "unusable
# files": servers, or a whole file as a text, and words of the refusal.
TABLES = json.loads((FOLDER / 'mcp_servers.json').read_text('utf-8'))


def listed(name, **fields):
    return {'name': name, 'description': f'does {name}', 'inputSchema': SCHEMA, **fields}


def text_result(text):
    return {'content': [{'type': 'text', 'text': text}]}


@pytest.fixture
def process(tmp_path):
    """A function that returns the entry of a server process with this behaviour."""
    count = iter(range(9))

    def entry(results, tools=None, **behaviour):
        file = tmp_path / f'behaviour{next(count)}.json'
        tools = [listed(**tool) for tool in tools or [{'name': name} for name in results]]
        file.write_text(json.dumps({'tools': tools, 'results': results, **behaviour}))
        return {'command': sys.executable, 'args': [str(SERVER), str(file)]}

    return entry


@pytest.fixture
def opened(tmp_path):
    """A function that opens servers from a file and returns their tools by name."""
    tools = {}

    def open_servers(key='mcpServers', **servers):
        file = tmp_path / 'mcp.json'
        file.write_text(json.dumps({key: servers}))
        for tool in mcp_tools.list_tools(str(file), SECONDS):
            tool.check()
            tools[tool.name] = tool
        return tools

    yield open_servers
    for tool in tools.values():
        tool.connection.close()


def call(tool, **arguments):
    (result,) = tool.run([Invocation({'text': 'x', **arguments})])
    return result


def test_the_text_of_every_kind_of_block_reaches_the_policy(process, opened):
    blocks = TABLES['blocks']
    tools = opened(a=process({name: result for name, (result, _) in blocks.items()}))
    for name, (_, text) in blocks.items():
        result = call(tools[name])
        assert (result.text, result.error) == (text, None), name


def test_the_text_of_errors_reaches_the_policy(process, opened):
    resource, _ = TABLES['blocks']['resource']
    results = {
        'error': resource | {'isError': True},
        'refusal': {'error': {'code': -32602, 'message': 'text must be a word'}},
        'broken': {'error': {'code': -32603, 'message': 'disk full'}},
    }
    tools = opened(a=process(results))
    error, refusal, broken = (call(tools[name]) for name in results)
    assert error.error == 'tool_error' and 'line 1' in error.text
    assert (refusal.text, refusal.error) == ('text must be a word', 'tool_error')
    # A server that is broken counts as a failure of the tool, with the cause in the log.
    assert (broken.text, broken.error) == (None, 'failed')


def test_several_servers_with_chosen_and_renamed_tools(process, opened):
    first = process({name: text_result(f'first {name}') for name in ('search', 'read', 'gone')})
    second = process({name: text_result(f'second {name}') for name in ('search', 'issues.list')})
    third = process({'2nd': text_result('third')}, greeting='Listening.')
    tools = opened(
        a={**first, 'tools': ['search', 'read'], 'rename': {'search': 'look_up'}},
        b={**second, 'prefix': 'b_', 'timeout': 30},
        c=third,
        d={'command': 'not-there', 'disabled': True},
    )
    assert list(tools) == ['look_up', 'read', 'b_search', 'b_issues_list', '_2nd']
    assert call(tools['look_up']).text == 'first search'
    assert call(tools['b_issues_list']).text == 'second issues.list'
    assert call(tools['_2nd']).text == 'third'


def test_a_session_is_kept_open_and_lists_its_tools_once(process, opened, tmp_path):
    log = tmp_path / 'calls'
    server = process({'echo': text_result('x')}, calls=str(log))
    # A second list of the same servers, as training and evaluation make it, has no process of its own.
    for tools in (opened('servers', a=server), opened(a=server)):
        for _ in range(3):
            assert call(tools['echo']).text == 'x'
    processes, methods = zip(*map(json.loads, log.read_text().splitlines()))
    assert len(set(processes)) == 1
    assert methods.count('tools/call') == 6 and methods.count('tools/list') == 1


def test_a_process_that_ends_is_started_again(process, opened, caplog):
    tools = opened(a=process({'echo': text_result('x'), 'die': {'exit': 3}}))
    for _ in range(2):
        assert call(tools['die']).error == 'failed'
        assert call(tools['echo']).text == 'x'
    assert 'its process ended: something broke' in caplog.text


def test_a_process_that_answers_no_call_is_started_again(process, opened):
    tools = opened(a=process({'echo': text_result('x'), 'hang': {'sleep': 600}}))
    for tool in tools.values():
        tool.call_seconds = 0.5
    assert [call(tools[name]).error for name in ('hang', 'echo')] == ['timeout', 'timeout']
    tools['echo'].call_seconds = SECONDS
    assert call(tools['echo']).text == 'x'


@pytest.mark.parametrize(('result', 'cause'), TABLES['bad replies'])
def test_a_bad_reply_fails_at_once_and_alone(process, opened, caplog, result, cause):
    tools = opened(a=process({'bad': result, 'echo': text_result('x')}))
    with caplog.at_level(logging.DEBUG):
        for _ in range(4):
            assert call(tools['bad']).error == 'failed'
            assert call(tools['echo']).text == 'x'
    # The first failure and each doubling; nothing of the library.
    lines = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert len(lines) == 3 and cause in caplog.text


def test_what_a_server_sends_is_cut_before_it_is_kept(process, opened):
    text = {'type': 'string', 'description': 'word ' * 2**18}
    schema = {'type': 'object', 'description': 'd' * 2**20, 'properties': {'text': text}}
    tool = dict(name='big', description='d' * 2**20, inputSchema=schema)
    tools = opened(a=process({'big': text_result('x' * 17 * 2**20)}, tools=[tool]))
    assert len(call(tools['big']).text) == 100_000
    assert len(tools['big'].description) == 300 and len(json.dumps(tools['big'].parameters)) < 2_000


def test_keys_come_from_the_environment_and_stay_out_of_results_and_logs(
    process, opened, monkeypatch, caplog
):
    monkeypatch.setenv('THE_KEY', 'secret-value-1')
    monkeypatch.setenv('OTHER', 'not for the server')
    # A value that is no secret is what the server says.
    harmless = {'TZ': 'Europe/Berlin', 'MAX_TOKENS': '10000000', 'TOKENIZER': 'cl100k_base'}
    secret = {'TOKEN': 'Bearer ${THE_KEY}', 'MODE': '${env:MODE_UNSET:-fast}'}
    entry = process({'environment': 'environment'})
    entry |= {'env': secret | harmless, 'url': None, 'cwd': None, 'prefix': None, 'disabled': None}
    tools = opened(a=entry)
    seen = json.loads(call(tools['environment']).text)
    expected = {'TOKEN': '***', 'MODE': 'fast', 'PATH': os.environ['PATH'], **harmless}
    assert {name: seen[name] for name in expected} == expected
    assert 'OTHER' not in seen
    server = tools['environment'].connection.server
    assert server.env['TOKEN'] == 'Bearer secret-value-1'
    error = ConnectionError('no https://h/x?key=1 with secret-value-1\n2')
    assert mcp_tools.reason_of(server, error) == 'no https://h/… with ***'


@pytest.mark.parametrize(
    ('servers', 'words'), [*TABLES['unusable files'], ('[' * 100_000, 'not a JSON file')]
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, servers, words):
    file = tmp_path / 'mcp.json'
    text = servers if isinstance(servers, str) else json.dumps({'mcpServers': servers})
    file.write_text(text)
    line = refused(mcp_tools.list_tools, str(file), SECONDS)
    assert words in line


@pytest.mark.parametrize(('tools', 'fields', 'words'), TABLES['unusable lists'])
def test_a_list_of_tools_that_cannot_be_used_is_one_line(process, opened, tools, fields, words):
    with pytest.raises((UserError, ValueError)) as refusal:
        opened(weather={**process({}, tools=tools), **fields})
    line = str(refusal.value)
    assert words in line and '\n' not in line and "server 'weather'" in line


def test_tools_of_two_servers_with_one_name_are_refused_with_both(process, opened):
    servers = {name: process({'search': text_result('x')}) for name in ('one', 'two')}
    with pytest.raises(UserError, match="server 'two': its tool 'search' .* server 'one'.*prefix"):
        opened(**servers)


def test_a_list_has_the_tools_of_all_pages(process, opened):
    results = {name: text_result(name) for name in 'abc'}
    pages = {'first': ['ab', 'next'], 'next': ['c', ''], '': ['ab', 'next']}
    assert list(opened(a=process(results, pages=pages))) == list('abc')


def test_a_list_without_an_end_is_one_line(process, opened):
    tools = [{'name': str(number)} for number in range(2_000)]
    pages = {'first': [[tool['name'] for tool in tools], 'first']}
    with pytest.raises(UserError, match='list of tools has no end'):
        opened(a=process({}, tools=tools, pages=pages))


def test_keys_in_an_address_and_its_headers_are_sent_and_hidden(opened, monkeypatch, caplog):
    monkeypatch.setenv('PART', 'key-of-the-user')
    headers = {'Authorization': 'Bearer ${PART}'}
    with Web() as server:
        tools = opened(a={'url': f'{server.address}/${{PART}}/mcp', 'headers': headers})
        assert call(tools['echo']).text == 'fine'
        assert server.keys[-1] == 'Bearer key-of-the-user'
        assert '/key-of-the-user/mcp' in server.seen[-1]
        server.mode, server.target = 'redirect', '/key-of-the-user/there'
        assert call(tools['echo']).error == 'failed'
    line = caplog.records[0].getMessage()
    assert 'redirects to' in line and 'key-of' not in line


@pytest.mark.parametrize('mode', ['cut', 'compressed', 'html', 'charset'])
def test_a_bad_reply_over_http_fails_at_once_and_alone(opened, mode, caplog):
    with Web() as server:
        tools = opened(a={'url': f'{server.address}/mcp'})
        server.mode = mode
        assert call(tools['echo']).error == 'failed'
        server.mode = 'good'
        assert call(tools['echo']).text == 'fine'
    assert 'no result within' not in caplog.text
