"""Time by cause, throughput, memory and operations of a step; and the figures that rest on too few cases."""

import collections
import types

import jax
import numpy as np
import pytest
import scripted

from zeroplay_jax.policy import transformer
from zeroplay_jax.policy.decoder import ModelConfig
from zeroplay_jax.runtime import devices
from zeroplay_jax.selfplay import metrics
from zeroplay_jax.types import Question, Row, RowInfo, ToolCall, Turn


def make_context(hosts=1, pages=8):
    config = types.SimpleNamespace(page_count=pages, slots=4, pages_per_slot=2)
    pool = types.SimpleNamespace(sampler=types.SimpleNamespace(config=config))
    workers = types.SimpleNamespace(seconds={'search': [1.0, 3.0]})
    scheduler = types.SimpleNamespace(
        stats=collections.Counter(), workers=workers, pools={'solver': pool}
    )
    processes = types.SimpleNamespace(count=hosts, index=0, seconds=0.0, gather=lambda x: [x])
    return types.SimpleNamespace(scheduler=scheduler, hosts=processes)


def test_the_causes_of_a_step_add_up_to_its_wall_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, 'perf_counter', lambda: now[0])
    context = make_context(hosts=2)
    clock = metrics.StepClock(context)
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
    alone = metrics.StepClock(make_context())
    alone.end_part('rollout')
    assert alone.metrics() == {'seconds/rollout': 0.0, 'seconds/tools': 0.0}


def test_evictions_are_a_column_wherever_pages_can_be_taken():
    before = collections.Counter()
    enough = metrics.throughput(make_context(pages=8), before, 4, 2.0)
    assert not {'evictions', 'refilled_tokens'} & enough.keys()
    assert enough['tool_seconds/search/p50'] == 2.0
    few = metrics.throughput(make_context(pages=7), before, 4, 2.0)
    assert few['evictions'] == few['refilled_tokens'] == 0.0


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
        assert metrics.operations(model, rows, is_frozen) == 2 * row_operations
    # A value network has no logits: three passes of an update, and one for the values before it.
    assert metrics.value_operations(model, rows) == pytest.approx(
        2 * 4 * transformer.forward_operations(model, 4, 0)
    )


def machines(*kinds, **stats):
    return [types.SimpleNamespace(device_kind=kind, memory_stats=lambda: stats) for kind in kinds]


@pytest.mark.parametrize(
    ('kind', 'peak'),
    [
        ('TPU v5 lite', 197e12),
        ('TPU v5', 459e12),
        ('NVIDIA H100 80GB HBM3', 989e12),
        ('NVIDIA A100-SXM4-80GB', 312e12),
        ('NVIDIA L4', 121e12),
        # Others have other rates.
        ('NVIDIA H100 PCIe', None),
        ('NVIDIA L40', None),
        ('cpu', None),
    ],
)
def test_the_utilisation_needs_a_known_peak(monkeypatch, kind, peak):
    monkeypatch.setattr(jax, 'devices', lambda: machines(kind, kind))
    expected = {} if peak is None else {'mfu': 0.25}
    assert metrics.utilisation(peak or 1.0, 2.0) == expected


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
    (total, count) = metrics.sampler_gap([batch], make_context().hosts)['sampler_gap']
    assert count == 2 and total == pytest.approx(0.1)
    batch.mask = ~np.ones_like(mask)
    assert metrics.sampler_gap([batch], make_context().hosts) == {}


# ---- figures of the alarms ---------------------------------------------------------------------------

FAILED = Turn('s', ToolCall('', None, error='malformed'))


def answer_row(*turns, answers=('Lomi',), score=1.0, **fields):
    info = RowInfo(question=Question('Who?', answers), answer='Lomi', score=score)
    return Row('solver', scripted.trajectory(*turns), score, 0, info=info, **fields)


def test_few_calls_of_rollouts_that_need_none_are_no_broken_tool():
    silent = [answer_row() for _ in range(40)]
    assert 'call_error_share' not in metrics.row_health(silent + [answer_row(FAILED)] * 9, ())
    calling = [answer_row(FAILED)] * 8 + [answer_row()] * 8
    assert metrics.row_health(calling, ())['call_error_share'] == (8, 8)
    # A role without tools cannot call one.
    assert 'no_call_share' not in metrics.row_health(calling, ())
    assert metrics.row_health(calling, ('solver',))['no_call_share'] == (8, 16)


@pytest.mark.parametrize(
    ('text', 'answers', 'missing'),
    [
        ('Founder: the Lomi.', ('Lomi',), 0),
        ('Lomina is a river.', ('Lomi',), 1),
        ('Lomina is a river.', ('Lomi', 'a River!'), 0),
        ('首都は東京都です', ('東京都',), 0),
        ('nothing', ('the',), 0),
    ],
)
def test_evidence_is_an_accepted_answer_in_a_result(text, answers, missing):
    call = scripted.search_call(['q'], (({'title': 'T', 'text': text},),))
    row = answer_row(Turn('s', call), answers=answers)
    # A result without passages, such as that of a calculator.
    plain = answer_row(Turn('s', ToolCall('calculator', {}, text)), answers=answers)
    for answered in (row, plain):
        rows = [answered] * 8 + [answer_row(score=0.4)]
        assert metrics.evidence_share(rows) == {'no_evidence_share': (8 * missing, 8)}
    assert metrics.evidence_share([row] * 7) == {}


def test_equal_questions_of_one_task_are_no_duplicates():
    def proposal(task, text, sample=0):
        info = RowInfo(question=Question(text), valid=True)
        row = Row('proposer', scripted.trajectory(), 0.0, 0, info=info)
        object.__setattr__(row.trajectory, 'identity', (3, task, sample))
        return row

    rows = [
        proposal(task, f'Who founded {task}?', sample) for task in range(6) for sample in (0, 1)
    ]
    rows += [proposal(6, 'The same?'), proposal(7, 'the SAME')]
    assert metrics.row_health(rows, ())['duplicate_share'] == (2, 8)
