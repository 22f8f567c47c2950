"""The records of `tasks.jsonl`: questions made in a step, and dropped rollouts, tasks and groups with reasons."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from zeroplay_jax.types import Json, Outcome, Row, Task

# Fields of a payload that are logged beside the questions made from it.
_PAYLOAD_FIELDS = ('document_id', 'title', 'hops', 'type', 'question', 'answer', 'answers')


def task_log(
    tasks: Sequence[Task],
    outcomes: Sequence[Outcome],
    pool_refusals: Sequence[Sequence[str | None]],
) -> list[Json]:
    """Returns one record per question made and per rollout or task dropped, with the reason as its 'drop'.

    Args:
      outcomes: the outcomes of `tasks`, in the same order.
      pool_refusals: per outcome and question, the reason code why the pool refused it, or None.
    """
    records: list[Json] = []
    for task, outcome, refusals in zip(tasks, outcomes, pool_refusals, strict=True):
        task_fields = _task_fields(task)
        dropped_rollouts = _dropped_rollouts(task_fields, outcome.rows)
        records += dropped_rollouts
        # The task gets a record of its own only if no record of a rollout has its reason.
        reasons = {record['drop'] for record in dropped_rollouts}
        if outcome.drop and outcome.drop not in reasons:
            records.append(task_fields | {'drop': outcome.drop})
        # The first row of an outcome belongs to the proposer, if there is one. Its role and version are the
        # same for all proposals of the outcome.
        proposer_fields: dict[str, Any] = {'role': None, 'version': None}
        if outcome.rows:
            first = outcome.rows[0]
            proposer_fields = {'role': first.role, 'version': first.trajectory.version}
        for question, refusal in zip(outcome.questions, refusals, strict=True):
            # The order decides where names coincide: the fields of the question win over the task's.
            record = task_fields | proposer_fields | question.to_json()
            records.append(record | {'drop': refusal})
    return records


def payload_json(task: Task) -> Any:
    """Returns a task's payload as JSON."""
    # Recipes of other packages may use plain dicts.
    return task.payload.to_json() if hasattr(task.payload, 'to_json') else task.payload


def _task_fields(task: Task) -> dict[str, Any]:
    """Returns the identity of a task and the logged fields of its payload."""
    payload_fields = payload_json(task)
    fields = {'task': list(task.identity)}
    for name in _PAYLOAD_FIELDS:
        if name in payload_fields:
            fields[name] = payload_fields[name]
    return fields


def _question_text(row: Row) -> str | None:
    """Returns the text of a row's question; None without a question, or if its text is empty."""
    question = row.info.question
    if question is None:
        return None
    return question.text or None


def _dropped_rollouts(task_fields: Json, rows: Sequence[Row]) -> list[Json]:
    """Returns records of the rollouts that are not trained on or whose proposal is not asked."""
    records: list[Json] = []
    for row in rows:
        reason = row.drop or row.info.rejected
        if not reason:
            continue
        trajectory = row.trajectory
        record = dict(task_fields)
        # Identity, weights and version suffice to sample the rollout again.
        record |= {
            'role': row.role,
            'rollout': list(trajectory.identity),
            'weights': trajectory.weights,
            'version': trajectory.version,
            'question': _question_text(row),
            'drop': reason,
        }
        records.append(record)
    return records


def filtered_groups_log(rows: Sequence[Row], surplus: Set[int]) -> list[Json]:
    """Returns one record per group that the dynamic filter excluded, with the rewards of its rollouts.

    The record's 'drop' is 'surplus' or 'uninformative'.

    Args:
      rows: rows of the excluded groups; dropped rows are ignored, because `task_log` has them.
      surplus: keys of groups with reward variance for which the batch had no place; the others have none
        ('uninformative').
    """
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if row.drop is None:
            groups.setdefault(row.group, []).append(row)
    records: list[Json] = []
    for key, group in groups.items():
        first = group[0]
        reason = 'surplus' if key in surplus else 'uninformative'
        records.append(
            {
                # The first two integers name the task, the others a request within it.
                'task': list(first.trajectory.identity[:2]),
                'role': first.role,
                'version': first.trajectory.version,
                'question': _question_text(first),
                'rewards': [row.reward for row in group],
                'drop': reason,
            }
        )
    return records


def skipped_update_log(role: str, rows: Sequence[Row]) -> Json:
    """Returns the record of an update whose gradient was not finite, with its rollouts, by which its cause is found."""
    rollouts = [list(row.trajectory.identity) for row in rows]
    return {'role': role, 'drop': 'nonfinite_gradient', 'rollouts': rollouts}
