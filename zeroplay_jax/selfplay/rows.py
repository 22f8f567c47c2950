"""What the processes of a run send each other about rollouts: summaries to all, tokens where they are trained on.

After the episodes of a round every process gets a summary of every row. From summaries all processes compute the same
metrics, advantages and packed batch. The tokens of a trained row then go from the process that sampled it to the
processes whose devices hold its place in the batch. Turns and tool results never leave their process, except for the
log and for checkpoints.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from zeroplay_jax.learner.batch import BatchPart
from zeroplay_jax.policy import sharding
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.types import (
    POLICY,
    ContextLengths,
    Json,
    Outcome,
    Question,
    Row,
    RowInfo,
    ToolCall,
    Trajectory,
    TrajectorySummary,
    Turn,
    TurnCounts,
)


def outcome_summary(outcome: Outcome) -> dict[str, Any]:
    """Returns what the other processes need of an outcome, as JSON; `whole_outcome` reads it.

    The questions of the outcome are whole, because any process may ask them later. Those of the rows are only logged:
    they have no path, and rows about the same question share one record.
    """
    questions: list[dict[str, Any]] = []
    # Compared by identity, because comparing the values of long questions would take longer.
    index_of_question: dict[int, int] = {}
    rows: list[dict[str, Any]] = []
    for row in outcome.rows:
        question = row.info.question
        index = None
        if question is not None:
            index = index_of_question.setdefault(id(question), len(questions))
            if index == len(questions):
                questions.append(dataclasses.replace(question, path=None).to_json())
        rows.append(_row_summary(row, index))
    return {
        'rows': rows,
        'row_questions': questions,
        'questions': list(map(Question.to_json, outcome.questions)),
        'drop': outcome.drop,
    }


def _row_summary(row: Row, question: int | None) -> dict[str, Any]:
    """Returns a row without tokens and turns as JSON; `question` is the index of its question."""
    trajectory = row.trajectory
    # Fields that are not set are left out, and `details`, which only the log shows.
    info = {}
    for name, value in vars(row.info).items():
        if value is not None and name not in ('question', 'details'):
            info[name] = value
    if question is not None:
        info['question'] = question
    return {
        'role': row.role,
        'reward': row.reward,
        'parts': row.parts,
        'group': row.group,
        'drop': row.drop,
        'info': info,
        'rollout': [
            trajectory.finish,
            trajectory.weights,
            trajectory.version,
            trajectory.identity,
            trajectory.lengths,
            trajectory.counts,
            row.teacher_tokens,
        ],
    }


def whole_outcome(summary: Json, process: int, local: Outcome | None) -> Outcome:
    """Returns the outcome of a summary that process `process` sent.

    Args:
      local: that outcome itself, in the process that sent it. Its rows keep their rollouts and infos; all other values
        are those of the summary, so that all processes compute with equal ones.
    """
    row_questions = list(map(Question.from_json, summary['row_questions']))
    rows = []
    for index, record in enumerate(summary['rows']):
        row = _summarised_row(record, row_questions, process)
        if local is not None:
            local_row = local.rows[index]
            row.trajectory = local_row.trajectory
            row.teacher_prompt = local_row.teacher_prompt
            row.info = local_row.info
        rows.append(row)
    questions = list(map(Question.from_json, summary['questions']))
    return Outcome(rows, questions, summary['drop'])


def _summarised_row(record: Json, questions: Sequence[Question], process: int) -> Row:
    """Inverse of `_row_summary`: a row whose trajectory is a summary."""
    info = dict(record['info'])
    if 'question' in info:
        info['question'] = questions[info['question']]
    (
        finish,
        weights,
        version,
        identity,
        lengths,
        counts,
        teacher_tokens,
    ) = record['rollout']
    trajectory = TrajectorySummary(
        finish=finish,
        weights=weights,
        version=version,
        identity=tuple(identity),
        lengths=tuple(ContextLengths(*context) for context in lengths),
        counts=TurnCounts(*counts),
        teacher_tokens=teacher_tokens,
    )
    return Row(
        role=record['role'],
        trajectory=trajectory,
        reward=record['reward'],
        group=record['group'],
        parts=record['parts'],
        drop=record['drop'],
        info=RowInfo(**info),
        process=process,
    )


def collect_records(
    hosts: Hosts, rows: Sequence[Row], make_record: Callable[[Row], Any]
) -> list[Any]:
    """Returns the records of rows in process 0, [] in the others; all processes must call it with the same rows.

    Args:
      make_record: returns a JSON value; it is called where the row's trajectory is.
    """
    if hosts.count == 1:
        return [make_record(row) for row in rows]
    local_records = []
    for index, row in enumerate(rows):
        # Process 0 makes the records of rows that all processes have.
        if (row.process or 0) == hosts.index:
            local_records.append([index, make_record(row)])
    record_of_row: dict[int, Any] = {}
    for records in hosts.collect(local_records):
        record_of_row.update(records)
    return [record_of_row[index] for index in sorted(record_of_row)]


def batch_part(hosts: Hosts, mesh: jax.sharding.Mesh, micro_rows: int) -> BatchPart | None:
    """Returns the rows of every micro-batch that this process holds, for `pack`; None for a single process.

    Args:
      hosts: the processes.
      mesh: devices of the learner.
      micro_rows: rows of a micro-batch, which are split over the data axes of `mesh`.
    """
    # A single process has all tokens already.
    if hosts.count == 1:
        return None
    rows_of_process = sharding.held_rows(micro_rows, sharding.rows(mesh))
    exchange = _RowExchange(hosts, rows_of_process)
    return BatchPart(rows_of_process[hosts.index], exchange.fetch)


class _RowExchange:
    """Sends the tokens of packed rows to the processes whose devices hold them."""

    def __init__(self, hosts: Hosts, rows_of_process: Sequence[Sequence[int]]):
        self._hosts = hosts
        # Row of a micro-batch → processes that hold it.
        self._holders: dict[int, set[int]] = collections.defaultdict(set)
        for process, rows in enumerate(rows_of_process):
            for row in rows:
                self._holders[row].add(process)

    def fetch(self, rows: Sequence[Row], micro_rows: Sequence[int]) -> list[Row | None]:
        """Returns the rows of this process's part with their tokens, None in the place of others; see `BatchPart`."""
        hosts = self._hosts
        outgoing: list[list[bytes]] = [[] for _ in range(hosts.count)]
        for row, micro_row in zip(rows, micro_rows, strict=True):
            if row.process == hosts.index:
                message = _row_bytes(row)
                for process in self._holders[micro_row]:
                    # What stays here needs no message.
                    if process != hosts.index:
                        outgoing[process].append(message)
        incoming = hosts.exchange([b''.join(messages) for messages in outgoing])
        # All processes know lengths and order of the arrays from the summaries, so the bytes have no headers.
        readers = [_Reader(message) for message in incoming]
        fetched: list[Row | None] = []
        for row, micro_row in zip(rows, micro_rows, strict=True):
            if hosts.index not in self._holders[micro_row]:
                fetched.append(None)
            elif isinstance(row.trajectory, Trajectory):
                fetched.append(row)
            else:
                assert row.process is not None
                fetched.append(_read_row(row, row.trajectory, readers[row.process]))
        return fetched


