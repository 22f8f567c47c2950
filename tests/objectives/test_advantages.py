"""Advantages of groups against golden values; what cannot count informs nobody."""

import numpy as np
import pytest

from zeroplay_jax.objectives import advantages as module


def group_advantages(rewards, groups, **options):
    for name in ('valid', 'lengths'):
        if name in options:
            options[name] = np.asarray(options[name])
    return module.group_advantages(np.asarray(rewards), np.asarray(groups), **options)


def informative_groups(*arrays):
    return module.informative_groups(*map(np.asarray, arrays))


def whiten(values, counts):
    return module.whiten(np.asarray(values), np.asarray(counts))


def close(given, wanted, rtol=1e-9):
    np.testing.assert_allclose(given, wanted, rtol=rtol, atol=1e-12)


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
    rewards, groups = inputs['rewards'], inputs['group']
    for name, options in GOLDEN.items():
        advantages, _ = group_advantages(rewards, groups, eps=inputs['eps'], **options)
        assert advantages.dtype == np.float64
        close(advantages, expected[name])
    kept = informative_groups(rewards, groups)
    assert [bool(kept[0]), bool(kept[5])] == expected['keep_group_0_lt_correct_lt_G']
    inputs, expected = golden['hrpo']
    rewards, hops = expected['reward'], inputs['hop']
    for name, options in GOLDEN_HRPO.items():
        close(group_advantages(rewards, hops, **options)[0], expected[name])
    pooled, _ = group_advantages(rewards, [7] * len(hops))
    close(pooled, expected['advantage_if_all_pooled'])


def test_golden_filter_and_fill(golden):
    inputs, expected = golden['dspo_filter_and_fill']
    rewards = np.array(inputs['groups'])
    groups = np.repeat(np.arange(len(rewards)), inputs['G'])
    kept = informative_groups(rewards.ravel(), groups).reshape(rewards.shape)
    assert np.array_equal(kept.any(1), kept.all(1))
    indices = np.flatnonzero(kept[:, 0]).tolist()
    assert indices == expected['kept_indices']
    assert indices[: inputs['train_groups']] == expected['batch_after_fill_in_arrival_order']
    assert indices[inputs['train_groups'] :] == expected['leftover_kept']
    advantages, stats = group_advantages(rewards.ravel(), groups)
    assert stats['informative_groups'] == (3.0, 5.0)
    for index, wanted in expected['advantages'].items():
        close(advantages.reshape(rewards.shape)[int(index)], wanted)


def test_golden_whitening_of_token_returns(golden):
    inputs, expected = golden['reinforce_pp_observation_gap']
    close(whiten(expected['returns_gap_safe'], inputs['mask']), expected['adv_gap_safe'])
    close(
        whiten(expected['returns_reset_at_mask0'], inputs['mask']), expected['adv_reset_at_mask0']
    )


@pytest.mark.parametrize('reward,size', [(0.7, 3), (1 / 3, 7), (1e9, 2)])
@pytest.mark.parametrize('scale', ['std', 'none'])
def test_constant_group_is_exactly_zero(reward, size, scale):
    advantages, stats = group_advantages([reward] * size, [3] * size, scale=scale)
    assert np.array_equal(advantages, np.zeros(size))
    assert stats['informative_groups'] == (0.0, 1.0)


@pytest.mark.parametrize(
    'reward, is_valid', [(np.nan, True), (np.inf, True), (-np.inf, True), (5.0, False)]
)
def test_a_row_that_cannot_count_never_enters_its_group(reward, is_valid):
    valid = [True, is_valid, True, True]
    advantages, stats = group_advantages([1.0, reward, 0.0, 0.0], [0, 0, 0, 1], valid=valid)
    close(advantages[[0, 2]], group_advantages([1.0, 0.0], [0, 0])[0])
    assert advantages[1] == 0 and advantages[3] == 0
    assert stats['nonfinite_rows'] == (is_valid, 4.0)
    assert stats['invalid_rows'] == (not is_valid, 4.0)
    assert stats['group_size'] == (3.0, 2.0)


