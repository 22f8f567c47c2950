"""The export of a run whose checkpoint, prompts or records are not those of its start."""

import shutil

from refused_calls import refused
from run_records import change_record, stored_config, write_record

from zeroplay_jax.configs import quickstart
from zeroplay_jax.configuration import places
from zeroplay_jax.export import export
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.policy import hf
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.run import run_folder
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT


def test_a_newer_revision_of_the_model_is_refused(tmp_path, monkeypatch):
    snapshots = tmp_path / 'models--owner--model' / 'snapshots'
    old, new = (shutil.copytree(BUILT_IN_CHECKPOINT, snapshots / name) for name in ('0a1b', '2c3d'))
    (new / 'tokenizer_config.json').write_text('{}')
    monkeypatch.setattr(downloads, '_fetch', lambda *_: old)
    monkeypatch.setattr(downloads, '_names', {})
    config = quickstart.get_config()
    config.policy.path = 'hf://owner/model'
    places.fetch(config)
    workdir, out = tmp_path / 'run', tmp_path / 'out'
    write_record(workdir, config, inputs=run_folder.fingerprints(config))
    checkpoints = Checkpointer(workdir, 1)
    checkpoints.save(1, {'solver': {'params': hf.load(old)}}, {'cursor': 1})
    checkpoints.close()
    monkeypatch.setattr(downloads, '_fetch', lambda *_: new)
    line = refused(export, workdir, out)
    assert 'another content of config.policy.path: tokenizer_config.json has other bytes' in line
    assert not out.exists()
    # As the message says.
    stored = stored_config(workdir)
    stored['policy']['path'] = str(old)
    change_record(workdir, config=stored)
    (folder,) = export(workdir, out)
    settings = 'tokenizer_config.json'
    assert (folder / settings).read_text() == (old / settings).read_text()
