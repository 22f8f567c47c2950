"""Advantages of groups against golden values; what cannot count informs nobody."""

import numpy as np
import pytest

from zeroplay_jax.objectives import advantages as module
from zeroplay_jax.objectives.advantages import whiten


def group_advantages(rewards, groups, **options):
    return module.group_advantages(np.array(rewards), np.array(groups), **options)


def informative(rewards, groups, valid=None):
    return module.informative_groups(np.array(rewards), np.array(groups), valid).tolist()


def close(given, wanted):
    np.testing.assert_allclose(given, wanted, rtol=1e-9, atol=1e-12)


RAW = dict(singleton='raw')
GOLDEN = {
    'grpo_std_ddof1': RAW,
    'grpo_std_ddof0': RAW | dict(ddof=0),
    'grpo_no_std': RAW | dict(scale='none'),
    'grpo_no_std_singleton_zero': dict(scale='none'),
    'rloo': RAW | dict(baseline='loo', scale='none'),
}
# HRPO is the same function, keyed by hop.
GOLDEN_HRPO = {
    'advantage_code_ddof1': RAW,
    'advantage_paper_ddof0': RAW | dict(ddof=0),
    'advantage_singleton_zero': {},
}


def test_golden_group_advantages(golden):
    inputs, expected = golden['group_advantages']
    for name, options in GOLDEN.items():
        advantages, _ = group_advantages(inputs['rewards'], inputs['group'], **options)
        assert advantages.dtype == np.float64
        close(advantages, expected[name])
    inputs, expected = golden['hrpo']
    for name, options in GOLDEN_HRPO.items():
        close(group_advantages(expected['reward'], inputs['hop'], **options)[0], expected[name])


def test_golden_filter(golden):
    inputs, expected = golden['dspo_filter_and_fill']
    rewards, groups = np.ravel(inputs['groups']), np.repeat(np.arange(5), inputs['G'])
    kept = np.isin(groups, expected['kept_indices'])
    assert informative(rewards, groups) == kept.tolist()
    advantages, stats = group_advantages(rewards, groups)
    assert stats['informative_groups'] == (3.0, 5.0)
    close(advantages[kept], np.concatenate([*expected['advantages'].values()]))


def test_golden_whitening_of_token_returns(golden):
    inputs, expected = golden['reinforce_pp_observation_gap']
    for kind in ('gap_safe', 'reset_at_mask0'):
        close(whiten(expected[f'returns_{kind}'], inputs['mask']), expected[f'adv_{kind}'])


# The last two differ by the order of a sum.
@pytest.mark.parametrize('rewards', [[1 / 3] * 7, [1e9] * 2, [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]])
@pytest.mark.parametrize('scale', ['std', 'none'])
def test_constant_group_is_exactly_zero(rewards, scale):
    groups = np.full(len(rewards), 3)
    advantages, stats = group_advantages(rewards, groups, scale=scale)
    assert not advantages.any() and stats['informative_groups'] == (0.0, 1.0)
    assert not any(informative(rewards, groups))
    # A length factor makes rewards differ by little; that difference counts.
    assert all(informative([1.0, 1.0 + 1e-9], [0, 0]))


@pytest.mark.parametrize(
    'reward, is_valid', [(np.nan, True), (np.inf, True), (-np.inf, True), (5.0, False)]
)
def test_a_row_that_cannot_count_never_enters_its_group(reward, is_valid):
    rewards, groups = [1.0, reward, 0.0, 0.0], [0, 0, 0, 1]
    valid = np.array([True, is_valid, True, True])
    advantages, stats = group_advantages(rewards, groups, valid=valid)
    close(advantages[[0, 2]], group_advantages([1.0, 0.0], [0, 0])[0])
    assert advantages[1] == 0 and advantages[3] == 0
    assert stats['nonfinite_rows'] == (is_valid, 4.0)
    assert stats['invalid_rows'] == (not is_valid, 4.0)
    assert stats['group_size'] == (3.0, 2.0)
    assert informative(rewards, groups, valid) == [True, False, True, False]
    assert not any(informative([0.0, reward, 0.0, 0.0], groups, valid))


def test_groups_with_one_usable_row_or_none():
    advantages, stats = group_advantages([1.0, np.nan], [0, 0])
    assert advantages.tolist() == [0.0, 0.0] and stats['singleton_groups'] == (1.0, 1.0)
    # Without a baseline the reward stands also for singletons.
    advantages, _ = group_advantages([0.5, 1.5, np.nan], [0, 1, 1], baseline='none', scale='none')
    assert advantages.tolist() == [0.5, 1.5, 0.0]
    advantages, _ = group_advantages(np.zeros(0), np.zeros(0, int))
    assert advantages.shape == (0,)


def test_what_cannot_count_stays_out_of_the_whitening_and_a_row_alone_unless_raw():
    rewards, groups = [1.0, 0.0, 0.5, np.nan, 9.0, 5.0], [0, 0, 0, 0, 0, 1]
    lengths, valid = [2, 3, 0, 4, 4, 4], np.array([True, True, True, True, False, True])
    options = dict(scale='batch', lengths=lengths, valid=valid)
    advantages, _ = group_advantages(rewards, groups, **options)
    close(advantages[:2], whiten([0.5, -0.5], [2, 3]))
    assert not advantages[2:].any()
    raw, _ = group_advantages(rewards, groups, singleton='raw', **options)
    close(raw[[0, 1, 5]], whiten([0.5, -0.5, 5.0], [2, 3, 4]))


@pytest.mark.parametrize('values, counts', [([], []), ([0.1] * 3, [1] * 3), ([1.0, 2.0], [0, 0])])
def test_whitening_what_is_all_alike_gives_zeros(values, counts):
    assert not whiten(values, counts).any()
