"""A tokenizer, and a policy whose tokens a test chooses."""

import pytest
import request_cases
import scripted_rollouts
import tiny

from zeroplay_jax.rollout.tokens import Codec


@pytest.fixture(scope='module')
def scripted(tmp_path_factory):
    folder = tmp_path_factory.mktemp('scripted') / 'policy'
    with scripted_rollouts.scripted_policy(folder) as policy:
        yield policy


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp('tokens') / 'policy')


@pytest.fixture(scope='module')
def codec(folder):
    return Codec(folder)


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    return request_cases.make_policy(tmp_path_factory.mktemp('tiny') / 'policy')
