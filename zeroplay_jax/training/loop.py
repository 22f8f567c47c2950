"""Runs training, in this order: build, restore, then per step roll out, update, log and save; at the end, report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from zeroplay_jax.learner.checkpoint import FOLDER, Checkpointer, saved_steps, set_damaged_aside
from zeroplay_jax.retrieval import progress
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.devices import CompilationCache
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.identity import STATE_FIELD, Identity, hash_of
from zeroplay_jax.runtime.log import MetricsWriter
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.rows import collect_records
from zeroplay_jax.selfplay.schedule import Phase, Step, all_steps, with_evaluations
from zeroplay_jax.training import (
    branch,
    build,
    continuation,
    ending,
    input_record,
    remote_run,
    run_folder,
    tool_record,
)
from zeroplay_jax.training.alarms import Alarm, Alarms
from zeroplay_jax.training.evaluation_step import evaluate_step
from zeroplay_jax.training.export import fingerprints
from zeroplay_jax.training.outcome import (
    current_stop,
    raise_if_stopped_or_untrained,
    raise_if_weights_are_lost,
    stop_after,
)
from zeroplay_jax.training.profiling import traced
from zeroplay_jax.training.progress_bar import ProgressBar
from zeroplay_jax.training.rollout_text import evaluation_text, rollout_text
from zeroplay_jax.training.saving import Saver
from zeroplay_jax.training.source_checkpoint import Source
from zeroplay_jax.training.trajectory_log import rendering_check, trajectory_records
from zeroplay_jax.types import Preempted, Row, UserError


def run(config, workdir, source: str | None = None) -> dict:
    """Runs `config` in `workdir` to its end, from its last checkpoint if there is one; returns the summary.

    Writes checkpoints, logs, trained weights, summary.json and the report to `workdir`.

    Args:
      config: all settings.
      workdir: folder of the run; created if it is missing. Or gs://bucket/path (`remote_run`).
      source: workdir of another run, with whose weights a new run begins (`branch`); None: config.policy.path.

    Raises:
      UserError: the workdir has another config, other inputs or no whole checkpoint, or is in use by another process,
        the objects of the run do not fit together, or too many searches, tool calls or judgements failed.
      TrainingStopped: the run stopped early (`config.stop_after_empty_steps`, `config.alarms`), or no policy was
        trained. Checkpoint, summary and report are written before. Or an update made weights that are not finite; that
        step is logged, but not saved.
      Preempted: SIGTERM asked the run to end while it trained. A checkpoint is written before.
    """
    hosts = Hosts()
    with remote_run.opened(hosts, workdir, config) as place:
        summary = _run_at(place, config, source)
    # Raised after the workdir is released, and on every process, so that all exit with the same status.
    raise_if_stopped_or_untrained(config, summary)
    return summary


def _run_at(place: remote_run.Place, config, source: str | None) -> dict:
    """Runs `config` in a local folder; arguments and errors are those of `run`."""
    hosts = place.hosts
    workdir = place.workdir
    shows_progress = config.progress and hosts.is_first
    with run_folder.claimed(hosts, workdir, config) as write_config:
        # ---- check ---------------------------------------------------------------------------------
        steps_of_all = hosts.run_on_all_and_gather(lambda: saved_steps(workdir / FOLDER))
        is_resumed = bool(steps_of_all[0])
        inputs = input_record.check(hosts, workdir, config, is_resumed)
        origin = branch.find(hosts, workdir, source, is_resumed)
        if origin is not None:
            branch.check_adapters(hosts, origin, config, inputs)
            names = list(build.weights_of_roles(config).values())
            branch.check_policies(hosts, origin, names)
        damage_lines = place.damage_lines
        # A damaged checkpoint of a run in a bucket was replaced when the folder was opened.
        if not place.is_remote:
            damage_lines = set_damaged_aside(hosts, workdir)
        if hosts.is_first:
            for line in damage_lines:
                print(f'warning: {line}', file=sys.stderr)
        if is_resumed:
            run_folder.check_identity(hosts, workdir, config, inputs)

        # ---- build ---------------------------------------------------------------------------------
        cache = CompilationCache(config.compilation.cache, config.compilation.gigabytes)
        context = _build_on_all(hosts, config, _start_date(hosts, workdir, origin))
        engine = build.build_engine(config, context)
        first_weights = fingerprints(engine)
        # Learners and samplers have their own copies.
        context = dataclasses.replace(context, params={})
        phases = engine.recipe.phases()
        steps = with_evaluations(all_steps(phases), engine.recipe.evaluated_role, config.eval.every)
        write_config()

        # ---- restore -------------------------------------------------------------------------------
        about, template = context.library.about, context.template
        recorded = input_record.write(hosts, workdir, config, inputs, about, template, is_resumed)
        identity = run_folder.record_identity(hosts, workdir, config, recorded, is_resumed)
        tool_record.check_or_write(hosts, workdir, context.rollouts.roles, is_resumed)
        if origin is not None and continuation.is_longer(hosts, workdir, origin, config):
            origin = continuation.copy(
                hosts, workdir, origin, steps, first_weights, identity, place.is_shared
            )
        checkpoints = Checkpointer(workdir, config.checkpoint.keep, is_shared=place.is_shared)
        with progress.clock('restore', shows_progress and (is_resumed or origin is not None)):
            state = _first_state(hosts, workdir, engine, checkpoints, origin, identity)
        if is_resumed and hosts.is_first:
            print(f'resumes at step {state["cursor"]} of {len(steps)}', file=sys.stderr)

        # ---- train ---------------------------------------------------------------------------------
        # Until here Ctrl-C ended the process at once: nothing was half done.
        signals.raise_again()
        # An early stop saves a checkpoint and then writes the report. If the run was killed in between, this call only
        # writes the report; the next one continues to train, as after any early stop.
        is_report_due = current_stop(config, state['stopped']) is not None
        if is_report_due:
            is_report_due = not run_folder.is_reported(hosts, workdir, state['cursor'])
        if state['cursor'] < len(steps) and not is_report_due:
            run_folder.remove_exports(hosts, workdir)
            place.delete_policies()
            with signals.watched():
                _train(config, place, context, engine, checkpoints, cache, steps, state)
                checkpoints.close()
                # The signal may have come during the last update.
                hosts.run_on_all_and_gather(signals.raise_if_requested)
        checkpoints.close()
        summary = ending.finish(config, workdir, context, engine, steps, state, first_weights)
        place.upload_results()
    return summary


def _first_state(
    hosts: Hosts,
    workdir: pathlib.Path,
    engine: Engine,
    checkpoints: Checkpointer,
    origin: Source | None,
    identity: Identity,
) -> dict[str, Any]:
    """Returns the state of the loop (see `_train`), and sets that of the engine: new, resumed, or of another run."""
    state: dict[str, Any] = {
        STATE_FIELD: identity,
        'cursor': 0,
        'evaluations': {},
        'rubrics': {},
        'seconds': 0.0,
        'stopped': None,
        'alarms': {},
    }
    if checkpoints.latest() is not None:
        device_state, saved_state = checkpoints.restore(engine.device_state())
        # A checkpoint of an earlier version gets the identity of its run.
        state |= saved_state
        # The learners hold these arrays afterwards; a second reference would keep them in memory.
        engine.restore(device_state, state['engine'])
        if origin is not None and hosts.is_first:
            origin.print_use('continues')
    elif origin is not None:
        origin = branch.load(hosts, origin, engine)
        branch.record(hosts, workdir, origin, engine)
        # A resumed run must not depend on the other one, which may have gone on or be gone.
        state['engine'] = engine.host_state()
        checkpoints.save(0, engine.device_state(), state)
        if hosts.is_first:
            origin.print_use('begins with')
    return state


def _train(
    config,
    place: remote_run.Place,
    context: build.RunContext,
    engine: Engine,
    checkpoints: Checkpointer,
    cache: CompilationCache,
    steps: list[Step],
    state: dict[str, Any],
) -> None:
    """Runs, logs and saves all steps from `state['cursor']` on; updates `state` in place, and raises what `run` does.

    A checkpoint holds `engine.device_state()` (weights, moments, teachers) and `state`:
      'engine': `engine.host_state()` (pool, dataset positions, carried-over groups, …).
      'identity': of the run (`runtime.identity`).
      'cursor': number of the next step.
      'evaluations', 'rubrics': results by step number, see `evaluate_step`.
      'seconds': total time of the run's processes up to this checkpoint.
      'stopped': why the run stopped after this step (fields of an `outcome.Stop`), or None.
      'alarms': `Alarms.state`.
      'best': the best evaluation so far (`Saver.save_if_best`); absent without one.
    """
    hosts = context.rollouts.hosts
    workdir = place.workdir
    first_step = state['cursor']
    writer = _open_log(hosts, config, workdir, first_step, hash_of(state[STATE_FIELD]))
    watch = Alarms(config.alarms)
    watch.restore(state['alarms'])
    # Saving follows the log of its step, so its time is logged with the next one.
    save_seconds = 0.0
    shows_progress = config.progress and hosts.is_first
    saver = Saver(hosts, workdir, config.checkpoint.best, engine, checkpoints, state)
    step_pairs = itertools.zip_longest(steps[first_step:], steps[first_step + 1 :])
    with (
        contextlib.closing(writer) if writer else contextlib.nullcontext(),
        checkpoints.saved_on_interrupt(),
        contextlib.closing(engine),
        contextlib.closing(saver),
        ProgressBar(shows_progress, steps, first_step, _planned_rollouts(context, engine)) as bar,
    ):
        for step, next_step in step_pairs:
            bar.begin_step(step)
            try:
                with traced(config.profile.steps, step.number, workdir):
                    metrics, rows = _run_step(
                        context, engine, step, next_step, state, bar.end_episode
                    )
            except Preempted:
                # Only the rollouts of this step are lost: the state is that before it.
                saver.save_now(step.number)
                moment = f'before step {step.number} of {len(steps)}'
                raise Preempted(f'stopped by SIGTERM, everything is saved {moment}') from None
            metrics |= cache.take_metrics()
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
            raise_if_weights_are_lost(step, metrics, checkpoints, state['cursor'])
            state['stopped'] = dataclasses.asdict(stop) if stop else None
            state['alarms'] = watch.state()
            save_started, next_number = time.perf_counter(), step.number + 1
            if step.phase.name == 'evaluation':
                saver.save_if_best(next_number, metrics)
            # The last step is always saved: the export and the summary can then be repeated.
            is_due = next_number % config.checkpoint.every == 0
            if is_due or state['stopped'] or next_number == len(steps):
                # Logs are written before the checkpoint, so no saved step lacks its records.
                saver.save(next_number)
            save_seconds = time.perf_counter() - save_started
            _check_uploads(place, saver, next_number)
            if state['stopped']:
                break


def _check_uploads(place: remote_run.Place, saver: Saver, next_number: int) -> None:
    """Raises UserError if nothing can be uploaded any more; saves the state before step `next_number` then."""
    try:
        place.raise_if_failed()
    except UserError:
        saver.save_now(next_number)
        raise


def _open_log(
    hosts: Hosts, config, workdir: pathlib.Path, first_step: int, run: str
) -> MetricsWriter | None:
    """Returns the writer of the log from a step on; prints a warning if steps before it are missing.

    Only the first process writes; the others get None. All processes must call it.

    Args:
      run: hash of the run's identity.

    Raises:
      UserError: a service among the writers cannot be opened, or the log is of another run; on all processes.
    """
    writers: list[MetricsWriter] = []

    def open_in_first() -> None:
        # The writer removes records of this and later steps, which a crash may have left behind.
        if hosts.is_first:
            names, project = config.log.writers, config.log.project
            writers.append(MetricsWriter(workdir, first_step, names, project, run))

    hosts.run_on_all_and_gather(open_in_first)
    if not writers:
        return None
    (writer,) = writers
    if writer.missing_steps:
        print(
            f'warning: {workdir / "metrics.jsonl"} lacks {len(writer.missing_steps)} of {first_step} steps, the first '
            f'is {writer.missing_steps[0]}; curves and report will lack them, too',
            file=sys.stderr,
        )
    return writer


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


def _start_date(hosts: Hosts, workdir: pathlib.Path, origin: Source | None) -> str:
    """Returns the day of the run's prompts, the same on all processes."""
    workdirs = [workdir] if origin is None else [workdir, origin.workdir]
    dates = hosts.run_on_all_and_gather(
        lambda: input_record.start_date(workdirs) if hosts.is_first else ''
    )
    return dates[0]


def _build_on_all(hosts: Hosts, config, date: str) -> build.RunContext:
    """Calls `build.build` on every process and returns this process's result; an error on one is raised on all."""
    built: list[build.RunContext] = []

    def build_locally() -> None:
        built.append(build.build(config, for_training=True, date=date))

    hosts.run_on_all_and_gather(build_locally)
    return built[0]
