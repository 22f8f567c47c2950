"""Saves the state of a run: the last steps, and the best evaluation beside them (`config.checkpoint.best`)."""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from zeroplay_jax.learner.checkpoint import Checkpointer, remove_after
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.recipe_attributes import RecipeAttributes
from zeroplay_jax.types import Json, UserError

# Folder of the best checkpoint in the workdir.
BEST_FOLDER = 'best'


class Saver:
    """Saves checkpoints of `engine.device_state()` (weights, moments, teachers) and the state of the loop.

    Checkpoints in `best` that are newer than the run are removed: it was resumed from a step before, and saves them
    again. All processes must create it.

    Args:
      hosts: processes of the run.
      workdir: folder of the run.
      best_metric: name of a metric of evaluations; '' keeps no best checkpoint.
      engine: the engine.
      checkpoints: the last steps of the run.
      state: the state of the loop (`loop._train`), which is updated in place.
    """

    def __init__(
        self,
        hosts: Hosts,
        workdir: pathlib.Path,
        best_metric: str,
        engine: Engine,
        checkpoints: Checkpointer,
        state: dict[str, Any],
    ):
        self._engine = engine
        self._shows_warnings = hosts.is_first
        self._attributes = RecipeAttributes(engine.recipe)
        self._checkpoints = checkpoints
        self._state = state
        self._seconds_before = state['seconds']
        self._best_metric = best_metric
        self._best: Checkpointer | None = None
        if best_metric:
            is_shared = checkpoints.is_shared
            kept = remove_after(hosts, workdir / BEST_FOLDER, state['cursor'], is_shared)
            # A later one had replaced the best one of the steps before.
            if state.get('best') and state['best']['checkpoint'] not in kept:
                del state['best']
            self._best = Checkpointer(workdir, 1, BEST_FOLDER, is_shared)

    def save(self, next_number: int) -> None:
        """Starts to save the state before step `next_number`. All processes must call it, as the methods below."""
        self._warn_of_attributes()
        self._state.update(self._snapshot(next_number))
        self._checkpoints.save(next_number, self._engine.device_state(), self._state)

    def save_now(self, next_number: int) -> None:
        """Saves the state before step `next_number`, unless it is saved already, and waits until it is on disk."""
        if self._state['cursor'] < next_number:
            self.save(next_number)
        self._checkpoints.wait()

    def save_if_best(self, next_number: int, metrics: Mapping[str, float]) -> None:
        """Saves the state after an evaluation if its metric is larger than all before, and waits until it is on disk.

        Sets `state['best']` to {'metric', 'value', 'checkpoint'}. A checkpoint holds it, so that a resumed run compares
        with the same value.

        Args:
          next_number: number of the step after the evaluation.
          metrics: of the evaluation.

        Raises:
          UserError: evaluations have no such metric.
        """
        if self._best is None:
            return
        name = self._best_metric
        if name not in metrics:
            names = ', '.join(sorted(metrics))
            raise UserError(
                f'config.checkpoint.best={name}: not a metric of evaluations, which have {names}'
            )
        value = metrics[name]
        best = self._state.get('best')
        # The metric may be changed when a run is resumed.
        if best and best['metric'] == name and value <= best['value']:
            return
        self._state['best'] = {'metric': name, 'value': value, 'checkpoint': next_number}
        loop_state = self._snapshot(next_number)
        self._best.save(next_number, self._engine.device_state(), loop_state)
        # The run's own checkpoint, which says where the best one is, must not be complete before it.
        self._best.wait()

    def close(self) -> None:
        """Releases threads of the best checkpoint."""
        if self._best is not None:
            self._best.close()

    def _warn_of_attributes(self) -> None:
        """Prints a line about attributes of the recipe that a checkpoint lacks, once per process."""
        line = self._attributes.warning() if self._shows_warnings else ''
        if line:
            self._shows_warnings = False
            print(f'warning: {line}', file=sys.stderr)

    def _snapshot(self, next_number: int) -> Json:
        """Returns the state of the loop before step `next_number`."""
        loop_state = dict(self._state)
        loop_state['engine'] = self._engine.host_state()
        loop_state['cursor'] = next_number
        loop_state['seconds'] = self._seconds_before + _process_age()
        return loop_state


def _process_age() -> float:
    """Returns the seconds since this process started, imports included; needs Linux."""
    # The program's name is in brackets and may contain any character, so fields are read after the last
    # bracket. Field 22 of proc(5), here index 19, is the start time in clock ticks since boot.
    fields = pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()
    start_seconds = int(fields[19]) / os.sysconf('SC_CLK_TCK')
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds
