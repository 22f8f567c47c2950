"""Agreement of two judges: kappa against values computed by hand."""

import pytest

from zeroplay_jax.extras.grading import grading_results


@pytest.mark.parametrize(
    ('counts', 'kappa'),
    [
        # p_o = 35/50, p_e = (25 · 30 + 25 · 20) / 50² = .5
        ((20, 5, 10, 15), 0.4),
        ((0, 5, 5, 0), -1),
        # One judge has a single verdict: no better than chance. Both have the same single verdict: none.
        ((9, 0, 1, 0), 0),
        ((7, 0, 0, 0), None),
    ],
)
def test_kappa_is_that_of_the_table(counts, kappa):
    pairs = []
    for cell, count in zip(grading_results.CELLS.values(), counts):
        pairs += [cell] * count
    measured = grading_results.agreement(pairs)
    assert measured['kappa'] == kappa and tuple(measured['table'].values()) == counts
    assert measured['raw'] == pytest.approx((counts[0] + counts[3]) / sum(counts), abs=1e-6)
