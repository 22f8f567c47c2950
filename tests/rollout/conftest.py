"""A policy whose tokens a test chooses."""

import pytest
import scripted_rollouts


@pytest.fixture(scope='module')
def scripted(tmp_path_factory):
    folder = tmp_path_factory.mktemp('scripted') / 'policy'
    with scripted_rollouts.scripted_policy(folder) as policy:
        yield policy
