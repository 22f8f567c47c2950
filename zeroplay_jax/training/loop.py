"""Runs training: build, restore, then per step roll out and update, or evaluate; log and save; at the end, report."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.evaluation import statistics
from zeroplay_jax.evaluation.answering import evaluate
from zeroplay_jax.learner.checkpoint import (
    FOLDER,
    Checkpointer,
    remove_after,
    saved_steps,
)
from zeroplay_jax.retrieval import objects, progress
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.devices import CompilationCache
from zeroplay_jax.runtime.hosts import Hosts, sums
from zeroplay_jax.runtime.log import MetricsWriter
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.recipe import answering_recipe, weights_of_roles
from zeroplay_jax.selfplay.records import step_name
from zeroplay_jax.selfplay.schedule import Step, all_steps, with_evaluations
from zeroplay_jax.settings.kinds import warn
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.training import branch, build, ending, run_folder
from zeroplay_jax.training.alarms import Alarm, Alarms
from zeroplay_jax.training.outcome import (
    current_stop,
    raise_if_nothing_found,
    raise_if_stopped_or_untrained,
    raise_if_weights_are_lost,
    stop_after,
)
from zeroplay_jax.training.policies import fingerprints
from zeroplay_jax.training.run_folder import Place
from zeroplay_jax.types import Json, Preempted, Row, UserError


def run(config: ConfigDict | Config, workdir, source: str | None = None) -> dict:
    """Runs `config` in `workdir` to its end, from its last checkpoint if there is one; returns the summary.

    Writes checkpoints, logs, trained weights, summary.json and the report to `workdir`.

    Args:
      config: all settings, checked (`rules.check`); the run has them frozen.
      workdir: folder of the run; created if it is missing. Or gs://bucket/path (`remote_run`).
      source: workdir of another run, with whose weights a new run begins (`branch`); None: config.policy.path.

    Raises:
      UserError: the workdir has another config, other inputs or no whole checkpoint, or is in use by another process,
        the objects of the run do not fit together, or too many searches, tool calls or judgements failed.
      TrainingStopped: the run stopped early (`config.stop_after_empty_steps`, an alarm), or no policy was
        trained. Checkpoint, summary and report are written before. Or an update made weights that are not finite; that
        step is logged, but not saved.
      Preempted: SIGTERM asked the run to end while it trained. A checkpoint is written before.
    """
    hosts = Hosts()
    config = fields.frozen(config)
    with _opened(hosts, workdir, config) as place:
        summary = _run_at(place, config, source)
    # Raised after the workdir is released, and on every process, so that all exit with the same status.
    raise_if_stopped_or_untrained(config, summary)
    return summary


def _opened(
    hosts: Hosts, workdir: str | pathlib.Path, config: Config
) -> contextlib.AbstractContextManager[Place]:
    """Returns a context with the local folder of a run; its errors are those of `bucket_run.opened`."""
    if not objects.is_address(workdir):
        return contextlib.nullcontext(Place(hosts, pathlib.Path(workdir)))
    # Only a run in a bucket loads this code.
    from zeroplay_jax.training import bucket_run

    return bucket_run.opened(hosts, str(workdir), config)


def _run_at(place: Place, config: Config, source: str | None) -> dict:
    """Runs `config` in a local folder; arguments and errors are those of `run`."""
    hosts = place.hosts
    workdir = place.workdir
    shows_progress = config.progress and hosts.is_first
    with run_folder.claimed(hosts, workdir, config):
        # ---- check ---------------------------------------------------------------------------------
        steps_of_all = hosts.run_on_all_and_gather(lambda: saved_steps(workdir / FOLDER))
        is_resumed = bool(steps_of_all[0])
        inputs = hosts.run_on_first(run_folder.check, workdir, config, is_resumed)
        origin = branch.find(hosts, workdir, source, is_resumed)
        if origin is not None:
            hosts.run_on_first(branch.check_adapters, origin, config, inputs)
            names = list(weights_of_roles(config).values())
            hosts.run_on_first(branch.check_policies, origin, names)
        damage_lines = place.set_damaged_aside()
        if hosts.is_first:
            for line in damage_lines:
                warn(line)
        if is_resumed:
            hosts.run_on_first(run_folder.check_checkpoints, workdir)

        # ---- build ---------------------------------------------------------------------------------
        cache = CompilationCache(config.compilation.cache)
        dated = [workdir] if origin is None else [workdir, origin.workdir]
        date = hosts.run_on_first(run_folder.start_date, dated)
        context = hosts.run_on_all(build.build, config, for_training=True, date=date)
        engine = build.build_engine(config, context)
        # Learners and samplers have their own copies.
        context = dataclasses.replace(context, params={})
        phases = engine.recipe.phases()
        steps = with_evaluations(all_steps(phases), engine.recipe.evaluated_role, config.eval.every)
        identity = hosts.run_on_first(
            run_folder.begin,
            workdir,
            config,
            inputs,
            index=context.library.about,
            template=context.template,
            roles=context.rollouts.roles,
            weights=fingerprints(engine),
            is_resumed=is_resumed,
        )

        # ---- restore -------------------------------------------------------------------------------
        if origin and hosts.run_on_first(branch.is_longer, workdir, origin, config):
            origin = branch.copy(hosts, workdir, origin, steps, identity, place.is_shared)
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
            is_reported = hosts.run_on_first(run_folder.is_reported, workdir, state['cursor'])
            is_report_due = not is_reported
        if state['cursor'] < len(steps) and not is_report_due:
            outdated = run_folder.exports(steps[state['cursor'] :])
            hosts.run_on_first(run_folder.remove_exports, workdir, outdated)
            place.delete_policies(outdated)
            with signals.watched():
                _train(config, place, context, engine, checkpoints, cache, steps, state)
                checkpoints.close()
                # The signal may have come during the last update.
                hosts.run_on_all_and_gather(signals.raise_if_requested)
        checkpoints.close()
        summary = ending.finish(config, workdir, context, engine, steps, state)
        place.upload_results()
    return summary


def _first_state(
    hosts: Hosts,
    workdir: pathlib.Path,
    engine: Engine,
    checkpoints: Checkpointer,
    origin: branch.Source | None,
    identity: run_record.Identity,
) -> dict[str, Any]:
    """Returns the state of the loop (see `_train`), and sets that of the engine: new, resumed, or of another run."""
    state: dict[str, Any] = {
        run_record.STATE_FIELD: identity,
        'cursor': 0,
        'evaluations': {},
        'rubrics': {},
        'seconds': 0.0,
        'stopped': None,
        'alarms': {},
    }
    if checkpoints.latest() is not None:
        device_state, saved_state = checkpoints.restore(engine.device_state())
        state |= saved_state
        # The learners hold these arrays afterwards; a second reference would keep them in memory.
        engine.restore(device_state, state['engine'])
        if origin is not None and hosts.is_first:
            origin.print_use('continues')
    elif origin is not None:
        origin = branch.load(hosts, origin, engine)
        weights = fingerprints(engine)
        if hosts.is_first:
            run_record.update(workdir, origin=branch.origin_of(origin), weights=weights)
        # A resumed run must not depend on the other one, which may have gone on or be gone.
        state['engine'] = engine.host_state()
        checkpoints.save(0, engine.device_state(), state)
        # `saved_on_error` watches the later ones only.
        checkpoints.wait()
        if hosts.is_first:
            origin.print_use('begins with')
    return state


def _train(
    config: Config,
    place: Place,
    context: build.RunContext,
    engine: Engine,
    checkpoints: Checkpointer,
    cache: CompilationCache,
    steps: list[Step],
    state: dict[str, Any],
) -> None:
    """Runs, logs and saves all steps from `state['cursor']` on; updates `state` in place, and raises what `run` does.

    A checkpoint holds `engine.device_state()` (weights, with `rollout.ahead` two versions; moments, …) and `state`:
      'engine': `engine.host_state()` (pool, dataset positions, carried-over groups, …).
      'identity': of the run (`runtime.record`).
      'cursor': number of the next step.
      'evaluations', 'scores', 'rubrics': results by step number, see `evaluate_step`.
      'seconds': total time of the run's processes up to this checkpoint.
      'stopped': why the run stopped after this step (fields of an `outcome.Stop`), or None.
      'alarms': `Alarms.in_a_row`.
      'best': the best evaluation so far (`Saver.save_if_best`); absent without one.
    """
    hosts = context.rollouts.hosts
    first_step = state['cursor']
    writer = _open_log(hosts, config, place.workdir, engine, state)
    watch = Alarms(config.stop_at_alarms, state['alarms'])
    # Saving follows the log of its step, so its time is logged with the next one.
    save_seconds = 0.0
    saver = Saver(hosts, place.workdir, config.checkpoint.best, engine, checkpoints, state)
    shown = config.progress and hosts.is_first
    step_pairs = itertools.zip_longest(steps[first_step:], steps[first_step + 1 :])
    with (
        contextlib.closing(writer) if writer else contextlib.nullcontext(),
        checkpoints.saved_on_error(),
        contextlib.closing(engine),
        contextlib.closing(saver),
        progress.Bar(len(steps), 'steps', initial=first_step, shown=shown, leave=True) as bar,
    ):
        for step, next_step in step_pairs:
            try:
                with traced(config.profile.steps, step.number, place.workdir):
                    metrics, rows = _run_step(context, engine, step, next_step, state, shown)
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
            if writer is not None:
                _log_step(config, context, engine, step, metrics, rows, alarms, writer)
            bar.update()
            bar.note = _rewards_text(metrics) or bar.note
            if hosts.is_first:
                _print_step(engine, step, metrics, alarms)
            raise_if_weights_are_lost(step, metrics, checkpoints, state['cursor'])
            exported = ending.export_iteration(place, context, engine, step, next_step, state)
            state['stopped'] = dataclasses.asdict(stop) if stop else None
            state['alarms'] = dict(watch.in_a_row)
            save_started, next_number = time.perf_counter(), step.number + 1
            if step.phase.name == 'evaluation':
                saver.save_if_best(next_number, metrics)
            # The last step is always saved: the export and the summary can then be repeated.
            is_due = next_number % config.checkpoint.every == 0
            if is_due or state['stopped'] or next_number == len(steps):
                # Logs are written before the checkpoint, so no saved step lacks its records.
                saver.save(next_number)
            save_seconds = time.perf_counter() - save_started
            _check_uploads(place, saver, next_number, exported)
            if state['stopped']:
                break


def _check_uploads(place: Place, saver: Saver, next_number: int, exported: str) -> None:
    """Uploads the folder `exported`, if it is not ''.

    Raises UserError if nothing can be uploaded any more; saves the state before step `next_number` then.
    """
    try:
        place.raise_if_failed()
        if exported:
            place.upload_results(exported)
    except UserError:
        saver.save_now(next_number)
        raise


def _open_log(
    hosts: Hosts, config: Config, workdir: pathlib.Path, engine: Engine, state: dict[str, Any]
) -> MetricsWriter | None:
    """Returns the writer of the log from the next step on; prints a warning if steps before it are missing.

    Only the first process writes; the others get None. All processes must call it. A new run logs the shapes of its
    weights.

    Args:
      state: of `_train`; its cursor and identity are read.

    Raises:
      UserError: a service among the writers cannot be opened, or the log is of another run; on all processes.
    """
    first_step = state['cursor']

    def open_in_first() -> MetricsWriter | None:
        # The writer removes records of this and later steps, which a crash may have left behind.
        if not hosts.is_first:
            return None
        run = run_record.hash_of(state[run_record.STATE_FIELD])
        return MetricsWriter(workdir, first_step, config.log.writers, run)

    writer = hosts.run_on_all(open_in_first)
    if writer is not None and writer.missing_steps:
        warn(
            f'{workdir / "metrics.jsonl"} lacks {len(writer.missing_steps)} of {first_step} steps, the first is '
            f'{writer.missing_steps[0]}; curves and report will lack them, too'
        )
    if writer is not None and first_step == 0:
        writer.write_parameters({name: each.params for name, each in engine.learners.items()})
    return writer


def _print_step(
    engine: Engine, step: Step, metrics: Mapping[str, float], alarms: Sequence[Alarm]
) -> None:
    """Prints an evaluation's result or a step's notices (no tasks, no update), and alarms."""
    # An evaluation is not a step of the engine: the notices would be those of the step before.
    if step.phase.name == 'evaluation':
        print(evaluation_text(step, metrics), file=sys.stderr)
    else:
        for notice in engine.learning.notices:
            print(notice, file=sys.stderr)
    for alarm in alarms:
        print(f'alarm: {alarm.text}', file=sys.stderr)


def _rewards_text(metrics: Mapping[str, float]) -> str:
    """Returns the mean reward of each trained role, such as 'solver/reward 0.31'; '' without one."""
    texts = []
    for name, value in metrics.items():
        if name.endswith('/reward_mean'):
            texts.append(f'{name.removesuffix("_mean")} {value:.2f}')
    return ', '.join(texts)


def _run_step(
    context: build.RunContext,
    engine: Engine,
    step: Step,
    next_step: Step | None,
    state: dict[str, Any],
    shown: bool,
) -> tuple[dict[str, float], list[Row]]:
    """Runs one step of any kind; returns its metrics and rows. Results of an evaluation also enter `state`."""
    with progress.Bar(None, 'episodes', step.phase.name, shown=shown) as bar:
        if step.phase.name == 'evaluation':
            return evaluate_step(context, engine, step, state, bar.update)
        metrics, rows = engine.run_step(step, bar.update, next_step)
    if rows:
        metrics |= ending.rendering_check(context.rollouts, rows)
    return metrics, rows


def _log_step(
    config: Config,
    context: build.RunContext,
    engine: Engine,
    step: Step,
    metrics: dict[str, float],
    rows: list[Row],
    alarms: Sequence[Alarm],
    writer: MetricsWriter,
) -> None:
    """Writes metrics, rollouts, alarms and, for a training step, the task log."""
    phase = step.phase
    records = ending.trajectory_records(
        config.recipe, context.rollouts, step, rows, config.log_trajectories
    )
    writer.write_scalars(step.number, phase.iteration, phase.name, metrics)
    writer.write('trajectories', records)
    # An evaluation has no task log: `engine.task_log` is still that of the step before.
    if phase.name == 'evaluation':
        return
    step_fields = {
        'system': config.recipe,
        'step': step.number,
        'iteration': phase.iteration,
        'phase': phase.name,
    }
    writer.write('tasks', (step_fields | dict(record) for record in engine.task_log))
    writer.write('alarms', (step_fields | dataclasses.asdict(alarm) for alarm in alarms))


# ---- traces ----------------------------------------------------------------------------------------
#
# Of jax.profiler, for single steps.


_PROFILE_FOLDER = 'profile'


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


# ---- evaluation ------------------------------------------------------------------------------------
#
# A step of a run that evaluates: metrics, rows, and results in the state of the run.


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


def evaluate_step(
    context: build.RunContext,
    engine: Engine,
    step: Step,
    state: dict[str, Any],
    on_episode_end: Callable[[], None],
) -> tuple[dict[str, float], list[Row]]:
    """Evaluates how the recipe answers; returns metrics and rows, and adds the results to `state`.

    With the step's number as a text for the key, `state['evaluations']` gets hop count (a text; 0: unknown) → 0 or 1
    per question, `state['rubrics']` the score of each open task, and `state['scores']` that of each question by
    `eval.metric`.

    Raises:
      UserError: too many searches, tool calls or judgements failed; `state` is then unchanged.
      TrainingStopped: no search found a passage; `state` is unchanged.
    """
    rollouts = context.evaluation.bound()
    correct, rows = evaluate(
        rollouts,
        context.library.evaluation_items,
        step.number,
        answering_recipe(engine.config),
        on_episode_end,
        engine.config.eval.metric,
    )
    # Checked before any result enters the state: failed searches, tools and judgements would be measured
    # as errors of the policy.
    hosts = context.rollouts.hosts
    searches = dict(sums(hosts.run_on_all_and_gather(context.check_and_reset_failures)))
    raise_if_nothing_found(engine.config, searches)
    judge_stats = rollouts.gather_judge_stats()
    # Keys are texts and values numbers, because the state is stored as JSON.
    results_by_hops: dict[str, list[int]] = {}
    metrics = {}
    for hops, is_correct in correct.items():
        results_by_hops[str(hops)] = is_correct.astype(int).tolist()
        # Questions of a file may have no hop count: then the mean says all.
        if hops:
            metrics[f'em/hop{hops}'] = float(is_correct.mean())
    state['evaluations'][str(step.number)] = results_by_hops
    headline = statistics.headline(correct)
    metrics['em/mean'] = statistics.mean_interval(headline)[0]
    metrics |= ending.record_scores(state, str(step.number), rows, engine.config.eval.metric)
    for name, count in judge_stats.items():
        metrics[f'judge/{name}'] = float(count)
    return metrics, rows


# ---- checkpoints -----------------------------------------------------------------------------------
#
# The last steps, and the best evaluation beside them (`config.checkpoint.best`).


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
        self._engine.take_snapshots('best')
        loop_state = self._snapshot(next_number)
        self._best.save(next_number, self._engine.device_state(), loop_state)
        # The run's own checkpoint, which says where the best one is, must not be complete before it.
        self._best.wait()

    def close(self) -> None:
        """Releases threads of the best checkpoint."""
        if self._best is not None:
            self._best.close()

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
