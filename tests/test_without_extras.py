"""The core without any extra: every module loads, and what needs one says so in one line."""

import shutil

import pytest
from python_process import ROOT, run_python

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
    folder = tmp_path_factory.mktemp('core')
    names = shutil.ignore_patterns('__pycache__', 'mini')
    shutil.copytree(ROOT / 'zeroplay_jax', folder / 'zeroplay_jax', ignore=names)
    shutil.copytree(ROOT / 'configs', folder / 'configs', ignore=names)
    (folder / 'zeroplay_jax' / 'mini').symlink_to(ROOT / 'zeroplay_jax' / 'mini')
    extras = folder / 'zeroplay_jax' / 'extras'
    table = extras / '__init__.py'
    lines = table.read_text().splitlines(keepends=True)
    shutil.rmtree(extras)
    extras.mkdir()
    kept = [line for line in lines if not line.startswith("    '")]
    table.write_text(''.join(kept))
    return folder


def run(core, *words):
    return run_python(*words, cwd=core, fresh=True, PYTHONPATH=str(core))


def test_every_module_loads(core):
    result = run(core, '-c', LOADS_ALL)
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_command_is_sound_unless_it_asks_for_an_extra(core):
    words = [
        '-m',
        'zeroplay_jax.main',
        '--config=configs/drzero.py:mini',
        '--workdir=run',
        '--check',
    ]
    result = run(core, *words)
    assert result.returncode == 0, result.stderr[-2000:]
    fields = ["tools.names=('search','mcp')", 'tools.mcp_servers=mcp.json']
    result = run(core, *words, *(f'--config.{field}' for field in fields))
    assert 'mcp: this installation is without zeroplay_jax/extras/mcp' in result.stderr
    assert result.returncode == 2 and 'Traceback' not in result.stderr
