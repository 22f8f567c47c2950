"""The rollouts of a step in trajectories.jsonl, as the report shows them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from zeroplay_jax.rollout.tokens import text_spans
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.types import Json, Row, ToolCall

# Number of rollouts per step whose text `rendering_check` tokenises again.
_RENDERING_SAMPLE = 16


def trajectory_records(
    recipe: str, context: RolloutContext, step: Step, rows: Sequence[Row], limit: int
) -> list[Json]:
    """Returns the records of about `limit` rollouts of a step: all rollouts of a question, of each kind in turn.

    The kind of a question is its hop count, and whether it is an open task.
    """
    return [trajectory_record(recipe, context, step, row) for row in _selected(rows, limit)]


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
        hops = question.hops if question else None
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
    """Returns the record of one rollout, with its text in segments of one author each.

    The result of a call that is a message of the chat template also stands without the template's text, as 'message'.
    """
    trajectory = row.trajectory
    env = context.roles[row.role].env
    codec = env.codec
    question = row.info.question
    teacher_prompt = None
    if row.teacher_prompt is not None:
        teacher_prompt = codec.decode(row.teacher_prompt)
    # The identity of the task in which the question was made, by which its proposal can be found in the log; None for
    # questions from outside the run.
    parent = question and question.origin.get('task')
    # The report distinguishes the authors: prompt, policy and environment.
    segments = list(text_spans(codec, trajectory))
    for segment in segments:
        del segment['tokens']
        if env.tools and env.syntax.writes_messages and segment['source'] == 'env':
            roles = ('user', 'assistant', codec.template.tool_role)
            *_, before, behind = codec.template.layout(roles).between
            segment['message'] = segment['text'].removeprefix(before).removesuffix(behind)
    record = {
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
        'advantage': np.asarray(row.advantage).tolist(),
        'drop': row.drop,
        'finish': trajectory.finish,
        'info': row.info.to_json(),
        'teacher': teacher_prompt,
        'turns': [_call_record(turn.call) for turn in trajectory.turns],
        'segments': segments,
    }
    notes = [turn.note for turn in trajectory.turns]
    if any(notes):
        record['notes'] = notes
    if row.turn_rewards is not None:
        earned = row.turn_rewards.tolist()
        record['turn_rewards'] = [None if np.isnan(reward) else reward for reward in earned]
    return record


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

    Args:
      rows: at least one; the first `_RENDERING_SAMPLE` are measured.
    """
    # Training uses the sampled ids. The metric shows how often a system that tokenises the text again between
    # turns would train on other ids, which users of such systems report as a drift in long runs.
    codec = context.roles[rows[0].role].env.codec
    measured = rows[:_RENDERING_SAMPLE]
    same = 0
    for row in measured:
        ids = row.trajectory.tokens
        same += codec.encode(codec.decode(ids)) == ids.tolist()
    return {'same_ids_when_rendered_again': same / len(measured)}
