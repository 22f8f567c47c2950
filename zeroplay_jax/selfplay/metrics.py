"""Figures of a step over its scored rollouts."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.objectives.advantages import differ
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.settings.rollouts import Rollout
from zeroplay_jax.types import ENV, Outcome, Row, Trajectory

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

    def add_known(self, name: str, value: float | None) -> None:
        if value is not None:
            self.add(name, value)

    def stats(self) -> Stats:
        return {name: (total, self.counts[name]) for name, total in self.sums.items()}


def rollout_stats(
    rows: Sequence[Row], outcomes: Sequence[Outcome], trained_roles: Sequence[str] = ()
) -> Stats:
    """Returns (sum, count) per metric: of the rollouts of each role as 'role/name', and of dropped tasks.

    Args:
      trained_roles: roles that the step trains; only theirs have 'reward_mean' and 'informative_share', because other
        rewards are not used (Dr. Zero's generation leaves them 0).
    """
    stats: Stats = {}
    for role in dict.fromkeys(row.role for row in rows):
        role_stats = _role_stats([row for row in rows if row.role == role], role in trained_roles)
        stats |= {f'{role}/{name}': value for name, value in role_stats.items()}
    accumulator = _Accumulator()
    dropped = sum(outcome.drop is not None for outcome in outcomes)
    accumulator.add('dropped_episodes', dropped, len(outcomes) or 1)
    # Per task, because a dropped task may have rows, too: they must not count twice.
    for outcome in outcomes:
        accumulator.add('dropped_share', _dropped_share(outcome))
    return stats | accumulator.stats()


def _role_stats(rows: Sequence[Row], is_trained: bool) -> Stats:
    """Returns (sum, count) per metric of the rollouts of one role."""
    accumulator = _Accumulator()
    for row in rows:
        if is_trained:
            accumulator.add('reward_mean', row.reward)
        _add_row(accumulator, row)
        _add_hops(accumulator, row)
    # `_add_row` leaves these counts 0. Solve counts are shares of the measured proposals, rejections, drops and failed
    # tools shares of all rows, and calls of a tool are averaged over all rows, with or without such a call.
    measured = sum(row.info.solve_count is not None for row in rows)
    for name in accumulator.sums:
        if name.startswith('k_histogram/'):
            accumulator.counts[name] = measured
        elif name.startswith(('rejected/', 'row_drop/', 'tool_calls/', 'tool_failed')):
            accumulator.counts[name] = len(rows)
    if is_trained:
        rewards_of_group = collections.defaultdict(list)
        for row in rows:
            rewards_of_group[row.group].append(row.reward)
        # The share of groups with reward variance is logged, because at 0 there is no policy gradient, which the
        # mean reward does not reveal.
        for rewards in rewards_of_group.values():
            accumulator.add('informative_share', differ(min(rewards), max(rewards)))
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
    """Adds the values of one row; those with weight 0 get their count in `_role_stats`."""
    trajectory = row.trajectory
    for name, value in row.parts.items():
        accumulator.add(f'reward/{name}', value)
    if row.turn_rewards is not None:
        accumulator.add('turn_rewards', np.nansum(row.turn_rewards))
    accumulator.add('turns', len(trajectory.turns))
    accumulator.add('truncated_rate', trajectory.finish in TRUNCATED)
    accumulator.add('policy_tokens', trajectory.policy_tokens)
    accumulator.add('prompt_tokens', trajectory.prompt_tokens)
    # Results of tools included, as papers give the length of a response.
    tool_tokens = int(np.sum(trajectory.source == ENV))
    accumulator.add('response_tokens', trajectory.policy_tokens + tool_tokens)
    _add_tool_calls(accumulator, row)
    info = row.info
    # Before penalties: SCOPE's rubric score without the length factor.
    accumulator.add_known('score', info.score)
    # `valid` is None for solvers, so the rate is over proposals.
    accumulator.add_known('valid_rate', info.valid)
    # Longer answers contain a gold answer more easily (subEM): their length shows that drift.
    if info.answer:
        accumulator.add('answer_words', len(info.answer.split()))
    accumulator.add_known('answer_tokens', info.answer_tokens)
    if info.rejected:
        accumulator.add(f'rejected/{info.rejected}', 1, weight=0)
    if trajectory.has_tool_failure:
        accumulator.add('tool_failed', 1, weight=0)
    if row.drop:
        accumulator.add(f'row_drop/{row.drop}', 1, weight=0)
    if info.solve_count is not None:
        accumulator.add(f'k_histogram/{info.solve_count}', 1, weight=0)
    accumulator.add_known('privileged_cut', info.privileged_cut)


def _add_hops(accumulator: _Accumulator, row: Row) -> None:
    """Adds the hops that were asked, those that were read, and by hop scores, solve counts and calls."""
    info = row.info
    hops = info.question.hops if info.question is not None else 0
    if not hops:
        return
    accumulator.add('hops_asked', hops)
    accumulator.add('hops_read', _hops_read(row.trajectory))
    accumulator.add(f'calls/hop{hops}', row.trajectory.valid_calls)
    accumulator.add_known(f'score/hop{hops}', info.score)
    accumulator.add_known(f'solve_count/hop{hops}', info.solve_count)


def _hops_read(trajectory: Trajectory) -> int:
    """Returns the number of queries that found a passage which no earlier one of the rollout found."""
    seen: set[tuple[str, str]] = set()
    count = 0
    for call in trajectory.calls:
        for passages in call.documents:
            texts = {(passage['title'], passage['text']) for passage in passages}
            count += not texts <= seen
            seen |= texts
    return count


def _add_tool_calls(accumulator: _Accumulator, row: Row) -> None:
    """Adds the number of valid calls of one row, in total and per tool, and its rate of failed calls."""
    trajectory = row.trajectory
    accumulator.add('tool_calls', trajectory.valid_calls)
    # The rate is over calls and not over rollouts, so that rollouts without a call do not lower it.
    accumulator.add('tool_error_rate', trajectory.failed_calls, weight=len(trajectory.calls))
    # Sorted, because this order decides that of the metrics.
    for tool in sorted({call.tool for call in trajectory.calls if call.is_valid}):
        accumulator.add(f'tool_calls/{tool}', len(trajectory.calls_of(tool)), weight=0)


def invalid_reason(row: Row, settings: Rollout) -> str | None:
    """Returns the reason code ('nonfinite_reward', 'tool_failed', 'truncated') of an unusable row; None for others.

    Args:
      settings: `config.rollout`. truncated='drop' excludes rollouts that ended at a limit; every `failed` but 'keep'
        excludes those in which a tool failed.
    """
    # One NaN would spread to the whole group through its mean.
    has_infinite_turn = row.turn_rewards is not None and bool(np.isinf(row.turn_rewards).any())
    if not math.isfinite(row.reward) or has_infinite_turn:
        return 'nonfinite_reward'
    # The policy would learn from a reward that a broken server decided.
    if settings.failed != 'keep' and row.trajectory.has_tool_failure:
        return 'tool_failed'
    if settings.truncated == 'drop' and row.trajectory.finish in TRUNCATED:
        return 'truncated'
    return None


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
