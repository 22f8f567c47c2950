"""The micro-batches that one update of the learner reads, and how trajectories are packed into them.

Array shapes: B packed rows of L tokens; M tokens of a teacher's row.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from zeroplay_jax.objectives import aggregation
from zeroplay_jax.policy.experts import NOT_RECORDED
from zeroplay_jax.types import POLICY, Row, Trajectory, UserError


@dataclasses.dataclass(frozen=True)
class TeacherBatch:
    """The rollouts of a `Batch` behind the teacher's prompts; row b matches row b of the student's batch.

    Attributes:
      tokens, positions, segment: int32 [B, M], as in `Batch`.
      teacher_index: int32 [B, L], index in the teacher's row of the token at each index of the student's row; 0 without
        one.
      weight: float32 [B, L], weight of the token in the distillation loss, global denominator included.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment: np.ndarray
    teacher_index: np.ndarray
    weight: np.ndarray


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows: several trajectories share a row of L tokens, separated by `segment`.

    Attributes (all [B, L]; label arrays refer to the token at that position, predicted by the previous one):
      tokens: int32, 0 where empty.
      positions: int32, restarting at 0 in every segment.
      segment: int32, 1, 2, … per row; 0 where empty.
      mask: bool, True on trained tokens (source POLICY), not at the first position of a row, which nothing predicts: it
        is that of a prompt.
      old_logp: float32, denominator of the importance ratio: the sampler's log-probs, or the trainer's own before the
        first update of a batch.
      sampler_logp: float32, the sampler's.
      advantage: float32.
      weight: float32, weight of the token in the loss, global denominator included.
      teacher: the teacher's view of the rows, or None.
      rollout: int32, number within the optimiser step of a rollout with several contexts; −1: of others, and where
        empty. Hosts alone read it, for `means.with_rollout_means`.
      means: name → float32, the mean over the batch of the optimiser step at every token, where the loss declares any.
      experts: [B, L, choices], experts that compute the token (`Trajectory.experts`); None: those that the routers
        choose, as for references, teachers and value networks.
      kept: sets that the tokens were drawn from: on hosts object [B], int32 [N, 2] of every row, (place, id); for
        devices int32 [B, L, ids], as of `head.within`. None: from all ids.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment: np.ndarray
    mask: np.ndarray
    old_logp: np.ndarray
    sampler_logp: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    teacher: TeacherBatch | None = None
    rollout: Any = None
    means: dict[str, np.ndarray] | None = None
    experts: np.ndarray | None = None
    kept: np.ndarray | None = None

    def for_devices(self, most: int = 0) -> Batch:
        """Returns the batch without `rollout`, which is not copied to devices, and with the sets of `kept` as an array.

        Args:
          most: ids of a set; more if a set has more.
        """
        records = [] if self.kept is None else self.kept
        most = max([most, *(np.bincount(record[:, 0]).max(initial=0) for record in records)])
        kept = np.full((*self.tokens.shape, most), -1, np.int32)
        for row, record in enumerate(records):
            place, ids = record.T
            number = np.arange(len(ids)) - np.searchsorted(place, place)
            kept[row, place, number] = ids
        return dataclasses.replace(self, rollout=None, kept=kept if most else None)

    @classmethod
    def blank(
        cls,
        shape: tuple[int, int],
        teacher_tokens: int = 0,
        choices: np.ndarray | None = None,
    ) -> Batch:
        """Returns a batch of zeros, to be filled in place.

        Args:
          shape: (B, L).
          teacher_tokens: M, tokens of a row of the teacher's batch; 0: without a teacher's batch.
          choices: record of an empty place; None: of a dense model.
        """
        rows, tokens = shape

        def ints(columns: int) -> np.ndarray:
            return np.zeros((rows, columns), np.int32)

        def floats() -> np.ndarray:
            return np.zeros(shape, np.float32)

        teacher = None
        if teacher_tokens:
            teacher = TeacherBatch(
                tokens=ints(teacher_tokens),
                positions=ints(teacher_tokens),
                segment=ints(teacher_tokens),
                teacher_index=ints(tokens),
                weight=floats(),
            )
        return cls(
            tokens=ints(tokens),
            positions=ints(tokens),
            segment=ints(tokens),
            mask=np.zeros(shape, bool),
            old_logp=floats(),
            sampler_logp=floats(),
            advantage=floats(),
            weight=floats(),
            teacher=teacher,
            rollout=np.full(shape, -1, np.int32),
            experts=None if choices is None else np.tile(choices, (*shape, 1)),
        )


