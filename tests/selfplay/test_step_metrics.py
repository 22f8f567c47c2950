"""Metrics of a step and of its rows: time by cause, throughput, memory, what rows and logs count."""

import collections
import pathlib
import types
from unittest import mock

import jax
import numpy as np
import pytest
import scripted
from refused_calls import check_table
from trajectories import make_trajectory

from zeroplay_jax.policy import transformer
from zeroplay_jax.policy.decoder import ModelConfig
from zeroplay_jax.runtime import devices
from zeroplay_jax.selfplay import health, metrics, step_metrics
from zeroplay_jax.selfplay.context import Episodes
from zeroplay_jax.selfplay.task_log import task_log
from zeroplay_jax.types import (
    ENV,
    POLICY,
    PROMPT,
    Outcome,
    Question,
    Row,
    RowInfo,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)


def make_context(hosts=1, pages=8, **scored):
    config = types.SimpleNamespace(page_count=pages, slots=4, pages_per_slot=2)
    pool = types.SimpleNamespace(sampler=types.SimpleNamespace(config=config))
    workers = types.SimpleNamespace(seconds={'search': [1.0, 3.0]})
    scheduler = types.SimpleNamespace(
        stats=collections.Counter(), workers=workers, pools={'solver': pool}
    )
    processes = types.SimpleNamespace(count=hosts, index=0, seconds=0.0, gather=lambda x: [x])
    return types.SimpleNamespace(scheduler=scheduler, hosts=processes, episodes=Episodes(**scored))


def test_the_causes_of_a_step_add_up_to_its_wall_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(step_metrics.time, 'perf_counter', lambda: now[0])
    context = make_context(hosts=2)
    clock = step_metrics.StepClock(context)
    now[0] += 10
    context.scheduler.stats['tool_wait_seconds'] += 3
    context.scheduler.stats['peer_wait_seconds'] += 1
    context.hosts.seconds += 0.5
    clock.end_part('rollout')
    assert clock.rollout_seconds == 10
    now[0] += 5
    context.hosts.seconds += 2
    clock.end_part('update')
    assert clock.metrics() == {
        'seconds/rollout': 5.5,
        'seconds/tools': 3.0,
        'seconds/exchange': 3.5,
        'seconds/update': 3.0,
    }
    # A single process exchanges nothing.
    alone = step_metrics.StepClock(make_context())
    alone.end_part('rollout')
    assert alone.metrics() == {'seconds/rollout': 0.0, 'seconds/tools': 0.0}


def test_evictions_are_a_column_wherever_pages_can_be_taken():
    before = collections.Counter()
    enough = step_metrics.throughput(make_context(pages=8), before, 4, 2.0)
    assert not {'evictions', 'refilled_tokens'} & enough.keys()
    assert enough['tool_seconds/search/p50'] == 2.0
    few = step_metrics.throughput(make_context(pages=7), before, 4, 2.0)
    assert few['evictions'] == few['refilled_tokens'] == 0.0
    # And what log_probs computed where there are any.
    assert 'scored_tokens' not in few
    context = make_context(scored_texts=3, scored_tokens=70)
    scored = step_metrics.throughput(context, before, 4, 2.0)
    assert (scored['scored_texts'], scored['scored_tokens']) == (3.0, 70.0)


