"""The papers' claims in miniature: measures of a run, and verdicts, intervals and corrections of claims."""

import numpy as np
import pytest
from python_process import ROOT
from refused_calls import check_table

from benchmarks import claims_runs
from benchmarks import claims_statistics as statistics

pytestmark = pytest.mark.results

# ---- measures ----


def curve(*points):
    return {'curve': [list(point) for point in points]}


# Half right after 4 steps, all right after 8; twice the rollouts per step of SLOW.
FAST = curve((0, 0, [0, 0]), (4, 200, [1, 0]), (8, 400, [1, 1]))
SLOW = curve((0, 0, [0, 0]), (8, 200, [1, 0]))
RUBRICS = curve((0, 0, [0], [0.0, 0.5]), (8, 9, [1], [0.5, 1.0]))


def test_measures_are_those_of_the_table(tmp_path):
    path = ROOT / 'tests' / 'golden' / 'claim_measures.txt'
    check_table(path, vars(statistics) | globals(), tmp_path)


# ---- verdicts ----


def test_the_p_value_and_the_interval_decide_alike():
    rng = np.random.default_rng(3)
    for _ in range(200):
        result = statistics.judge(rng.normal(rng.normal(), 1, (4, 1)) + rng.normal(0, 0.5, (4, 30)))
        low, high = result['interval']
        assert (result['p'] < 0.05) == (low > 0 or high < 0)


@pytest.mark.parametrize('of_seeds', [0.0, 0.03, 0.1])
def test_seeds_and_questions_both_count(of_seeds):
    # Differences that are 0 on average, but differ between questions: some are easier for one of the arms.
    rng, missed = np.random.default_rng(5), 0
    for _ in range(300):
        by_seed, by_question = of_seeds * rng.normal(size=(8, 1)), 0.45 * rng.normal(size=160)
        both = by_seed + by_question + 0.2 * rng.normal(size=(8, 160))
        low, high = statistics.judge(both)['interval']
        missed += low > 0 or high < 0
    assert 0.02 < missed / 300 < 0.08


def test_holms_correction():
    rows = [dict(p=p, interval=[-0.2, 0.1]) for p in (0.01, 0.04, 0.03, 0.005)]
    statistics.correct_verdicts(rows, family=4)
    verdicts = [row['verdict_holm'] for row in rows]
    assert verdicts == ['does not hold', 'open', 'open', 'does not hold']


def test_a_p_value_of_several_looks_is_one():
    rng, looks = np.random.default_rng(4), [(8, 0.5), (12, 0.25), (16, 0.25)]
    wrong = above = 0
    for _ in range(600):
        result = statistics.judge_looks(rng.normal(size=(16, 1)), looks)
        wrong += result['p'] < 0.05
        above += result['upper'] < 0
    assert 0.015 < wrong / 600 < 0.07
    assert 0.015 < above / 600 < 0.07
    assert sum(look.share for look in claims_runs.LOOKS) == pytest.approx(1)
