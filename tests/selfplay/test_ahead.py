"""Rollouts of the next step begin while this one's last are in progress: what plays what is counted, not timed."""

import json

import ahead_runs
import jax
import numpy as np
import pytest


@pytest.fixture(scope='module')
def whole():
    engine = ahead_runs.make_engine(ahead_runs.make_config())
    records = ahead_runs.play(engine)
    return engine, records


def versions(records):
    return [{version for _, version, *_ in record['rollouts']} for record in records]


def test_a_step_is_played_whole_by_the_weights_of_the_step_before(whole):
    _, records = whole
    assert versions(records) == [{0}, {0}, {1}, {2}]
    assert [record['metrics']['staleness'] for record in records] == [0, 1, 1, 1]
    assert all('importance' in record['metrics'] for record in records)


def test_without_it_every_step_is_played_by_the_newest_weights():
    engine = ahead_runs.make_engine(ahead_runs.make_config(ahead=0))
    records = ahead_runs.play(engine)
    assert versions(records) == [{0}, {1}, {2}, {3}]
    assert all('staleness' not in record['metrics'] for record in records)
    assert engine.scheduler._runner is None
