"""Rows, outcomes and questions survive JSON: checkpoints and other processes get exactly the same values."""

import dataclasses
import json

import numpy as np

from zeroplay_jax.selfplay import serialization
from zeroplay_jax.types import Outcome, Question, Row, RowInfo, ToolCall, Trajectory, Turn

PASSAGE = {'id': 1, 'title': 'a', 'text': 'b', 'score': 0.1}
QUESTION = Question(
    text='é?',
    answers=('x', 'y'),
    hops=3,
    rubrics=({'text': 'Name it.', 'priority': 'bonus'},),
    path={'title': 'a', 'hops': 3, 'steps': [{'think': '', 'query': 'q', 'found': []}]},
    unique_key='k',
    solve_rate=1 / 3,
    origin={'document': 'a', 'task': [1, 2], 'score': 0.1},
)
TURNS = (
    Turn(
        't',
        ToolCall('search', {'query_list': ['q', 'r']}, 'found', ((PASSAGE,), ())),
    ),
    Turn('u', ToolCall('open', {'document': 'a', 'page': 2}, 'a page')),
    Turn('v', ToolCall('', None, 'unreadable', error='malformed')),
    Turn('w', closed=False),
)


def sent(outcome):
    """The outcome that another process or a resumed run gets."""
    text = json.dumps(serialization.outcome_to_json(outcome))
    return serialization.outcome_from_json(json.loads(text))


def make_row(**changes):
    logp = np.array([0.1, -1 / 3], np.float32)
    trajectory = Trajectory(
        tokens=np.arange(2, dtype=np.int32),
        source=np.array([0, 1], np.int8),
        logp=logp,
        turns=TURNS,
        finish='eos',
        weights='w',
        version=3,
        identity=(1, 2),
    )
    earlier = dataclasses.replace(trajectory, turns=(), finish='continued')
    trajectory = dataclasses.replace(trajectory, earlier=(earlier,))
    info = RowInfo(
        question=QUESTION,
        answer='x',
        score=0.1,
        valid=False,
        solve_count=0,
        rejected='r',
        privileged_cut=1.0,
        details={'x': [1, None]},
    )
    row = Row(
        role='solver',
        trajectory=trajectory,
        reward=1 / 3,
        group=7,
        parts={'a': 0.1},
        drop='d',
        info=info,
        advantage=0.5,
        teacher_prompt=np.arange(3, dtype=np.int32),
    )
    return dataclasses.replace(row, **changes)


def without_arrays(row):
    fields = dict(vars(row))
    del fields['trajectory'], fields['teacher_prompt']
    return fields


def test_a_row_with_calls_of_several_tools_survives():
    row = make_row()
    outcome = sent(Outcome([row], [QUESTION], 'why'))
    (received,) = outcome.rows
    assert (outcome.questions, outcome.drop) == ([QUESTION], 'why')
    assert without_arrays(received) == without_arrays(row)
    assert received.trajectory.turns == TURNS
    assert received.trajectory.identity == (1, 2)
    assert received.trajectory.valid_calls == 2 and received.trajectory.failed_calls == 1
    assert received.trajectory.calls_of('open') == [TURNS[1].call]


def test_arrays_keep_their_bytes_and_contexts_their_order():
    row = make_row()
    (received,) = sent(Outcome([row])).rows
    for name in ('tokens', 'source', 'logp'):
        before = getattr(row.trajectory, name)
        after = getattr(received.trajectory, name)
        assert after.dtype == before.dtype and after.tobytes() == before.tobytes()
    contexts = received.trajectory.contexts
    assert [context.finish for context in contexts] == ['continued', 'eos']
    assert contexts[0].logp.tobytes() == row.trajectory.logp.tobytes()
    assert received.teacher_prompt.dtype == np.int32
    assert received.teacher_prompt.tolist() == [0, 1, 2]


def test_unset_fields_stay_unset():
    bare = make_row(info=RowInfo(), teacher_prompt=None, drop=None)
    (received,) = sent(Outcome([bare])).rows
    assert received.info == RowInfo() and received.teacher_prompt is None and received.drop is None
    question = Question('q?')
    (received_question,) = sent(Outcome(questions=[question])).questions
    assert received_question == question
    assert set(question.to_json()) == {'question', 'answers', 'hops'}
