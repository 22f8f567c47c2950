"""Rows survive as bytes: other processes and a resumed run get exactly the same values, or a line about damage."""

import base64
import dataclasses

import numpy as np
import pytest
from trajectories import make_trajectory

from zeroplay_jax.configs import common
from zeroplay_jax.selfplay import rows
from zeroplay_jax.selfplay.groups import GroupFilter
from zeroplay_jax.types import (
    Outcome,
    Question,
    Row,
    RowInfo,
    ToolCall,
    Turn,
    UserError,
)

PASSAGE = {'id': 1, 'title': 'a', 'text': 'b', 'score': 0.1}
QUESTION = Question(
    text='é?',
    answers=('x', 'y'),
    hops=3,
    rubrics=({'text': 'Name it.', 'priority': 'bonus'},),
    path={'title': 'a', 'steps': [{'think': '', 'found': []}]},
    unique_key='k',
    solve_rate=1 / 3,
    origin={'task': [1, 2], 'score': 0.1},
)
TURNS = (
    Turn('t', ToolCall('search', {'query_list': ['q', 'r']}, 'found', ((PASSAGE,), ()))),
    Turn('u', ToolCall('', None, 'unreadable', error='malformed')),
    Turn('v', closed=False, context=1, start=3, stop=5),
)


def make_row(**changes):
    earlier = make_trajectory(finish='continued', identity=(1, 2), length=3)
    trajectory = make_trajectory(*TURNS, identity=(1, 2))
    trajectory = dataclasses.replace(trajectory, version=3, earlier=(earlier,))
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


def received(value):
    return rows.from_bytes(rows.to_bytes(value))


def assert_equal_values(value, expected):
    assert type(value) is type(expected)
    if dataclasses.is_dataclass(value):
        value, expected = vars(value), vars(expected)
    if isinstance(value, np.ndarray):
        assert value.dtype == expected.dtype and value.tobytes() == expected.tobytes()
        # Neither a view of the bytes of all rows, nor one that cannot be written to.
        assert value.base is None and value.flags.writeable
    elif isinstance(value, dict):
        assert list(value) == list(expected)
        assert_equal_values(list(value.values()), list(expected.values()))
    elif isinstance(value, list | tuple):
        for item, expected_item in zip(value, expected, strict=True):
            assert_equal_values(item, expected_item)
    else:
        assert value == expected


@pytest.mark.parametrize(
    'value',
    [
        [make_row()],
        [make_row(info=RowInfo(), teacher_prompt=None, drop=None, advantage=None)],
        [Outcome([make_row(), make_row()], [QUESTION, Question('q?')], 'why'), Outcome()],
        # What looks like the marks of the format, and a lone surrogate, which UTF-8 has not.
        [{'list': ['list', ('object', 0)], 'Row': {}}, '\ud800', [], ()],
        [float('inf'), 5e-324, -0.0, np.zeros((0, 2), np.int8), np.arange(6)[::2] / 3],
    ],
)
def test_values_and_types_survive(value):
    assert_equal_values(received(value), value)


def test_numpy_scalars_become_numbers():
    row = make_row(reward=np.float32(0.1), parts={'a': np.bool_(True)}, group=np.int64(2))
    (same,) = received([row])
    plain = make_row(reward=float(np.float32(0.1)), parts={'a': True}, group=2)
    assert_equal_values(same, plain)


def test_what_is_no_record_is_refused():
    with pytest.raises(TypeError, match='holds a set'):
        rows.to_bytes([make_row(parts={1, 2})])


def as_text(row, **other_fields):
    vars(row).update(other_fields)
    return base64.b64encode(rows.to_bytes([row])).decode()


WRITTEN = rows.to_bytes([make_row()])


def with_flipped_bit(place):
    damaged = bytearray(WRITTEN)
    damaged[place] ^= 1
    return bytes(damaged)


@pytest.mark.parametrize(
    'data',
    [
        b'',
        bytes(4),
        WRITTEN[:11],
        WRITTEN[:-1],
        WRITTEN + b'x',
        *map(with_flipped_bit, (0, 4, 40, -1)),
    ],
    ids=len,
)
def test_damaged_bytes_are_refused(data):
    with pytest.raises(ValueError, match='^the bytes are damaged$'):
        rows.from_bytes(data)


def carried_over(text):
    group_filter = GroupFilter(common.get_config())
    group_filter.restore({'solver': text})
    return group_filter.state()['solver']


def test_a_checkpoint_holds_carried_over_rows_as_text():
    text = as_text(make_row())
    assert carried_over(text) == text


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('no base64', 'the bytes are damaged'),
        (as_text(make_row()).swapcase(), 'the bytes are damaged'),
        (
            as_text(make_row(), process=1),
            "another version wrote these bytes: .*unexpected keyword argument 'process'",
        ),
    ],
)
def test_carried_over_rows_that_cannot_be_read_are_refused_in_one_line(text, reason):
    with pytest.raises(UserError, match=f'role solver carried over .*{reason}.*--from'):
        carried_over(text)
