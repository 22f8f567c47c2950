"""Flags that are the same in all commands: --policy, --index, and names of the Hugging Face Hub."""

import pathlib

import pytest
from config_checks import FILES

from zeroplay_jax.configuration import places
from zeroplay_jax.types import UserError


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The repositories that the Hub, here a folder, was asked for; it answers once."""
    import huggingface_hub

    repositories = []
    for name in (*FILES, 'test.jsonl'):
        (tmp_path / name).write_text('{}')

    def snapshot_download(repository, **options):
        if repository in repositories:
            raise ConnectionError('no route\nto the host')
        repositories.append(repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    return repositories


def test_a_run_reads_the_fetched_paths_or_ends_in_one_line(asked, sound, tmp_path):
    sound.policy.path, sound.eval.file = 'hf://Qwen/Qwen2.5-3B', 'hf://owner/set/test.jsonl'
    sound.retrieval.update(kind='http')
    assert not [*places.policy_folder(sound, None)]
    places.fetch(sound)
    assert sound.policy.path == str(tmp_path) and pathlib.Path(sound.eval.file).is_file()
    assert sorted(asked) == ['Qwen/Qwen2.5-3B', 'owner/set']
    sound.policy.path = 'hf://Qwen/Qwen2.5-3B'
    line = (
        r'config.policy.path: hf://Qwen/Qwen2.5-3B could not be fetched \(no route\); download it'
    )
    with pytest.raises(UserError, match=line):
        places.fetch(sound)
