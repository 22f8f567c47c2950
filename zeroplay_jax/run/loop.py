"""Runs training: build, restore, then per step roll out and update, or evaluate; log and save; at the end, report."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable, Sequence

import numpy as np
from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.evaluation import statistics
from zeroplay_jax.evaluation.answering import evaluate, scores_by_hop
from zeroplay_jax.learner.checkpoint import set_damaged_aside
from zeroplay_jax.retrieval import progress
from zeroplay_jax.run import build, ending, run_folder
from zeroplay_jax.run.hooks import Log, Screen, rendering_check, traced
from zeroplay_jax.run.outcome import (
    Alarms,
    EndedStep,
    RunState,
    current_stop,
    raise_if_nothing_found,
    raise_if_stopped_or_untrained,
    raise_if_weights_are_lost,
    stop_after,
)
from zeroplay_jax.run.policies import describe, fingerprints
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.run.saver import Saver
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.devices import CompilationCache
from zeroplay_jax.runtime.hosts import Hosts, sums
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.recipe import answering_recipe
from zeroplay_jax.selfplay.schedule import Step, all_steps, with_evaluations
from zeroplay_jax.settings.kinds import warn
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Preempted, Row, UserError


def run(
    config: ConfigDict | Config, workdir: str | pathlib.Path, source: str | None = None
) -> dict:
    """Runs `config` in `workdir` to its end, from its last checkpoint if there is one; returns the summary.

    Writes checkpoints, logs, trained weights, summary.json and the report to `workdir`.

    Args:
      config: all settings, checked (`rules.check`); the run has them frozen.
      workdir: folder of the run; created if it is missing. Or gs://bucket/path (`extras.buckets`).
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
    with run_folder.opened(hosts, workdir, config) as place:
        summary = _run_at(hosts, place, config, source)
    # Raised after the workdir is released, and on every process, so that all exit with the same status.
    raise_if_stopped_or_untrained(config, summary)
    return summary


def _run_at(hosts: Hosts, place: Place, config: Config, source: str | None) -> dict:
    """Runs `config` in a local folder; errors are those of `run`."""
    workdir = place.workdir
    inputs, is_resumed = hosts.run_on_first(run_folder.check, workdir, config)
    lines = [] if place.is_whole else set_damaged_aside(hosts, workdir)
    for line in lines if hosts.is_first else ():
        warn(line)
    hosts.run_on_first(run_folder.check_checkpoints, workdir)
    other = hosts.run_on_first(run_folder.other_run, workdir, source, is_resumed)
    cache = CompilationCache(config.compilation.cache)
    origin = None
    with contextlib.ExitStack() as stack:
        if other is not None:
            # Only such a run loads this code.
            from zeroplay_jax.run import branch

            origin = stack.enter_context(branch.found(hosts, place, other))
            hosts.run_on_first(branch.check, origin, config, inputs)
        dated = [workdir] if origin is None else [workdir, origin.workdir]
        date = hosts.run_on_first(run_folder.start_date, dated)
        context = hosts.run_on_all(build.build, config, for_training=True, date=date)
        engine = build.build_engine(config, context)
        # Learners and samplers have their own copies.
        context = dataclasses.replace(context, params={})
        phases = engine.recipe.phases()
        evaluated = engine.recipe.evaluated_role
        steps = with_evaluations(all_steps(phases), evaluated, config.eval.every)
        trained = [context.rollouts.roles[role] for role in engine.weights_of]
        identity = hosts.run_on_first(
            run_folder.begin,
            workdir,
            config,
            inputs,
            index=context.library.about,
            template=context.template,
            roles=context.rollouts.roles,
            weights=fingerprints(engine),
            policies=describe(config, context.folder, trained, evaluated, context.rollouts.prompts),
            is_resumed=is_resumed,
        )
        saver = Saver(hosts, place, config, engine)
        shown = config.progress and hosts.is_first and (is_resumed or origin is not None)
        with progress.clock('restore', shown):
            state = saver.restored(steps) or RunState(identity)
            saver.begin(state)
            if origin is not None:
                branch.begin(hosts, workdir, engine, origin)
                # A resumed run must not depend on the other one, which may have gone on or be gone.
                saver.save(0)
                saver.checkpoints.wait()
    if is_resumed and hosts.is_first:
        print(f'resumes at step {state.cursor} of {len(steps)}', file=sys.stderr)
    # Until here Ctrl-C ended the process at once: nothing was half done.
    signals.raise_again()
    if state.cursor < len(steps) and not _is_report_due(hosts, workdir, config, state):
        hosts.run_on_first(run_folder.remove_exports, workdir, steps[state.cursor :])
        with signals.watched():
            _train(place, context, engine, saver, cache, steps, state)
            saver.checkpoints.close()
            # The signal may have come during the last update.
            hosts.run_on_all_and_gather(signals.raise_if_requested)
    saver.checkpoints.close()
    summary = ending.finish(workdir, context, engine, steps, state)
    place.at_end()
    return summary


