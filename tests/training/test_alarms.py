"""The pure part of the alarms: levels, steps in a row, what a line says, and what survives a checkpoint."""

import json
import math
import pathlib

import pytest
from refused_calls import check_table

from zeroplay_jax.configs import common, quickstart
from zeroplay_jax.configuration import fields
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.settings.schema import ALARMS_THAT_FALL, Run
from zeroplay_jax.settings.schema import Alarms as Section
from zeroplay_jax.training.outcome import FIGURES, STOP, WARN, Alarms


def step(number, name='solver', trains=('solver',)):
    return Step(Phase(name, 99, trains), number, number)


def levels(**changes):
    """All alarms off, but those of `changes`: name → (warn, stop, steps)."""
    return dict.fromkeys(FIGURES, (0.0, 0.0, 1)) | changes


def reached(alarms, number, metrics, **place):
    return [(alarm.name, alarm.level) for alarm in alarms.check(step(number, **place), metrics)]


def test_every_figure_has_levels_that_a_resumed_run_may_change():
    assert set(Section.model_fields) == set(FIGURES)
    changeable = fields.changeable_fields(common.get_config())
    assert {f'alarms.{name}' for name in FIGURES} <= set(changeable)
    # With the defaults every figure warns.
    assert all(getattr(Run().alarms, name)[0] for name in FIGURES)


@pytest.mark.parametrize('name', FIGURES)
def test_a_level_warns_and_stops_at_its_value_and_0_is_off(name):
    figure = FIGURES[name]
    alarms = Alarms(
        levels(**{name: (0.5, 0.25, 1) if name in ALARMS_THAT_FALL else (0.5, 0.75, 1)})
    )
    metric = 'policy_tokens' if name == 'length' else figure.metrics[0]
    worse = (0.6, 0.5, 0.25) if name in ALARMS_THAT_FALL else (0.4, 0.5, 0.75)
    if name == 'length':
        for number in range(3):
            assert alarms.check(step(number), {metric: 1.0}) == []
    found = [reached(alarms, 3 + index, {metric: value}) for index, value in enumerate(worse)]
    assert found == [[], [(name, WARN)], [(name, STOP)]]
    off = Alarms(levels())
    for number in range(5):
        assert off.check(step(number), {metric: worse[-1]}) == []


RESUMED = object()


# Steps of other phases in between, with metrics of their own.
GENERATE = dict(name='generate', trains=(), value=1.0)


PROPOSER = dict(name='proposer', trains=('solver',), value=500)


def metric_of(name):
    return 'policy_tokens' if name == 'length' else FIGURES[name].metrics[0]


def series(name, level, *values):
    """What is reached at every step with these values of a figure; None: the step has none."""
    alarms, reached_levels = Alarms(levels(**{name: level})), []
    for number, value in enumerate(values):
        if value is RESUMED:
            saved = json.loads(json.dumps(alarms.state()))
            alarms = Alarms(levels(**{name: level}))
            alarms.restore(saved)
            continue
        place = {}
        if isinstance(value, dict):
            place = dict(value)
            value = place.pop('value')
        metrics = {'reward_mean': 0.0} if value is None else {metric_of(name): value}
        found = reached(alarms, number, metrics, **place)
        assert all(alarm == name for alarm, _ in found)
        reached_levels += [kind for _, kind in found] or ['-']
    return ' '.join(reached_levels)


def line(name, level, *metrics):
    """The line of the alarm after a step with the first metrics, or three of length, and two with the last."""
    alarms, place = Alarms(levels(**{name: level})), {}
    if any('/' in metric.removeprefix('value_network/') for metric in metrics[-1]):
        place = dict(name='selfplay', trains=('proposer', 'solver'))
    steps = [metrics[0]] * 3 + [metrics[-1]] if name == 'length' else [metrics[0]] * 2
    for number, values in enumerate(steps):
        alarm = alarms.check(step(number, **place), values)
    (alarm,) = alarm
    return f'{alarm.metric}={alarm.value:g}: {alarm.text}'


def test_series_and_lines():
    names = globals() | {'nan': math.nan}
    check_table(pathlib.Path(__file__).parent / 'alarms.txt', names)


def test_the_quickstart_reaches_no_level():
    """The watched figures of a whole run (seed 0)."""
    config = quickstart.get_config()
    alarms = Alarms(config.alarms)
    path = pathlib.Path(__file__).parents[1] / 'golden' / 'quickstart_metrics.jsonl'
    phases = set()
    for line in path.read_text().splitlines():
        metrics = json.loads(line)
        number, phase = metrics.pop('step'), metrics.pop('phase')
        phases.add(phase)
        trains = () if phase == 'generate' else (phase,)
        assert alarms.check(step(number, phase, trains), metrics) == []
    assert phases == {'proposer', 'generate', 'solver'}