# Batches pass through jit, device_put and tree.map.
for _batch_class in (Batch, TeacherBatch):
    _field_names = [field.name for field in dataclasses.fields(_batch_class)]
    jax.tree_util.register_dataclass(_batch_class, data_fields=_field_names, meta_fields=[])


class _Context(NamedTuple):
    """A context of a rollout, which is packed by itself (`Trajectory.contexts`).

    Attributes:
      rollout: index of the rollout, which all its contexts share.
      trajectory: the context.
      prompt_tokens: tokens of the rollout's prompt, with which every context begins.
      advantage: of its tokens: a number, or float64 [T], 0 where no turn is.
      row: the rollout with its teacher's prompt.
    """

    rollout: int
    trajectory: Trajectory
    prompt_tokens: int
    advantage: float | np.ndarray | None
    row: Row


class _Place(NamedTuple):
    """Where a trajectory is written.

    Attributes:
      packed_row: index of its row, in the student's and in the teacher's view.
      start: its first position in the student's row.
      teacher_start: its first position in the teacher's row.
      segment: its label in the row, from 1.
    """

    packed_row: int
    start: int
    teacher_start: int
    segment: int


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
) -> list[Batch]:
    """Packs trajectories by first fit into rows, and rows into micro-batches.

    The contexts of a rollout (`rollout.drop_thinking`, `go_on`) are packed each by itself, with its advantage, and
    count as one rollout in the weights. A teacher reads every context behind its own prompt.

    Args:
      rows: trajectories with their advantages.
      micro_rows: B.
      tokens: L.
      mode: aggregation (objectives/aggregation.py). It becomes token weights here, over the whole optimiser step.
      total: the denominator of the weights, where it is not that of these rows: rows of advantage 0 that were left out
        count as well.
      teacher_tokens: M where a teacher reads the trajectories behind its own prompts (`Row.teacher_prompt`), else 0.
      teacher_total: number of distilled tokens of the whole optimiser step, the denominator of the divergence.
      order: 'arrival', or 'longest_first', which fills rows better (Johnson 1973, first-fit decreasing); trajectories
        of equal length stay in the order of `rows`.

    Returns:
      Micro-batches of B rows each; the last is filled up with empty rows.

    Raises:
      UserError: a trajectory is longer than L, or longer than M behind the teacher's prompt.
    """
    contexts = _contexts(rows)
    if order == 'longest_first':
        contexts.sort(key=lambda each: len(each.trajectory.tokens), reverse=True)
    places = _first_fit(contexts, tokens, teacher_tokens)
    whole, sequence = _written(contexts, places, micro_rows, tokens, teacher_tokens)
    # Weights are computed before the cut into micro-batches: their denominator is that of the whole optimiser step.
    whole.weight[:] = aggregation.token_weights(whole.mask, sequence, mode, total)
    if whole.teacher is not None:
        # Index 0 of the teacher's row is never that of a policy token, because a prompt comes before it.
        is_distilled = whole.mask & (whole.teacher.teacher_index > 0)
        whole.teacher.weight[:] = aggregation.token_weights(
            is_distilled, sequence, 'token', teacher_total
        )
    micro_batches = []
    for start in range(0, len(whole.tokens), micro_rows):
        part = slice(start, start + micro_rows)
        micro_batches.append(jax.tree.map(operator.itemgetter(part), whole))
    return micro_batches


def _contexts(rows: Sequence[Row]) -> list[_Context]:
    """Returns the contexts of all rollouts, in order."""
    contexts = []
    for rollout, row in enumerate(rows):
        prompt_tokens = row.trajectory.prompt_tokens
        # Each sampled token is POLICY in exactly one context, so it is trained once.
        for number, trajectory in enumerate(row.trajectory.contexts):
            advantage = _token_advantages(row, number, len(trajectory.tokens))
            contexts.append(_Context(rollout, trajectory, prompt_tokens, advantage, row))
    return contexts


def _token_advantages(row: Row, context: int, tokens: int) -> float | np.ndarray | None:
    """Returns the advantages of the tokens of a context: those of its turns at their tokens, or the rollout's one."""
    if not isinstance(row.advantage, np.ndarray):
        return row.advantage
    advantages = np.zeros(tokens)
    for turn, advantage in zip(row.trajectory.turns, row.advantage, strict=True):
        if turn.context == context:
            advantages[turn.start : turn.stop] = advantage
    return advantages


