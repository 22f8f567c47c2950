"""Advantages per turn: golden values, and the mean gradient over all groups of a small chain, which is the true one."""

import itertools
import types

import numpy as np
import pytest

from zeroplay_jax.objectives import advantages
from zeroplay_jax.objectives.advantages import RewardTable

TURNS = 3
BAD, GOOD = 0, 1
SEARCH, ANSWER = 0, 1
# Logits by turn, what the last search found, and action.
LOGITS = np.random.default_rng(0).normal(size=(TURNS, 2, 2))


def settings(baseline='loo'):
    return types.SimpleNamespace(baseline=baseline, scale='none', std_ddof=1, singleton='zero')


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


@pytest.mark.parametrize('baseline', ['loo', 'mean', 'none'])
def test_golden_turn_advantages(golden, baseline):
    inputs, expected = golden['turn_advantages']
    table = make_table(*(inputs[name] for name in ('reward', 'turn_reward', 'group', 'valid')))
    given, _ = advantages.of_turns(table, settings(baseline))
    assert given.dtype == np.float64 and not given[~table.turn_mask].any()
    wanted = np.concatenate(expected[baseline])
    np.testing.assert_allclose(given[table.turn_mask], wanted, rtol=1e-12, atol=1e-15)


def test_without_turn_rewards_every_turn_has_the_advantage_of_its_rollout():
    rewards, groups = [1.0, 0.0, 0.5, 1.0, 1.0], [3, 3, 3, 7, 7]
    table = make_table(rewards, [[None]] * 2 + [[None] * 4] * 3, groups)
    of_rollouts, stats = advantages.of_rollouts(table, settings())
    given, turn_stats = advantages.of_turns(table, settings())
    np.testing.assert_array_equal(given, of_rollouts[:, None] * table.turn_mask)
    assert turn_stats == stats and stats['informative_groups'] == (1.0, 2.0)


# ---- the mean gradient -----------------------------------------------------------------------------
#
# An agent searches up to three times and answers. A search finds something (BAD or GOOD) at random and earns a turn
# reward; an answer earns an outcome, more after a GOOD search. Whether there is a further turn is its choice.


def action_shares(turn, seen):
    weights = np.exp(LOGITS[turn, seen])
    return weights / weights.sum()


def paths(turn=0, seen=BAD, probability=1.0, scores=(), earned=()):
    """All rollouts of the agent: (probability, gradient of each action's log-probability, turn rewards, outcome)."""
    gradients = np.zeros((2, *LOGITS.shape))
    gradients[:, turn, seen] = np.eye(2) - action_shares(turn, seen)
    search, answer = probability * action_shares(turn, seen)
    yield answer, [*scores, gradients[ANSWER]], [*earned, None], 1.0 if seen == GOOD else 0.3
    searched = [*scores, gradients[SEARCH]]
    for now_seen, share, reward in ((BAD, 0.4, 0.25), (GOOD, 0.6, 0.75)):
        if turn + 1 < TURNS:
            yield from paths(turn + 1, now_seen, search * share, searched, [*earned, reward])
        else:
            yield search * share, searched, [*earned, reward], 0.0


@pytest.mark.parametrize('samples', [2, 3])
@pytest.mark.parametrize('baseline', ['loo', 'none', 'mean'])
def test_the_mean_gradient_is_the_true_one(baseline, samples):
    """Over all groups of so many rollouts; it is Σ probability · sum of rewards · ∇ log probability."""
    probabilities, scores, earned, outcomes = zip(*paths())
    probabilities = np.array(probabilities)
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    by_turn = np.zeros((len(scores), TURNS, LOGITS.size))
    for row, gradients in zip(by_turn, scores, strict=True):
        row[: len(gradients)] = np.reshape(gradients, (-1, LOGITS.size))
    sums = [outcome + sum(filter(None, turns)) for outcome, turns in zip(outcomes, earned)]
    expected = np.einsum('p,puw->w', probabilities * sums, by_turn)

    groups = np.array(list(itertools.product(range(len(outcomes)), repeat=samples)))
    members = groups.ravel()
    keys = np.repeat(np.arange(len(groups)), samples)
    table = make_table(np.array(outcomes)[members], [earned[index] for index in members], keys)
    values, _ = advantages.of_turns(table, settings(baseline))
    values = (values * table.turn_mask).reshape(*groups.shape, TURNS)
    gradients = np.einsum('gsu,gsuw->gw', values, by_turn[groups]) / samples
    mean = probabilities[groups].prod(1) @ gradients
    # The mean of a group holds the rollout itself.
    factor = samples / (samples - 1) if baseline == 'mean' else 1
    np.testing.assert_allclose(factor * mean, expected, atol=1e-12)