def test_groups_with_one_usable_row_or_none():
    advantages, stats = group_advantages([1.0, np.nan], [0, 0])
    assert advantages.tolist() == [0.0, 0.0] and stats['singleton_groups'] == (1.0, 1.0)
    # Without a baseline the reward stands also for singletons.
    advantages, _ = group_advantages([0.5, 1.5, np.nan], [0, 1, 1], baseline='none', scale='none')
    assert advantages.tolist() == [0.5, 1.5, 0.0]
    advantages, stats = group_advantages(np.zeros(0), np.zeros(0, int))
    assert advantages.shape == (0,) and stats['singleton_groups'] == (0.0, 0.0)


def test_a_row_alone_stays_out_of_the_whitening_unless_raw():
    options = dict(scale='batch', lengths=[2, 3, 4])
    advantages, _ = group_advantages([1.0, 0.0, 5.0], [0, 0, 1], **options)
    close(advantages[:2], whiten([0.5, -0.5], [2, 3]))
    assert advantages[2] == 0
    raw, _ = group_advantages([1.0, 0.0, 5.0], [0, 0, 1], singleton='raw', **options)
    close(raw, whiten([0.5, -0.5, 5.0], [2, 3, 4]))


def test_rows_without_tokens_or_validity_do_not_weigh_in_the_whitening():
    rewards, groups, lengths = [1.0, 0.0, 0.5, np.nan, 9.0], [0, 0, 0, 0, 0], [2, 3, 0, 4, 4]
    valid = [True, True, True, True, False]
    advantages, _ = group_advantages(rewards, groups, scale='batch', lengths=lengths, valid=valid)
    assert np.all(advantages[2:] == 0)
    close(advantages[:2], whiten([0.5, -0.5], [2, 3]))


@pytest.mark.parametrize(
    'values, counts', [([], []), ([3.0], [5]), ([0.1] * 3, [1] * 3), ([1.0, 2.0], [0, 0])]
)
def test_whitening_what_is_all_alike_gives_zeros(values, counts):
    assert np.array_equal(whiten(values, counts), np.zeros(len(values)))


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_rows_that_cannot_count_inform_nobody(bad):
    rewards, groups = [1.0, bad, 1.0, 0.0, 1.0, 0.0], [0, 0, 0, 1, 1, 1]
    assert informative_groups(rewards, groups).tolist() == [False] * 3 + [True] * 3
    valid = [True, True, True, False, True, False]
    assert informative_groups(rewards, groups, valid).tolist() == [False] * 6
    assert informative_groups([0.2, bad, 0.3], [4, 4, 4]).tolist() == [True, False, True]


@pytest.mark.fault('nov29-C9', 'rewards whose squares overflow')
@pytest.mark.parametrize('function', [module.group_advantages, module.informative_groups])
def test_rewards_beyond_float32_are_refused(function):
    rewards = np.array([0.0, 1.0, -1e308, 1.0])
    with pytest.raises(ValueError, match=r'rewards\[2\] is -1e\+308; give at most 1e\+18'):
        function(rewards, np.array([0, 0, 1, 1]))
    # Those of rows that do not count are not read.
    function(rewards, np.array([0, 0, 1, 1]), valid=np.array([1, 1, 0, 1], bool))


@pytest.mark.fault('nov29-B10', 'a group whose rewards are equal sums in another order')
def test_a_group_that_differs_by_rounding_is_constant():
    sums = np.array([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1])
    assert sums[0] != sums[1]
    groups = np.zeros(2, int)
    values, stats = module.group_advantages(sums, groups)
    assert values.tolist() == [0.0, 0.0] and stats['informative_groups'] == (0.0, 1.0)
    assert not module.informative_groups(sums, groups).any()
    # A length factor makes rewards differ by little; that difference counts.
    assert module.informative_groups(np.array([1.0, 1.0 + 1e-9]), groups).all()
