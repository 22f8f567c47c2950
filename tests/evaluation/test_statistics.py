"""Intervals: published values, coverage by simulation, all-correct and all-wrong samples, invalid input."""

import json

import numpy as np
import pytest
from refused_calls import refused

from zeroplay_jax.evaluation import statistics


def _flags(correct, total):
    """Returns bool [total], of which the first `correct` are True."""
    return np.arange(total) < correct


def _pairs(both, gained, lost, neither):
    """Returns paired flags (before, after) with the given counts."""
    counts = (both, gained, lost, neither)
    before = np.repeat([True, False, True, False], counts)
    after = np.repeat([True, True, False, False], counts)
    return before, after


@pytest.mark.parametrize(
    ('correct', 'total', 'low', 'high'),
    [  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_one_proportion_has_wilsons_interval(correct, total, low, high):
    mean, *interval = statistics.mean_interval(_flags(correct, total))
    assert mean == pytest.approx(correct / total)
    assert interval == pytest.approx([low, high], abs=6e-5)


def test_the_mean_over_hops_weights_hop_counts_equally():
    easy = _flags(100, 100)
    hard = _flags(0, 10)
    mean, low, high = statistics.mean_interval({1: easy, 2: hard})
    assert mean == pytest.approx(0.5)
    _, easy_low, _ = statistics.mean_interval(easy)
    _, _, hard_high = statistics.mean_interval(hard)
    assert 0.5 - low == pytest.approx((1 - easy_low) / 2)
    assert high - 0.5 == pytest.approx(hard_high / 2)


def test_intervals_have_a_width_if_all_answers_are_equal():
    mean, low, high = statistics.mean_interval({1: _flags(50, 50), 2: _flags(50, 50)})
    assert mean == 1 and high == 1
    assert 0.9 < low < 1
    difference, low, high = statistics.paired_difference(_flags(0, 50), _flags(50, 50))
    assert difference == 1 and high == 1
    assert 0.8 < low < 1


def test_the_paired_difference_has_newcombes_interval():
    # Newcombe 1998, Statistics in Medicine 17:2635, table II, method 10: counts 36, 12, 2, 0
    before, after = _pairs(36, 12, 2, 0)
    expected = (0.2, 0.0569, 0.3404)
    assert statistics.paired_difference(before, after) == pytest.approx(expected, abs=6e-5)


def test_agreement_between_pairs_narrows_the_interval():
    difference, low, high = statistics.paired_difference(*_pairs(45, 10, 0, 45))
    other_difference, other_low, other_high = statistics.paired_difference(*_pairs(0, 55, 45, 0))
    assert difference == pytest.approx(other_difference)
    assert high - low < 0.5 * (other_high - other_low)


@pytest.mark.parametrize('rates', [(0.6, 0.9), (0.05, 0.9)])
def test_coverage_is_about_95_percent(rates):
    rng = np.random.default_rng(0)
    rate_before, rate_after = rates
    trials = 600
    differences_covered = 0
    means_covered = 0
    for _ in range(trials):
        # The same random numbers before and after give correlated pairs.
        uniform = rng.random((2, 40))
        before = {1: uniform[0] < rate_before, 2: uniform[1] < rate_before}
        after = {1: uniform[0] < rate_after, 2: uniform[1] < rate_after}
        _, low, high = statistics.paired_difference(before, after)
        differences_covered += low <= rate_after - rate_before <= high
        _, low, high = statistics.mean_interval(after)
        means_covered += low <= rate_after <= high
    assert differences_covered / trials >= 0.92
    # An interval that is far too wide would always cover the true value.
    assert 0.92 <= means_covered / trials <= 0.99


def test_summary_and_table_have_the_same_headline():
    before = {1: _flags(12, 20), 2: _flags(2, 20), 3: _flags(1, 20), 4: _flags(0, 20)}
    after = {1: _flags(20, 20), 2: _flags(19, 20), 3: _flags(18, 20), 4: _flags(10, 20)}
    summary = json.loads(json.dumps(statistics.summarise(before, after)))
    assert summary['em_before'] == pytest.approx(0.25)
    assert summary['em_after'] == pytest.approx(0.95)
    assert summary['questions'] == 60 and summary['questions_by_hop']['4'] == 20
    assert summary['em_by_hop']['after'] == {'1': 1.0, '2': 0.95, '3': 0.9, '4': 0.5}
    low, high = summary['ci95']['after']
    assert low < 0.95 < high

    lines = statistics.before_after_table(before, after).splitlines()
    assert len(lines) == 8 and max(map(len, lines)) <= 110
    assert lines[0].split() == ['hops', 'questions', 'before', 'after', 'change']
    assert lines[2].startswith('1 ')
    assert '0.600 [' in lines[2] and '+0.400 [' in lines[2]
    assert lines[-1].startswith('mean of 1, 2, 3')
    assert '0.250 [' in lines[-1] and '+0.700 [' in lines[-1]


def test_without_headline_hops_the_headline_is_the_mean_over_all():
    by_hop = {5: _flags(1, 2), 6: _flags(2, 2)}
    assert statistics.headline(by_hop) == by_hop
    assert statistics.summarise(by_hop, by_hop)['em_after'] == 0.75
    assert statistics.before_after_table(by_hop, by_hop).splitlines()[-1].startswith('mean  ')


@pytest.mark.fault('O', 'one score, or equal scores, of a metric between 0 and 1')
def test_scores_between_0_and_1_have_intervals_inside(user_reads):
    before = [0.0, 0.5, 1.0, 0.5]
    after = [0.5, 1.0, 1.0, 0.5]
    summary = json.loads(json.dumps(statistics.summarise_scores(before, after)))
    assert summary['before'][0] == 0.5 and summary['after'][0] == 0.75
    mean, low, high = summary['difference']
    assert mean == 0.25 and -1 <= low < 0.25 < high <= 1
    assert summary['items'] == 4
    for scores in ([0.3], [0.3] * 5, [0.0], [1.0], before, after):
        mean, low, high = statistics.mean_interval(scores)
        assert 0 <= low <= mean <= high <= 1 and high - low > 0.1
    line = statistics.scores_line(summary)
    assert line.startswith('0.500 [') and line.endswith('4 tasks')
    assert 'change +0.250 [' in line
    user_reads(f'right: inside [0, 1]: {line}')
    with pytest.raises(ValueError, match='questions per hop count differ'):
        statistics.summarise_scores(before[:3], after)


def test_scores_that_vary_less_than_right_and_wrong_have_narrower_intervals():
    _, low, high = statistics.mean_interval([0.4, 0.6] * 20)
    _, widest_low, widest_high = statistics.mean_interval([0, 1] * 20)
    assert widest_low < low < 0.5 < high < widest_high


@pytest.mark.fault(
    'user-9', 'exact match and a second score of a run, on questions of unequal hop counts'
)
def test_both_scores_are_means_over_hop_counts(user_reads):
    scores = statistics.by_hop([1, 1, 1, 2], [1.0, 1.0, 1.0, 0.0])
    assert statistics.summarise_scores(scores, scores)['after'][0] == 0.5
    assert statistics.summarise(scores, scores)['em_after'] == 0.5
    user_reads('right: the same mean, and one method of intervals for run, compare and report')


@pytest.mark.parametrize(
    ('before', 'after', 'message'),
    [
        ([], [], 'non-empty'),
        ([0, 2], [0, 1], 'between 0 and 1'),
        ([1, 0, 0], [1, 0], 'ask the same'),
        ({1: [1, 0]}, {2: [1, 0]}, 'ask the same'),
        ({}, {}, 'no hop count'),
    ],
)
def test_invalid_samples_are_errors_of_one_line(before, after, message):
    assert message in refused(statistics.paired_difference, before, after, error=ValueError)


def test_questions_without_hops_get_neither_column_nor_line_of_hops():
    before, after = {0: _flags(2, 8)}, {0: _flags(6, 8)}
    table = statistics.before_after_table(before, after).splitlines()
    assert table[0].split() == ['questions', 'before', 'after', 'change']
    assert len(table) == 3 and table[2].startswith('8  ') and '0.250' in table[2]
    assert statistics.summarise(before, after)['em_after'] == 0.75
    # Among others they are a line of their own and count in the mean.
    mixed = {0: _flags(8, 8), 1: _flags(0, 8)}
    table = statistics.before_after_table(mixed, mixed).splitlines()
    assert table[2].startswith('none ') and table[-1].startswith('mean of no hops, 1  ')
    assert statistics.summarise(mixed, mixed)['em_after'] == 0.5
