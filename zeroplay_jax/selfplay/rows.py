"""What the engine says about rows: their averages in the log, and their form in a checkpoint and between hosts."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.types import Json, Outcome, Row, Task, Trajectory, Turn

TRUNCATED = ('context', 'turn_tokens', 'turns')  # endings that the policy did not choose
# What of an item goes into the log beside the questions that were made of it.
_KNOWN = ('document_id', 'title', 'hops', 'type', 'question', 'answer', 'answers')


def rollout_stats(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> Stats:
    """Averages over rows as (sum, count): rewards, parts, turns, tools, endings, lengths, solve counts."""
    stats: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])

    def add(name, value, weight=1.0):
        stats[name][0] += float(value)
        stats[name][1] += weight

    for row in rows:
        t = row.trajectory
        add('reward_mean', row.reward)
        for name, value in row.parts.items():
            add(f'reward/{name}', value)
        if 'valid' in row.info:
            add('valid_rate', row.info['valid'])
        add('turns', len(t.turns))
        add('tool_calls', t.calls)
        add(
            'tool_error_rate',
            t.errors,
            sum(bool(u.queries) or u.error is not None for u in t.turns),
        )
        add('truncated_rate', t.finish in TRUNCATED)
        add('policy_tokens', t.policy_tokens)
        if row.info.get('answer_given'):
            add('answer_words', len(row.info['answer_given'].split()))
        if reason := row.info.get('rejected'):
            add(f'rejected/{reason}', 1, 0)
        if row.drop:
            add(f'row_drop/{row.drop}', 1, 0)
        if 'solved' in row.info:
            add(f'k_histogram/{row.info["solved"]}', 1, 0)
        if 'privileged_cut' in row.info:
            add('privileged_cut', row.info['privileged_cut'])
    asked = sum(v[0] for k, v in stats.items() if k.startswith('k_histogram'))
    for name in [n for n in stats if n.startswith(('k_histogram', 'rejected', 'row_drop'))]:
        stats[name][1] = asked if name.startswith('k_histogram') else len(rows)
    groups = collections.defaultdict(set)
    for row in rows:
        groups[row.role, row.group].add(row.reward)
    for values in groups.values():
        add('informative_share', len(values) > 1)
    add('dropped_episodes', sum(o.drop is not None for o in outcomes), len(outcomes) or 1)
    return {k: (v[0], v[1]) for k, v in stats.items()}


def unfit(row: Row, truncated: str) -> str | None:
    """Why a row cannot be learnt from, whatever the game: its reward is not finite, or (`rollout.truncated`) a limit
    ended it and such rollouts are dropped."""
    if not math.isfinite(row.reward):
        return 'nonfinite_reward'
    return 'truncated' if truncated == 'drop' and row.trajectory.finish in TRUNCATED else None


def fates(
    tasks: Sequence[Task], outcomes: Sequence[Outcome], refused: Sequence[Sequence[str | None]]
) -> list[Json]:
    """What became of the items of a step, as JSON: every question made, and all that was dropped with its reason code.

    Args:
      refused: per outcome, per question: why the pool did not take it, or None.
    """
    found: list[Json] = []
    for task, outcome, reasons in zip(tasks, outcomes, refused, strict=True):
        about: dict[str, Any] = {'task': list(task.identity)} | {
            k: task.payload[k] for k in _KNOWN if k in task.payload
        }
        before = len(found)
        for row in outcome.rows:
            t = row.trajectory
            if reason := row.drop or row.info.get('rejected'):
                who = {
                    'role': row.role,
                    'rollout': list(t.identity),
                    'weights': t.weights,
                    'version': t.version,
                }
                found.append(about | who | {'question': row.info.get('question'), 'drop': reason})
        if outcome.drop and len(found) == before:  # else a rollout has told why
            found.append(about | {'drop': outcome.drop})
        version = outcome.rows[0].trajectory.version if outcome.rows else None
        maker = about | {'role': 'proposer', 'version': version}
        found += [
            maker | made | {'drop': reason}
            for made, reason in zip(outcome.questions, reasons, strict=True)
        ]
    return found


def let_go(rows: Sequence[Row], surplus: Set[int]) -> list[Json]:
    """`fates` of whole groups that a filter did not let train, with what their rollouts had earned; groups of
    `surplus` could have taught something but came too late for a batch. Rows dropped before are told already."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if row.drop is None:
            groups.setdefault(row.group, []).append(row)
    return [
        {
            'task': list(own[0].trajectory.identity[:2]),
            'role': own[0].role,
            'version': own[0].trajectory.version,
            'question': own[0].info.get('question'),
            'rewards': [row.reward for row in own],
            'drop': 'surplus' if group in surplus else 'uninformative',
        }
        for group, own in groups.items()
    ]


def segments(rows: Sequence[Row]) -> list[Row]:
    """A row per context of each rollout (`Trajectory.earlier`), all with what was found for the whole."""
    return [
        dataclasses.replace(row, trajectory=part)
        for row in rows
        for part in row.trajectory.segments
    ]


def _trajectory_state(t: Trajectory) -> Json:
    arrays = {name: getattr(t, name).tolist() for name in ('tokens', 'source', 'logp')}
    turns = [dataclasses.asdict(turn) for turn in t.turns]
    earlier = [_trajectory_state(part) for part in t.earlier]
    scalars = dict(finish=t.finish, weights=t.weights, version=t.version, identity=list(t.identity))
    return arrays | scalars | dict(turns=turns, earlier=earlier)


def _trajectory_restore(saved: Json) -> Trajectory:
    types = dict(tokens=np.int32, source=np.int8, logp=np.float32)
    arrays = {name: np.asarray(saved[name], dtype) for name, dtype in types.items()}
    turns = tuple(
        Turn(
            **(
                turn
                | dict(
                    queries=tuple(turn['queries']), documents=tuple(map(tuple, turn['documents']))
                )
            )
        )
        for turn in saved['turns']
    )
    earlier = tuple(_trajectory_restore(part) for part in saved['earlier'])
    return Trajectory(
        **(dict(saved, turns=turns, earlier=earlier, identity=tuple(saved['identity'])) | arrays)
    )


def state(row: Row) -> Json:
    """A row as JSON; floats survive exactly."""
    prompt = None if row.teacher_prompt is None else row.teacher_prompt.tolist()
    return dict(vars(row), teacher_prompt=prompt, trajectory=_trajectory_state(row.trajectory))


def restore(saved: Json) -> Row:
    """The row that `state` wrote."""
    prompt = (
        None if saved['teacher_prompt'] is None else np.asarray(saved['teacher_prompt'], np.int32)
    )
    return Row(
        **dict(saved, teacher_prompt=prompt, trajectory=_trajectory_restore(saved['trajectory']))
    )


def outcome_state(outcome: Outcome) -> Json:
    """An outcome as JSON."""
    return dict(vars(outcome), rows=[state(row) for row in outcome.rows])


def outcome_restore(saved: Json) -> Outcome:
    """The outcome that `outcome_state` wrote."""
    return Outcome(**dict(saved, rows=[restore(row) for row in saved['rows']]))
