"""The pure part of the alarms: levels, steps in a row, what a line says, and what survives a checkpoint."""

import json
import math
import pathlib

import pytest
from refused_calls import check_table

from zeroplay_jax.configs import common
from zeroplay_jax.configuration import fields
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


def test_a_resumed_run_may_go_on_without_stops():
    assert 'stop_at_alarms' in fields.changeable_fields(common.get_config())


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


RESUMED = object()


# Steps of other phases in between, with metrics of their own.
GENERATE = dict(name='generate', trains=(), value=1.0)


def test_series_and_lines(watched):
    def series(name, levels, *values):
        """What is reached at every step with these values of a figure; None: the step has none."""
        watched(name, *levels)
        alarms, reached_levels = Alarms(), []
        for number, value in enumerate(values):
            if value is RESUMED:
                alarms = Alarms(in_a_row=json.loads(json.dumps(alarms.in_a_row)))
                continue
            place = {}
            if isinstance(value, dict):
                place = dict(value)
                value = place.pop('value')
            metric = FIGURES[name].metrics[0]
            metrics = {'reward_mean': 0.0} if value is None else {metric: value}
            found = reached(alarms, number, metrics, **place)
            reached_levels += [kind for _, kind in found] or ['-']
        return ' '.join(reached_levels)

    def line(name, levels, metrics):
        """The line of the alarm after two steps with these metrics."""
        watched(name, *levels)
        alarms, place = Alarms(), {}
        if any('/' in metric.removeprefix('value_network/') for metric in metrics):
            place = dict(name='selfplay', trains=('proposer', 'solver'))
        alarms.check(step(0, **place), metrics)
        (alarm,) = alarms.check(step(1, **place), metrics)
        return f'{alarm.metric}={alarm.value:g}: {alarm.text}'

    names = globals() | {'nan': math.nan, 'series': series, 'line': line}
    check_table(pathlib.Path(__file__).parent / 'alarms.txt', names)


def test_the_quickstart_reaches_no_level():
    """The watched figures of a whole run (seed 0)."""
    alarms = Alarms()
    path = pathlib.Path(__file__).parents[1] / 'golden' / 'quickstart_metrics.jsonl'
    phases = set()
    for line in path.read_text().splitlines():
        metrics = json.loads(line)
        number, phase = metrics.pop('step'), metrics.pop('phase')
        phases.add(phase)
        trains = () if phase == 'generate' else (phase,)
        assert alarms.check(step(number, phase, trains), metrics) == []
    assert phases == {'proposer', 'generate', 'solver'}
