"""Runs training, in this order: build, restore, then per step roll out, update, log and save; at the end, report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.learner.checkpoint import Checkpointer, claim
from zeroplay_jax.retrieval import progress
from zeroplay_jax.runtime import atomic
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.metrics import MetricsWriter
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.row_exchange import collect_records
from zeroplay_jax.selfplay.schedule import Phase, Step, all_steps, with_evaluations
from zeroplay_jax.training import build, tool_record
from zeroplay_jax.training.alarms import ALARM_FIELDS, Alarm, Alarms
from zeroplay_jax.training.evaluation_step import evaluate_step
from zeroplay_jax.training.export import (
    export,
    fingerprints,
    remove_exports,
    unchanged_policies,
)
from zeroplay_jax.training.outcome import (
    current_stop,
    learning_summary,
    proposal_summary,
    raise_if_stopped_or_untrained,
    stop_after,
)
from zeroplay_jax.training.profiling import traced
from zeroplay_jax.training.progress_bar import ProgressBar
from zeroplay_jax.training.rollout_text import evaluation_text, rollout_text
from zeroplay_jax.training.summary import summarise_run, summary_json
from zeroplay_jax.training.trajectory_log import rendering_check, trajectory_records
from zeroplay_jax.types import Json, Row

# File that holds the number of steps after which the last report was written.
_REPORTED_FILE = '.reported'
# Fields that may change on resume: the result does not depend on them.
CHANGEABLE_FIELDS = (
    'progress',
    'stop_after_empty_steps',
    'log.samples_every',
    'log.writers',
    'log.project',
    'profile.steps',
    *ALARM_FIELDS,
    'checkpoint.every',
    'checkpoint.keep',
    'offload',
    'distributed.mode',
    'distributed.coordinator',
    'distributed.processes',
    'distributed.process',
    'distributed.heartbeat',
)


def run(config, workdir) -> dict:
    """Runs `config` in `workdir` to its end, from its last checkpoint if there is one; returns the summary.

    Writes checkpoints, logs, trained weights, summary.json and the report to `workdir`.

    Raises:
      UserError: the workdir has another config or is in use by another process, the objects of the run do not fit
        together, or too many searches, tool calls or judgements failed.
      TrainingStopped: the run stopped early (`config.stop_after_empty_steps`, `config.alarms`), or no policy was
        trained. Checkpoint, summary and report are written before.
    """
    workdir = pathlib.Path(workdir)
    hosts = Hosts()
    shows_progress = config.progress and hosts.is_first
    with _claimed_workdir(hosts, workdir, config) as write_config:
        # ---- build ---------------------------------------------------------------------------------
        context = _build_on_all(hosts, config)
        engine = build.build_engine(config, context)
        first_weights = fingerprints(engine)
        # Learners and samplers have their own copies.
        context = dataclasses.replace(context, params={})
        phases = engine.recipe.phases()
        steps = with_evaluations(all_steps(phases), engine.recipe.evaluated_role, config.eval.every)
        write_config()

        # ---- restore -------------------------------------------------------------------------------
        checkpoints = Checkpointer(workdir, config.checkpoint.keep)
        is_resumed = checkpoints.latest() is not None
        tool_record.check_or_write(hosts, workdir, context.rollouts.roles, is_resumed)
        state: dict[str, Any] = {
            'cursor': 0,
            'evaluations': {},
            'rubrics': {},
            'seconds': 0.0,
            'stopped': None,
            'alarms': {},
        }
        if is_resumed:
            with progress.clock('restore', shows_progress):
                device_state, saved_state = checkpoints.restore(engine.device_state())
            state |= saved_state
            engine.restore(device_state, state['engine'])
            # The learners hold these arrays now; a second reference would keep them in memory after
            # the first update.
            del device_state
            if hosts.is_first:
                print(f'resumes at step {state["cursor"]} of {len(steps)}', file=sys.stderr)

        # ---- train ---------------------------------------------------------------------------------
        # An early stop saves a checkpoint and then writes the report. If the run was killed in between, this call only
        # writes the report; the next one continues to train, as after any early stop.
        is_report_due = current_stop(config, state['stopped']) is not None
        if is_report_due:
            is_report_due = not _is_reported(hosts, workdir, state['cursor'])
        if state['cursor'] < len(steps) and not is_report_due:
            remove_exports(hosts, workdir)
            _train(config, workdir, context, engine, checkpoints, steps, state)
        checkpoints.close()

        # ---- report --------------------------------------------------------------------------------
        summary, table = summarise_run(
            config, context.library, engine.external_items, state, len(steps)
        )
        unchanged = unchanged_policies(engine, first_weights)
        stopped = current_stop(config, state['stopped'])
        summary |= learning_summary(engine, steps, unchanged, stopped)
        summary |= proposal_summary(hosts, engine, context.library.training)
        export(config, hosts, workdir, context, engine, shows_progress, unchanged)
        if hosts.is_first:
            atomic.write_text(workdir / 'summary.json', summary_json(summary))
            report_path = report_builder.write_report(workdir)
            atomic.write_text(workdir / _REPORTED_FILE, f'{state["cursor"]}\n')
            print(table)
            print(f'{summary["seconds"]:.0f} s; the report is {report_path}')
    # Raised after the workdir is released, and on every process, so that all exit with the same status.
    raise_if_stopped_or_untrained(config, summary)
    return summary


def _train(
    config,
    workdir: pathlib.Path,
    context: build.RunContext,
    engine: Engine,
    checkpoints: Checkpointer,
    steps: list[Step],
    state: dict[str, Any],
) -> None:
    """Runs, logs and saves all steps from `state['cursor']` on; updates `state` in place.

    A checkpoint holds `engine.device_state()` (weights, moments, teachers) and `state`:
      'engine': `engine.host_state()` (pool, dataset positions, carried-over groups, …).
      'cursor': number of the next step.
      'evaluations', 'rubrics': results by step number, see `evaluate_step`.
      'seconds': total time of the run's processes up to this checkpoint.
      'stopped': why the run stopped after this step (fields of an `outcome.Stop`), or None.
      'alarms': `Alarms.state`.
    """
    hosts = context.rollouts.hosts
    first_step = state['cursor']
    seconds_before = state['seconds']
    # The writer removes records of this and later steps, which a crash may have left behind.
    writer: MetricsWriter | None = None
    if hosts.is_first:
        writer = MetricsWriter(workdir, first_step, config.log.writers, config.log.project)
    watch = Alarms(config.alarms)
    watch.restore(state['alarms'])
    # Saving follows the log of its step, so its time is logged with the next one.
    save_seconds = 0.0
    shows_progress = config.progress and hosts.is_first
    step_pairs = itertools.zip_longest(steps[first_step:], steps[first_step + 1 :])
    with (
        checkpoints.saved_on_interrupt(),
        contextlib.closing(engine),
        ProgressBar(shows_progress, steps, first_step, _planned_rollouts(context, engine)) as bar,
    ):
        for step, next_step in step_pairs:
            bar.begin_step(step)
            with traced(config.profile.steps, step.number, workdir):
                metrics, rows = _run_step(context, engine, step, next_step, state, bar.end_episode)
            metrics['seconds/save'] = save_seconds
            alarms: list[Alarm] = []
            stop = None
            if step.phase.name != 'evaluation':
                # All processes get the same alarms: the watched metrics are those of the whole step.
                alarms = watch.check(step, metrics)
                stop = stop_after(config, engine, step, alarms)
            _log_step(config, context, engine, step, metrics, rows, alarms, writer)
            bar.end_step(step, metrics)
            rollouts = _shown_rollouts(config, hosts, step, rows)
            if hosts.is_first:
                _print_step(config, engine, step, metrics, rollouts, alarms, bar)
            state['stopped'] = dataclasses.asdict(stop) if stop else None
            save_started = time.perf_counter()
            # The last step is always saved: the export and the summary can then be repeated.
            next_step = step.number + 1
            is_due = next_step % config.checkpoint.every == 0
            if is_due or state['stopped'] or next_step == len(steps):
                # Logs are written before the checkpoint, so no saved step lacks its records.
                state['engine'] = engine.host_state()
                state['alarms'] = watch.state()
                state['cursor'] = next_step
                state['seconds'] = seconds_before + _process_age()
                checkpoints.save(next_step, engine.device_state(), state)
            save_seconds = time.perf_counter() - save_started
            if state['stopped']:
                break
    if writer:
        writer.close()


def _is_reported(hosts: Hosts, workdir: pathlib.Path, cursor: int) -> bool:
    """Returns whether the report of a run that stopped before step `cursor` was written; equal on all processes."""
    path = workdir / _REPORTED_FILE
    is_reported = path.is_file() and path.read_text(encoding='utf-8').strip() == str(cursor)
    # The first process decides: only its folder has the reports.
    return hosts.gather(is_reported)[0]


def _planned_rollouts(context: build.RunContext, engine: Engine) -> Callable[[Phase], int]:
    """Returns a function from a phase, an evaluation included, to its planned rollouts per step."""

    def planned_rollouts(phase: Phase) -> int:
        if phase.name == 'evaluation':
            return len(context.library.evaluation_items)
        return engine.recipe.rollouts_per_step(phase)

    return planned_rollouts


def _shown_rollouts(config, hosts: Hosts, step: Step, rows: list[Row]) -> list[str]:
    """Returns the text of one rollout every `config.log.samples_every` steps, in process 0; all processes call it."""
    # The step's number decides, so that a resumed run prints the same rollouts.
    period = config.log.samples_every
    if not period or not rows or step.number % period:
        return []
    # The position changes with the step, so that a recipe's order of rows does not decide which rollout is shown.
    row = rows[step.number % len(rows)]
    return collect_records(hosts, [row], functools.partial(rollout_text, step))


def _print_step(
    config,
    engine: Engine,
    step: Step,
    metrics: dict[str, float],
    rollouts: list[str],
    alarms: Sequence[Alarm],
    bar: ProgressBar,
) -> None:
    """Prints an evaluation's result or a step's notices (no tasks, no update), alarms, and the texts of rollouts."""
    # An evaluation is not a step of the engine: the notices would be those of the step before.
    if step.phase.name == 'evaluation':
        bar.write_wrapped(evaluation_text(step, metrics))
    else:
        for notice in engine.learning.notices:
            bar.write_wrapped(notice)
    for alarm in alarms:
        bar.write_wrapped(f'alarm: {alarm.text}')
    if config.progress:
        for text in rollouts:
            bar.write(text)


def _run_step(
    context: build.RunContext,
    engine: Engine,
    step: Step,
    next_step: Step | None,
    state: dict[str, Any],
    on_episode_end: Callable[[], None],
) -> tuple[dict[str, float], list[Row]]:
    """Runs one step of any kind; returns its metrics and rows. Results of an evaluation also enter `state`."""
    if step.phase.name == 'evaluation':
        return evaluate_step(context, engine, step, state, on_episode_end)
    metrics, rows = engine.run_step(step, on_episode_end, next_step)
    if rows:
        metrics |= rendering_check(context.rollouts, rows)
    return metrics, rows


def _log_step(
    config,
    context: build.RunContext,
    engine: Engine,
    step: Step,
    metrics: dict[str, float],
    rows: list[Row],
    alarms: Sequence[Alarm],
    writer: MetricsWriter | None,
) -> None:
    """Writes metrics, rollouts, alarms and, for a training step, the task log.

    Called by all processes, because each has some of the rollouts; the first has the writer.
    """
    phase = step.phase
    records = trajectory_records(
        config.recipe, context.rollouts, step, rows, config.log_trajectories
    )
    if writer is None:
        return
    writer.write_scalars(step.number, phase.iteration, phase.name, metrics)
    writer.write_trajectories(records)
    # An evaluation has no task log: `engine.task_log` is still that of the step before.
    if phase.name == 'evaluation':
        return
    step_fields = {
        'system': config.recipe,
        'step': step.number,
        'iteration': phase.iteration,
        'phase': phase.name,
    }
    writer.write_tasks(step_fields | dict(record) for record in engine.task_log)
    writer.write_alarms(step_fields | dataclasses.asdict(alarm) for alarm in alarms)


def _build_on_all(hosts: Hosts, config) -> build.RunContext:
    """Calls `build.build` on every process and returns this process's result; an error on one is raised on all."""
    built: list[build.RunContext] = []

    def build_locally() -> None:
        built.append(build.build(config, for_training=True))

    hosts.run_on_all_and_gather(build_locally)
    return built[0]