def _row_bytes(row: Row) -> bytes:
    """Returns the arrays of a row of one context as bytes, in the order in which `_read_row` reads them."""
    trajectory = row.trajectory
    assert isinstance(trajectory, Trajectory)
    # The bytes have no dtypes with them, so the dtypes are made sure of.
    pieces = [
        np.asarray(trajectory.tokens, np.int32).tobytes(),
        np.asarray(trajectory.source, np.int8).tobytes(),
        # Log-probs of other tokens are 0; most tokens are not the policy's.
        np.asarray(trajectory.logp[trajectory.source == POLICY], np.float32).tobytes(),
    ]
    if row.teacher_prompt is not None:
        pieces.append(np.asarray(row.teacher_prompt, np.int32).tobytes())
    return b''.join(pieces)


class _Reader:
    """Reads arrays from bytes one after another."""

    def __init__(self, message: bytes):
        self._message = message
        self._offset = 0

    def read(self, dtype: Any, length: int) -> np.ndarray:
        """Returns the next `length` values."""
        array = np.frombuffer(self._message, dtype, length, self._offset)
        self._offset += array.nbytes
        return array


def _read_row(row: Row, summary: TrajectorySummary, reader: _Reader) -> Row:
    """Returns a row of one context with the arrays that another process sent; it has no turns."""
    lengths = summary.lengths[-1]
    tokens = reader.read(np.int32, lengths.tokens)
    source = reader.read(np.int8, lengths.tokens)
    logp = np.zeros(lengths.tokens, np.float32)
    logp[source == POLICY] = reader.read(np.float32, lengths.policy)
    teacher_prompt = None
    if summary.teacher_tokens:
        teacher_prompt = reader.read(np.int32, summary.teacher_tokens)
    trajectory = Trajectory(
        tokens=tokens,
        source=source,
        logp=logp,
        turns=(),
        finish=summary.finish,
        weights=summary.weights,
        version=summary.version,
        identity=summary.identity,
    )
    return dataclasses.replace(row, trajectory=trajectory, teacher_prompt=teacher_prompt)


# ---- serialization ---------------------------------------------------------------------------------
#
# Converts rows to JSON and back, for checkpoints; floats are exact.


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