def _written(
    contexts: Sequence[_Context],
    places: Sequence[_Place],
    micro_rows: int,
    tokens: int,
    teacher_tokens: int,
) -> tuple[Batch, np.ndarray]:
    """Writes contexts into their places.

    Returns:
      The rows of all micro-batches as one batch, with weights of 0; and the index of the rollout of every position, -1
      where empty.
    """
    packed_rows = max((place.packed_row + 1 for place in places), default=0)
    # The number is rounded up: micro-batches have one shape, so that one compiled program serves all of them.
    num_micro_batches = math.ceil(packed_rows / micro_rows)
    shape = (num_micro_batches * micro_rows, tokens)
    records = [context.trajectory.experts for context in contexts]
    known = next((record for record in records if record is not None), None)
    choices = None if known is None else np.full_like(known[0], NOT_RECORDED)
    whole = Batch.blank(shape, teacher_tokens, choices)
    if any(context.trajectory.kept is not None for context in contexts):
        kept = np.empty(len(whole.tokens), object)
        kept[:] = [np.zeros((0, 2), np.int32)]
        whole = dataclasses.replace(whole, kept=kept)

    # Segments are labelled per row; the weights need labels that are unique in the whole batch.
    sequence = np.full(shape, -1, np.int32)
    for context, place in zip(contexts, places, strict=True):
        trajectory = context.trajectory
        length = len(trajectory.tokens)
        span = (place.packed_row, slice(place.start, place.start + length))
        sequence[span] = context.rollout
        if context.row.trajectory.earlier:
            whole.rollout[span] = context.rollout
        whole.tokens[span] = trajectory.tokens
        whole.positions[span] = np.arange(length)
        whole.segment[span] = place.segment
        # Only tokens that the policy sampled are trained on: prompts and retrieved passages have no gradient.
        whole.mask[span] = trajectory.source == POLICY
        whole.old_logp[span] = trajectory.logp
        # Both arrays hold the sampler's log-probs at first; Learner.recompute_old_logp replaces `old_logp`.
        whole.sampler_logp[span] = trajectory.logp
        whole.advantage[span] = context.advantage
        if whole.experts is not None and trajectory.experts is not None:
            whole.experts[span] = trajectory.experts
        if whole.kept is not None and trajectory.kept is not None:
            record = trajectory.kept + np.array([place.start, 0], np.int32)
            before = whole.kept[place.packed_row]
            whole.kept[place.packed_row] = np.concatenate([before, record])
        if whole.teacher is not None and context.row.teacher_prompt is not None:
            _write_teacher_view(whole.teacher, context, context.row.teacher_prompt, place)
    return whole, sequence


def _first_fit(contexts: Sequence[_Context], tokens: int, teacher_tokens: int) -> list[_Place]:
    """Returns a place per context, in the first row with enough free tokens in both views; raises as `pack` does."""
    # Of every row: tokens in use in the student's view, in the teacher's, and contexts.
    used: list[tuple[int, int, int]] = []
    places = []
    for context in contexts:
        length = len(context.trajectory.tokens)
        teacher_length = 0
        if teacher_tokens and context.row.teacher_tokens:
            teacher_length = context.row.teacher_tokens + length - context.prompt_tokens
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
        most, most_of_teacher = tokens - length, teacher_tokens - teacher_length
        fits = [student <= most and teacher <= most_of_teacher for student, teacher, _ in used]
        row = fits.index(True) if True in fits else len(used)
        if row == len(used):
            used.append((0, 0, 0))
        start, teacher_start, segments = used[row]
        places.append(_Place(row, start, teacher_start, segments + 1))
        used[row] = (start + length, teacher_start + teacher_length, segments + 1)
    return places


def _write_teacher_view(
    view: TeacherBatch, context: _Context, teacher_prompt: np.ndarray, place: _Place
) -> None:
    """Writes the context behind the teacher's prompt, and each token's index there into `view.teacher_index`."""
    trajectory = context.trajectory
    student_prompt_length = context.prompt_tokens
    reply = trajectory.tokens[student_prompt_length:]
    tokens = np.concatenate([teacher_prompt, reply])
    length = len(tokens)
    end = place.teacher_start + length
    span = (place.packed_row, slice(place.teacher_start, end))
    view.tokens[span] = tokens
    view.positions[span] = np.arange(length)
    view.segment[span] = place.segment

    # Both views hold the same tokens after the prompt. The last token of the prompt is included: its output predicts
    # the first token of the reply.
    student_positions = np.arange(student_prompt_length - 1, len(trajectory.tokens))
    prompt_difference = len(teacher_prompt) - student_prompt_length
    teacher_positions = student_positions + prompt_difference
    student_index = place.start + student_positions
    teacher_index = place.teacher_start + teacher_positions
    view.teacher_index[place.packed_row, student_index] = teacher_index
