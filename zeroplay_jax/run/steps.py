"""Plays a step of a run: rollouts and updates, or an evaluation of how the recipe answers."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.evaluation.answering import evaluate, scores_by_hop
from zeroplay_jax.retrieval import progress
from zeroplay_jax.run.build import RunContext
from zeroplay_jax.run.outcome import raise_if_nothing_found
from zeroplay_jax.run.state import RunState
from zeroplay_jax.run.trajectories import rendering_check
from zeroplay_jax.runtime.hosts import sums
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.recipe import answering_recipe
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.types import Row


class Played(NamedTuple):
    """A step that has ended; equal on all processes.

    Attributes:
      step: the step.
      metrics: its metrics by name.
      rows: its rollouts.
    """

    step: Step
    metrics: dict[str, float]
    rows: list[Row]

    @property
    def is_evaluation(self) -> bool:
        """Whether it is no step of the engine, which has notices and tasks of the step before then."""
        return self.step.phase.name == 'evaluation'


def play(
    context: RunContext, engine: Engine, step: Step, next_step: Step | None, state: RunState
) -> Played:
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
    return Played(step, metrics, rows)


def _evaluate(
    context: RunContext,
    engine: Engine,
    step: Step,
    state: RunState,
    on_episode_end: Callable[[], None],
) -> Played:
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
    return Played(step, metrics, rows)


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
        for part, name in (('exact_match', 'em'), (metric, metric_name(metric))):
            if 'set' in origin and part in row.parts:
                of_files[f'{name}/{origin["set"]}/mean'].append(row.parts[part])
    metrics |= {name: float(np.mean(scores)) for name, scores in of_files.items()}
    scores = [row.parts[metric] for row in rows if metric in row.parts]
    if scores:
        state.scores[number] = scores
        # The mean over hop counts, as of exact match.
        by_hop = scores_by_hop(rows, metric)
        mean, _, _ = statistics.mean_interval(statistics.headline(by_hop))
        metrics[f'{metric_name(metric)}/mean'] = mean
    return metrics


def metric_name(metric: str) -> str:
    """Returns the name of a metric in logs: of 'package.module:function' the function."""
    return metric.rpartition(':')[2]
