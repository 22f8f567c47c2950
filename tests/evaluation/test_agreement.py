"""Agreement of two judges: kappa against values computed by hand, and intervals over tasks instead of items."""

import numpy as np
import pytest

from zeroplay_jax.evaluation import grading_results

YES, NO = (True, True), (False, False)
FIRST, SECOND = (True, False), (False, True)


@pytest.mark.parametrize(
    ('table', 'kappa'),
    [
        # p_o = 35/50, p_e = (25 · 30 + 25 · 20) / 50² = .5
        ((20, 5, 10, 15), 0.4),
        # p_o = 60/100, p_e = (70 · 60 + 30 · 40) / 100² = .54
        ((45, 25, 15, 15), 0.06 / 0.46),
        ((4, 4, 4, 4), 0.0),
        ((30, 0, 0, 12), 1.0),
        ((0, 5, 5, 0), -1.0),
        # One judge has a single verdict: no better than chance.
        ((9, 0, 1, 0), 0.0),
        # Both have the same single verdict.
        ((7, 0, 0, 0), None),
        ((0, 0, 0, 7), None),
    ],
)
def test_kappa_of_a_table(table, kappa):
    value = float(grading_results.kappa(np.array(table)))
    assert np.isnan(value) if kappa is None else value == pytest.approx(kappa, abs=1e-15)


def test_tables_of_many_tasks_are_computed_side_by_side_and_exactly():
    # The square of a million items times itself would leave no exact digit in float32.
    tables = np.array([[[20, 5, 10, 15], [7, 0, 0, 0]], [[1_000_000, 0, 0, 1], [0, 1, 1, 0]]])
    values = grading_results.kappa(tables)
    assert values.shape == (2, 2) and values[0, 0] == pytest.approx(0.4)
    assert np.isnan(values[0, 1]) and values[1].tolist() == [1.0, -1.0]


def test_agreement_of_pairs():
    pairs = [[YES, YES, FIRST], [], [NO, SECOND], [NO]]
    measured = grading_results.agreement(grading_results.count_pairs(pairs))
    assert measured.table == {'both_met': 2, 'first_only': 1, 'second_only': 1, 'neither': 2}
    assert (measured.items, measured.tasks) == (6, 3)
    share, low, high = measured.raw
    assert share == pytest.approx(4 / 6) and low <= share <= high == 1
    assert measured.kappa == pytest.approx(1 / 3)


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
