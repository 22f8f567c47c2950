"""The golden vectors: expected numbers of an independent float64 implementation; and a batch to compute with."""

import json
import pathlib

import batches
import pytest

_PATH = pathlib.Path(__file__).parents[1] / 'golden' / 'golden.json'


@pytest.fixture(scope='session')
def golden():
    """{name: (inputs, expected)}."""
    return {
        record['name']: (record['inputs'], record['expected'])
        for record in json.loads(_PATH.read_text())
    }


@pytest.fixture
def batch():
    return batches.make()
