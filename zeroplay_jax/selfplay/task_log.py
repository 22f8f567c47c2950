"""Records of `tasks.jsonl`: every question made in a step, and everything dropped with its reason."""

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
    """One record per question made and per rollout or task dropped.

    Args:
      pool_refusals: per outcome and question, why the pool refused it, or None.
    """
    records: list[Json] = []
    for task, outcome, refusals in zip(tasks, outcomes, pool_refusals, strict=True):
        about = _about(task)
        dropped_rollouts = _dropped_rollouts(about, outcome.rows)
        records += dropped_rollouts
        # Otherwise the rollouts' own records say why.
        if outcome.drop and not dropped_rollouts:
            records.append(about | {'drop': outcome.drop})
        # The first row of an outcome is that of the rollout that made its questions.
        maker = outcome.rows[0].role if outcome.rows else None
        version = outcome.rows[0].trajectory.version if outcome.rows else None
        for question, refusal in zip(outcome.questions, refusals, strict=True):
            made = about | {'role': maker, 'version': version}
            records.append(made | question.to_json() | {'drop': refusal})
    return records


def _about(task: Task) -> dict[str, Any]:
    payload = task.payload
    fields = payload.to_json() if hasattr(payload, 'to_json') else payload
    about: dict[str, Any] = {'task': list(task.identity)}
    for name in _PAYLOAD_FIELDS:
        if name in fields:
            about[name] = fields[name]
    return about


def _dropped_rollouts(about: Json, rows: Sequence[Row]) -> list[Json]:
    records: list[Json] = []
    for row in rows:
        reason = row.drop or row.info.rejected
        if not reason:
            continue
        trajectory = row.trajectory
        question = row.info.question
        records.append(
            {
                **about,
                'role': row.role,
                'rollout': list(trajectory.identity),
                'weights': trajectory.weights,
                'version': trajectory.version,
                'question': None if question is None else question.text or None,
                'drop': reason,
            }
        )
    return records


def filtered_groups_log(rows: Sequence[Row], surplus: Set[int]) -> list[Json]:
    """Records of whole groups that the dynamic filter excluded, with the rewards of their rollouts.

    Args:
      rows: of the excluded groups; rows that were dropped earlier are logged already.
      surplus: keys of groups with reward variance that came too late for a batch.
    """
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if row.drop is None:
            groups.setdefault(row.group, []).append(row)
    records: list[Json] = []
    for key, group in groups.items():
        first = group[0]
        question = first.info.question
        records.append(
            {
                'task': list(first.trajectory.identity[:2]),
                'role': first.role,
                'version': first.trajectory.version,
                'question': None if question is None else question.text or None,
                'rewards': [row.reward for row in group],
                'drop': 'surplus' if key in surplus else 'uninformative',
            }
        )
    return records
