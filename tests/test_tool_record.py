"""The record of a run's tools: a run is not resumed with tools that its policy would see otherwise."""

import json
import types

import pytest
from run_records import change_record, write_record

from zeroplay_jax.configs import quickstart
from zeroplay_jax.run import run_folder
from zeroplay_jax.tools.base import Tool, ToolResult, string_parameter
from zeroplay_jax.tools.search import OpenTool, SearchTool
from zeroplay_jax.types import UserError


class Weather(Tool):
    """A tool as a server lists it."""

    def __init__(self, description='the weather of a city', parameter='city'):
        self.name = 'weather'
        self.description = description
        self.parameters = string_parameter(parameter, 'a city')
        self.errors = types.MappingProxyType({'unknown': 'There is no such city.'})

    def run(self, calls):
        return [ToolResult(text='rain') for _ in calls]


def roles(*tools):
    env = types.SimpleNamespace(tools={tool.name: tool for tool in tools})
    without_tools = types.SimpleNamespace(env=types.SimpleNamespace(tools={}))
    return {'solver': types.SimpleNamespace(env=env), 'judge': without_tools}


def check(workdir, *tools, is_resumed=True):
    check_roles(workdir, roles(*tools), is_resumed)


def check_roles(workdir, roles, is_resumed=True):
    if is_resumed:
        (workdir / 'checkpoints' / '1').mkdir(parents=True, exist_ok=True)
    start = dict(index='', template={}, weights={}, policies={}, is_resumed=is_resumed)
    run_folder.begin(workdir, quickstart.get_config(), {}, roles=roles, **start)


def recorded(workdir):
    (listing,) = json.loads((workdir / 'run.json').read_text())['tools'].values()
    return listing


TOOLS = {
    'search': SearchTool(None),
    'weather': Weather(),
    'open': OpenTool(None),
    'windy': Weather('weather, now with wind'),
    'of a town': Weather(parameter='town'),
}
DIFFERENCES = {
    'search': 'solver: weather is missing',
    'search, weather, open': 'solver: open is new',
    'weather, search': 'solver: the order was search, weather and is weather, search',
    'search, windy': (
        'weather differs in description (there "the weather of a city", now "weather, now'
    ),
    'search, of a town': 'weather differs in parameters (there ',
}


@pytest.mark.parametrize('listed', DIFFERENCES)
def test_other_tools_are_refused_in_one_line_that_says_how_to_go_on(tmp_path, listed):
    tools = [TOOLS[name] for name in listed.split(', ')]
    check(tmp_path, SearchTool(None), Weather(), is_resumed=False)
    check(tmp_path, SearchTool(None), Weather())
    before = recorded(tmp_path)
    with pytest.raises(UserError) as caught:
        check(tmp_path, *tools)
    text = str(caught.value)
    assert DIFFERENCES[listed] in text and '\n' not in text
    assert f'remove "tools" from {tmp_path / "run.json"} to continue' in text
    assert recorded(tmp_path) == before
    # Before the first checkpoint nothing was learnt.
    check(tmp_path, *tools, is_resumed=False)
    check(tmp_path, *tools)


def test_a_record_without_tools_gets_them(tmp_path):
    write_record(tmp_path, quickstart.get_config())
    check(tmp_path, Weather(), is_resumed=True)
    assert list(recorded(tmp_path)) == ['weather']


def test_an_attribute_that_a_later_version_adds_is_no_difference(tmp_path):
    check(tmp_path, Weather())
    listing = recorded(tmp_path)
    del listing['weather']['note']
    change_record(tmp_path, tools={'solver': listing})
    check(tmp_path, Weather())


def test_a_tool_of_one_role_does_not_hide_that_of_another(tmp_path):
    both = roles(Weather()) | {'proposer': roles(Weather('the same name'))['solver']}
    check_roles(tmp_path, both, is_resumed=False)
    check_roles(tmp_path, both)
    both['solver'] = roles(Weather('another description'))['solver']
    with pytest.raises(UserError, match='role solver: weather differs in description'):
        check_roles(tmp_path, both)
