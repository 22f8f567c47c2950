"""Advantages from values and the value loss, against sums over whole rollouts in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zeroplay_jax.objectives import values as module


def rollout(rng, length):
    """Rewards, values and mask of one rollout, with a prompt and retrieved tokens that are not trained."""
    mask = rng.random(length) < 0.6
    mask[0] = False
    mask[rng.integers(1, length)] = True
    return rng.normal(size=length), rng.normal(size=length), mask


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
    row = np.zeros((3, 1, width))
    segment = np.zeros((1, width), int)
    start = 0
    for number, parts in enumerate(rollouts, 1):
        stop = start + len(parts[0])
        for array, part in zip(row, parts, strict=True):
            array[0, start:stop] = part
        segment[0, start:stop] = number
        start = stop
    rewards, values, mask = row
    return rewards, values, mask.astype(bool), segment


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
    rng = np.random.default_rng(3)
    rollouts = [rollout(rng, length) for length in (9, 6)]
    _, values, mask, segment = packed(rollouts, width=17)
    # Turns of one trained token each but the first, which has two.
    returns = np.zeros(mask.shape)
    expected = np.zeros(mask.shape)
    for number in (1, 2):
        trained = np.flatnonzero(mask[0] & (segment[0] == number))
        earned = rng.normal(size=len(trained))
        earned[0] = 0.0
        expected[0, trained] = earned
        returns[0, trained] = np.cumsum(earned[::-1])[::-1]
    rewards = module.token_rewards(np.where(mask, returns, np.nan), mask, segment)
    np.testing.assert_allclose(rewards, expected, atol=1e-14)
    # One reward of a rollout is earned once, at its last trained token.
    at_the_end = module.token_rewards(np.array([np.nan, 1.0, 0.25])[segment], mask, segment)
    assert sorted(at_the_end[at_the_end != 0]) == [0.25, 1.0]
    advantages, targets = module.gae(rewards, values, mask, segment)
    np.testing.assert_allclose(advantages[mask], (returns - values)[mask], atol=1e-14)
    np.testing.assert_allclose(targets[mask], returns[mask], atol=1e-14)


def test_neither_retrieved_tokens_nor_neighbours_nor_nan_change_a_rollout():
    rng = np.random.default_rng(2)
    first, second = rollout(rng, 8), rollout(rng, 8)
    options = dict(discount=0.9, decay=0.8)
    alone, _ = module.gae(*packed([first], width=8), **options)
    together, _ = module.gae(*packed([second, first], width=20), **options)
    np.testing.assert_array_equal(together[0, 8:16], alone[0])
    rewards, values, mask, segment = packed([first], width=8)
    dirty = module.gae(
        np.where(mask, rewards, np.nan), np.where(mask, values, np.inf), mask, segment, **options
    )
    np.testing.assert_array_equal(dirty[0], alone)
    # Untrained tokens between two trained ones are no step.
    is_kept = np.append(np.flatnonzero(mask[0]), np.flatnonzero(~mask[0])[:1])
    is_kept.sort()
    shorter, _ = module.gae(
        *(array[:, is_kept] for array in (rewards, values, mask, segment)), **options
    )
    np.testing.assert_array_equal(shorter[0][mask[0, is_kept]], alone[mask])


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


def test_a_value_that_moved_too_far_has_no_gradient_away_from_its_return():
    # Far above its return and moving on from it; far below and moving towards it.
    values, old_values, returns = jnp.array([[[1.0, 1.0]], [[0.0, 0.0]], [[0.2, 3.0]]])

    def total_loss(values):
        return module.value_loss(values, old_values, returns, jnp.ones((1, 2), bool), 0.5)[0].sum()

    # ½·(1 − .2)² exceeds ½·(.5 − .2)²: the larger one counts. ½·(.5 − 3)² exceeds ½·(1 − 3)², and is constant.
    np.testing.assert_allclose(jax.grad(total_loss)(values), [[0.8, 0.0]], rtol=1e-6)
