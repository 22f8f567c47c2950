"""The small policy that updates train, and a bucket in memory with checkpoints to upload."""

import dataclasses

import pytest
import tiny
from memory_bucket import MemoryBucket
from saved_runs import save_checkpoints

from zeroplay_jax.policy import hf
from zeroplay_jax.runtime.remote_workdir import RemoteWorkdir


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp('learner') / 'policy', letters=tiny.LETTERS)


@pytest.fixture(scope='module')
def policy(folder):
    """(model, its parameters)."""
    model = dataclasses.replace(hf.read_config(folder), logit_chunk=16)
    return model, hf.load(folder, model)


@pytest.fixture
def remote(monkeypatch):
    """A workdir in a bucket, where attempts follow each other at once."""
    monkeypatch.setattr('zeroplay_jax.training.mirror._FIRST_PAUSE', 0.01)
    return RemoteWorkdir(MemoryBucket(), 'runs/a')


@pytest.fixture(scope='module')
def steps(tmp_path_factory):
    """A local folder with the checkpoints 2, 4 and 6, which tests link into their own."""
    return save_checkpoints(tmp_path_factory.mktemp('steps'))
