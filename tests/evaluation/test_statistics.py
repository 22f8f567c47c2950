"""Intervals: published values, coverage by simulation, the degenerate ends, and refusals."""

import json

import numpy as np
import pytest

from zeroplay_jax.evaluation import statistics


def _flags(right, total):
    return np.arange(total) < right


def _table(both, gained, lost, neither):
    """Paired flags (before, after) with the given counts."""
    counts = (both, gained, lost, neither)
    return np.repeat([True, False, True, False], counts), np.repeat(
        [True, True, False, False], counts
    )


@pytest.mark.parametrize(
    'right, total, low, high',
    [  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_one_proportion_is_wilsons(right, total, low, high):
    mean, *interval = statistics.mean_interval(_flags(right, total))
    assert mean == pytest.approx(right / total)
    assert interval == pytest.approx([low, high], abs=6e-5)


def test_mean_over_hops_weighs_hops_not_questions():
    mean, low, high = statistics.mean_interval({1: _flags(100, 100), 2: _flags(0, 10)})
    assert mean == pytest.approx(0.5)
    assert 0.5 - low == pytest.approx((1 - statistics.mean_interval(_flags(100, 100))[1]) / 2)
    assert high - 0.5 == pytest.approx(statistics.mean_interval(_flags(0, 10))[2] / 2)


def test_intervals_keep_a_width_where_all_is_right_or_wrong():
    mean, low, high = statistics.mean_interval({1: _flags(50, 50), 2: _flags(50, 50)})
    assert (mean, high) == (1, 1) and 0.9 < low < 1
    difference, low, high = statistics.paired_difference(_flags(0, 50), _flags(50, 50))
    assert (difference, high) == (1, 1) and 0.8 < low < 1


def test_paired_difference_is_newcombes():
    # Newcombe 1998, Statistics in Medicine 17:2635, table II, method 10: counts 36, 12, 2, 0
    assert statistics.paired_difference(*_table(36, 12, 2, 0)) == pytest.approx(
        (0.2, 0.0569, 0.3404), abs=6e-5
    )


def test_paired_interval_narrows_with_agreement_and_mirrors_in_time():
    same = statistics.paired_difference(*_table(45, 10, 0, 45))
    crossed = statistics.paired_difference(*_table(0, 55, 45, 0))
    assert same[0] == pytest.approx(crossed[0])
    assert same[2] - same[1] < 0.5 * (crossed[2] - crossed[1])
    before, after = _table(20, 25, 5, 10)
    forward, backward = (
        statistics.paired_difference(before, after),
        statistics.paired_difference(after, before),
    )
    assert forward == pytest.approx((-backward[0], -backward[2], -backward[1]))


@pytest.mark.parametrize('rates', [(0.6, 0.9), (0.05, 0.9)])
def test_coverage_is_about_95_percent(rates):
    rng = np.random.default_rng(0)
    truth, inside, trials = rates[1] - rates[0], np.zeros(2), 600
    for _ in range(trials):
        luck = rng.random((2, 40))
        shared = {
            hop: luck[i] for i, hop in enumerate((1, 2))
        }  # the same luck before and after: correlated pairs
        before, after = ({hop: x < rate for hop, x in shared.items()} for rate in rates)
        _, low, high = statistics.paired_difference(before, after)
        inside[0] += low <= truth <= high
        _, low, high = statistics.mean_interval(after)
        inside[1] += low <= rates[1] <= high
    assert (inside / trials >= 0.92).all()
    assert inside[1] / trials <= 0.99  # a uselessly wide interval would cover always


def test_summary_and_table_agree_on_the_headline_hops():
    before = {hop: _flags(right, 20) for hop, right in ((1, 12), (2, 2), (3, 1), (4, 0))}
    after = {hop: _flags(right, 20) for hop, right in ((1, 20), (2, 19), (3, 18), (4, 10))}
    summary = json.loads(json.dumps(statistics.summarise(before, after)))
    assert summary['em_before'] == pytest.approx(0.25) and summary['em_after'] == pytest.approx(
        0.95
    )
    assert summary['questions'] == 60 and summary['questions_by_hop']['4'] == 20
    assert summary['em_by_hop']['after'] == {'1': 1.0, '2': 0.95, '3': 0.9, '4': 0.5}
    assert summary['ci95']['after'][0] < 0.95 < summary['ci95']['after'][1]
    lines = statistics.before_after_table(before, after).splitlines()
    assert lines[0].split() == ['hops', 'questions', 'before', 'after', 'change']
    assert lines[2].startswith('1 ') and '0.600 [' in lines[2] and '+0.400 [' in lines[2]
    assert (
        lines[-1].startswith('mean of 1, 2, 3')
        and '0.250 [' in lines[-1]
        and '+0.700 [' in lines[-1]
    )
    assert len(lines) == 8 and max(map(len, lines)) <= 110


def test_scores_between_0_and_1_have_normal_intervals():
    before, after = [0.0, 0.5, 1.0, 0.5], [0.5, 1.0, 1.0, 0.5]
    found = json.loads(json.dumps(statistics.summarise_scores(before, after)))
    half = 1.96 * np.std([0.5, 0.5, 0, 0], ddof=1) / 2
    assert found['difference'] == pytest.approx([0.25, 0.25 - half, 0.25 + half], abs=1e-4)
    assert found['before'][0] == 0.5 and found['after'][0] == 0.75 and found['items'] == 4
    assert statistics.mean_score([0.3]) == (0.3, -0.7, 1.3)
    line = statistics.scores_line(found)
    assert line.startswith('0.500 [') and 'change +0.250 [' in line and line.endswith('4 tasks')
    with pytest.raises(ValueError, match='3 scores before, 4 after'):
        statistics.summarise_scores(before[:3], after)


@pytest.mark.parametrize(
    'before, after, words',
    [
        (_flags(0, 0), _flags(0, 0), 'non-empty'),
        (np.array([0, 2]), np.array([0, 1]), '0 and 1'),
        (_flags(1, 3), _flags(1, 4), 'ask the same'),
        ({1: _flags(1, 3)}, {2: _flags(1, 3)}, 'ask the same'),
        ({}, {}, 'no hop count'),
    ],
)
def test_bad_samples_are_refused_in_one_line(before, after, words):
    with pytest.raises(ValueError, match=words) as error:
        statistics.paired_difference(before, after)
    assert '\n' not in str(error.value)
