"""What comes with the package is found by its name from any folder, as the commands of the README name it."""

import pathlib

import pytest

import zeroplay_jax as zp
from zeroplay_jax import ask, quickstart
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.retrieval import build, downloads
from zeroplay_jax.settings.kinds import EXAMPLE_TEXTS, PACKAGE

BASE = 'zeroplay_jax/mini/base'
TEXTS = 'zeroplay_jax/mini/texts'


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_what_is_packaged_is_found_from_any_folder():
    config = zp.config('drzero', 'mini', {'policy.path': BASE})
    rules.check(config)
    for path in (zp.load_policy(BASE).config.policy.path, ask._policy_folder(BASE)):
        assert pathlib.Path(path) == PACKAGE / 'mini' / 'base'
    assert quickstart._parser().parse_args(['--corpus', TEXTS]).corpus == EXAMPLE_TEXTS
    build.main(f'--corpus {TEXTS} --kind bm25 --out index'.split())
    assert pathlib.Path('index/manifest.json').is_file()
    assert fields.config_of_file('configs/drzero.py:mini').recipe == 'drzero'


def test_a_file_in_the_current_folder_takes_precedence():
    pathlib.Path(BASE).mkdir(parents=True)
    for path in (BASE, '', 'elsewhere/mini/base', 'zeroplay_jax/mini/none', 'zeroplay_jax/api.py'):
        assert downloads.packaged(path) == path
