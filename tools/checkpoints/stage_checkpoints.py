"""Checkpoints of a supervised training run of several stages, from which a killed run continues."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from tools.checkpoints.stages import Stage
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.policy import transformer


class StageCheckpoints:
    """The last parameters, moments and log of a training run, in a folder that a restart continues from."""

    def __init__(self, folder: pathlib.Path, stages: Sequence[Stage]):
        """Opens the folder; checkpoints are numbered by the steps of all `stages` together."""
        self._checkpointer = Checkpointer(folder, keep=1)
        self._first_step: dict[str, int] = {}
        total_steps = 0
        for stage in stages:
            self._first_step[stage.name] = total_steps
            total_steps += stage.steps

    def is_finished(self, stage: Stage) -> bool:
        """Whether steps of a later stage were saved.

        A stage of which all steps were saved does not count as finished: its diagnosis and its folder may be missing.
        """
        saved_steps = self._checkpointer.latest() or 0
        stage_end = self._first_step[stage.name] + stage.steps
        return saved_steps > stage_end

    def restore(
        self, stage: Stage, params: transformer.Params, state: Any, log: list[dict[str, Any]]
    ) -> tuple[transformer.Params, Any, int]:
        """Returns parameters, moments and the number of the stage's finished steps; replaces the log.

        If nothing of this stage was saved, the arguments and 0 are returned and the log stays.
        """
        saved_steps = self._checkpointer.latest() or 0
        done_steps = saved_steps - self._first_step[stage.name]
        if done_steps <= 0:
            return params, state, 0
        template = {'params': params, 'state': state}
        arrays, saved = self._checkpointer.restore(template)
        log[:] = saved['log']
        return arrays['params'], arrays['state'], done_steps

    def save(
        self,
        stage: Stage,
        done_steps: int,
        params: transformer.Params,
        state: Any,
        log: Sequence[dict[str, Any]],
    ) -> None:
        """Saves the state after a number of steps of a stage."""
        step = self._first_step[stage.name] + done_steps
        arrays = {'params': params, 'state': state}
        self._checkpointer.save(step, arrays, {'log': list(log)})

    def close(self) -> None:
        """Waits for the last save."""
        self._checkpointer.close()
