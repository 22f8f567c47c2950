"""Two runs to report on, and a browser that opens their pages."""

import pytest
import sample_run
from browser import CHROMIUM, Browser

from zeroplay_jax.evaluation import report_builder


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return sample_run.write_run(tmp_path_factory.mktemp('runs') / 'one')


@pytest.fixture(scope='module')
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'two'
    return sample_run.write_run(folder, count=40, after=sample_run.BETTER, rate=2e-3, bonus=0.05)


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip('chromium is not installed')
    browser = Browser(tmp_path_factory.mktemp('profile'))
    yield browser
    browser.close()


@pytest.fixture
def page(run, browser):
    return report_builder.write_report(run).as_uri()


@pytest.fixture
def both(run, other, browser, tmp_path):
    return report_builder.write_report(run, other, out=tmp_path / 'both.html').as_uri()
