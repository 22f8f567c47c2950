import numpy as np
import pytest

from zeroplay_jax.objectives.advantages import group_advantages, stratify


def close(given, wanted):
    np.testing.assert_allclose(given, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    'name, options',
    [
        ('grpo_std_ddof1', dict(singleton='raw')),
        ('grpo_std_ddof0', dict(singleton='raw', ddof=0)),
        ('grpo_no_std', dict(singleton='raw', scale='none')),
        ('grpo_no_std_singleton_zero', dict(scale='none')),
    ],
)
def test_golden_group_advantages(golden, name, options):
    inputs, expected = golden['group_advantages']
    advantages, _ = group_advantages(inputs['rewards'], inputs['group'], eps=inputs['eps'], **options)
    assert advantages.dtype == np.float64
    close(advantages, expected[name])


@pytest.mark.parametrize(
    'name, options',
    [
        ('advantage_code_ddof1', dict(singleton='raw')),
        ('advantage_paper_ddof0', dict(singleton='raw', ddof=0)),
        ('advantage_singleton_zero', dict()),
    ],
)
def test_golden_hrpo_is_the_same_function_keyed_by_hop(golden, name, options):
    inputs, expected = golden['hrpo']
    close(group_advantages(expected['reward'], inputs['hop'], **options)[0], expected[name])


def test_golden_hrpo_pooled_is_one_group(golden):
    inputs, expected = golden['hrpo']
    close(group_advantages(expected['reward'], [7] * len(inputs['hop']))[0], expected['advantage_if_all_pooled'])


def test_golden_objectives_of_paper_and_code_differ_in_scale(golden):
    inputs, expected = golden['hrpo']
    advantages, _ = group_advantages(expected['reward'], inputs['hop'], singleton='raw')
    terms = advantages * np.array(inputs['seq_logprob_sum'])
    close(terms.mean(), expected['J_paper_mean_over_N_of_A_times_seq_logprob'])
    close(terms.sum() / sum(inputs['seq_len']), expected['J_code_token_mean'])


def test_golden_kept_groups(golden):
    inputs, expected = golden['dspo_filter_and_fill']
    for index, wanted in expected['advantages'].items():
        rewards = inputs['groups'][int(index)]
        close(group_advantages(rewards, [0] * len(rewards))[0], wanted)
    rewards = np.array(inputs['groups'])
    groups = np.repeat(np.arange(len(rewards)), rewards.shape[1])
    advantages, stats = group_advantages(rewards.ravel(), groups)
    moved = np.any(advantages.reshape(rewards.shape) != 0, axis=1)
    assert np.flatnonzero(moved).tolist() == expected['kept_indices']
    assert stats['informative_groups'] == (3.0, 5.0)


@pytest.mark.parametrize('scale', ['std', 'none'])
@pytest.mark.parametrize('ddof', [0, 1])
def test_sum_to_zero_in_every_group_and_match_a_plain_loop(scale, ddof):
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=200), rng.integers(-5, 40, 200)
    advantages, _ = group_advantages(rewards, groups, scale=scale, ddof=ddof)
    for key in set(groups.tolist()):
        rows = groups == key
        assert abs(advantages[rows].sum()) < 1e-9
        if rows.sum() > 1:
            wanted = rewards[rows] - rewards[rows].mean()
            close(advantages[rows], wanted / (rewards[rows].std(ddof=ddof) + 1e-6) if scale == 'std' else wanted)


def test_row_order_does_not_matter():
    rng = np.random.default_rng(1)
    rewards, groups, order = rng.normal(size=50), rng.integers(0, 9, 50), rng.permutation(50)
    close(group_advantages(rewards[order], groups[order])[0], group_advantages(rewards, groups)[0][order])