def test_operations_of_a_sequence_by_hand():
    model = ModelConfig('qwen3', 10, 4, 6, 2, heads=2, kv_heads=1, head_dim=3, windows=(0, 2))
    # Per layer: query and output 4·6 each, key and value 4·3 each, feed-forward 3·4·6.
    matrices = 2 * (2 * 24 + 2 * 12 + 72) * 5
    head = 4 * 10 * 3
    # Pairs of five tokens: 15, and 9 within a window of two; two products of size 6.
    attention = 2 * 6 * 15 + 2 * 6 * 9
    assert transformer.forward_operations(model, 5, 3) == 2 * (matrices + head + attention)
    assert transformer.update_operations(model, 5, 3) == 6 * (matrices + head + attention)
    # The weights of a frozen base have no gradients.
    frozen = transformer.update_operations(model, 5, 3, is_frozen=True)
    assert frozen == 4 * (matrices + head + attention)
    rows = [Row('solver', scripted.trajectory(), 1.0, 0)] * 2
    for is_frozen in (False, True):
        row_operations = transformer.update_operations(model, 4, 4, is_frozen)
        assert step_metrics.operations(model, rows, is_frozen) == 2 * row_operations
    # A value network has no logits: three passes of an update, and one for the values before it.
    assert step_metrics.value_operations(model, rows) == pytest.approx(
        2 * 4 * transformer.forward_operations(model, 4, 0)
    )


def machines(*kinds, **stats):
    return [types.SimpleNamespace(device_kind=kind, memory_stats=lambda: stats) for kind in kinds]


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    full = machines('x', bytes_in_use=3 << 30, peak_bytes_in_use=5 << 30)
    half = machines('x', bytes_in_use=1 << 30)
    monkeypatch.setattr(jax, 'local_devices', lambda: full + half)
    assert devices.memory() == {'memory/used_gib': 3.0, 'memory/peak_gib': 5.0}
    monkeypatch.setattr(jax, 'local_devices', lambda: machines('cpu'))
    assert devices.memory() == {}


def test_the_gap_counts_trained_tokens_only():
    mask = np.array([[False, True, True]])
    batch = types.SimpleNamespace(
        mask=mask, old_logp=np.log([[0.9, 0.5, 0.5]]), sampler_logp=np.log([[0.1, 0.4, 0.5]])
    )
    (total, count) = step_metrics.sampler_gap([batch], make_context().hosts)['sampler_gap']
    assert count == 2 and total == pytest.approx(0.1)
    batch.mask = ~np.ones_like(mask)
    assert step_metrics.sampler_gap([batch], make_context().hosts) == {}


# ---- figures of the alarms ---------------------------------------------------------------------------

FAILED = Turn('s', ToolCall('', None, error='malformed'))


def answer_row(*turns, answers=('Lomi',), score=1.0, finish='answer', **fields):
    info = RowInfo(question=Question('Who?', answers), answer='Lomi', score=score)
    rollout = scripted.trajectory(*turns, finish=finish)
    return Row('solver', rollout, score, 0, info=info, **fields)


def test_few_calls_of_rollouts_that_need_none_are_no_broken_tool():
    silent = [answer_row() for _ in range(40)]
    assert 'call_error_share' not in health.health(silent + [answer_row(FAILED)] * 9, (), {})
    calling = [answer_row(FAILED)] * 8 + [answer_row()] * 8
    assert health.health(calling, (), {})['call_error_share'] == (8, 8)
    # A role without tools cannot call one.
    assert 'no_call_share' not in health.health(calling, (), {})
    assert health.health(calling, ('solver',), {})['no_call_share'] == (8, 16)
    # Rollouts that were cut before they could call or answer.
    cut = [answer_row(finish='turn_tokens')] * 8
    assert health.health(calling + cut, ('solver',), {})['no_call_share'] == (8, 16)
    assert 'no_call_share' not in health.health(cut * 2, ('solver',), {})


