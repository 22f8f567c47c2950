"""Flags that are the same in all commands: --policy, --index, and names of the Hugging Face Hub."""

import pathlib
import types

import pytest
from config_checks import message

from zeroplay_jax.configs import common
from zeroplay_jax.configuration import places
from zeroplay_jax.data import files
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.types import UserError

# ---- names of the Hub --------------------------------------------------------------------------------


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """The Hub as a folder; its attribute `online` says whether it answers."""
    import huggingface_hub

    state = types.SimpleNamespace(online=True, cached=False, calls=[])
    snapshot = tmp_path / 'snapshot'
    (snapshot / 'data').mkdir(parents=True)
    for name in ('config.json', 'tokenizer.json', 'model.safetensors', 'data/test.jsonl'):
        (snapshot / name).write_text('{}')

    def snapshot_download(repository, **options):
        state.calls.append((repository, options['repo_type']))
        # As the library: without a connection it takes what is in its cache.
        if not state.online and not state.cached:
            raise ConnectionError('no route\nto the host')
        state.cached = True
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    state.snapshot = snapshot
    return state


def test_a_model_is_fetched_and_needs_no_connection_then(hub_folder):
    assert downloads.fetch_model('hf://Qwen/Qwen2.5-3B') == str(hub_folder.snapshot)
    hub_folder.online = False
    assert downloads.fetch_model('hf://Qwen/Qwen2.5-3B') == str(hub_folder.snapshot)
    assert downloads.fetch_model('some/folder') == 'some/folder'


def test_a_file_of_a_dataset_is_fetched(hub_folder):
    name = 'hf://owner/set/data/test.jsonl'
    assert downloads.fetch_file(name) == str(hub_folder.snapshot / 'data' / 'test.jsonl')
    assert {*hub_folder.calls} == {('owner/set', 'dataset')}
    with pytest.raises(RetrievalError, match='the dataset has no such file'):
        downloads.fetch_file('hf://owner/set/data/train.jsonl')


def test_a_run_reads_the_fetched_paths(hub_folder, sound):
    with sound.unlocked():
        sound.policy.path = 'hf://Qwen/Qwen2.5-3B'
    sound.retrieval.update(kind='http')
    sound.eval.file = sound.inputs.documents = 'hf://owner/set/data/test.jsonl'
    assert not [*places.policy_folder(sound, None)]
    places.fetch(sound)
    assert sound.policy.path == str(hub_folder.snapshot)
    assert pathlib.Path(sound.eval.file).is_file()
    assert sound.inputs.documents == sound.eval.file


def test_a_name_of_a_wrong_form_is_refused_before_anything_is_asked(hub_folder, sound):
    sound.policy.path = 'hf://Qwen'
    assert 'config.policy.path: hf://Qwen: names no model' in message(sound)
    with pytest.raises(UserError, match='config.eval.file: hf://owner/set: names no file of a'):
        sound.eval.file = 'hf://owner/set'
        next(places.input_files(sound, None))
    files.check_set('hf://owner/set/test.jsonl')
    with pytest.raises(UserError, match='hf://owner/set: names no file of a dataset'):
        files.check_set('hf://owner/set')
    assert hub_folder.calls == []
    # One that is right is one line without a connection.
    hub_folder.online = False
    config = common.get_config()
    config.policy.path = 'hf://Qwen/Qwen2.5-3B'
    line = (
        r'config.policy.path: hf://Qwen/Qwen2.5-3B could not be fetched \(no route\); download it'
    )
    with pytest.raises(UserError, match=line):
        places.fetch(config)