@pytest.mark.parametrize('reward', [0.7, 0.1, 1 / 3, 1e9, -2.2])
@pytest.mark.parametrize('size', [2, 3, 5, 7])
@pytest.mark.parametrize('scale', ['std', 'none'])
def test_constant_group_is_exactly_zero(reward, size, scale):
    advantages, stats = group_advantages([reward] * size, [3] * size, scale=scale)
    assert np.array_equal(advantages, np.zeros(size))
    assert stats['informative_groups'] == (0.0, 1.0)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_nonfinite_reward_never_enters_its_group(bad):
    advantages, stats = group_advantages([1.0, bad, 0.0, 0.0], [0, 0, 0, 1])
    close(advantages[[0, 2]], group_advantages([1.0, 0.0], [0, 0])[0])
    assert advantages[1] == 0 and advantages[3] == 0
    assert stats['nonfinite_rows'] == (1.0, 4.0) and stats['invalid_rows'] == (0.0, 4.0)


def test_invalid_row_never_enters_its_group():
    advantages, stats = group_advantages([1.0, 5.0, 0.0], [0, 0, 0], valid=[True, False, True])
    close(advantages[[0, 2]], group_advantages([1.0, 0.0], [0, 0])[0])
    assert advantages[1] == 0
    assert stats['invalid_rows'] == (1.0, 3.0) and stats['group_size'] == (2.0, 1.0)


def test_a_group_left_with_one_usable_row_is_a_singleton():
    advantages, stats = group_advantages([1.0, np.nan], [0, 0])
    assert advantages.tolist() == [0.0, 0.0] and stats['singleton_groups'] == (1.0, 1.0)


def test_without_baseline_the_reward_stands_also_for_singletons():
    advantages, _ = group_advantages([0.5, 1.5, np.nan], [0, 1, 1], baseline='none', scale='none')
    assert advantages.tolist() == [0.5, 1.5, 0.0]


def test_statistics_count_groups_by_size():
    sizes = (1, 1, 2, 4, 5, 16, 17, 300)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    _, stats = group_advantages(np.arange(len(groups)) % 2, groups)
    histogram = {name: value for name, value in stats.items() if name.startswith('group_size/')}
    assert histogram == {
        'group_size/1': (2.0, 8.0),
        'group_size/2': (1.0, 8.0),
        'group_size/3_4': (1.0, 8.0),
        'group_size/5_8': (1.0, 8.0),
        'group_size/9_16': (1.0, 8.0),
        'group_size/17_up': (2.0, 8.0),
    }
    assert stats['singleton_groups'] == (2.0, 8.0) and stats['informative_groups'] == (6.0, 8.0)
    assert stats['group_size'] == (346.0, 8.0)


def test_no_rows():
    advantages, stats = group_advantages(np.zeros(0), np.zeros(0, int))
    assert advantages.shape == (0,) and stats['singleton_groups'] == (0.0, 0.0)


@pytest.mark.parametrize(
    'rewards, groups, options, message',
    [
        ([1.0, 2.0], [0], {}, 'equally long'),
        ([[1.0]], [[0]], {}, 'one-dimensional'),
        ([1.0], [0.5], {}, 'not integers'),
        ([1.0], [0], dict(valid=[True, True]), 'equally long'),
        ([1.0], [0], dict(baseline='median'), "baseline is 'median'"),
        ([1.0], [0], dict(scale='var'), "scale is 'var'"),
        ([1.0], [0], dict(ddof=2), 'ddof is 2'),
        ([1.0], [0], dict(singleton='one'), "singleton is 'one'"),
        ([1.0], [0], dict(baseline='none'), "take scale='none'"),
    ],
)
def test_bad_input_is_one_clear_line(rewards, groups, options, message):
    with pytest.raises(ValueError, match=message) as error:
        group_advantages(rewards, groups, **options)
    assert '\n' not in str(error.value)


def test_golden_batch_plans(golden):
    inputs, expected = golden['batch_plans']
    for ratio in ('drzero', 'scope'):
        counts = [stratify(inputs[f'{ratio}_ratio'], batch) for batch in inputs['batches']]
        assert counts == expected[f'{ratio}_counts']


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


@pytest.mark.parametrize('ratio, n', [((), 3), ((0, 0), 3), ((-1, 2), 3), ((float('nan'),), 3), ((1,), -1)])
def test_stratify_refuses(ratio, n):
    with pytest.raises(ValueError, match='stratify: cannot split'):
        stratify(ratio, n)
