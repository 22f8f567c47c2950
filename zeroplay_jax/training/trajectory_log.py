"""Records of `trajectories.jsonl`: whole rollouts of a step, as the report shows them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zeroplay_jax.rollout.tokens import Codec, text_spans
from zeroplay_jax.selfplay.roles import RolloutContext
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.types import Json, Row, ToolCall

# Rollouts whose text is tokenised again, for a metric.
_RENDERING_SAMPLE = 16


def trajectory_records(
    recipe: str, context: RolloutContext, step: Step, rows: Sequence[Row], limit: int
) -> Iterator[Json]:
    """About `limit` rollouts of a step: all rollouts of a question, spread over hop counts and kinds."""
    for row in _selected(rows, limit):
        yield trajectory_record(recipe, context, step, row)


def _selected(rows: Sequence[Row], limit: int) -> list[Row]:
    """Rollouts of alternating kinds, whole groups at a time: their comparison is what one reads them for."""
    rollouts_of_question: dict[tuple, list[Row]] = {}
    for row in rows:
        # Without its last integer, the index of the sample.
        key = (row.role, row.trajectory.identity[:-1])
        rollouts_of_question.setdefault(key, []).append(row)
    questions_of_kind: dict[tuple, list[list[Row]]] = {}
    for rollouts in rollouts_of_question.values():
        question = rollouts[0].info.question
        hops = None if question is None else question.hops
        # An evaluation asks questions and open tasks.
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
    """One rollout as JSON."""
    trajectory = row.trajectory
    codec = context.roles[row.role].env.codec
    question = row.info.question
    teacher_prompt = None
    if row.teacher_prompt is not None:
        teacher_prompt = codec.decode(row.teacher_prompt)
    # The task whose rollout made the question; None for questions from outside.
    parent = None
    if question is not None:
        parent = question.origin.get('task')
    # Text with its author, so that the report can show policy and environment apart.
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
    if call is None:
        return None
    return {
        'tool': call.tool,
        'arguments': call.arguments,
        'error': call.error,
        'documents': call.documents,
        'text': call.text,
    }


def rendering_check(codec: Codec, rows: Sequence[Row]) -> dict[str, float]:
    """Share of rollouts whose text tokenises to the sampled ids: what re-tokenising would change."""
    # Training uses the sampled ids. The share shows what a system that re-tokenises text between
    # turns would get wrong: the drift that users of such systems report in long runs.
    is_same = []
    for row in rows[:_RENDERING_SAMPLE]:
        ids = row.trajectory.tokens
        is_same.append(codec.encode(codec.decode(ids)) == ids.tolist())
    return {'same_ids_when_rendered_again': float(np.mean(is_same))}
