"""The pure part of the alarms: levels, steps in a row, what a line says, and what survives a checkpoint."""

import json
import math
import pathlib

import pytest
from refused_calls import check_table

from zeroplay_jax.run import outcome as alarms_module
from zeroplay_jax.run.outcome import FIGURES, STOP, WARN, Alarms, Levels
from zeroplay_jax.selfplay.schedule import Phase, Step


def step(number, name='solver', trains=('solver',)):
    return Step(Phase(name, 99, trains), number, number)


@pytest.fixture
def watched(monkeypatch):
    """A function: the figure of this name alone is watched, with these levels."""

    def set_levels(name, *values):
        figure = FIGURES[name]._replace(levels=Levels(*values))
        monkeypatch.setattr(alarms_module, 'FIGURES', {name: figure})

    return set_levels


def reached(alarms, number, metrics, **place):
    return [(alarm.name, alarm.level) for alarm in alarms.check(step(number, **place), metrics)]


@pytest.mark.parametrize('name', FIGURES)
def test_a_level_warns_and_stops_at_its_value_or_warns_only(name, watched):
    figure = FIGURES[name]
    at_most = figure.levels.at_most
    watched(name, 0.5, 0.25 if at_most else 0.75, 1, at_most)
    alarms, metric = Alarms(), figure.metrics[0]
    worse = (0.6, 0.5, 0.25) if at_most else (0.4, 0.5, 0.75)
    found = [reached(alarms, index, {metric: value}) for index, value in enumerate(worse)]
    assert found == [[], [(name, WARN)], [(name, STOP)]]
    assert reached(Alarms(stops=False), 0, {metric: worse[-1]}) == [(name, WARN)]


RESUMED, GENERATE = object(), object()


def test_series(watched):
    def series(name, levels, *values):
        """What is reached at every step with these values of a figure; None: the step has none."""
        watched(name, *levels)
        alarms, reached_levels = Alarms(), []
        for number, value in enumerate(values):
            if value is RESUMED:
                alarms = Alarms(in_a_row=json.loads(json.dumps(alarms.in_a_row)))
                continue
            place = {}
            if value is GENERATE:
                # A step of another phase, with metrics of its own.
                place, value = dict(name='generate', trains=()), 1.0
            metrics = {} if value is None else {FIGURES[name].metrics[0]: value}
            found = reached(alarms, number, metrics, **place)
            reached_levels += [kind for _, kind in found] or ['-']
        return ' '.join(reached_levels)

    names = globals() | {'nan': math.nan, 'series': series}
    check_table(pathlib.Path(__file__).parent / 'alarms.txt', names)
