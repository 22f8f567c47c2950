import numpy as np
import pytest

from zeroplay_jax.objectives.rewards import alpha_at, closes_window, stratify


def test_golden_counts(golden):
    inputs, expected = golden['batch_plans']
    for ratio in ('drzero', 'scope'):
        counts = [stratify(inputs[f'{ratio}_ratio'], batch) for batch in inputs['batches']]
        assert counts == expected[f'{ratio}_counts']


def test_golden_alpha(golden):
    inputs, expected = golden['batch_plans']
    for model, schedule in inputs['pi_alpha'].items():
        given = [alpha_at(schedule, i) for i in range(4)]
        assert given == expected['alpha_iter1to4_clamped'][model]


def test_golden_replay_windows(golden):
    inputs, expected = golden['batch_plans']
    steps, period = inputs['replay']['steps'], inputs['replay']['period']
    closed = [step for step in range(1, steps + 1) if closes_window(step, period)]
    assert closed == expected['replay_cleared_after_steps_1based']
    lengths = np.diff([0, *closed, steps]).tolist()
    assert lengths == expected['replay_window_lengths_if_cleared_at_end_of_step_s']
    # The released code asks with the counter of the next step.
    early = [step for step in range(1, steps + 1) if closes_window(step + 1, period)]
    released = expected['replay_window_lengths_released_code(counter already incremented)']
    assert np.diff([0, *early, steps]).tolist() == released


def test_a_window_of_no_period_never_closes():
    assert not any(closes_window(step, 0) for step in range(1, 50))
    assert all(closes_window(step, 1) for step in range(1, 50))


@pytest.mark.parametrize(
    'function, arguments, message',
    [
        (closes_window, (0, 10), 'closes_window: '),
        (closes_window, (-3, 10), 'closes_window: '),
        (closes_window, (1, -1), 'closes_window: '),
        (alpha_at, ((), 0), 'alpha_at: no value'),
        (alpha_at, ((0.1,), -1), 'alpha_at: no value'),
        (stratify, ((), 3), 'stratify: cannot split'),
        (stratify, ((0, 0), 3), 'stratify: cannot split'),
        (stratify, ((-1, 2), 3), 'stratify: cannot split'),
        (stratify, ((float('nan'),), 3), 'stratify: cannot split'),
        (stratify, ((1,), -1), 'stratify: cannot split'),
    ],
)
def test_bad_numbers_are_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize(
    'ratio, n, counts',
    [
        ((1, 1, 1), 4, [2, 1, 1]),
        ((1, 3), 2, [1, 1]),
        ((0, 1, 0), 5, [0, 5, 0]),
        ((4, 3, 2, 1), 1, [1, 0, 0, 0]),
        ((0.3, 0.1, 0.6), 5, [2, 0, 3]),
        ((1, 2), 0, [0, 0]),
    ],
)
def test_stratify_ties_and_edges(ratio, n, counts):
    assert stratify(ratio, n) == counts


def test_stratify_always_sums_and_stays_within_one():
    rng = np.random.default_rng(2)
    for _ in range(200):
        ratio, n = rng.integers(1, 9, rng.integers(1, 6)).tolist(), int(rng.integers(0, 300))
        counts = stratify(ratio, n)
        assert sum(counts) == n
        assert all(abs(c - n * w / sum(ratio)) < 1 for c, w in zip(counts, ratio, strict=True))
