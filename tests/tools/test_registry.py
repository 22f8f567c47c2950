"""Which tools a config names: built in, from other packages, or one line that says what is wrong."""

import sys

import pytest

from zeroplay_jax.configs import common
from zeroplay_jax.tools import registry
from zeroplay_jax.types import UserError

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
    config = common.get_config()
    config.tools.names = names
    return registry.build_tools(config, Source())


def message(*names):
    with pytest.raises(UserError) as caught:
        build(*names)
    text = str(caught.value)
    assert '\n' not in text and text.startswith('config.tools.names: ')
    return text


def test_built_in_tools():
    assert list(build('search', 'open', 'calculator')) == ['search', 'open', 'calculator']
    assert build() == {}


@pytest.mark.parametrize(
    ('entry', 'zones'),
    [
        ('ready', [('clock', 'ready')]),
        ('Clock', [('clock', 'UTC')]),
        ('factory', [('clock', '0 source')]),
        ('several', [('clock', '1'), ('clock2', '2')]),
    ],
)
def test_a_tool_a_class_a_factory_and_a_factory_of_several(entry, zones):
    tools = build(f'their_tools.clock:{entry}')
    assert [(name, tool.zone) for name, tool in tools.items()] == zones


def test_two_tools_of_one_name_are_refused():
    assert "two tools are called 'clock'" in message(
        'their_tools.clock:ready', 'their_tools.clock:Clock'
    )
    assert "two tools are called 'search'" in message('search', 'their_tools.clock:Search')


@pytest.mark.parametrize(
    ('entry', 'contains'),
    [
        ('serach', "'serach' is not a tool; give search, open, calculator, mcp, or package.module"),
        ('', "'' is not a tool"),
        (':x', 'is not a tool'),
        ('their_tools.clock:', 'is not a tool'),
        ('their_tools.gone:x', 'cannot be imported'),
        ('their_tools.clock:gone', 'cannot be imported'),
        ('their_tools.broken:x', 'a_package_that_is_not_there'),
        ('their_tools.clock:wrong', "'their_tools.clock:wrong' gave a int; it must be a"),
    ],
)
def test_a_bad_entry_is_one_line(entry, contains):
    assert contains in message(entry)


@pytest.mark.parametrize('entry', ['search', 'mcp', 'their_tools.broken:anything'])
def test_a_name_is_checked_without_an_import(entry):
    registry.check_name(entry)
    assert 'their_tools' not in sys.modules
