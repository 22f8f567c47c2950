"""Computes metrics over the scored rollouts of a step, and finds the rows that no recipe can train on."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.types import Outcome, Row

# Endings that the policy did not choose.
TRUNCATED = ('context', 'response_tokens', 'turn_tokens', 'turns')


class _Accumulator:
    """Sums values and counts by name; `add` with weight 0 adds to the sum alone."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = collections.defaultdict(float)
        self.counts: dict[str, float] = collections.defaultdict(float)

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        self.sums[name] += float(value)
        self.counts[name] += weight

    def stats(self) -> Stats:
        stats: Stats = {}
        for name, total in self.sums.items():
            stats[name] = (total, self.counts[name])
        return stats


def rollout_stats(
    rows: Sequence[Row], outcomes: Sequence[Outcome], trained_roles: Sequence[str] = ()
) -> Stats:
    """Returns (sum, count) per metric over rows: rewards, parts, turns, tool calls, endings, lengths, solve counts.

    Args:
      trained_roles: roles that the step trains; of several the mean reward of each is a metric as well.
    """
    accumulator = _Accumulator()
    for row in rows:
        _add_row(accumulator, row)
    if len(trained_roles) > 1:
        for row in rows:
            if row.role in trained_roles:
                accumulator.add(f'{row.role}/reward_mean', row.reward)
    # `_add_row` leaves these counts 0. Solve counts are shares of the measured proposals, rejections and drops
    # shares of all rows, and calls of a tool are averaged over all rows, with or without such a call.
    measured = 0.0
    for name, total in accumulator.sums.items():
        if name.startswith('k_histogram/'):
            measured += total
    for name in accumulator.sums:
        if name.startswith('k_histogram/'):
            accumulator.counts[name] = measured
        elif name.startswith(('rejected/', 'row_drop/', 'tool_calls/')):
            accumulator.counts[name] = len(rows)
    # The role is part of the key, because group keys are unique within a role only: HRPO's are hop counts.
    rewards_of_group = collections.defaultdict(set)
    for row in rows:
        rewards_of_group[row.role, row.group].add(row.reward)
    # The share of groups with reward variance is logged, because at 0 there is no policy gradient, which the
    # mean reward does not reveal.
    for rewards in rewards_of_group.values():
        accumulator.add('informative_share', len(rewards) > 1)
    dropped = sum(outcome.drop is not None for outcome in outcomes)
    accumulator.add('dropped_episodes', dropped, len(outcomes) or 1)
    # Per task, because a dropped task may have rows, too: they must not count twice.
    for outcome in outcomes:
        accumulator.add('dropped_share', _dropped_share(outcome))
    return accumulator.stats()


def _dropped_share(outcome: Outcome) -> float:
    """Share of a task that is not used: 1 if the task is dropped, otherwise that of its dropped rows."""
    if outcome.drop is not None:
        return 1.0
    if not outcome.rows:
        return 0.0
    dropped_rows = [row for row in outcome.rows if row.drop is not None]
    return len(dropped_rows) / len(outcome.rows)


def _add_row(accumulator: _Accumulator, row: Row) -> None:
    """Adds the values of one row; those with weight 0 get their count in `rollout_stats`."""
    trajectory = row.trajectory
    accumulator.add('reward_mean', row.reward)
    for name, value in row.parts.items():
        accumulator.add(f'reward/{name}', value)
    accumulator.add('turns', trajectory.counts.turns)
    accumulator.add('truncated_rate', trajectory.finish in TRUNCATED)
    accumulator.add('policy_tokens', trajectory.policy_tokens)
    _add_tool_calls(accumulator, row)
    info = row.info
    # `valid` is None for solvers, so the rate is over proposals.
    if info.valid is not None:
        accumulator.add('valid_rate', info.valid)
    # Longer answers contain a gold answer more easily (subEM): their length shows that drift.
    if info.answer:
        accumulator.add('answer_words', len(info.answer.split()))
    if info.rejected:
        accumulator.add(f'rejected/{info.rejected}', 1, weight=0)
    if row.drop:
        accumulator.add(f'row_drop/{row.drop}', 1, weight=0)
    if info.solve_count is not None:
        accumulator.add(f'k_histogram/{info.solve_count}', 1, weight=0)
    if info.privileged_cut is not None:
        accumulator.add('privileged_cut', info.privileged_cut)


def _add_tool_calls(accumulator: _Accumulator, row: Row) -> None:
    """Adds the number of valid calls of one row, in total and per tool, and its rate of failed calls."""
    counts = row.trajectory.counts
    accumulator.add('tool_calls', sum(counts.valid_calls.values()))
    # The rate is over calls and not over rollouts, so that rollouts without a call do not lower it.
    accumulator.add('tool_error_rate', counts.failed_calls, weight=counts.calls)
    # Sorted, because this order decides that of the metrics.
    for tool in sorted(counts.valid_calls):
        accumulator.add(f'tool_calls/{tool}', counts.valid_calls[tool], weight=0)


def reward_columns(
    rows: Sequence[Row],
) -> tuple[Float[np.ndarray, ' rows'], Int[np.ndarray, ' rows'], Bool[np.ndarray, ' rows']]:
    """Returns rewards, group keys, and True for rows that are not dropped, as `objectives.advantages` takes them."""
    # float64, because a length factor makes the rewards of a group differ by little, and advantages are
    # divided by their deviation.
    rewards = np.zeros(len(rows), np.float64)
    groups = np.zeros(len(rows), np.int64)
    valid = np.zeros(len(rows), bool)
    for index, row in enumerate(rows):
        rewards[index] = row.reward
        groups[index] = row.group
        valid[index] = row.drop is None
    return rewards, groups, valid


def invalid_reason(row: Row, truncated: str) -> str | None:
    """Returns the reason code ('nonfinite_reward', 'truncated') of an unusable row; None if the row is usable.

    Args:
      truncated: `config.rollout.truncated`; 'drop' excludes rollouts that ended at a limit.
    """
    # One NaN would spread to the whole group through its mean.
    if not math.isfinite(row.reward):
        return 'nonfinite_reward'
    if truncated == 'drop' and row.trajectory.finish in TRUNCATED:
        return 'truncated'
    return None


def rows_per_context(rows: Sequence[Row]) -> list[Row]:
    """Returns one row per context of each rollout (`Trajectory.contexts`), with the rollout's reward and advantage."""
    # The advantage is copied to each context, as in SCOPE's code for Qwen3; each sampled token is
    # POLICY in exactly one of them, so it is trained once.
    split_rows: list[Row] = []
    for row in rows:
        for context in row.trajectory.contexts:
            split_rows.append(dataclasses.replace(row, trajectory=context))
    return split_rows


def ratios(stats: Stats) -> dict[str, float]:
    """Returns sums divided by their counts, without those of count 0."""
    metrics = {}
    for name, (total, count) in stats.items():
        # A metric of count 0 (no search, no valid proposal) is left out, because 0 would be misleading.
        if count:
            metrics[name] = total / count
    return metrics


def added(left: Stats, right: Stats) -> Stats:
    """Returns the sums of two sets of statistics, name by name."""
    result = dict(left)
    for name, (total, count) in right.items():
        previous_total, previous_count = result.get(name, (0.0, 0.0))
        result[name] = (previous_total + total, previous_count + count)
    return result
