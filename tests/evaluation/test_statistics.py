"""Intervals: published values, coverage by simulation, all-correct and all-wrong samples, invalid input."""

import pathlib

import numpy as np
import pytest
from refused_calls import check_table
from results import result

from zeroplay_jax.evaluation import answering, protocols, statistics, tables


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


def test_scores_between_0_and_1_have_intervals_inside():
    for scores in ([0.3], [0.3] * 5, [0.0], [1.0], [0.0, 0.5, 1.0, 0.5], [0.5, 1.0, 1.0, 0.5]):
        mean, low, high = statistics.mean_interval(scores)
        assert 0 <= low <= mean <= high <= 1 and high - low > 0.1


def test_values_and_refusals_are_those_of_the_table(tmp_path):
    def figures(sets, kind='score'):
        """{set: what its cell shows} of a result."""
        return {name: str(figure) for name, figure in result(sets).figures(kind).items()}

    names = vars(statistics) | vars(tables) | {'figures': figures, 'result': result}
    names |= {'flags': _flags, 'pairs': _pairs, 'in_form': protocols.in_form} | vars(answering)
    # Before and after a run, by hop count.
    names['before'] = {hops: _flags(n, 20) for hops, n in enumerate((12, 2, 1, 0), 1)}
    names['after'] = {hops: _flags(n, 20) for hops, n in enumerate((20, 19, 18, 10), 1)}
    path = pathlib.Path(__file__).parent / 'statistics.txt'
    check_table(path, names, tmp_path, ValueError)
