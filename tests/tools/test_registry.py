"""Which tools a config names: built in, from other packages, or one line that says what is wrong."""

import pathlib
import sys

import pytest
from refused_calls import check_table

from zeroplay_jax.configs import common
from zeroplay_jax.tools import registry

MODULE = """
from zeroplay_jax.tools.base import Tool, ToolResult


class Clock(Tool):
    name = 'clock'
    description = 'the time'
    parameters = {'type': 'object', 'properties': {}}

    def __init__(self, zone='UTC'):
        self.zone = zone

    def run(self, calls):
        return [ToolResult(text=self.zone) for _ in calls]


class Search(Clock):
    name = 'search'


ready = Clock('ready')


def factory(config, source):
    return Clock(f'{config.seed} {source}')


def several(config, source):
    first, second = Clock('1'), Clock('2')
    second.name = 'clock2'
    return [first, second]


def wrong(config, source):
    return [3]


class BadName(Clock):
    name = 'my tool'


class BadSchema(Clock):
    parameters = {'type': 'strnig'}


class Asynchronous(Clock):
    async def run(self, calls):
        return []
"""


class Source:
    def search(self, queries):
        return [[] for _ in queries]

    def open(self, references, pages):
        return [None for _ in references]

    def __str__(self):
        return 'source'


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    folder = tmp_path / 'their_tools'
    folder.mkdir()
    (folder / '__init__.py').touch()
    (folder / 'clock.py').write_text(MODULE)
    (folder / 'broken.py').write_text('import a_package_that_is_not_there\n')
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split('.')[0] == 'their_tools']:
        del sys.modules[name]


def build(*names):
    """The zones of the clocks by name, None for other tools."""
    config = common.get_config()
    config.tools.names = names
    tools = registry.build_tools(config, Source())
    return {name: getattr(tool, 'zone', None) for name, tool in tools.items()}


def test_which_tools_a_config_names():
    check_table(pathlib.Path(__file__).parent / 'registry.txt', {'build': build})


@pytest.mark.parametrize('entry', ['search', 'mcp', 'their_tools.broken:anything'])
def test_a_name_is_checked_without_an_import(entry):
    registry.check_name(entry)
    assert 'their_tools' not in sys.modules
