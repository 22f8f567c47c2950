"""Runs training: build, restore, then per step roll out and update, or evaluate; log and save; at the end, report."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import sys

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.retrieval import progress
from zeroplay_jax.run import branch, build, ending, run_folder
from zeroplay_jax.run.alarms import Alarms
from zeroplay_jax.run.hooks import Log, Screen, traced
from zeroplay_jax.run.outcome import (
    current_stop,
    raise_if_stopped_or_untrained,
    raise_if_weights_are_lost,
    stop_after,
)
from zeroplay_jax.run.policies import fingerprints
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.run.state import RunState, Saver
from zeroplay_jax.run.steps import play
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.devices import CompilationCache
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import Step, all_steps, with_evaluations
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Preempted, UserError


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
    is_resumed = hosts.run_on_first(run_folder.has_checkpoint, workdir)
    inputs = hosts.run_on_first(run_folder.check, workdir, config, is_resumed)
    cache = CompilationCache(config.compilation.cache)
    with branch.found(hosts, place, source, is_resumed) as origin:
        if origin is not None:
            hosts.run_on_first(branch.check, origin, config, inputs)
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
        if origin and hosts.run_on_first(branch.is_longer, workdir, origin, config):
            branch.copy(hosts, place, origin, steps, identity)
        saver = Saver(hosts, place, config, engine)
        shown = config.progress and hosts.is_first and (is_resumed or origin is not None)
        with progress.clock('restore', shown):
            state = _first_state(hosts, workdir, engine, saver, origin, identity)
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


def _first_state(
    hosts: Hosts,
    workdir: pathlib.Path,
    engine: Engine,
    saver: Saver,
    origin: branch.Source | None,
    identity: run_record.Identity,
) -> RunState:
    """Returns the state of the run, and sets that of the engine: new, resumed, or of another run."""
    restored = saver.restored()
    state = restored or RunState(identity)
    saver.begin(state)
    if restored is None and origin is not None:
        hosts.run_on_all(branch.load, origin, engine)
        branch.publish(engine)
        weights = fingerprints(engine)
        if hosts.is_first:
            run_record.update(workdir, origin=branch.origin_of(origin), weights=weights)
        # A resumed run must not depend on the other one, which may have gone on or be gone.
        saver.save(0)
        saver.checkpoints.wait()
    if origin is not None and hosts.is_first:
        origin.print_use('begins with' if restored is None else 'continues')
    return state


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
        for step, next_step in itertools.zip_longest(steps[first_step:], steps[first_step + 1 :]):
            try:
                with traced(config.profile.steps, step.number, place.workdir):
                    played = play(context, engine, step, next_step, state)
            except Preempted:
                # Only the rollouts of this step are lost: the state is that before it.
                saver.save_now(step.number)
                moment = f'before step {step.number} of {len(steps)}'
                raise Preempted(f'stopped by SIGTERM, everything is saved {moment}') from None
            # Saving follows the log of its step, so its time is logged with the next one.
            played.metrics.update(cache.take_metrics() | {'seconds/save': saver.seconds})
            # All processes get the same alarms: the watched metrics are those of the whole step.
            alarms = watch.check(step, played.metrics)
            stop = stop_after(config, engine, step, alarms)
            for hook in hooks:
                hook.after(played, alarms)
            raise_if_weights_are_lost(step, played.metrics, saver.checkpoints, state.cursor)
            ending.export_iteration(place.workdir, context, engine, step, next_step, state)
            state.stopped, state.alarms = stop, dict(watch.in_a_row)
            # Logs are written before the checkpoint, so no saved step lacks its records.
            saver.after(step, played.metrics, is_last=next_step is None)
            try:
                place.after_step()
            except UserError:
                saver.save_now(step.number + 1)
                raise
            if stop:
                break
