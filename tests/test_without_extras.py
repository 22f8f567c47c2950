"""The project without extras, removed as docs/reading.md says: what needs one says so in one line, the rest works."""

import re
import shutil

import pytest
from project_copy import copy_project
from python_process import config_flags, run_python

from zeroplay_jax.extras import EXTRAS

LOADS_ALL = """
import importlib, pathlib
for path in sorted(pathlib.Path('zeroplay_jax').rglob('*.py')):
    name = '.'.join(path.with_suffix('').parts).removesuffix('.__init__')
    # They define flags of the same names as `evaluate`.
    if not name.endswith(('__main__', '.main')):
        importlib.import_module(name)
"""


@pytest.fixture(scope='module')
def core(tmp_path_factory):
    """A copy of the project without the files of extras and their lines in the table."""
    folder = copy_project(tmp_path_factory.mktemp('core'))
    package = folder / 'zeroplay_jax' / 'extras'
    for place in package.iterdir():
        if place.is_dir():
            shutil.rmtree(place)
        elif place.stem in EXTRAS:
            place.unlink()
    table = package / '__init__.py'
    table.write_text(re.sub(r"^    '\w+': Extra\(.*\n", '', table.read_text(), flags=re.M))
    return folder


def run(project, *words):
    return run_python(*words, cwd=project, fresh=True, PYTHONPATH=str(project))


def test_every_module_loads(core):
    result = run(core, '-c', LOADS_ALL)
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_command_is_sound_unless_it_asks_for_an_extra(core):
    command = '-m zeroplay_jax.main --config=configs/drzero.py:mini --workdir=run --check'.split()
    assert run(core, *command).returncode == 0
    fields = config_flags("tools.names=('search','mcp') tools.mcp_servers=mcp.json")
    result = run(core, *command, *fields)
    assert 'mcp: this installation is without zeroplay_jax/extras/mcp' in result.stderr
    assert result.returncode == 2 and 'Traceback' not in result.stderr