def test_equal_questions_of_one_task_are_no_duplicates():
    def proposal(task, text, sample=0):
        info = RowInfo(question=Question(text), valid=True)
        rollout = make_trajectory(identity=(3, task, sample))
        return Row('proposer', rollout, 0.0, 0, info=info)

    rows = [
        proposal(number // 2, f'Who founded {number // 2}?', number % 2) for number in range(12)
    ]
    rows += [proposal(6, 'The same?'), proposal(7, 'the SAME')]
    assert health.health(rows, (), {})['duplicate_share'] == (2, 8)


# ---- the table, and rows --------------------------------------------------


def peak(kind):
    with mock.patch.object(jax, 'devices', lambda: machines(kind, kind)):
        figures = step_metrics.utilisation(1e12, 2.0)
    return f'{1e12 / (2 * 2.0 * figures["mfu"]):.4g}' if figures else 'unknown'


def missing_evidence(text, *answers):
    call = scripted.search_call(['q'], (({'title': 'T', 'text': text},),))
    # A result without passages, such as that of a calculator.
    plain = ToolCall('calculator', {}, text)
    shares = set()
    for row in (answer_row(Turn('s', each), answers=answers) for each in (call, plain)):
        shares.add(health.health([row] * 8 + [answer_row(score=0.4)], (), {})['no_evidence_share'])
        assert 'no_evidence_share' not in health.health([row] * 7, (), {})
    (share,) = shares
    return share


def means(rows):
    """Metrics of the solver as the engine writes them: sums over counts, without those of count 0."""
    figures = metrics.ratios(metrics.rollout_stats(rows, [Outcome(rows)]))
    return {name.removeprefix('solver/'): value for name, value in figures.items()}


def solver_row(*turns, **info):
    return Row('solver', scripted.trajectory(*turns), 1.0, 0, info=RowInfo(**info))


SEARCH = Turn('a', scripted.search_call(['x']))
FAILED_SEARCH = Turn('b', scripted.search_call(['x'], error='failed'))
OPENED = Turn('c', ToolCall('open', {'document': 'Lomi'}, 'a page'))


def calls(*rollouts):
    figures = means([solver_row(*turns) for turns in rollouts])
    return {name: round(x, 3) for name, x in figures.items() if name.startswith('tool_')}


def rejected_row(**info):
    info = RowInfo(rejected='unfinished', **info)
    return Row('proposer', scripted.trajectory(Turn('x')), 0.0, 0, info=info)


def logged_drops(reason):
    outcome = Outcome([rejected_row(), solver_row()], drop=reason)
    return [record['drop'] for record in task_log([Task((3, 1), {})], [outcome], [[]])]


def test_the_table_of_metrics():
    check_table(pathlib.Path(__file__).parent / 'metrics.txt', globals())


# Names that would be metrics if an entry of the question's provenance were taken for the row's own.
PROVENANCE = {
    'solved': 3,
    'rejected': 'no_answer',
    'valid': True,
    'privileged_cut': 1.0,
    'answer_given': 'some words',
    'score': 0.25,
}


def test_the_measured_solve_rate_and_provenance_of_a_question_are_not_metrics_of_its_solver():
    turn = Turn('<answer>Lomi</answer>')
    plain = Question('Where?', ('Lomi',))
    measured = Question('Where?', ('Lomi',), solve_rate=0.75, origin=PROVENANCE)
    rows, measured_rows = (
        [solver_row(turn, question=question, answer='Lomi', score=1.0)]
        for question in (plain, measured)
    )
    assert means(measured_rows) == means(rows)
    names = ('k_histogram', 'rejected', 'valid_rate', 'privileged_cut', 'solve_rate')
    assert not [name for name in means(measured_rows) if name.startswith(names)]
    # The solver's row of the task log stays silent as well: nothing was rejected.
    assert task_log([Task((0, 0), measured)], [Outcome(measured_rows)], [[]]) == []


def test_solve_counts_of_proposals_are_a_histogram():
    rows = [solver_row(solve_count=count) for count in (0, 2, 2, 5, None)]
    histogram = {name: x for name, x in means(rows).items() if name.startswith('k_histogram/')}
    assert histogram['k_histogram/0'] == 0.25 and histogram['k_histogram/2'] == 0.5


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


def test_a_proposal_without_a_question_has_none_in_the_logs():
    row = rejected_row(question=Question('', hops=2, origin={'document': 'Lomi'}))
    logged = row.info.to_json()
    assert logged['question'] is None and logged['document'] == 'Lomi'
    (record,) = task_log([Task((3, 1), {'title': 'Lomi'})], [Outcome([row])], [[]])
    assert record['question'] is None and record['drop'] == 'unfinished'
    assert record['task'] == [3, 1] and record['title'] == 'Lomi'


def test_figures_of_roles_are_never_mixed():
    rows = [solver_row(SEARCH, SEARCH), solver_row(SEARCH), solver_row()]
    rows[0].role, rows[0].reward = 'proposer', 0.25
    rows[1].role, rows[1].reward = 'judge', 7.0
    figures = metrics.ratios(metrics.rollout_stats(rows, [], ('proposer', 'solver')))
    calls = {name: value for name, value in figures.items() if name.endswith('/tool_calls')}
    assert calls == {'proposer/tool_calls': 2, 'judge/tool_calls': 1, 'solver/tool_calls': 0}
    # A reward is only that of a role that is trained.
    rewards = {name: value for name, value in figures.items() if name.endswith('reward_mean')}
    assert rewards == {'proposer/reward_mean': 0.25, 'solver/reward_mean': 1.0}
    assert all('/' in name or name.startswith('dropped_') for name in figures)


def test_a_rollout_reads_a_hop_with_each_query_that_finds_something_new():
    first, second = ({'title': name, 'text': f'{name} is a river.'} for name in ('Lomi', 'Duvo'))
    found = ((first,), (first, second), (second,), ())
    turns = [Turn('x', scripted.search_call(['q'], (passages,))) for passages in found]
    asked = solver_row(*turns, question=Question('Where?', ('Lomi',), hops=3), score=0.5)
    unknown = solver_row(*turns, question=Question('Where?', ('Lomi',), hops=0), score=1.0)
    figures = means([asked, unknown])
    names = ('hops_asked', 'hops_read', 'calls/hop3', 'score/hop3', 'score')
    assert [figures[name] for name in names] == [3, 2, 4, 0.5, 0.75]
    proposal = solver_row(question=Question('Where?', hops=2), solve_count=4)
    assert means([proposal, rejected_row()])['solve_count/hop2'] == 4


def test_lengths_are_counted_in_tokens_with_and_without_the_texts_of_tools():
    row = solver_row(SEARCH, Turn('b'), answer_tokens=7)
    trajectory = row.trajectory
    figures = means([row])
    assert figures['answer_tokens'] == 7 and figures['prompt_tokens'] == trajectory.prompt_tokens
    whole = figures['prompt_tokens'] + figures['response_tokens']
    assert whole == len(trajectory.tokens) and figures['policy_tokens'] == trajectory.policy_tokens


def context_of(*lengths, earlier=()):
    """A context of runs of prompt, retained prompt, tool results and sampled tokens."""
    source = np.repeat([PROMPT, PROMPT, ENV, POLICY], lengths).astype(np.int8)
    tokens = np.zeros(len(source), np.int32)
    logp = np.zeros(len(source), np.float32)
    return Trajectory(tokens, source, logp, (), 'answer', 'w', 0, (0,), earlier)


def test_lengths_without_thoughts_are_those_of_what_was_written(monkeypatch):
    """Dropped thoughts count as response, and a retained turn is no part of the prompt."""
    trajectory = context_of(3, 1, 2, 2, earlier=(context_of(3, 0, 0, 4),))
    row = Row('solver', trajectory, 1.0, 0, teacher_prompt=np.zeros(5, np.int32))
    figures = means([row])
    lengths = [figures[f'{name}_tokens'] for name in ('prompt', 'policy', 'response')]
    assert lengths == [3, 6, 8]
    # The teacher reads each context behind its own prompt.
    read = []
    monkeypatch.setattr(transformer, 'forward_operations', lambda *each: read.append(each) or 1.0)
    assert step_metrics.teacher_operations('model', [row, solver_row()]) == 2.0
    assert read == [('model', 9, 4), ('model', 10, 2)]
