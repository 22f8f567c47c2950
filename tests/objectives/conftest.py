"""The golden vectors: expected numbers of an independent float64 implementation."""

import json
import pathlib

import pytest

_PATH = pathlib.Path(__file__).parents[1] / 'golden' / 'golden.json'


@pytest.fixture(scope='session')
def golden():
    """{name: (inputs, expected)}."""
    return {record['name']: (record['inputs'], record['expected']) for record in json.loads(_PATH.read_text())}
