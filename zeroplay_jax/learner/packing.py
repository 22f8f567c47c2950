"""Trajectories → micro-batches of one static shape.

Letters: B rows of a micro-batch, L tokens of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.objectives import policy_gradient
from zeroplay_jax.types import POLICY, Batch, Row, UserError


def pack(rows: Sequence[Row], *, micro_rows: int, tokens: int, mode: str, total: float | None = None) -> list[Batch]:
    """Packs trajectories, in order, into as few rows as first-fit finds, and rows into micro-batches.

    Args:
      rows: what is learnt from, with their advantages.
      micro_rows: B.   tokens: L.
      mode: aggregation (objectives/policy_gradient.py), which becomes weights here, over the whole batch.
      total: its denominator where that is not these rows' own (rows of advantage 0 that were left out count too).

    Raises:
      ValueError: a trajectory longer than L.
    """
    room: list[int] = []
    placed: list[tuple[int, int, int]] = []  # row, first place, segment
    segments: list[int] = []
    for row in rows:
        n = len(row.trajectory.tokens)
        if n > tokens:
            raise UserError(f'a trajectory of {n} tokens does not fit micro.tokens={tokens}; raise it')
        at = next((i for i, free in enumerate(room) if free >= n), None)
        if at is None:
            at = len(room)
            room.append(tokens)
            segments.append(0)
        segments[at] += 1
        placed.append((at, tokens - room[at], segments[at]))
        room[at] -= n
    height = -(-len(room) // micro_rows) * micro_rows
    whole = _fill(rows, placed, height, tokens, mode, total)
    parts = range(0, height, micro_rows)
    return [
        Batch(**{f.name: getattr(whole, f.name)[i : i + micro_rows] for f in dataclasses.fields(Batch)}) for i in parts
    ]


def _fill(rows, placed, height, length, mode, total) -> Batch:
    ints = {name: np.zeros((height, length), np.int32) for name in ('tokens', 'positions', 'segment')}
    floats = {name: np.zeros((height, length), np.float32) for name in ('old_logp', 'advantage')}
    mask = np.zeros((height, length), bool)
    sequence = np.full((height, length), -1, np.int32)
    for i, (row, (at, start, segment)) in enumerate(zip(rows, placed, strict=True)):
        t = row.trajectory
        place = (at, slice(start, start + len(t.tokens)))
        ints['tokens'][place], ints['positions'][place] = t.tokens, np.arange(len(t.tokens))
        ints['segment'][place], sequence[place] = segment, i
        mask[place] = t.source == POLICY
        floats['old_logp'][place], floats['advantage'][place] = t.logp, row.advantage
    weight = policy_gradient.token_weights(mask, sequence, mode, total)
    return Batch(**ints, mask=mask, **floats, weight=weight)
