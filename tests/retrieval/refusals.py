"""Refusals in one line, for the tests of retrieval."""

import contextlib

import pytest

from zeroplay_jax.retrieval.types import RetrievalError


@contextlib.contextmanager
def refused(message, kind=RetrievalError):
    """Fails unless the block raises an error of one line that matches; yields it."""
    with pytest.raises(kind, match=message) as error:
        yield error
    assert '\n' not in str(error.value)
