"""Fixtures of several tests of retrieval."""

import pytest
from fake_server import fake_server


@pytest.fixture
def fake():
    with fake_server() as server:
        yield server
