"""Metrics over the scored rollouts of a step, and the checks that every rollout must pass."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from zeroplay_jax.types import Outcome, Row

# Sums and counts, so that processes and micro-batches can be added before the division.
Stats = dict[str, tuple[float, float]]
# Endings that the policy did not choose.
TRUNCATED = ('context', 'turn_tokens', 'turns')


class _Accumulator:
    """Sums values with weights by name."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = collections.defaultdict(float)
        self.counts: dict[str, float] = collections.defaultdict(float)

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        self.sums[name] += float(value)
        self.counts[name] += weight

    def stats(self) -> Stats:
        return {name: (total, self.counts[name]) for name, total in self.sums.items()}


def rollout_stats(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> Stats:
    """Sums and counts over rows: rewards, parts, turns, tool calls, endings, lengths, solve counts."""
    accumulator = _Accumulator()
    for row in rows:
        _add_row(accumulator, row)
    # Histograms are shares: of the proposals that were measured, or of all rows. Calls of a tool are
    # averaged over all rows, with or without such a call.
    measured = sum(
        total for name, total in accumulator.sums.items() if name.startswith('k_histogram/')
    )
    for name in accumulator.sums:
        if name.startswith('k_histogram/'):
            accumulator.counts[name] = measured
        elif name.startswith(('rejected/', 'row_drop/', 'tool_calls/')):
            accumulator.counts[name] = len(rows)
    rewards_of_group = collections.defaultdict(set)
    for row in rows:
        rewards_of_group[row.role, row.group].add(row.reward)
    for rewards in rewards_of_group.values():
        accumulator.add('informative_share', len(rewards) > 1)
    dropped = sum(outcome.drop is not None for outcome in outcomes)
    accumulator.add('dropped_episodes', dropped, len(outcomes) or 1)
    return accumulator.stats()


def _add_row(accumulator: _Accumulator, row: Row) -> None:
    trajectory = row.trajectory
    accumulator.add('reward_mean', row.reward)
    for name, value in row.parts.items():
        accumulator.add(f'reward/{name}', value)
    accumulator.add('turns', len(trajectory.turns))
    accumulator.add('truncated_rate', trajectory.finish in TRUNCATED)
    accumulator.add('policy_tokens', trajectory.policy_tokens)
    _add_tool_calls(accumulator, row)
    info = row.info
    if info.valid is not None:
        accumulator.add('valid_rate', info.valid)
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
    calls = [turn.call for turn in row.trajectory.turns if turn.call is not None]
    accumulator.add('tool_calls', row.trajectory.valid_calls)
    accumulator.add('tool_error_rate', row.trajectory.failed_calls, weight=len(calls))
    # Sorted: the order of a set differs between processes, and the names come in this order.
    for tool in sorted({call.tool for call in calls if call.is_valid}):
        accumulator.add(f'tool_calls/{tool}', len(row.trajectory.calls_of(tool)), weight=0)


def invalid_reason(row: Row, truncated: str) -> str | None:
    """Why a row cannot be trained on, whatever the recipe; None if it can.

    Args:
      truncated: `config.rollout.truncated`; 'drop' excludes rollouts that ended at a limit.
    """
    if not math.isfinite(row.reward):
        return 'nonfinite_reward'
    if truncated == 'drop' and row.trajectory.finish in TRUNCATED:
        return 'truncated'
    return None


def rows_per_context(rows: Sequence[Row]) -> list[Row]:
    """One row per context of each rollout (`Trajectory.earlier`), with the rollout's reward."""
    split_rows = []
    for row in rows:
        for context in row.trajectory.contexts:
            split_rows.append(dataclasses.replace(row, trajectory=context))
    return split_rows
