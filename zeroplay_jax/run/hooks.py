"""What follows the steps of a run and changes nothing about it: its log, the terminal, traces of jax.profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Container, Iterator, Mapping, Sequence

import jax

from zeroplay_jax.retrieval import progress
from zeroplay_jax.run.alarms import Alarm
from zeroplay_jax.run.state import RunState
from zeroplay_jax.run.steps import Played
from zeroplay_jax.run.trajectories import trajectory_records
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.log import MetricsWriter
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.records import step_name
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.settings.kinds import warn

_PROFILE_FOLDER = 'profile'


class Log:
    """The log of a run, which the first process writes: metrics, rollouts, alarms and tasks.

    It is opened at the next step; a warning names steps before it that are missing. All processes must
    create it.

    Raises:
      UserError: a service among the writers cannot be opened, or the log is of another run; on all processes.
    """

    def __init__(
        self, rollouts: RolloutContext, engine: Engine, workdir: pathlib.Path, state: RunState
    ):
        self._rollouts = rollouts
        self._engine = engine
        self._writer = _open_writer(rollouts.hosts, engine, workdir, state)

    def after(self, played: Played, alarms: Sequence[Alarm]) -> None:
        """Writes what a step has left."""
        if self._writer is None:
            return
        config, step, phase = self._engine.config, played.step, played.step.phase
        self._writer.write_scalars(step.number, phase.iteration, phase.name, played.metrics)
        limit = config.log_trajectories
        records = trajectory_records(config.recipe, self._rollouts, step, played.rows, limit)
        self._writer.write('trajectories', records)
        if played.is_evaluation:
            return
        step_fields = {
            'system': config.recipe,
            'step': step.number,
            'iteration': phase.iteration,
            'phase': phase.name,
        }
        tasks = (step_fields | dict(record) for record in self._engine.task_log)
        self._writer.write('tasks', tasks)
        self._writer.write('alarms', (step_fields | dataclasses.asdict(alarm) for alarm in alarms))

    def close(self) -> None:
        """Flushes and closes all files."""
        if self._writer is not None:
            self._writer.close()


def _open_writer(
    hosts: Hosts, engine: Engine, workdir: pathlib.Path, state: RunState
) -> MetricsWriter | None:
    """Returns the writer of the first process; the others get None."""
    first_step = state.cursor

    def open_in_first() -> MetricsWriter | None:
        # The writer removes records of this and later steps, which a crash may have left behind.
        if not hosts.is_first:
            return None
        run = run_record.hash_of(state.identity)
        return MetricsWriter(workdir, first_step, engine.config.log.writers, run)

    writer = hosts.run_on_all(open_in_first)
    if writer is not None and writer.missing_steps:
        warn(
            f'{workdir / "metrics.jsonl"} lacks {len(writer.missing_steps)} of {first_step} steps, the first is '
            f'{writer.missing_steps[0]}; curves and report will lack them, too'
        )
    if writer is not None and first_step == 0:
        writer.write_parameters({name: each.params for name, each in engine.learners.items()})
    return writer


class Screen:
    """The terminal: a bar over the steps, results of evaluations, what the engine notes, and alarms."""

    def __init__(self, hosts: Hosts, engine: Engine, bar: progress.Bar):
        self._hosts = hosts
        self._engine = engine
        self._bar = bar

    def after(self, played: Played, alarms: Sequence[Alarm]) -> None:
        """Moves the bar, and prints lines about a step."""
        self._bar.update()
        self._bar.note = _rewards_text(played.metrics) or self._bar.note
        lines = list(self._engine.learning.notices)
        if played.is_evaluation:
            lines = [evaluation_text(played.step, played.metrics)]
        lines += [f'alarm: {alarm.text}' for alarm in alarms]
        for line in lines if self._hosts.is_first else ():
            print(line, file=sys.stderr)


def _rewards_text(metrics: Mapping[str, float]) -> str:
    """Returns the mean reward of each trained role, such as 'solver/reward 0.31'; '' without one."""
    texts = []
    for name, value in metrics.items():
        if name.endswith('/reward_mean'):
            texts.append(f'{name.removesuffix("_mean")} {value:.2f}')
    return ', '.join(texts)


def evaluation_text(step: Step, metrics: Mapping[str, float]) -> str:
    """Returns one line with an evaluation's exact match, also by hops where there are several, and rubric score."""
    line = f'{step_name(step)}: exact match {metrics["em/mean"]:.3f}'
    by_hops = []
    for name, share in sorted(metrics.items()):
        if name.startswith('em/hop'):
            by_hops.append(f'{name.removeprefix("em/hop")}: {share:.3f}')
    if len(by_hops) > 1:
        line += f' (by hops {", ".join(by_hops)})'
    if 'rubrics/mean' in metrics:
        line += f', rubrics {metrics["rubrics/mean"]:.3f}'
    return line


@contextlib.contextmanager
def traced(steps: Container[int], step: int, workdir: pathlib.Path) -> Iterator[None]:
    """Writes a trace of the block to workdir/profile/step_<number> if its step is one of `steps`.

    Every process writes its own files there; TensorBoard's profile plugin and Perfetto show them.

    Args:
      steps: `config.profile.steps`.
      step: number of the step that the block runs.
      workdir: folder of the run.
    """
    if step not in steps:
        yield
        return
    with jax.profiler.trace(str(workdir / _PROFILE_FOLDER / f'step_{step}')):
        yield
