"""A step of a run that evaluates: its metrics and rows, and its results in the state of the run."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.evaluation.held_out import evaluate
from zeroplay_jax.runtime.hosts import sums
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.training import build
from zeroplay_jax.training.outcome import raise_if_nothing_found
from zeroplay_jax.training.summary import record_scores
from zeroplay_jax.types import Row


def evaluate_step(
    context: build.RunContext,
    engine: Engine,
    step: Step,
    state: dict[str, Any],
    on_episode_end: Callable[[], None],
) -> tuple[dict[str, float], list[Row]]:
    """Evaluates the recipe's `evaluated_role`; returns metrics and rows, and adds the results to `state`.

    With the step's number as a text for the key, `state['evaluations']` gets hop count (a text; 0: unknown) → 0 or 1
    per question, `state['rubrics']` the score of each open task, and `state['scores']` that of each question by
    `eval.metric`.

    Raises:
      UserError: too many searches, tool calls or judgements failed; `state` is then unchanged.
      TrainingStopped: no search found a passage; `state` is unchanged.
    """
    judge_before = collections.Counter(context.evaluation.judge_stats)
    correct, rows = evaluate(
        context.evaluation,
        context.library.evaluation_items,
        step.number,
        engine.recipe.evaluated_role,
        on_episode_end,
        engine.config.eval.metric,
    )
    # Checked before any result enters the state: failed searches, tools and judgements would be measured
    # as errors of the policy.
    hosts = context.rollouts.hosts
    searches = dict(sums(hosts.run_on_all_and_gather(context.check_and_reset_failures)))
    raise_if_nothing_found(engine.config, searches)
    rollouts = context.evaluation
    judge_stats = rollouts.gather_judge_stats(rollouts.judge_stats - judge_before)
    # Keys are texts and values numbers, because the state is stored as JSON.
    results_by_hops: dict[str, list[int]] = {}
    metrics: dict[str, float] = {}
    for hops, is_correct in correct.items():
        results_by_hops[str(hops)] = is_correct.astype(int).tolist()
        # Questions of a file may have no hop count: then the mean says all.
        if hops:
            metrics[f'em/hop{hops}'] = float(is_correct.mean())
    state['evaluations'][str(step.number)] = results_by_hops
    headline = statistics.headline(correct)
    metrics['em/mean'] = statistics.mean_interval(headline)[0]
    metrics |= record_scores(state, str(step.number), rows, engine.config.eval.metric)
    for name, count in judge_stats.items():
        metrics[f'judge/{name}'] = float(count)
    return metrics, rows
