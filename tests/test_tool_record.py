"""The record of a run's tools: a run is not resumed with tools that its policy would see otherwise."""

import types

import pytest
from refused_calls import refused
from run_records import begin_run

from zeroplay_jax.configs import quickstart
from zeroplay_jax.tools.base import Tool, string_parameter
from zeroplay_jax.tools.search import OpenTool, SearchTool


class Weather(Tool):
    """A tool as a server lists it."""

    def __init__(self, description='the weather of a city', parameter='city'):
        self.name = 'weather'
        self.description = description
        self.parameters = string_parameter(parameter, 'a city')
        self.errors = types.MappingProxyType({'unknown': 'There is no such city.'})

    def run(self, calls):
        """Is not called."""


SEARCH, WEATHER, OPEN = SearchTool(None), Weather(), OpenTool(None)


def begin(workdir, tools, is_resumed=True):
    env = types.SimpleNamespace(tools={tool.name: tool for tool in tools})
    roles = {'solver': types.SimpleNamespace(env=env)}
    begin_run(workdir, quickstart.get_config(), roles=roles, is_resumed=is_resumed)


@pytest.mark.parametrize(
    ('tools', 'difference'),
    [
        ([SEARCH], 'weather is missing'),
        ([SEARCH, WEATHER, OPEN], 'open is new'),
        ([WEATHER, SEARCH], 'the order was search, weather and is weather, search'),
        (
            [SEARCH, Weather('windy')],
            'weather differs in description (there "the weather of a city"',
        ),
        ([SEARCH, Weather(parameter='town')], 'weather differs in parameters (there '),
    ],
)
def test_other_tools_are_refused_in_one_line_that_says_how_to_go_on(tmp_path, tools, difference):
    begin(tmp_path, [SEARCH, WEATHER], is_resumed=False)
    begin(tmp_path, [SEARCH, WEATHER])
    before = (tmp_path / 'run.json').read_bytes()
    line = refused(begin, tmp_path, tools)
    assert f'role solver: {difference}' in line
    assert f'remove "tools" from {tmp_path / "run.json"} to continue' in line
    assert (tmp_path / 'run.json').read_bytes() == before
    # Before the first checkpoint nothing was learnt.
    begin(tmp_path, tools, is_resumed=False)
    begin(tmp_path, tools)
