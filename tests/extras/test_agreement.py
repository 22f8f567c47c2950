"""Agreement of two judges: kappa against values computed by hand, and intervals over tasks instead of items."""

import pathlib

import numpy as np
import pytest
from refused_calls import check_table

from zeroplay_jax.extras.grading import grading_results

YES, NO = (True, True), (False, False)
FIRST, SECOND = (True, False), (False, True)


def test_values_are_those_of_the_table(tmp_path):
    names = vars(grading_results) | globals()
    check_table(pathlib.Path(__file__).parent / 'agreement.txt', names, tmp_path)


def test_intervals_are_over_tasks_and_not_over_items():
    """Four equal verdicts within a task are one observation: the interval is as wide as with a quarter of the items."""
    rng = np.random.default_rng(1)
    verdicts = [(bool(a), bool(b)) for a, b in rng.integers(0, 2, (150, 2))]
    single = grading_results.agreement(grading_results.count_pairs([[pair] for pair in verdicts]))
    fourfold = grading_results.agreement(
        grading_results.count_pairs([[pair] * 4 for pair in verdicts])
    )
    assert fourfold.kappa_interval == pytest.approx(single.kappa_interval)
    independent = grading_results.agreement(
        grading_results.count_pairs([[pair] for pair in verdicts * 4])
    )
    low, high = single.kappa_interval
    independent_low, independent_high = independent.kappa_interval
    assert (high - low) / (independent_high - independent_low) == pytest.approx(2, rel=0.1)
    # Normal approximation of kappa at chance level with even margins: 1 / sqrt(n).
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(150), rel=0.1)


def test_judges_that_always_agree_and_judges_with_one_verdict():
    always = grading_results.agreement(grading_results.count_pairs([[YES, NO]] * 20))
    assert always.raw == (1, 1, 1) and always.kappa == 1 and always.kappa_interval == (1, 1)
    one_verdict = grading_results.agreement(grading_results.count_pairs([[YES]] * 20))
    assert one_verdict.raw == (1, 1, 1)
    assert one_verdict.kappa is one_verdict.kappa_interval is None
    # A third of the draws miss the only task that differs and have no kappa.
    nearly = grading_results.agreement(grading_results.count_pairs([[YES]] * 19 + [[FIRST]]))
    assert nearly.kappa == 0 and nearly.kappa_interval is None
    assert grading_results.agreement(grading_results.count_pairs([[], []])) is None
