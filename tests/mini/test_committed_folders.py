"""The folders of trained policies that ship with the project: whole, small, of these stages, and what they can do."""

import hashlib
import json
import sys
from unittest import mock

import pytest

from tools.checkpoints import base_english, base_model, base_open, base_parts
from tools.checkpoints.demo import FORMS, forms
from zeroplay_jax.run import ending, run_folder
from zeroplay_jax.settings.kinds import DEMONSTRATIONS, is_policy_file

# Folder → the stages of its training.
STAGES = {
    'base': base_model.STAGES,
    'open/base': base_open.STAGES,
    'parts/base': base_parts.STAGES,
    'english/base': base_english.STAGES,
}
ENGLISH = 'english/base'
FOLDERS = [name for name in STAGES if name != ENGLISH]
every_folder = pytest.mark.parametrize('name', STAGES)


def check_hashes(folder):
    """Asserts that SHA256SUMS lists every other file of the folder with its digest."""
    digests = {}
    for line in (folder / 'SHA256SUMS').read_text().splitlines():
        digest, file = line.split('  ')
        digests[file] = digest
    assert set(digests) == {path.name for path in folder.iterdir()} - {'SHA256SUMS'}
    for file, digest in digests.items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == digest


def log_of(folder):
    return [json.loads(line) for line in (folder / 'training.jsonl').read_text().splitlines()]


@every_folder
def test_a_folder_is_whole_and_small_and_was_trained_by_these_stages(name):
    folder = base_model.MINI / name
    check_hashes(folder)
    limit = 12_500_000 if name == ENGLISH else 4_000_000
    assert sum(path.stat().st_size for path in folder.iterdir()) <= limit
    trained_steps = {entry['stage']: entry['step'] for entry in log_of(folder) if 'step' in entry}
    assert trained_steps == {stage.name: stage.steps for stage in STAGES[name]}
    assert STAGES[name][-1].folder == 'base'


def test_every_folder_with_weights_is_one_of_these():
    """None is a start that was trained in another way."""
    weights = base_model.MINI.rglob('*.safetensors')
    assert {str(path.parent.relative_to(base_model.MINI)) for path in weights} == set(STAGES)


@pytest.fixture(scope='module')
def blank(tmp_path_factory):
    """A folder without weights, as of the trainings with the prompts 'mini', and as of that with 'numbered'."""
    mini, numbered = (tmp_path_factory.mktemp(name) for name in ('mini', 'numbered'))
    base_model.write_config_and_tokenizer(mini)
    # The tokenizer is trained on the prompts.
    with mock.patch.dict(FORMS, forms('numbered')):
        base_model.write_config_and_tokenizer(numbered, base_parts.LAYERS)
    return mini, numbered


@pytest.mark.parametrize('name', FOLDERS)
def test_a_folder_has_the_tokenizer_and_config_that_the_command_writes(name, blank):
    expected = blank[name == 'parts/base']
    for file in ('tokenizer.json', 'config.json', 'chat_template.jinja'):
        assert (base_model.MINI / name / file).read_text() == (expected / file).read_text()


def test_the_start_of_two_hops_says_what_it_was_shown(tmp_path, monkeypatch):
    """The command that trains it writes the file; training itself is left out."""
    written = []

    def keep(stages, template, *_, **__):
        written.append((template / DEMONSTRATIONS).read_text())

    monkeypatch.setattr(base_model.supervised, 'train_checkpoints', keep)
    monkeypatch.setattr(sys, 'argv', ['base_parts', '--out', str(tmp_path)])
    with mock.patch.dict(FORMS):
        base_parts.main()
    assert written == [(base_model.MINI / 'parts/base' / DEMONSTRATIONS).read_text()]
    # Training does not depend on it: a run keeps its identity.
    folder = run_folder._policy_files(base_model.MINI / 'parts/base')
    assert 'config.json' in {path.name for path in folder} and not is_policy_file(DEMONSTRATIONS)
    assert ending._demonstrated_hops(base_model.MINI / 'parts/base') == 2
    assert ending._demonstrated_hops(base_model.MINI / 'base') is None


def test_the_folder_for_english_has_the_architecture_of_the_command():
    config = json.loads((base_model.MINI / ENGLISH / 'config.json').read_text())
    assert base_english.ARCHITECTURE.items() <= (config | {'torch_dtype': 'float32'}).items()
