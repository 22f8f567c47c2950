"""Converts rows to JSON and back, for checkpoints; floats are exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from zeroplay_jax.types import Json, Question, Row, RowInfo, ToolCall, Trajectory, Turn

# Dtypes of the arrays of `Trajectory`, because JSON has none. A float32 written as a decimal is exact:
# Python writes the shortest text that reads back as the same float64.
_ARRAY_DTYPES = {'tokens': np.int32, 'source': np.int8, 'logp': np.float32}


def _call_from_json(saved: Json | None) -> ToolCall | None:
    if saved is None:
        return None
    fields = dict(saved)
    # JSON lists become tuples again: a restored call must equal the original.
    fields['documents'] = tuple(map(tuple, saved['documents']))
    return ToolCall(**fields)


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Returns a trajectory with all its contexts as JSON."""
    record: dict[str, Any] = {}
    for name in _ARRAY_DTYPES:
        record[name] = getattr(trajectory, name).tolist()
    record['turns'] = [dataclasses.asdict(turn) for turn in trajectory.turns]
    record['finish'] = trajectory.finish
    record['weights'] = trajectory.weights
    record['version'] = trajectory.version
    record['identity'] = list(trajectory.identity)
    # Recursion ends after one level: an earlier context has no earlier ones of its own.
    record['earlier'] = list(map(trajectory_to_json, trajectory.earlier))
    return record


def trajectory_from_json(saved: Json) -> Trajectory:
    """Inverse of `trajectory_to_json`."""
    turns = []
    for turn in saved['turns']:
        turns.append(Turn(turn['text'], _call_from_json(turn['call']), turn['closed']))
    arrays = {}
    for name, dtype in _ARRAY_DTYPES.items():
        arrays[name] = np.asarray(saved[name], dtype)
    earlier = map(trajectory_from_json, saved['earlier'])
    return Trajectory(
        **arrays,
        turns=tuple(turns),
        finish=saved['finish'],
        weights=saved['weights'],
        version=saved['version'],
        identity=tuple(saved['identity']),
        earlier=tuple(earlier),
    )


def row_to_json(row: Row) -> dict[str, Any]:
    """Returns a row as JSON; this process must have its trajectory."""
    # dataclasses.asdict would copy the nested records and their arrays; `vars` does not.
    info = dict(vars(row.info))
    if row.info.question is not None:
        info['question'] = row.info.question.to_json()
    record = dict(vars(row))
    record['info'] = info
    # Every process that restores the row has all of it.
    del record['process']
    assert isinstance(row.trajectory, Trajectory)
    record['trajectory'] = trajectory_to_json(row.trajectory)
    # The only array of a row outside its trajectory.
    if row.teacher_prompt is not None:
        record['teacher_prompt'] = row.teacher_prompt.tolist()
    return record


def row_from_json(saved: Json) -> Row:
    """Inverse of `row_to_json`."""
    info = dict(saved['info'])
    if info['question'] is not None:
        info['question'] = Question.from_json(info['question'])
    fields = dict(saved)
    fields['info'] = RowInfo(**info)
    fields['trajectory'] = trajectory_from_json(saved['trajectory'])
    if saved['teacher_prompt'] is not None:
        fields['teacher_prompt'] = np.asarray(saved['teacher_prompt'], np.int32)
    return Row(**fields)
