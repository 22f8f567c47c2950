"""Two runs to report on."""

import pytest
import sample_run


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return sample_run.write_run(tmp_path_factory.mktemp('runs') / 'one')


@pytest.fixture(scope='module')
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'two'
    return sample_run.write_run(folder, count=40, after=sample_run.BETTER, rate=2e-3, bonus=0.05)