@contextlib.contextmanager
def _claimed_workdir(hosts: Hosts, workdir: pathlib.Path, config) -> Iterator[Callable[[], None]]:
    """Locks the workdir and compares its config.json with `config`, on the first process; errors are raised on all.

    The lock is released when the context ends.

    Yields:
      A function that writes config.json; on the other processes it does nothing.
    """
    changeable_fields: tuple[str, ...] = CHANGEABLE_FIELDS
    if config.rollout.deterministic:
        # The limit has no effect in a deterministic run, which has no deadlines.
        changeable_fields += ('rollout.tool_timeout',)
    stored_config: Json = config.to_dict()
    # run_on_all_and_gather shares errors, so the lock is taken inside it; the ExitStack holds it until this context
    # ends. `writers` passes the function out of the call; it is empty on the other processes.
    with contextlib.ExitStack() as stack:
        writers: list[Callable[[], None]] = []

        def claim_locally() -> None:
            if hosts.is_first:
                claimed = claim(workdir, stored_config, changeable_fields)
                writers.append(stack.enter_context(claimed))

        hosts.run_on_all_and_gather(claim_locally)
        yield writers[0] if writers else _write_nothing


def _write_nothing() -> None:
    """Does nothing: only the first process writes the config."""


def _process_age() -> float:
    """Returns the seconds since this process started, imports included; needs Linux."""
    # The program's name is in brackets and may contain any character, so fields are read after the last
    # bracket. Field 22 of proc(5), here index 19, is the start time in clock ticks since boot.
    fields = pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()
    start_seconds = int(fields[19]) / os.sysconf('SC_CLK_TCK')
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds
