"""The time left is estimated per kind of phase, and compilations do not enter it."""

import pathlib

import pytest
from refused_calls import check_table

from zeroplay_jax.retrieval import progress
from zeroplay_jax.selfplay.schedule import Phase, all_steps, with_evaluations
from zeroplay_jax.training.screen import TimeLeft

ROLLOUTS = {'evaluation': 200, 'proposer': 96, 'generate': 16, 'solver': 40}

SECONDS = {'evaluation': 8.0, 'proposer': 7.5, 'generate': 0.7, 'solver': 3.2}


def schedule():
    phases = []
    for iteration in range(3):
        phases.append(Phase('proposer', 4, ('proposer',), iteration))
        phases.append(Phase('generate', 3, (), iteration))
        phases.append(Phase('solver', 18, ('solver',), iteration))
    return with_evaluations(all_steps(phases), 'solver', 6)


def rollouts(phase):
    return ROLLOUTS[phase.name]


def test_the_estimate_does_not_grow_by_more_than_half_as_the_phases_appear():
    steps = schedule()
    estimate = TimeLeft(steps, rollouts)
    assert estimate.predict(0) is None
    smallest_total = float('inf')
    elapsed = 0.0
    for step in steps[:40]:
        estimate.add(step, SECONDS[step.phase.name])
        elapsed += SECONDS[step.phase.name]
        total = elapsed + estimate.predict(step.number + 1).seconds_left(0.0)
        assert total < 1.6 * smallest_total
        smallest_total = min(smallest_total, total)


def test_phases_that_were_seen_are_predicted_exactly():
    steps = schedule()
    estimate = TimeLeft(steps, rollouts)
    for step in steps[:12]:
        estimate.add(step, SECONDS[step.phase.name])
    expected = sum(SECONDS[step.phase.name] for step in steps[12:])
    assert estimate.predict(12).seconds_left(0.0) == pytest.approx(expected)


def left(phases, seconds, at=None, passed=0.0, rollouts=None):
    """Seconds left before a step, after steps that took these seconds."""
    steps = all_steps([Phase(*phase) for phase in phases])
    estimate = TimeLeft(steps, lambda phase: (rollouts or {}).get(phase.name, 1))
    for step, each in zip(steps, seconds):
        estimate.add(step, each)
    prediction = estimate.predict(len(seconds) if at is None else at)
    return prediction and round(prediction.seconds_left(passed), 6)


def test_the_table():
    check_table(pathlib.Path(__file__).parent / 'time_left.txt', {'left': left})


def test_compilations_are_measured():
    clock = progress.Compilations()
    clock.on_end('/jax/core/compile/backend_compile_duration', 2.0, fun_name='f')
    # Durations of tracing are nested: they cannot be added.
    clock.on_end('/jax/core/compile/jaxpr_trace_duration', 0.5)
    clock.on_end('/jax/other', 7.0)
    assert clock.seconds == 2.0
