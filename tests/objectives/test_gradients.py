"""The expected gradient of every config's estimator, summed over all batches of a small world."""

import csv

import numpy as np
import pytest

from benchmarks import exact, gradients
from benchmarks.command import RESULTS

ESTIMATORS = gradients.estimators()
STORED = list(csv.reader((RESULTS / 'gradients.tsv').read_text().splitlines()[1:], delimiter='\t'))


@pytest.mark.parametrize('cells', ESTIMATORS, ids=lambda cells: f'{cells[-1]}-{cells[-2]}')
def test_the_expected_gradient_is_the_exact_one(cells):
    error, length, angle = gradients.compare(*ESTIMATORS[cells])
    assert error < 1e-6
    stored = next(row for row in STORED if row[: len(cells)] == list(cells))
    assert stored[-2:] == [f'{length:.3f}', f'{angle:.1f}']
    if cells[-2:] == ('fresh', 'RLOO'):
        assert (length, angle) == pytest.approx((1, 0), abs=1e-4)
    if cells[-2:] == ('fresh', 'Dr. GRPO'):
        # A mean over three rows holds the row itself; six rows are divided by the constant.
        assert (length, angle) == pytest.approx((2 / 3 * 6 / exact.CONSTANT, 0), abs=1e-4)


def test_the_true_gradient_is_that_of_the_expected_reward():
    for place in np.ndindex(exact.LOGITS.shape):
        step = np.zeros(exact.LOGITS.shape)
        step[place] = 1e-5
        up, down = (np.exp(exact.log_probs(exact.LOGITS + x).sum(2)) for x in (step, -step))
        slope = ((up - down) * exact.REWARDS).sum() / 2 / 2e-5
        assert slope == pytest.approx(exact.true_gradient()[place], abs=1e-9)
