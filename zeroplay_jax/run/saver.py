"""When the state of a run is saved, and from what it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence

from zeroplay_jax.learner.checkpoint import Checkpointer, remove_after
from zeroplay_jax.run.outcome import RunState
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import UserError

# Folder of the best checkpoint in the workdir.
BEST_FOLDER = 'best'


class Saver:
    """Saves the state of a run: the last steps, and the best evaluation beside them (`config.checkpoint.best`).

    A run whose schedule was made longer leaves out the evaluation that ended the shorter one (`restored`), so its next
    step ends at the number of that last checkpoint. The checkpoint is kept, and this step is not saved again: whoever
    stops there repeats it.

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

    def restored(self, steps: Sequence[Step]) -> RunState | None:
        """Returns the state in the newest checkpoint, and sets that of the engine; None without a checkpoint.

        Args:
          steps: all steps of the run, which may have become more since.
        """
        if self.checkpoints.latest() is None:
            return None
        device_state, stored = self.checkpoints.restore(self._engine.device_state())
        # The learners hold these arrays afterwards; a second reference would keep them in memory.
        self._engine.restore(device_state, stored['engine'])
        state = RunState.from_json(stored)
        # The evaluation that ends a shorter schedule is no step of the longer one. It changes nothing but its results
        # and what is best, which stays.
        last = str(state.cursor - 1)
        if last in state.evaluations and steps[int(last)].phase.name != 'evaluation':
            for results in (state.evaluations, state.rubrics, state.scores):
                results.pop(last, None)
            state.cursor -= 1
        return state

    def begin(self, state: RunState) -> None:
        """Saves this state from now on.

        Best checkpoints that are newer than it are removed: the run was resumed from a step before them.
        """
        self.state = state
        self._seconds_before = state.seconds
        if not self._config.best:
            return
        workdir, is_shared = self._place.workdir, self._place.is_shared
        # After a longer schedule the newest checkpoint is that of the shorter one, behind the state.
        newest = max(state.cursor, self.checkpoints.latest() or 0)
        kept = remove_after(self._hosts, workdir / BEST_FOLDER, newest, is_shared)
        # A later one had replaced the best one of the steps before.
        if state.best and state.best['checkpoint'] not in kept:
            state.best = None
        self._best = Checkpointer(workdir, 1, BEST_FOLDER, is_shared)

    def save(self, next_number: int) -> None:
        """Starts to save the state before step `next_number`.

        Does nothing where `can_save` says no.
        """
        if self.can_save(next_number):
            self._save(self.checkpoints, next_number)
            self.state.cursor = next_number

    def can_save(self, next_number: int) -> bool:
        """Returns False for the number at which a shorter schedule ended."""
        return self.checkpoints.latest() != next_number

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
