"""Row metrics and log records: what they count, and what they must not take from a question."""

import pytest
import scripted
from scripted import trajectory

from zeroplay_jax.selfplay import metrics
from zeroplay_jax.selfplay.records import task_log
from zeroplay_jax.types import Outcome, Question, Row, RowInfo, Task, ToolCall, Turn

# Names that would be metrics if an entry of the question's provenance were taken for the row's own.
PROVENANCE = {
    'solved': 3,
    'rejected': 'no_answer',
    'valid': True,
    'privileged_cut': 1.0,
    'answer_given': 'some words',
    'score': 0.25,
}


def means(rows):
    """Metrics as the engine writes them: sums over counts, without those of count 0."""
    stats = metrics.rollout_stats(rows, [Outcome(rows)])
    return {name: total / count for name, (total, count) in stats.items() if count}


def solver_row(*turns, **info):
    return Row('solver', trajectory(*turns), 1.0, 0, info=RowInfo(**info))


def test_the_measured_solve_rate_and_provenance_of_a_question_are_not_metrics_of_its_solver():
    plain = Question('Where?', ('Lomi',))
    measured = Question('Where?', ('Lomi',), solve_rate=0.75, origin=PROVENANCE)
    turn = Turn('<answer>Lomi</answer>')
    rows = [solver_row(turn, question=plain, answer='Lomi', score=1.0)]
    measured_rows = [solver_row(turn, question=measured, answer='Lomi', score=1.0)]
    assert means(measured_rows) == means(rows)
    names = ('k_histogram', 'rejected', 'valid_rate', 'privileged_cut', 'solve_rate')
    assert not [name for name in means(measured_rows) if name.startswith(names)]
    # The solver's row of the task log stays silent as well: nothing was rejected.
    assert task_log([Task((0, 0), measured)], [Outcome(measured_rows)], [[]]) == []


def test_solve_counts_of_proposals_are_a_histogram():
    rows = [solver_row(solve_count=count) for count in (0, 2, 2, 5)]
    rows.append(solver_row())
    metrics = means(rows)
    assert (metrics['k_histogram/0'], metrics['k_histogram/2']) == (0.25, 0.5)


def test_dropped_tasks_and_rollouts_are_one_share():
    used, masked = solver_row(), solver_row()
    masked.drop = 'truncated'
    outcomes = [
        # A dropped task counts once, with and without rollouts.
        Outcome([masked, masked], drop='unfinished'),
        Outcome(drop='prompt_too_long'),
        Outcome([used, masked]),
        Outcome([used, used]),
    ]
    rows = [row for outcome in outcomes for row in outcome.rows]
    total, count = metrics.rollout_stats(rows, outcomes)['dropped_share']
    assert total / count == (1 + 1 + 0.5 + 0) / 4


def test_calls_are_counted_in_total_and_by_tool():
    search = Turn('a', scripted.search_call(['x']))
    failed_search = Turn('b', scripted.search_call(['x'], error='failed'))
    opened = Turn('c', ToolCall('open', {'document': 'Lomi'}, 'a page'))
    malformed = Turn('d', ToolCall('', None, error='malformed'))
    rows = [solver_row(search, failed_search, opened), solver_row(search, malformed), solver_row()]
    metrics = means(rows)
    assert metrics['tool_calls'] == 4 / 3
    assert metrics['tool_calls/search'] == 1.0
    assert metrics['tool_calls/open'] == 1 / 3
    assert metrics['tool_error_rate'] == 2 / 5
    assert 'tool_calls/' not in metrics


def test_a_proposal_without_a_question_has_none_in_the_logs():
    info = RowInfo(
        question=Question('', hops=2, origin={'document': 'Lomi'}), rejected='unfinished'
    )
    assert info.to_json()['question'] is None
    assert info.to_json()['document'] == 'Lomi'
    row = Row('proposer', trajectory(Turn('x')), 0.0, 0, info=info)
    (record,) = task_log([Task((3, 1), {'title': 'Lomi'})], [Outcome([row])], [[]])
    assert record['question'] is None and record['drop'] == 'unfinished'
    assert record['task'] == [3, 1] and record['title'] == 'Lomi'


@pytest.mark.parametrize(
    'reason,drops',
    [
        # One proposal was rejected, and the question of another one was dropped.
        ('outside_window', ['unfinished', 'outside_window']),
        # The record of the rollout has the reason already.
        ('unfinished', ['unfinished']),
    ],
)
def test_a_dropped_task_is_in_the_log_with_its_reason(reason, drops):
    rejected = Row('proposer', trajectory(Turn('x')), 0.0, 0, info=RowInfo(rejected='unfinished'))
    outcome = Outcome([rejected, solver_row()], drop=reason)
    records = task_log([Task((3, 1), {})], [outcome], [[]])
    assert [record['drop'] for record in records] == drops


def test_a_step_of_several_trained_roles_has_the_reward_of_each():
    rows = [solver_row(), solver_row(), solver_row()]
    rows[0].role, rows[0].reward = 'proposer', 0.25
    rows[1].role, rows[1].reward = 'judge', 7.0
    stats = metrics.rollout_stats(rows, [], ('proposer', 'solver'))
    assert stats['proposer/reward_mean'] == (0.25, 1) and stats['solver/reward_mean'] == (1.0, 1)
    assert 'judge/reward_mean' not in stats and stats['reward_mean'] == (8.25, 3)
    # Of a single role it is the mean of all rows.
    names = metrics.rollout_stats(rows, [], ('solver',)).keys()
    assert not [name for name in names if name.endswith('/reward_mean')]
