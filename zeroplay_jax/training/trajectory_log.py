"""Makes the records of `trajectories.jsonl`: whole rollouts of a step, as the report shows them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from zeroplay_jax.rollout.tokens import text_spans
from zeroplay_jax.runtime.hosts import sums
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.rows import collect_records
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.types import Json, Row, ToolCall, Trajectory

# Number of rollouts per step whose text `rendering_check` tokenises again.
_RENDERING_SAMPLE = 16


def trajectory_records(
    recipe: str, context: RolloutContext, step: Step, rows: Sequence[Row], limit: int
) -> list[Json]:
    """Returns the records of about `limit` rollouts of a step: all rollouts of a question, of each kind in turn.

    The kind of a question is its hop count, and whether it is an open task. All processes must call it; only process 0
    gets the records.
    """
    make_record = functools.partial(trajectory_record, recipe, context, step)
    return collect_records(context.hosts, _selected(rows, limit), make_record)


def _selected(rows: Sequence[Row], limit: int) -> list[Row]:
    """Returns whole questions, of alternating kinds, until there are at least `limit` rollouts or no more questions.

    All rollouts of a question are logged, so that they can be compared.
    """
    rollouts_of_question: dict[tuple, list[Row]] = {}
    for row in rows:
        # The last integer of an identity is the index of the sample.
        key = (row.role, row.trajectory.identity[:-1])
        rollouts_of_question.setdefault(key, []).append(row)
    questions_of_kind: dict[tuple, list[list[Row]]] = {}
    for rollouts in rollouts_of_question.values():
        question = rollouts[0].info.question
        hops = None if question is None else question.hops
        # The kind distinguishes questions from open tasks, and hop counts; an evaluation may have all of them.
        kind = ('rubrics' in rollouts[0].parts, hops)
        questions_of_kind.setdefault(kind, []).append(rollouts)
    # One question of each kind in turn, until there are enough rollouts.
    selected: list[Row] = []
    for round_of_kinds in itertools.zip_longest(*questions_of_kind.values()):
        for rollouts in round_of_kinds:
            if rollouts and len(selected) < limit:
                selected += rollouts
    return selected


def trajectory_record(recipe: str, context: RolloutContext, step: Step, row: Row) -> Json:
    """Returns the record of one rollout, with its text in segments of one author each."""
    trajectory = row.trajectory
    assert isinstance(trajectory, Trajectory)
    codec = context.roles[row.role].env.codec
    question = row.info.question
    teacher_prompt = None
    if row.teacher_prompt is not None:
        teacher_prompt = codec.decode(row.teacher_prompt)
    # The identity of the task in which the question was made, by which its proposal can be found in the log; None for
    # questions from outside the run.
    parent = None
    if question is not None:
        parent = question.origin.get('task')
    # The report distinguishes the authors: prompt, policy and environment.
    segments = []
    for span in text_spans(codec, trajectory):
        segments.append({'source': span['source'], 'text': span['text']})
    return {
        'system': recipe,
        'step': step.number,
        'iteration': step.phase.iteration,
        'phase': step.phase.name,
        'role': row.role,
        'is_proposal': row.info.is_proposal,
        'weights': trajectory.weights,
        'version': trajectory.version,
        'rollout': list(trajectory.identity),
        'parent': parent,
        'group': row.group,
        'reward': row.reward,
        'parts': row.parts,
        'advantage': row.advantage,
        'drop': row.drop,
        'finish': trajectory.finish,
        'info': row.info.to_json(),
        'teacher': teacher_prompt,
        'turns': [_call_record(turn.call) for turn in trajectory.turns],
        'segments': segments,
    }


def _call_record(call: ToolCall | None) -> dict[str, Any] | None:
    """Returns a call with its result as JSON; None for a turn without a call."""
    if call is None:
        return None
    return {
        'tool': call.tool,
        'arguments': call.arguments,
        'error': call.error,
        'documents': call.documents,
        'text': call.text,
    }


def rendering_check(context: RolloutContext, rows: Sequence[Row]) -> dict[str, float]:
    """Returns a metric: the share of rollouts whose decoded text (the whole context) tokenises to the same ids again.

    All processes must call it.

    Args:
      rows: at least one; the first `_RENDERING_SAMPLE` are measured.
    """
    # Training uses the sampled ids. The metric shows how often a system that tokenises the text again between
    # turns would train on other ids, which users of such systems report as a drift in long runs.
    codec = context.roles[rows[0].role].env.codec
    counts = {'same': 0, 'measured': 0}
    for row in rows[:_RENDERING_SAMPLE]:
        # Each process measures the rollouts that it sampled.
        if isinstance(row.trajectory, Trajectory):
            ids = row.trajectory.tokens
            counts['same'] += codec.encode(codec.decode(ids)) == ids.tolist()
            counts['measured'] += 1
    total = sums(context.hosts.gather(counts))
    return {'same_ids_when_rendered_again': total['same'] / total['measured']}
