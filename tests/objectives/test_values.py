"""Advantages from values and the value loss, against sums over whole rollouts in float64."""

import jax
import numpy as np
import pytest

from zeroplay_jax.objectives import values as module


def rollout(rng, length):
    """Rewards, values and mask of one rollout; its prompt and retrieved tokens are not trained and not a number."""
    mask = rng.random(length) < 0.6
    mask[0] = False
    mask[rng.integers(1, length)] = True
    rewards, values = np.where(mask, rng.normal(size=(2, length)), np.nan)
    return rewards, values, mask


def expected_gae(rewards, values, mask, discount, decay):
    """The definition: a discounted sum of temporal differences over the trained tokens of one rollout."""
    trained = np.flatnonzero(mask)
    rewards, values = rewards[trained], values[trained]
    next_values = np.append(values[1:], 0.0)
    differences = rewards + discount * next_values - values
    advantages = np.zeros(len(mask))
    for number, position in enumerate(trained):
        powers = (discount * decay) ** np.arange(len(trained) - number)
        advantages[position] = np.sum(powers * differences[number:])
    returns = np.zeros(len(mask))
    returns[trained] = advantages[trained] + values
    return advantages, returns


def packed(rollouts, width):
    """One row with these rollouts one behind the other, and empty positions at the end."""
    parts = [
        *map(np.concatenate, zip(*rollouts)),
        np.repeat([1, 2, 3], [len(mask) for *_, mask in rollouts]),
    ]
    return [np.pad(part, (0, width - len(part)))[None] for part in parts]


@pytest.mark.parametrize('discount, decay', [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 0.5)])
def test_packed_rollouts_have_the_advantages_of_the_definition(discount, decay):
    rng = np.random.default_rng(0)
    rollouts = [rollout(rng, length) for length in (7, 5, 11)]
    arrays = packed(rollouts, width=26)
    given = np.concatenate(module.gae(*arrays, discount=discount, decay=decay))
    expected = [expected_gae(*parts, discount, decay) for parts in rollouts]
    np.testing.assert_allclose(given[:, :23], np.hstack(expected), rtol=1e-12, atol=1e-14)
    assert not given[:, 23:].any()


def test_returns_per_turn_are_rewards_at_the_ends_of_turns():
    """Turns of one trained token each but the first one, which has two."""
    earned = np.array([[0.0, 0.0, 0.3, 0.0, -0.7, 0.2, 0.0]])
    trained = np.array([[0, 1, 1, 0, 1, 1, 0]], bool)
    returns = np.cumsum(earned[:, ::-1], 1)[:, ::-1]
    segment = np.ones((1, 7), int)
    rewards = module.token_rewards(np.where(trained, returns, np.nan), trained, segment)
    np.testing.assert_allclose(rewards, earned, atol=1e-14)
    # One reward of a rollout is earned once, at its last trained token.
    segment[0, 4:] = 2
    at_the_end = module.token_rewards(np.array([np.nan, 1.0, 0.25])[segment], trained, segment)
    np.testing.assert_array_equal(at_the_end, [[0, 0, 1.0, 0, 0, 0.25, 0]])


@pytest.mark.parametrize('clip', [0.0, 0.3])
def test_the_value_loss_is_that_of_verl(clip):
    rng = np.random.default_rng(3)
    values, old_values, returns = rng.normal(size=(3, 4, 6))
    mask = rng.random((4, 6)) < 0.7
    loss, stats = jax.jit(module.value_loss, static_argnums=4)(
        values, old_values, returns, mask, clip
    )
    squares = (values - returns) ** 2
    expected = squares
    if clip:
        moved = old_values + np.clip(values - old_values, -clip, clip)
        expected = np.maximum(squares, (moved - returns) ** 2)
    np.testing.assert_allclose(loss, np.where(mask, 0.5 * expected, 0), rtol=1e-5, atol=1e-6)
    total, count = stats['squared_error']
    np.testing.assert_allclose([total, count], [squares[mask].sum(), mask.sum()], rtol=1e-5)
    assert float(stats['clip_share'][0]) == (expected > squares)[mask].sum()
