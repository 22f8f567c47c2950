"""The folder of a small policy."""

import pytest
import tiny


@pytest.fixture(scope='session')
def published(tmp_path_factory):
    """A folder that nothing is wrong with; not to be changed."""
    return tiny.make_folder(tmp_path_factory.mktemp('published') / 'policy', letters=tiny.LETTERS)
