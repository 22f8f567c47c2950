"""The state of a run beside its device arrays, and the checkpoints that hold both."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator, Mapping

from zeroplay_jax.learner.checkpoint import Checkpointer, remove_after
from zeroplay_jax.run.outcome import Stop
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.record import Identity
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Json, UserError

# Folder of the best checkpoint in the workdir.
BEST_FOLDER = 'best'


@dataclasses.dataclass
class RunState:
    """What a checkpoint holds as JSON, beside `Engine.host_state()` and the arrays of `Engine.device_state()`.

    The keys of results are numbers of evaluations, as texts.

    Attributes:
      identity: of the run (`runtime.record`).
      cursor: number of the next step.
      evaluations: results → hop count (a text; 0: unknown) → 0 or 1 per question.
      rubrics: results → the score of each open task; empty without such tasks.
      scores: results → the score of each question by `eval.metric`; empty if that is exact match.
      seconds: total time of the run's processes up to the checkpoint.
      stopped: why the run stopped after its last step; None if it did not.
      alarms: `Alarms.in_a_row`.
      best: 'metric', 'value' and 'checkpoint' of the best evaluation so far; None without one.
    """

    identity: Identity
    cursor: int = 0
    evaluations: dict[str, dict[str, list[int]]] = dataclasses.field(default_factory=dict)
    rubrics: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    scores: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    stopped: Stop | None = None
    alarms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    best: Json | None = None

    @classmethod
    def from_json(cls, stored: Json) -> RunState:
        """Returns the state in a checkpoint; that of the engine is left out."""
        stopped = stored['stopped'] and Stop(**stored['stopped'])
        names = stored.keys() - {'engine'}
        return cls(**{name: stored[name] for name in names} | {'stopped': stopped})

    def to_json(self, engine: Engine) -> Json:
        """Returns the state with that of the engine."""
        stopped = self.stopped and dataclasses.asdict(self.stopped)
        return vars(self) | {'stopped': stopped, 'engine': engine.host_state()}


class Saver:
    """Saves the state of a run: the last steps, and the best evaluation beside them (`config.checkpoint.best`).

    All processes must call the methods.

    Attributes:
      checkpoints: the last steps.
      state: of the run, from `begin` on.
      seconds: time that the last call of `after` took.
    """

    state: RunState

    def __init__(self, hosts: Hosts, place: Place, config: Config, engine: Engine):
        self.seconds = 0.0
        self._hosts = hosts
        self._place = place
        self._config = config.checkpoint
        self._engine = engine
        self.checkpoints = Checkpointer(place.workdir, self._config.keep, is_shared=place.is_shared)
        self._best: Checkpointer | None = None

    def restored(self) -> RunState | None:
        """Returns the state in the newest checkpoint, and sets that of the engine; None without a checkpoint."""
        if self.checkpoints.latest() is None:
            return None
        device_state, stored = self.checkpoints.restore(self._engine.device_state())
        # The learners hold these arrays afterwards; a second reference would keep them in memory.
        self._engine.restore(device_state, stored['engine'])
        return RunState.from_json(stored)

    def begin(self, state: RunState) -> None:
        """Saves this state from now on.

        Best checkpoints that are newer than it are removed: the run was resumed from a step before them.
        """
        self.state = state
        self._seconds_before = state.seconds
        if not self._config.best:
            return
        workdir, is_shared = self._place.workdir, self._place.is_shared
        kept = remove_after(self._hosts, workdir / BEST_FOLDER, state.cursor, is_shared)
        # A later one had replaced the best one of the steps before.
        if state.best and state.best['checkpoint'] not in kept:
            state.best = None
        self._best = Checkpointer(workdir, 1, BEST_FOLDER, is_shared)

    def save(self, next_number: int) -> None:
        """Starts to save the state before step `next_number`."""
        self._save(self.checkpoints, next_number)
        self.state.cursor = next_number

    def save_now(self, next_number: int) -> None:
        """Saves the state before step `next_number`, unless it is saved already, and waits until it is on disk."""
        if self.state.cursor < next_number:
            self.save(next_number)
        self.checkpoints.wait()

    def after(self, step: Step, metrics: Mapping[str, float], is_last: bool) -> None:
        """Saves after a step if it is due, or the run ends with it; a better evaluation in any case.

        Raises:
          UserError: evaluations have no metric `config.checkpoint.best`.
        """
        started = time.perf_counter()
        next_number = step.number + 1
        if step.phase.name == 'evaluation' and self._best is not None:
            self._save_if_best(self._best, next_number, metrics)
        # The last step is always saved: the export and the summary can then be repeated.
        if next_number % self._config.every == 0 or self.state.stopped or is_last:
            self.save(next_number)
        self.seconds = time.perf_counter() - started

    def _save_if_best(
        self, checkpoints: Checkpointer, next_number: int, metrics: Mapping[str, float]
    ) -> None:
        """Saves after an evaluation if its metric is larger than all before, and waits until it is on disk."""
        name = self._config.best
        if name not in metrics:
            names = ', '.join(sorted(metrics))
            raise UserError(
                f'config.checkpoint.best={name}: not a metric of evaluations, which have {names}'
            )
        best = self.state.best
        # The metric may be changed when a run is resumed.
        if best and best['metric'] == name and metrics[name] <= best['value']:
            return
        self.state.best = {'metric': name, 'value': metrics[name], 'checkpoint': next_number}
        self._engine.take_snapshots('best')
        self._save(checkpoints, next_number)
        # The run's own checkpoint, which says where the best one is, must not be complete before it.
        checkpoints.wait()

    def _save(self, checkpoints: Checkpointer, next_number: int) -> None:
        seconds = self._seconds_before + _process_age()
        saved = dataclasses.replace(self.state, cursor=next_number, seconds=seconds)
        self.state.seconds = seconds
        checkpoints.save(next_number, self._engine.device_state(), saved.to_json(self._engine))

    @contextlib.contextmanager
    def saved_on_error(self) -> Iterator[None]:
        """Returns a context in which an error first completes the save in progress (`Checkpointer.saved_on_error`)."""
        with self.checkpoints.saved_on_error():
            try:
                yield
            finally:
                if self._best is not None:
                    self._best.close()


def _process_age() -> float:
    """Returns the seconds since this process started, imports included; needs Linux."""
    # The program's name is in brackets and may contain any character, so fields are read after the last
    # bracket. Field 22 of proc(5), here index 19, is the start time in clock ticks since boot.
    fields = pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()
    start_seconds = int(fields[19]) / os.sysconf('SC_CLK_TCK')
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds
