"""Advantages per turn: golden values, and the mean gradient over all groups of a small chain, which is the true one."""

import dataclasses
import functools
import itertools
import types

import numpy as np
import outside_functions
import pytest

from zeroplay_jax.objectives import advantages
from zeroplay_jax.objectives.advantages import AdvantageError, RewardTable

OUTSIDE = outside_functions.__name__
TURNS = 3
BAD, GOOD = 0, 1
SEARCH, ANSWER = 0, 1
# Logits by turn, what the last search found, and action.
LOGITS = np.random.default_rng(0).normal(size=(TURNS, 2, 2))


def settings(**changes):
    return types.SimpleNamespace(
        **dict(baseline='loo', scale='none', std_ddof=1, singleton='zero') | changes
    )


def make_table(rewards, turn_rewards, groups, valid=None):
    """A table of ragged lists of turn rewards, None where a turn has none."""
    shape = (len(rewards), max(map(len, turn_rewards)))
    turn_reward, mask = np.full(shape, np.nan), np.zeros(shape, bool)
    for row, earned in enumerate(turn_rewards):
        mask[row, : len(earned)] = True
        turn_reward[row, : len(earned)] = np.array(earned, float)
    valid = np.ones(len(rewards), bool) if valid is None else np.array(valid)
    return RewardTable(
        np.array(rewards, float), turn_reward, mask, 3 * mask.astype(int), np.array(groups), valid
    )


def of_turns(table, **changes):
    return advantages.of_turns(table, settings(**changes))[0]


@pytest.mark.parametrize('baseline', ['loo', 'mean', 'none'])
def test_golden_turn_advantages(golden, baseline):
    inputs, expected = golden['turn_advantages']
    table = make_table(*(inputs[name] for name in ('reward', 'turn_reward', 'group', 'valid')))
    given = of_turns(table, baseline=baseline)
    assert given.dtype == np.float64 and not given[~table.turn_mask].any()
    wanted = np.concatenate(expected[baseline])
    np.testing.assert_allclose(given[table.turn_mask], wanted, rtol=1e-12, atol=1e-15)


def test_without_turn_rewards_every_turn_has_the_advantage_of_its_rollout():
    rewards, groups = np.array([1.0, 0.0, 0.5, 1.0, 1.0]), [3, 3, 3, 7, 7]
    table = make_table(rewards, [[None]] * 2 + [[None] * 4] * 3, groups)
    of_rollouts, stats = advantages.of_rollouts(table, settings())
    expected = np.where(table.turn_mask, of_rollouts[:, None], 0.0)
    given, turn_stats = advantages.of_turns(table, settings())
    np.testing.assert_array_equal(given, expected)
    assert turn_stats == stats and stats['informative_groups'] == (1.0, 2.0)


# ---- the mean gradient -----------------------------------------------------------------------------
#
# An agent searches up to three times and answers. A search finds something (BAD or GOOD) at random and earns a turn
# reward; an answer earns an outcome, more after a GOOD search. Whether there is a further turn is its choice.


@dataclasses.dataclass
class Path:
    probability: float
    steps: list
    turn_rewards: list
    outcome: float


def action_shares(turn, seen):
    weights = np.exp(LOGITS[turn, seen])
    return weights / weights.sum()


def paths(turn=0, seen=BAD, probability=1.0, steps=(), earned=()):
    """All rollouts of the agent."""
    search, answer = probability * action_shares(turn, seen)
    outcome = 1.0 if seen == GOOD else 0.3
    yield Path(answer, [*steps, (turn, seen, ANSWER)], [*earned, None], outcome)
    searched = [*steps, (turn, seen, SEARCH)]
    for now_seen, share, reward in ((BAD, 0.4, 0.25), (GOOD, 0.6, 0.75)):
        if turn + 1 < TURNS:
            yield from paths(turn + 1, now_seen, search * share, searched, [*earned, reward])
        else:
            yield Path(search * share, searched, [*earned, reward], 0.0)


