"""What comes with the package is found by its name from any folder, as the commands of the README name it."""

import pathlib

import pytest

import zeroplay_jax as zp
from zeroplay_jax import ask, quickstart
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.retrieval import build, downloads
from zeroplay_jax.settings.kinds import EXAMPLE_TEXTS, PACKAGE

inputs = pytest.importorskip('zeroplay_jax.extras.inputs.__main__')

CLEAN = 'zeroplay_jax/mini/clean'


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def policy_of_config():
    config = zp.config('drzero', 'mini', {'policy.path': CLEAN})
    rules.check(config)
    return config.policy.path


def corpus_of(module, *arguments):
    return str(
        module._parser().parse_args([*arguments, '--corpus', 'zeroplay_jax/mini/texts']).corpus
    )


PLACES = {
    'load_policy': lambda: zp.load_policy(CLEAN).config.policy.path,
    'load_policy(settings)': lambda: (
        zp.load_policy(settings=zp.config(changes={'policy.path': CLEAN})).config.policy.path
    ),
    'ask --policy': lambda: str(ask._policy_folder(CLEAN)),
    'main --policy': policy_of_config,
}


@pytest.mark.fault('user-1', 'a packaged policy, named in a folder that is no checkout')
@pytest.mark.parametrize('place', PLACES)
def test_a_packaged_policy_is_found_from_any_folder(place):
    path = PLACES[place]()
    assert pathlib.Path(path) == PACKAGE / 'mini' / 'clean'


@pytest.mark.fault('user-1', 'the packaged texts, named in a folder that is no checkout')
def test_packaged_texts_are_found_from_any_folder():
    assert corpus_of(quickstart) == str(EXAMPLE_TEXTS)
    documents = inputs._parser().parse_args(
        'documents --corpus zeroplay_jax/mini/texts --count=1 --out=d.jsonl'.split()
    )
    assert str(documents.corpus) == str(EXAMPLE_TEXTS)
    build.main('--corpus zeroplay_jax/mini/texts --kind bm25 --out index'.split())
    assert pathlib.Path('index/manifest.json').is_file()


def test_a_file_in_the_current_folder_takes_precedence():
    pathlib.Path(CLEAN).mkdir(parents=True)
    assert downloads.packaged(CLEAN) == CLEAN
    for path in ('', 'elsewhere/mini/clean', 'zeroplay_jax/mini/none', 'zeroplay_jax/api.py'):
        assert downloads.packaged(path) == path


def test_a_packaged_config_is_found_from_any_folder():
    assert fields.config_of_file('configs/drzero.py:mini').recipe == 'drzero'
