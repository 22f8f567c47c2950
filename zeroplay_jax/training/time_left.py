"""Estimates the time that the remaining steps of a run take, by kind of phase.

Steps of different phases take different times, and the first ones contain compilations, so the mean over all
steps so far would be wrong for a long time. Here a phase is predicted from its own recent steps, without the time
of compilations, and a phase that has not begun from its number of rollouts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.monitoring

from zeroplay_jax.selfplay.schedule import Phase, Step

# Recent steps of a phase: enough to average over, few enough to follow rollouts that grow longer.
_RECENT_STEPS = 8
# If only steps without an update have been seen, an update is assumed to take as long as its rollouts.
_UPDATE_FACTOR = 2.0
# Only XLA's compilations are counted: events of tracing are nested, so their sum would exceed the time they took.
_COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted durations.

    Attributes:
      total: seconds of all remaining steps, the one that runs included.
      current: seconds of the step that runs.
    """

    total: float
    current: float

    def seconds_left(self, elapsed: float) -> float:
        """Returns the seconds left, `elapsed` seconds after the current step began."""
        # The time left of the current step is never negative, even if it takes longer than predicted.
        return self.total - min(elapsed, self.current)


class TimeLeft:
    """Predicts the seconds of the remaining steps.

    Args:
      steps: all steps of the run.
      rollouts: planned rollouts per step of a phase.
    """

    def __init__(self, steps: Sequence[Step], rollouts: Callable[[Phase], int]):
        self._steps = steps
        self._rollouts = rollouts
        self._seconds: dict[str, collections.deque[float]] = {}
        self._phases: dict[str, Phase] = {}
        # Names of phases of which a second step was added.
        self._repeated: set[str] = set()

    def add(self, step: Step, seconds: float) -> None:
        """Records the duration of a step, without compilations."""
        name = step.phase.name
        recent = self._seconds.setdefault(name, collections.deque(maxlen=_RECENT_STEPS))
        # The first step of a phase also traces its programs, so its duration is dropped when a second one is known.
        if recent and name not in self._repeated:
            recent.clear()
            self._repeated.add(name)
        recent.append(seconds)
        self._phases[name] = step.phase

    def predict(self, next_step: int) -> Prediction | None:
        """Predicts all steps from number `next_step` on; None before the first step has ended."""
        if not self._seconds:
            return None
        remaining_steps = self._steps[next_step:]
        if not remaining_steps:
            return Prediction(0.0, 0.0)
        # Steps are counted per phase, because there are few kinds of phases but thousands of steps.
        count_of_phase: collections.Counter[str] = collections.Counter()
        phases: dict[str, Phase] = {}
        for step in remaining_steps:
            count_of_phase[step.phase.name] += 1
            phases[step.phase.name] = step.phase
        total = 0.0
        for name, count in count_of_phase.items():
            total += count * self._step_seconds(phases[name])
        return Prediction(total, current=self._step_seconds(remaining_steps[0].phase))

    def _step_seconds(self, phase: Phase) -> float:
        """Returns the predicted seconds of a step of a phase; at least one step must have been added."""
        recent = self._seconds.get(phase.name)
        if recent:
            return sum(recent) / len(recent)
        # A phase that was not seen yet is predicted from phases like it: those that train roles, or those that do not.
        trains = bool(phase.trains)
        rate = self._seconds_per_rollout(trains)
        if rate is None:
            factor = _UPDATE_FACTOR if trains else 1 / _UPDATE_FACTOR
            other_rate = self._seconds_per_rollout(not trains)
            # `predict` has made sure that some phase was seen.
            assert other_rate is not None
            rate = factor * other_rate
        return rate * self._rollouts(phase)

    def _seconds_per_rollout(self, trains: bool) -> float | None:
        """Returns the mean of the phases seen so far that train roles (or that do not); None if there is none."""
        seconds = 0.0
        rollouts = 0
        for phase in self._phases.values():
            if bool(phase.trains) == trains:
                seconds += self._step_seconds(phase)
                rollouts += self._rollouts(phase)
        if not rollouts:
            return None
        return seconds / rollouts


class CompileClock:
    """Counts the seconds that XLA spent on compilations in this process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, event: str, seconds: float, **_details) -> None:
        """Adds the duration of a compilation; JAX calls it for all of its duration events."""
        if event == _COMPILE_EVENT:
            self.seconds += seconds


# Cached, because JAX keeps every listener for the lifetime of the process.
@functools.cache
def compile_clock() -> CompileClock:
    """Returns the clock of this process, which runs since the first call."""
    clock = CompileClock()
    jax.monitoring.register_event_duration_secs_listener(clock.add)
    return clock