def _is_report_due(hosts: Hosts, workdir: pathlib.Path, config: Config, state: RunState) -> bool:
    """Returns whether this call only writes the report of a run that stopped early.

    An early stop saves a checkpoint and then writes the report; the run may have been killed in between. The next call
    continues to train, as after any early stop.
    """
    if current_stop(config, state.stopped) is None:
        return False
    return not hosts.run_on_first(run_folder.is_reported, workdir, state.cursor)


def _train(
    place: Place,
    context: build.RunContext,
    engine: Engine,
    saver: Saver,
    cache: CompilationCache,
    steps: list[Step],
    state: RunState,
) -> None:
    """Runs, logs and saves all steps from `state.cursor` on; updates `state` in place, and raises what `run` does."""
    config, hosts, first_step = engine.config, context.rollouts.hosts, state.cursor
    watch = Alarms(config.stop_at_alarms, state.alarms)
    log = Log(context.rollouts, engine, place.workdir, state)
    shown = config.progress and hosts.is_first
    with (
        contextlib.closing(log),
        saver.saved_on_error(),
        contextlib.closing(engine),
        progress.Bar(len(steps), 'steps', initial=first_step, shown=shown, leave=True) as bar,
    ):
        hooks = (log, Screen(hosts, engine, bar))
        ending.export_step(place.workdir, context, engine, first_step, state)
        for step, next_step in itertools.zip_longest(steps[first_step:], steps[first_step + 1 :]):
            try:
                with traced(config.profile.steps, step.number, place.workdir):
                    ended = run_step(context, engine, step, next_step, state)
            except Preempted:
                # Only the rollouts of this step are lost: the state is that before it.
                saver.save_now(step.number)
                moment = f'before step {state.cursor} of {len(steps)}'
                raise Preempted(f'stopped by SIGTERM, everything is saved {moment}') from None
            # Saving follows the log of its step, so its time is logged with the next one.
            ended.metrics.update(cache.take_metrics() | {'seconds/save': saver.seconds})
            # All processes get the same alarms: the watched metrics are those of the whole step.
            alarms = watch.check(step, ended.metrics)
            # A stop waits for a step that can be saved.
            can_stop = saver.can_save(step.number + 1)
            stop = stop_after(config, engine, step, alarms) if can_stop else None
            for hook in hooks:
                hook.after(ended, alarms)
            raise_if_weights_are_lost(step, ended.metrics, saver.checkpoints, state.cursor)
            ending.export_iteration(place.workdir, context, engine, step, next_step, state)
            ending.export_step(place.workdir, context, engine, step.number + 1, state)
            state.stopped, state.alarms = stop, dict(watch.in_a_row)
            # Logs are written before the checkpoint, so no saved step lacks its records.
            saver.after(step, ended.metrics, is_last=next_step is None)
            try:
                place.after_step()
            except UserError:
                saver.save_now(step.number + 1)
                raise
            if stop:
                break


def run_step(
    context: build.RunContext, engine: Engine, step: Step, next_step: Step | None, state: RunState
) -> EndedStep:
    """Runs one step of any kind. Results of an evaluation also enter `state`.

    Raises:
      UserError, TrainingStopped: as `Engine.run_step` and `_evaluate`.
      Preempted: SIGTERM asked the run to end; nothing was changed.
    """
    is_shown = engine.config.progress and context.rollouts.hosts.is_first
    with progress.Bar(None, 'episodes', step.phase.name, shown=is_shown) as bar:
        if step.phase.name == 'evaluation':
            return _evaluate(context, engine, step, state, bar.update)
        metrics, rows = engine.run_step(step, bar.update, next_step)
    if rows:
        metrics |= rendering_check(context.rollouts, rows)
    return EndedStep(step, metrics, rows)


