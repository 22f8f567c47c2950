"""The time left is estimated per kind of phase, and compilations do not enter it."""

import pytest

from zeroplay_jax.retrieval import progress
from zeroplay_jax.selfplay.schedule import Phase, Step, all_steps, with_evaluations
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
    assert estimate.predict(12).seconds_left(1.0) == pytest.approx(expected - 1.0)
    # A step that takes longer than expected.
    assert estimate.predict(12).seconds_left(1e6) >= 0
    assert estimate.predict(len(steps)).seconds_left(0.0) == 0


def test_a_phase_that_was_not_seen_is_scaled_by_its_rollouts():
    first, second = Phase('a', 1), Phase('b', 2)
    steps = all_steps([first, second])
    estimate = TimeLeft(steps, lambda phase: {'a': 10, 'b': 30}[phase.name])
    estimate.add(steps[0], 5.0)
    assert estimate.predict(1).seconds_left(0.0) == pytest.approx(2 * 15.0)


def test_the_first_step_of_a_phase_is_forgotten():
    steps = all_steps([Phase('a', 40)])
    estimate = TimeLeft(steps, lambda phase: 1)
    # It traces the programs of the phase.
    for step, seconds in zip(steps, (20.0, 2.0, 4.0)):
        estimate.add(step, seconds)
    assert estimate.predict(30).seconds_left(0.0) == pytest.approx(10 * 3.0)


def test_recent_steps_count():
    steps = all_steps([Phase('a', 40)])
    estimate = TimeLeft(steps, lambda phase: 1)
    for step in steps[:10]:
        estimate.add(step, 100.0)
    for step in steps[10:20]:
        estimate.add(step, 1.0)
    assert estimate.predict(20).seconds_left(0.0) == pytest.approx(20.0)


def test_compilations_are_measured():
    clock = progress.Compilations()
    clock.on_end('/jax/core/compile/backend_compile_duration', 2.0, fun_name='f')
    # Durations of tracing are nested: they cannot be added.
    clock.on_end('/jax/core/compile/jaxpr_trace_duration', 0.5)
    clock.on_end('/jax/other', 7.0)
    assert clock.seconds == 2.0


def test_a_schedule_of_evaluations_only():
    steps = [Step(Phase('evaluation', 1), 0, number) for number in range(2)]
    estimate = TimeLeft(steps, lambda phase: 0)
    estimate.add(steps[0], 4.0)
    assert estimate.predict(1).seconds_left(0.0) == pytest.approx(4.0)
