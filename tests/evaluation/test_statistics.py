"""Intervals: published values, coverage by simulation, all-correct and all-wrong samples, invalid input."""

import json
import pathlib

import numpy as np
import pytest
from refused_calls import check_table

from zeroplay_jax.evaluation import answering, statistics


def _flags(correct, total):
    """Returns bool [total], of which the first `correct` are True."""
    return np.arange(total) < correct


def _pairs(both, gained, lost, neither):
    """Returns paired flags (before, after) with the given counts."""
    counts = (both, gained, lost, neither)
    before = np.repeat([True, False, True, False], counts)
    after = np.repeat([True, True, False, False], counts)
    return before, after


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
    assert summary['hops'] == [1, 2, 3]
    assert summary['questions'] == 60 and summary['questions_by_hop']['4'] == 20
    assert summary['em_by_hop']['after'] == {'1': 1.0, '2': 0.95, '3': 0.9, '4': 0.5}
    low, high = summary['ci95']['after']
    assert low < 0.95 < high

    lines = statistics.before_after_table(before, after).splitlines()
    assert len(lines) == 8 and max(map(len, lines)) <= 110
    assert lines[0].split() == 'hops questions before after change'.split()
    assert lines[2].startswith('1 ')
    assert '0.600 [' in lines[2] and '+0.400 [' in lines[2]
    assert lines[-1].startswith('mean of 1, 2, 3')
    assert '0.250 [' in lines[-1] and '+0.700 [' in lines[-1]
    labels = [
        line[:20].rstrip() for line in statistics.before_after_table(before, after, 2).splitlines()
    ]
    assert labels[2:6] == ['1', '2', '3 (not demonstrated)', '4 (not demonstrated)']


@pytest.mark.fault('O', 'one score, or equal scores, of a metric between 0 and 1')
def test_scores_between_0_and_1_have_intervals_inside():
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
    with pytest.raises(ValueError, match='questions per hop count differ'):
        statistics.summarise_scores(before[:3], after)


@pytest.mark.fault(
    'user-9', 'exact match and a second score of a run, on questions of unequal hop counts'
)
def test_both_scores_are_means_over_hop_counts():
    scores = statistics.by_hop([1, 1, 1, 2], [1.0, 1.0, 1.0, 0.0])
    assert statistics.summarise_scores(scores, scores)['after'][0] == 0.5
    assert statistics.summarise(scores, scores)['em_after'] == 0.5


def test_values_and_refusals_are_those_of_the_table(tmp_path):
    names = vars(statistics) | {'flags': _flags, 'pairs': _pairs}
    names['redundancy'] = answering.redundancy
    path = pathlib.Path(__file__).parent / 'statistics.txt'
    check_table(path, names, tmp_path, ValueError)


def test_questions_about_one_document_count_as_little_as_they_tell():
    """Of a document all questions are right or wrong: the interval is as wide as that of a question per document."""
    right = np.arange(40) % 2
    names = [f'd{number}' for number in range(40)]
    many = {1: np.repeat(right, 12)}
    documents = {1: np.repeat(names, 12).tolist()}
    _, low, high = statistics.mean_interval(many, documents)
    _, plain_low, plain_high = statistics.mean_interval(many)
    assert abs((high - low) / (2 * 1.96 * np.sqrt(0.25 / 40)) - 1) < 0.1
    assert plain_high - plain_low < 0.4 * (high - low)
    wrong = {1: np.zeros(480)}
    _, low, high = statistics.paired_difference(wrong, many, documents)
    assert abs((high - low) / (2 * 1.96 * np.sqrt(0.25 / 40)) - 1) < 0.1
    table = statistics.before_after_table(wrong, many, documents=documents)
    assert '480 of 40 documents' in table
    # Independent questions, and those without a document, keep the interval.
    single = statistics.mean_interval({1: right})
    assert statistics.mean_interval({1: right}, {1: [''] * 40}) == single
    assert statistics.mean_interval({1: right}, {1: names}) == pytest.approx(single, abs=0.03)
