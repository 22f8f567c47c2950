"""Fixtures of several tests of retrieval."""

import contextlib

import pytest
from fake_server import fake_server
from refusals import refused

from zeroplay_jax.retrieval.types import RetrievalError


@pytest.fixture
def fake():
    with fake_server() as server:
        yield server


@pytest.fixture
def user_meets(user_reads):
    """A function: the block is refused with such a line, which is recorded as what a user reads."""

    @contextlib.contextmanager
    def meets(message, kind=RetrievalError):
        with refused(message, kind) as error:
            yield
        user_reads(error.value)

    return meets
