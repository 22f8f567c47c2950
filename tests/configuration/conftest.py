"""A config without a mistake."""

import pytest
from config_checks import FILES

from zeroplay_jax.configs import (
    quickstart,
)


@pytest.fixture
def checkpoint(tmp_path):
    """A folder that looks like a checkpoint to a check that loads nothing."""
    folder = tmp_path / 'checkpoint'
    folder.mkdir()
    for name in FILES:
        (folder / name).touch()
    return folder


@pytest.fixture
def sound(checkpoint):
    """A config without a mistake, locked as the command line hands it over."""
    config = quickstart.get_config()
    config.policy.path = str(checkpoint)
    return config.lock()
