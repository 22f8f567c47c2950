"""The small policy that updates train."""

import dataclasses

import pytest
import tiny

from zeroplay_jax.policy import hf


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp('learner') / 'policy', letters=tiny.LETTERS)


@pytest.fixture(scope='module')
def policy(folder):
    """(model, its parameters)."""
    model = dataclasses.replace(hf.read_config(folder), logit_chunk=14)
    return model, hf.load(folder, model)
