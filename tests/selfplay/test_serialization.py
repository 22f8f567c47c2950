"""Rows and questions survive JSON: a resumed run gets exactly the same values; other processes get summaries."""

import dataclasses
import json

import numpy as np

from zeroplay_jax.selfplay import rows
from zeroplay_jax.selfplay.metrics import rollout_stats
from zeroplay_jax.selfplay.records import task_log
from zeroplay_jax.types import (
    Outcome,
    Question,
    Row,
    RowInfo,
    Task,
    ToolCall,
    Trajectory,
    TrajectorySummary,
    Turn,
)

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


def saved(row):
    """The row that a resumed run gets."""
    text = json.dumps(rows.row_to_json(row))
    return rows.row_from_json(json.loads(text))


def sent(outcome, local=None):
    """The outcome that another process gets from process 1, or process 1 itself."""
    text = json.dumps(rows.outcome_summary(outcome))
    return rows.whole_outcome(json.loads(text), 1, local)


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
    received = saved(row)
    assert without_arrays(received) == without_arrays(row)
    assert received.trajectory.turns == TURNS
    assert received.trajectory.identity == (1, 2)
    assert received.trajectory.valid_calls == 2 and received.trajectory.failed_calls == 1
    assert received.trajectory.calls_of('open') == [TURNS[1].call]


def test_arrays_keep_their_bytes_and_contexts_their_order():
    row = make_row()
    received = saved(row)
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
    received = saved(bare)
    assert received.info == RowInfo() and received.teacher_prompt is None and received.drop is None
    question = Question('q?')
    (received_question,) = sent(Outcome(questions=[question])).questions
    assert received_question == question
    assert set(question.to_json()) == {'question', 'answers', 'hops'}


def test_a_restored_row_is_in_all_processes():
    assert saved(make_row(process=1)).process is None


def test_another_process_gets_everything_but_tokens_turns_and_details():
    row = make_row()
    text = json.dumps(rows.outcome_summary(Outcome([row, row])))
    assert all(word not in text for word in ('"found"', 'a page', 'tokens'))
    outcome = sent(Outcome([row, row], [QUESTION], 'why'))
    # A question for the pool is whole; that of a row has no path, and both rows share it.
    assert (outcome.questions, outcome.drop) == ([QUESTION], 'why')
    first, second = outcome.rows
    asked = dataclasses.replace(QUESTION, path=None)
    assert first.info == dataclasses.replace(row.info, question=asked, details={})
    assert first.info.question is second.info.question
    for name in ('role', 'reward', 'parts', 'group', 'drop'):
        assert getattr(first, name) == getattr(row, name)
    summary = first.trajectory
    assert isinstance(summary, TrajectorySummary) and first.process == 1
    for name in ('finish', 'weights', 'version', 'identity', 'lengths', 'counts', 'policy_tokens'):
        assert getattr(summary, name) == getattr(row.trajectory, name), name
    assert first.teacher_prompt is None and first.teacher_tokens == row.teacher_tokens == 3
    lengths = [context.lengths for context in summary.contexts]
    assert lengths == [context.lengths[-1:] for context in row.trajectory.contexts]


def test_metrics_and_task_log_are_the_same_with_summaries():
    rows = [make_row(), make_row(reward=0.1, drop=None, info=RowInfo(answer='a b', valid=True))]
    outcome = Outcome(rows, [QUESTION], 'why')
    received = sent(outcome)
    assert rollout_stats(received.rows, [received]) == rollout_stats(rows, [outcome])
    tasks = [Task((1, 2), {})]
    assert task_log(tasks, [received], [[None]]) == task_log(tasks, [outcome], [[None]])


def test_the_process_that_sampled_a_row_keeps_its_rollout_and_reads_its_numbers_back():
    row = make_row(reward=np.float32(0.1), parts={'a': np.float32(0.1)})
    outcome = Outcome([row])
    text = json.dumps(rows.outcome_summary(outcome), default=lambda scalar: scalar.item())
    (received,) = rows.whole_outcome(json.loads(text), 1, outcome).rows
    assert received.trajectory is row.trajectory and received.teacher_prompt is row.teacher_prompt
    assert received.info is row.info and received.process == 1
    assert type(received.reward) is float and type(received.parts['a']) is float
