"""The folders of trained policies that ship with the project: whole, small, of these stages, and what they can do."""

import hashlib
import json

import pytest

from tools.checkpoints import base_english, base_model, base_open, base_parts
from zeroplay_jax.run import ending, run_folder
from zeroplay_jax.settings.kinds import DEMONSTRATIONS

# Folder → the stages of its training.
STAGES = {
    'base': base_model.STAGES,
    'open/base': base_open.STAGES,
    'parts/base': base_parts.STAGES,
    'english/base': base_english.STAGES,
}
ENGLISH = 'english/base'
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


def test_the_start_of_two_hops_says_what_it_was_shown():
    parts = base_model.MINI / 'parts/base'
    assert ending._demonstrated_hops(parts) == 2
    assert ending._demonstrated_hops(base_model.MINI / 'base') is None
    # Training does not depend on it: a run keeps its identity.
    names = {path.name for path in run_folder._policy_files(parts)}
    assert 'config.json' in names and DEMONSTRATIONS not in names


def test_every_folder_with_weights_is_one_of_these():
    """None is a start that was trained in another way."""
    weights = base_model.MINI.rglob('*.safetensors')
    assert {str(path.parent.relative_to(base_model.MINI)) for path in weights} == set(STAGES)
