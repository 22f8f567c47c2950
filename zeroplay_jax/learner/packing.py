"""Packs trajectories into micro-batches of one static shape.

Places are chosen by lengths alone. With several processes each fills in only the rows that its devices hold.

Letters: B rows of a micro-batch, L tokens of a row, M tokens of a teacher's row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from zeroplay_jax.learner.batch import Batch, TeacherBatch
from zeroplay_jax.objectives import aggregation
from zeroplay_jax.types import POLICY, Row, Trajectory, UserError

# Orders in which trajectories are packed.
ORDERS = ('arrival', 'longest_first')


@dataclasses.dataclass(frozen=True)
class BatchPart:
    """The rows of every micro-batch that one of several processes holds.

    Attributes:
      rows: their indices within a micro-batch, ascending.
      fetch: (trajectories, their rows within micro-batches) → the same with their tokens, None where the row belongs to
        another process. All processes call it with the same arguments.
    """

    rows: Sequence[int]
    fetch: Callable[[Sequence[Row], Sequence[int]], Sequence[Row | None]]


class _Slot(NamedTuple):
    """Where a trajectory is written.

    Attributes:
      row: index of its row, in the student's and in the teacher's view.
      start: its first position in the student's row.
      teacher_start: its first position in the teacher's row.
      segment: its label in the row, from 1.
    """

    row: int
    start: int
    teacher_start: int
    segment: int


@dataclasses.dataclass
class _RowUsage:
    """Tokens in use in a row of the student's and of the teacher's view, and number of segments in it."""

    student_tokens: int = 0
    teacher_tokens: int = 0
    segments: int = 0

    def fits(self, length: int, teacher_length: int, tokens: int, teacher_tokens: int) -> bool:
        """Returns whether a trajectory fits into what is free in rows of `tokens` and `teacher_tokens` positions."""
        fits_student = self.student_tokens + length <= tokens
        fits_teacher = self.teacher_tokens + teacher_length <= teacher_tokens
        return fits_student and fits_teacher


def pack(
    rows: Sequence[Row],
    *,
    micro_rows: int,
    tokens: int,
    mode: str,
    total: float | int | None = None,
    teacher_tokens: int = 0,
    teacher_total: float | int | None = None,
    order: str = 'arrival',
    part: BatchPart | None = None,
) -> list[Batch]:
    """Packs trajectories by first fit into rows, and rows into micro-batches.

    Args:
      rows: trajectories with their advantages.
      micro_rows: B.
      tokens: L.
      mode: aggregation (objectives/aggregation.py). It becomes token weights here, over the whole batch.
      total: the denominator of the weights, where it is not that of these rows: rows of advantage 0 that were left out
        count as well.
      teacher_tokens: M where a teacher reads the trajectories behind its own prompts (`Row.teacher_prompt`), else 0.
      teacher_total: number of distilled tokens of the whole batch, the denominator of the divergence.
      order: 'arrival', or 'longest_first', which fills rows better (Johnson 1973, first-fit decreasing); trajectories
        of equal length stay in the order of `rows`.
      part: the rows of this process; then `total` and `teacher_total` are required. None: all rows.

    Returns:
      Micro-batches of B rows each, or of the rows of `part`; the last is filled up with empty rows.

    Raises:
      UserError: a trajectory is longer than L, or longer than M behind the teacher's prompt.
    """
    if order not in ORDERS:
        raise ValueError(f'pack: order is {order!r}; choose one of {ORDERS}')
    if order == 'longest_first':
        rows = sorted(rows, key=_length, reverse=True)
    slots = _first_fit(rows, tokens, teacher_tokens)
    num_rows_used = max((slot.row + 1 for slot in slots), default=0)
    # The number is rounded up: micro-batches have one shape, so that one compiled program serves all of them.
    num_micro_batches = -(-num_rows_used // micro_rows)
    packed_rows: Sequence[Row | None] = rows
    if part is not None:
        packed_rows = part.fetch(rows, [slot.row % micro_rows for slot in slots])
        slots = _local_slots(slots, micro_rows, part.rows)
        micro_rows = len(part.rows)
    shape = (num_micro_batches * micro_rows, tokens)
    whole = Batch.blank(shape, teacher_tokens)

    # Segments are labelled per row; the weights need labels that are unique in the whole batch.
    sequence = np.full(shape, -1, np.int32)
    for index, (row, slot) in enumerate(zip(packed_rows, slots, strict=True)):
        if row is not None:
            _write(whole, row, slot)
            sequence[slot.row, slot.start : slot.start + _length(row)] = index

    # Weights are computed before the cut into micro-batches, because the denominator is that of the whole batch.
    whole.weight[:] = aggregation.token_weights(whole.mask, sequence, mode, total)
    if whole.teacher is not None:
        # Index 0 of the teacher's row is never that of a policy token, because a prompt comes before it.
        is_distilled = whole.mask & (whole.teacher.teacher_index > 0)
        whole.teacher.weight[:] = aggregation.token_weights(
            is_distilled, sequence, 'token', teacher_total
        )

    micro_batches = []
    for start in range(0, shape[0], micro_rows):
        micro_batches.append(_take_rows(whole, start, start + micro_rows))
    return micro_batches


def _local_slots(slots: Sequence[_Slot], micro_rows: int, part_rows: Sequence[int]) -> list[_Slot]:
    """Returns the slots with their rows counted among those of one process; -1 where another process has the row."""
    local_index = {row: index for index, row in enumerate(part_rows)}
    local_slots = []
    for slot in slots:
        micro_batch, row = divmod(slot.row, micro_rows)
        local_row = -1
        if row in local_index:
            local_row = micro_batch * len(part_rows) + local_index[row]
        local_slots.append(slot._replace(row=local_row))
    return local_slots


def _write(whole: Batch, row: Row, slot: _Slot) -> None:
    """Writes a trajectory into its slot, in both views; the weights stay 0."""
    trajectory = row.trajectory
    assert isinstance(trajectory, Trajectory)
    length = len(trajectory.tokens)
    span = (slot.row, slice(slot.start, slot.start + length))
    whole.tokens[span] = trajectory.tokens
    whole.positions[span] = np.arange(length)
    whole.segment[span] = slot.segment
    # Only tokens that the policy sampled are trained on: prompts and retrieved passages have no gradient.
    whole.mask[span] = trajectory.source == POLICY
    whole.old_logp[span] = trajectory.logp
    # Both arrays hold the sampler's log-probs at first; Learner.recompute_old_logp replaces `old_logp`.
    whole.sampler_logp[span] = trajectory.logp
    whole.advantage[span] = row.advantage
    if whole.teacher is not None and row.teacher_prompt is not None:
        _write_teacher_view(whole.teacher, trajectory, row.teacher_prompt, slot)


def _take_rows(batch: Batch, start: int, stop: int) -> Batch:
    return jax.tree.map(lambda x: x[start:stop], batch)


def _first_fit(rows: Sequence[Row], tokens: int, teacher_tokens: int) -> list[_Slot]:
    """Returns a slot per trajectory, in the first row with enough free tokens in both views; raises as `pack` does."""
    usages: list[_RowUsage] = []
    slots = []
    for row in rows:
        length = _length(row)
        teacher_length = 0
        if teacher_tokens and row.teacher_tokens:
            teacher_length = row.teacher_tokens + length - prompt_length(row)
        # A trajectory is never cut: its prefix would be trained on with the reward of the whole.
        if length > tokens:
            raise UserError(
                f'a trajectory of {length} tokens does not fit micro.tokens={tokens}; raise it'
            )
        if teacher_length > teacher_tokens:
            raise UserError(
                f'{teacher_length} tokens behind a teacher prompt do not fit '
                f'privileged.tokens={teacher_tokens}; raise it'
            )

        # Index of the first row with enough free tokens, or of a new row.
        row_index = 0
        while row_index < len(usages) and not usages[row_index].fits(
            length, teacher_length, tokens, teacher_tokens
        ):
            row_index += 1
        if row_index == len(usages):
            usages.append(_RowUsage())

        usage = usages[row_index]
        usage.segments += 1
        slots.append(_Slot(row_index, usage.student_tokens, usage.teacher_tokens, usage.segments))
        usage.student_tokens += length
        usage.teacher_tokens += teacher_length
    return slots


def _length(row: Row) -> int:
    return row.trajectory.lengths[-1].tokens


def prompt_length(row: Row) -> int:
    """Returns the number of tokens before the first that is not part of the prompt."""
    return row.trajectory.lengths[-1].prompt


def _write_teacher_view(
    view: TeacherBatch, trajectory: Trajectory, teacher_prompt: np.ndarray, slot: _Slot
) -> None:
    """Writes the trajectory behind the teacher's prompt, and each token's index there into `view.teacher_index`."""
    student_prompt_length = trajectory.lengths[-1].prompt
    tokens = np.concatenate([teacher_prompt, trajectory.tokens[student_prompt_length:]])
    span = (slot.row, slice(slot.teacher_start, slot.teacher_start + len(tokens)))
    view.tokens[span] = tokens
    view.positions[span] = np.arange(len(tokens))
    view.segment[span] = slot.segment

    # Both views hold the same tokens after the prompt. The last token of the prompt is included: its output predicts
    # the first token of the reply.
    student_positions = np.arange(student_prompt_length - 1, len(trajectory.tokens))
    offset = slot.teacher_start + len(teacher_prompt) - student_prompt_length
    view.teacher_index[slot.row, slot.start + student_positions] = offset + student_positions