def score(step):
    """The gradient of an action's log-probability by all logits."""
    turn, seen, action = step
    gradient = np.zeros(LOGITS.shape)
    gradient[turn, seen] = -action_shares(turn, seen)
    gradient[turn, seen, action] += 1
    return gradient.ravel()


PATHS = list(paths())
PROBABILITIES = np.array([path.probability for path in PATHS])
SCORES = np.zeros((len(PATHS), TURNS, LOGITS.size))
for _scores, _path in zip(SCORES, PATHS, strict=True):
    _scores[: len(_path.steps)] = list(map(score, _path.steps))


def true_gradient():
    """Of the expected sum of all rewards: Σ over rollouts of probability · sum · ∇ log probability."""
    sums = [path.outcome + sum(filter(None, path.turn_rewards)) for path in PATHS]
    return np.einsum('p,puw->w', PROBABILITIES * sums, SCORES)


def mean_and_variance(estimator, samples):
    """Exact moments of the policy gradient of a group of so many rollouts, over all groups with their probabilities."""
    groups = np.array(list(itertools.product(range(len(PATHS)), repeat=samples)))
    rows = [PATHS[index] for index in groups.ravel()]
    outcomes, earned = [row.outcome for row in rows], [row.turn_rewards for row in rows]
    table = make_table(outcomes, earned, np.repeat(np.arange(len(groups)), samples))
    values = (estimator(table) * table.turn_mask).reshape(*groups.shape, TURNS)
    gradients = np.einsum('gsu,gsuw->gw', values, SCORES[groups]) / samples
    shares = PROBABILITIES[groups].prod(1)
    mean = shares @ gradients
    return mean, shares @ ((gradients - mean) ** 2).sum(1)


@pytest.mark.parametrize('samples', [2, 3])
def test_the_mean_gradient_is_the_true_one(samples):
    assert sum(PROBABILITIES) == pytest.approx(1, abs=1e-12)
    for baseline, factor in (('loo', 1), ('none', 1), ('mean', samples / (samples - 1))):
        mean, _ = mean_and_variance(functools.partial(of_turns, baseline=baseline), samples)
        np.testing.assert_allclose(factor * mean, true_gradient(), atol=1e-12)


def test_of_the_simple_baselines_ours_has_the_least_variance_here():
    samples = 3
    others = [
        functools.partial(of_turns, baseline='none'),
        # The whole return of every turn: RLOO without credit.
        lambda table: of_turns(table)[:, :1],
    ]
    _, ours = mean_and_variance(of_turns, samples)
    for other in others:
        mean, variance = mean_and_variance(other, samples)
        np.testing.assert_allclose(mean, true_gradient(), atol=1e-12)
        assert variance > 1.02 * ours


# ---- functions of other packages -------------------------------------------------------------------


@pytest.mark.parametrize(
    'name, problem',
    [
        ('with_dropped', 'returned numbers that are not finite'),
        ('of_tokens', r'returned shape \(2, 4\); return \(2,\), one per row, or \(2, 3\)'),
        ('bare', r'returned a ndarray; return \(advantages, \{name: \(sum, count\)\}\)'),
        ('mean_statistic', "statistic 'mean' is no pair"),
        ('nan_statistic', r"statistic 'earned' is .*nan.*; return finite numbers"),
        ('absent', "has no 'advantage_absent'; define it there"),
        ('one_argument', r'too many positional arguments; it is called with \(table, settings\)'),
    ],
)
def test_functions_that_return_no_advantages_are_refused_in_one_line(name, problem):
    table = make_table([1.0, np.nan], [[None], [1.0, None, 0.5]], [3, 3], valid=[True, False])
    with pytest.raises(AdvantageError, match=f'^advantage .*{problem}'):
        advantages.evaluate(f'{OUTSIDE}:advantage_{name}', table, settings())
