"""Trajectories → micro-batches of one static shape.

Letters: B rows of a micro-batch, L tokens of a row, M tokens of a teacher's row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from zeroplay_jax.objectives import aggregation
from zeroplay_jax.types import POLICY, PROMPT, Batch, Row, TeacherBatch, UserError

for _kind in (Batch, TeacherBatch):
    jax.tree_util.register_dataclass(_kind, [f.name for f in dataclasses.fields(_kind)], [])


class _Place(NamedTuple):
    row: int
    start: int  # first place of the trajectory in its row
    teacher_start: int
    segment: int


def pack(
    rows: Sequence[Row],
    *,
    micro_rows: int,
    tokens: int,
    mode: str,
    total: float | None = None,
    teacher_tokens: int = 0,
    teacher_total: float | None = None,
) -> list[Batch]:
    """Packs trajectories, in order, into as few rows as first-fit finds, and rows into micro-batches.

    Args:
      rows: what is learnt from, with their advantages.
      micro_rows: B.   tokens: L.
      mode: aggregation (objectives/aggregation.py), which becomes weights here, over the whole batch.
      total: its denominator where that is not these rows' own (rows of advantage 0 that were left out count too).
      teacher_tokens: M, where a teacher reads the rows behind its own prompts (`Row.teacher_prompt`); else 0.
      teacher_total: the distilled tokens of the whole batch, over which the divergence is averaged.

    Raises:
      UserError: a trajectory longer than L, or longer than M behind the teacher's prompt.
    """
    placed = _first_fit(rows, tokens, teacher_tokens)
    height = -(-max((p.row + 1 for p in placed), default=0) // micro_rows) * micro_rows
    whole = Batch.blank((height, tokens), teacher_tokens)
    sequence = np.full((height, tokens), -1, np.int32)
    for i, (row, place) in enumerate(zip(rows, placed, strict=True)):
        t = row.trajectory
        at = (place.row, slice(place.start, place.start + len(t.tokens)))
        whole.tokens[at], whole.positions[at] = t.tokens, np.arange(len(t.tokens))
        whole.segment[at], sequence[at] = place.segment, i
        whole.mask[at] = t.source == POLICY
        whole.old_logp[at] = whole.sampler_logp[at] = t.logp
        whole.advantage[at] = row.advantage
        if whole.teacher is not None and row.teacher_prompt is not None:
            _fill_teacher(whole.teacher, row, place)
    whole.weight[:] = aggregation.token_weights(whole.mask, sequence, mode, total)
    if whole.teacher is not None:
        taught = whole.mask & (whole.teacher.place > 0)
        whole.teacher.weight[:] = aggregation.token_weights(
            taught, sequence, 'token', teacher_total
        )
    cut = lambda at: jax.tree.map(lambda x: x[at : at + micro_rows], whole)
    return [cut(at) for at in range(0, height, micro_rows)]


def _first_fit(rows, tokens, teacher_tokens) -> list[_Place]:
    """A place per trajectory: the first row with room for it, in the teacher's view too."""
    used: list[tuple[int, int, int]] = []  # places taken in a row, in the teacher's, and segments
    placed = []
    for row in rows:
        n, m = len(row.trajectory.tokens), 0
        if teacher_tokens and row.teacher_prompt is not None:
            m = len(row.teacher_prompt) + n - prompt_length(row)
        if n > tokens:
            raise UserError(
                f'a trajectory of {n} tokens does not fit micro.tokens={tokens}; raise it'
            )
        if m > teacher_tokens:
            raise UserError(
                f'{m} tokens behind a teacher prompt do not fit privileged.tokens={teacher_tokens}; raise it'
            )
        fits = (
            i for i, (a, b, _) in enumerate(used) if a + n <= tokens and b + m <= teacher_tokens
        )
        at = next(fits, len(used))
        if at == len(used):
            used.append((0, 0, 0))
        start, teacher_start, segments = used[at]
        placed.append(_Place(at, start, teacher_start, segments + 1))
        used[at] = (start + n, teacher_start + m, segments + 1)
    return placed


def prompt_length(row: Row) -> int:
    """Tokens before the first that the policy wrote."""
    return int(np.argmax(row.trajectory.source != PROMPT))


def _fill_teacher(view, row, place):
    prompt, own = row.teacher_prompt, prompt_length(row)
    ids = np.concatenate([prompt, row.trajectory.tokens[own:]])
    at = (place.row, slice(place.teacher_start, place.teacher_start + len(ids)))
    view.tokens[at], view.positions[at], view.segment[at] = ids, np.arange(len(ids)), place.segment
    # From the last token of the prompt on, which predicts the first of the reply, both views hold the same tokens.
    offset = place.teacher_start + len(prompt) - own
    student = np.arange(own - 1, len(row.trajectory.tokens))
    view.place[place.row, place.start + student] = offset + student
