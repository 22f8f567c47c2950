"""The export of a run whose checkpoint, prompts or records are not those of its start."""

import shutil

import pytest
from run_records import change_record, stored_config, write_record

from zeroplay_jax.configs import quickstart
from zeroplay_jax.configuration import places
from zeroplay_jax.export import export
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.policy import hf
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.run import run_folder
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.types import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run from hf://owner/model with a checkpoint; returns its workdir and the folder of the model's revision."""
    snapshot = tmp_path / 'models--owner--model' / 'snapshots' / '0a1b'
    shutil.copytree(BUILT_IN_CHECKPOINT, snapshot)
    monkeypatch.setattr(downloads, '_fetch', lambda *_: snapshot)
    monkeypatch.setattr(downloads, '_names', {})
    config = quickstart.get_config()
    config.policy.path = 'hf://owner/model'
    places.fetch(config)
    workdir = tmp_path / 'run'
    write_record(workdir, config, inputs=run_folder.fingerprints(config))
    checkpoints = Checkpointer(workdir, 1)
    checkpoints.save(1, {'solver': {'params': hf.load(snapshot)}}, {'cursor': 1})
    checkpoints.close()
    return workdir, snapshot


def set_field(workdir, section, name, value):
    stored = stored_config(workdir)
    fields = stored[section] if section else stored
    fields[name] = value
    change_record(workdir, config=stored)


def test_a_newer_revision_of_the_model_is_refused(run, tmp_path, monkeypatch):
    workdir, old = run
    new = old.with_name('2c3d')
    shutil.copytree(old, new)
    (new / 'tokenizer_config.json').write_text('{}')
    monkeypatch.setattr(downloads, '_fetch', lambda *_: new)
    out = tmp_path / 'out'
    line = (
        'another content of config.policy.path: tokenizer_config.json has other bytes in .*/2c3d; '
    )
    with pytest.raises(UserError, match=line) as error:
        export(workdir, out)
    assert '\n' not in str(error.value) and not out.exists()
    # As the message says.
    set_field(workdir, 'policy', 'path', str(old))
    (folder,) = export(workdir, out)
    settings = 'tokenizer_config.json'
    assert (folder / settings).read_text() == (old / settings).read_text()


def test_weights_are_exported_with_the_files_in_the_record(run, tmp_path):
    workdir, _ = run
    change_record(workdir, policies={'solver': {'whole': {'README.md': 'a card'}}})
    (folder,) = export(workdir, tmp_path / 'out')
    assert (folder / 'README.md').read_text() == 'a card'
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['solver']
    with pytest.raises(UserError, match='exists already'):
        export(workdir, tmp_path / 'out')
