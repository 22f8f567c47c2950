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
from zeroplay_jax.selfplay import health, metrics, step_metrics
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


def make_context(hosts=1):
    scheduler = types.SimpleNamespace(stats=collections.Counter())
    processes = types.SimpleNamespace(count=hosts, index=0, seconds=0.0, gather=lambda x: [x])
    return types.SimpleNamespace(scheduler=scheduler, hosts=processes)


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
    assert step_metrics.operations(model, rows, False) == 2 * transformer.update_operations(
        model, 4, 4
    )
    # A value network has no logits: three passes of an update, and one for the values before it.
    passes = 2 * 4 * transformer.forward_operations(model, 4, 0)
    assert step_metrics.value_operations(model, rows) == pytest.approx(passes)


def test_the_gap_counts_trained_tokens_only():
    mask = np.array([[False, True, True]])
    batch = types.SimpleNamespace(
        mask=mask, old_logp=np.log([[0.9, 0.5, 0.5]]), sampler_logp=np.log([[0.1, 0.4, 0.5]])
    )
    (total, count) = step_metrics.sampler_gap([batch], make_context().hosts)['sampler_gap']
    assert count == 2 and total == pytest.approx(0.1)


# ---- figures of the alarms ---------------------------------------------------------------------------

FAILED = Turn('s', ToolCall('', None, error='malformed'))


def answer_row(*turns, answers=('Lomi',), score=1.0, finish='answer', **fields):
    info = RowInfo(question=Question('Who?', answers), answer='Lomi', score=score)
    rollout = scripted.trajectory(*turns, finish=finish)
    return Row('solver', rollout, score, 0, info=info, **fields)


def proposal(task, text, sample=0):
    info = RowInfo(question=Question(text), valid=True)
    return Row('proposer', make_trajectory(identity=(3, task, sample)), 0.0, 0, info=info)


# ---- the table, and rows --------------------------------------------------


def shares(rows, *roles_with_tools):
    figures = health.health(rows, roles_with_tools, {})
    return {name: figures.get(name) for name in ('call_error_share', 'no_call_share')}


def peak(kind):
    devices = [types.SimpleNamespace(device_kind=kind)] * 2
    with mock.patch.object(jax, 'devices', lambda: devices):
        figures = step_metrics.utilisation(1e12, 2.0)
    return f'{1e12 / (2 * 2.0 * figures["mfu"]):.4g}' if figures else 'unknown'


def evidence(call, answers=('Lomi',), count=8):
    """Correct answers without evidence, of how many; one that is wrong does not count."""
    rows = [answer_row(Turn('s', call), answers=answers)] * count + [answer_row(score=0.4)]
    return health.health(rows, (), {}).get('no_evidence_share')


def found(text):
    return scripted.search_call(['q'], (({'title': 'T', 'text': text},),))


def means(rows):
    """Metrics of the solver as the engine writes them: sums over counts, without those of count 0."""
    figures = metrics.ratios(metrics.rollout_stats(rows, [Outcome(rows)]))
    return {name.removeprefix('solver/'): value for name, value in figures.items()}


def solver_row(*turns, drop=None, **info):
    return Row('solver', scripted.trajectory(*turns), 1.0, 0, drop=drop, info=RowInfo(**info))


def dropped_share(*outcomes):
    rows = [row for outcome in outcomes for row in outcome.rows]
    return metrics.rollout_stats(rows, outcomes)['dropped_share']


SEARCH = Turn('a', scripted.search_call(['x']))
FAILED_SEARCH = Turn('b', scripted.search_call(['x'], error='failed'))
OPENED = Turn('c', ToolCall('open', {'document': 'Lomi'}, 'a page'))


def reads(*titles):
    """A turn whose query finds these documents."""
    passages = tuple({'title': title, 'text': f'{title} is a river.'} for title in titles)
    return Turn('x', scripted.search_call(['q'], (passages,)))


READS = reads('Lomi'), reads('Lomi', 'Duvo'), reads('Duvo'), reads()


def hops(*rows):
    names = ('hops_asked', 'hops_read', 'calls/hop3', 'score/hop3', 'score')
    figures = means(rows)
    return {name: figures.get(name) for name in names}


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


def context_of(*lengths, earlier=()):
    """A context of runs of prompt, retained prompt, tool results and sampled tokens."""
    source = np.repeat([PROMPT, PROMPT, ENV, POLICY], lengths).astype(np.int8)
    tokens = np.zeros(len(source), np.int32)
    logp = np.zeros(len(source), np.float32)
    return Trajectory(tokens, source, logp, (), 'answer', 'w', 0, (0,), earlier)


def test_lengths_without_thoughts_are_those_of_what_was_written():
    """Dropped thoughts count as response, and a retained turn is no part of the prompt."""
    trajectory = context_of(3, 1, 2, 2, earlier=(context_of(3, 0, 0, 4),))
    row = Row('solver', trajectory, 1.0, 0, teacher_prompt=np.zeros(5, np.int32))
    figures = means([row])
    lengths = [figures[f'{name}_tokens'] for name in ('prompt', 'policy', 'response')]
    assert lengths == [3, 6, 8]
