"""Searches that find nothing: counted, watched, and the cause of a stop with status 3."""

import pathlib
import types
from unittest import mock

import pytest
from refused_calls import check_table
from trajectories import make_trajectory

from zeroplay_jax.configs import common
from zeroplay_jax.retrieval.client import Client
from zeroplay_jax.run import outcome
from zeroplay_jax.run.outcome import Alarms
from zeroplay_jax.selfplay import health, metrics
from zeroplay_jax.selfplay.library import Library, SearchableCorpus
from zeroplay_jax.selfplay.library_builder import check_and_reset_failures
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.types import Row, ToolCall, TrainingStopped, Turn

PASSAGE = {'id': '7', 'title': 'T', 'text': 'x', 'score': 0.0}


def counts_of(*answers):
    """The counts after one search for each of these lists of passages."""
    answer = lambda queries, k: list(answers)
    backend = types.SimpleNamespace(name='http://127.0.0.1:9', retrieve=answer)
    corpus = SearchableCorpus(Client(backend), 3, 100)
    corpus.search([f'query {number}' for number, _ in enumerate(answers)])
    return check_and_reset_failures(Library(corpus, corpus, (), ()))


@pytest.fixture
def config():
    settings = common.get_config()
    settings.retrieval.update(kind='http', url='http://127.0.0.1:9')
    return settings


def test_an_evaluation_whose_searches_find_nothing_stops_with_the_cause(config):
    with pytest.raises(TrainingStopped, match='http://127.0.0.1:9 .0 of 2.;') as stop:
        outcome.raise_if_nothing_found(config, counts_of([], []))
    assert stop.value.status == 3


def test_what_searches_that_find_nothing_do(config):
    def evaluated(*answers, stops=True):
        config.stop_at_alarms = stops
        outcome.raise_if_nothing_found(config, counts_of(*answers))

    names = globals() | {'evaluated': evaluated}
    table = pathlib.Path(__file__).parent / 'empty_searches.txt'
    check_table(table, names, error=TrainingStopped)


def metrics_of(*rows):
    calls = [ToolCall('search', {'query_list': ['q']}, documents=documents) for documents in rows]
    trajectory = make_trajectory(*(Turn('', call) for call in calls), identity=(0, 0))
    return metrics.ratios(health.health([Row('solver', trajectory, 0.0, group=0)], (), {}))


def test_training_stops_with_status_3_although_its_steps_are_empty_as_well(config):
    watch = Alarms()
    engine = mock.Mock()
    engine.learning.stuck_policies.return_value = ['solver']
    for number in range(2):
        step = Step(Phase('solver', 4, ('solver',), 0), number, number)
        alarms = watch.check(step, {'empty_search_share': 1.0})
    stop = outcome.stop_after(config, engine, step, alarms)
    assert stop.cause == 'empty_searches'
    summary = {'stopped': stop.line, 'stopped_by': stop.cause}
    with pytest.raises(TrainingStopped, match='http://127.0.0.1:9') as stopped:
        outcome.raise_if_stopped_or_untrained(config, summary)
    assert stopped.value.status == 3
