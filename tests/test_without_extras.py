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
# What a removed extra can break: rules and tables about all files, commands and pages.
WIDE = """
    test_house.py test_docs.py test_refusals.py test_commands.py test_workdir.py test_launch.py
    test_check.py test_config_values.py test_ask_settings.py test_registry.py test_packaged_paths.py
""".split()


def project_without(extras, folder):
    """A copy of the project without the files of these extras, their lines in the table and their tests."""
    copy_project(folder)
    package = folder / 'zeroplay_jax' / 'extras'
    for place in [*package.iterdir(), *(folder / 'tests' / 'extras').iterdir()]:
        if place.stem in extras:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    table = package / '__init__.py'
    line = rf"^    '({'|'.join(extras)})': .*\n"
    table.write_text(re.sub(line, '', table.read_text(), flags=re.M))
    return folder


@pytest.fixture(scope='module')
def core(tmp_path_factory):
    return project_without(EXTRAS, tmp_path_factory.mktemp('core'))


def run(project, *words):
    return run_python(*words, cwd=project, timeout=1500, fresh=True, PYTHONPATH=str(project))


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


@pytest.mark.long
@pytest.mark.parametrize('extra', EXTRAS)
def test_the_other_tests_pass_without_one_extra(tmp_path, extra):
    project = project_without([extra], tmp_path)
    # All files of tests are loaded, and the wide ones are run.
    words = ['-m', 'not long', '-k', ' or '.join(WIDE)]
    result = run(project, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *words, 'tests')
    assert result.returncode == 0, result.stdout[-4000:]