def _evaluate(
    context: build.RunContext,
    engine: Engine,
    step: Step,
    state: RunState,
    on_episode_end: Callable[[], None],
) -> EndedStep:
    """Evaluates how the recipe answers, and adds the results to `state`.

    Raises:
      UserError: too many searches, tool calls or judgements failed; `state` is then unchanged.
      TrainingStopped: no search found a passage; `state` is unchanged.
    """
    config = engine.config
    rollouts = context.evaluation.bound()
    rows = evaluate(
        rollouts,
        context.library.evaluation_items,
        step.number,
        answering_recipe(config),
        on_episode_end,
        config.eval.metric,
    )
    # Checked before any result enters the state: failed searches, tools and judgements would be measured
    # as errors of the policy.
    hosts = context.rollouts.hosts
    searches = dict(sums(hosts.run_on_all_and_gather(context.check_and_reset_failures)))
    raise_if_nothing_found(config, searches)
    judge_stats = rollouts.gather_judge_stats()
    # Keys are texts and values numbers, because the state is stored as JSON.
    results_by_hops: dict[str, list[int]] = {}
    metrics = {}
    correct = scores_by_hop(rows, 'exact_match')
    for hops, is_correct in correct.items():
        results_by_hops[str(hops)] = is_correct.astype(int).tolist()
        # Questions of a file may have no hop count: then the mean says all.
        if hops:
            metrics[f'em/hop{hops}'] = float(is_correct.mean())
    state.evaluations[str(step.number)] = results_by_hops
    metrics['em/mean'] = statistics.mean_interval(statistics.headline(correct))[0]
    metrics |= record_scores(state, str(step.number), rows, config.eval.metric)
    for name, count in judge_stats.items():
        metrics[f'judge/{name}'] = float(count)
    return EndedStep(step, metrics, rows)


def record_scores(
    state: RunState, number: str, rows: Sequence[Row], metric: str
) -> dict[str, float]:
    """Adds the scores of an evaluation other than exact match to the state of a run; returns their metrics.

    Those of each of several files of questions are metrics, too, with exact match.

    Args:
      state: gets `rubrics[number]` and `scores[number]`; nothing where there is none.
      number: number of the evaluation.
      rows: its rollouts, in the order of questions and tasks.
      metric: `config.eval.metric`.
    """
    metrics = {}
    drops = collections.Counter(row.drop for row in rows)
    for reason in drops.keys() - {None, 'ungraded'}:
        metrics[f'{rows[0].role}/row_drop/{reason}'] = drops[reason] / len(rows)
    graded_rows = [row for row in rows if 'rubrics' in row.parts]
    if graded_rows:
        state.rubrics[number] = [row.reward for row in graded_rows]
        metrics['rubrics/mean'] = float(np.mean(state.rubrics[number]))
        # An ungraded answer counts as 0 in the mean, so its share is shown beside it.
        ungraded = [row.drop == 'ungraded' for row in graded_rows]
        metrics['rubrics/ungraded'] = float(np.mean(ungraded))
    of_files: dict[str, list[float]] = collections.defaultdict(list)
    for row in rows:
        origin = row.info.question.origin if row.info.question else {}
        for part, name in (('exact_match', 'em'), (metric, ending.metric_name(metric))):
            if 'set' in origin and part in row.parts:
                of_files[f'{name}/{origin["set"]}/mean'].append(row.parts[part])
    metrics |= {name: float(np.mean(scores)) for name, scores in of_files.items()}
    scores = [row.parts[metric] for row in rows if metric in row.parts]
    if scores:
        state.scores[number] = scores
        # The mean over hop counts, as of exact match.
        by_hop = scores_by_hop(rows, metric)
        mean, _, _ = statistics.mean_interval(statistics.headline(by_hop))
        metrics[f'{ending.metric_name(metric)}/mean'] = mean
    return metrics
