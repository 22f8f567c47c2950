"""Losses of single tokens have their gradient computed with the logits: the same gradient, with fewer products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import updates
from updates import DISTILS, batches_of, config_of, other, packed, taught_rows

from zeroplay_jax.policy.head import Head, map_tokens, sum_tokens

# Relative, by norm of a parameter's gradient.
FLOAT32 = 1e-6


@pytest.fixture(scope='module')
def policy(policy):
    return dataclasses.replace(policy[0], logit_chunk=14), policy[1]


def by_rows(config):
    """The same loss, called with whole rows."""
    policy_loss = dataclasses.replace(config.policy_loss, elementwise=False)
    return dataclasses.replace(config, policy_loss=policy_loss)


def on_policy(batch, seed=0):
    """The batch with ratios on both sides of the clips, and another sampler."""
    rng = np.random.default_rng(seed)
    change = lambda scale: np.where(batch.mask, rng.normal(size=batch.mask.shape) * scale, 0)
    old_logp = np.where(batch.mask, -3 + change(0.5), 0).astype(np.float32)
    sampler_logp = (old_logp + change(0.5)).astype(np.float32)
    return dataclasses.replace(batch, old_logp=old_logp, sampler_logp=sampler_logp)


def gradient(policy, config, batch, **options):
    """(gradient of the loss times a number, statistics)."""
    _, stats, gradients = updates.gradient(policy, config, [batch], scale=-8.0, **options)
    return gradients, stats


def assert_close(ours, theirs, tolerance):
    gradients, stats = ours
    expected_gradients, expected_stats = theirs
    assert tiny.gap(gradients, expected_gradients) <= tolerance
    assert all(np.linalg.norm(x) > 0 for x in jax.tree.leaves(expected_gradients))
    assert stats.keys() == expected_stats.keys()
    for name, (total, count) in expected_stats.items():
        assert stats[name][0] == pytest.approx(total, rel=tolerance, abs=1e-5), name
        assert stats[name][1] == count


def check(policy, config, batch, tolerance=FLOAT32, **options):
    """Checks that the gradient and the statistics are those of whole rows; returns them."""
    ours = gradient(policy, config, on_policy(batch), **options)
    assert_close(ours, gradient(policy, by_rows(config), on_policy(batch), **options), tolerance)
    return ours


# A policy loss with all other terms of single tokens.
TERMS = dict(kl_coef=0.1, entropy_coef=0.01, tis_cap=1.5, tis_level='token', dual_clip=1.2)


@pytest.fixture
def wide(policy):
    (batch,) = batches_of(policy, 16, micro_rows=8, tokens=60)
    return batch


@pytest.mark.parametrize(
    'name,logits,mesh', [('reinforce', 'all', (1, 1, 1)), ('token_pg', 'trained', (2, 2, 2))]
)
def test_the_gradient_and_the_statistics_are_those_of_whole_rows(policy, wide, name, logits, mesh):
    check(policy, config_of(loss=name, **TERMS), wide, mesh=mesh, logits=logits)


def test_distillation_has_the_gradient_of_whole_rows(policy):
    rows = taught_rows(policy[0], 8)
    for number, row in enumerate(rows):
        row.advantage = 0.5 - number % 3
    (batch,) = packed(rows, micro_rows=8)
    config = config_of(**DISTILS, **TERMS)
    options = dict(mesh=(2, 2, 1), teacher=other(policy[1]), logits='trained')
    assert 'distill_tail_mass' in check(policy, config, batch, **options)[1]


# Products with the output head


# The sum over tokens


def test_wanted_tokens_alone_are_visited():
    """Once in a sum, and twice, forward and backward, in a map: a NaN in the other states is never read."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(3, 40, 8)).astype(np.float32)
    wanted = rng.random((3, 40)) < 0.2
    wanted[1] = False
    states[~wanted] = np.nan
    head = {'head': rng.normal(size=(8, 5)).astype(np.float32)}
    factor = rng.normal(size=wanted.shape).astype(np.float32)
    visited = []

    def values_of(head, chunk_states, shared, per_token):
        jax.debug.callback(visited.append, chunk_states.shape[0])
        return jnp.sum(chunk_states @ head['head'], -1) * per_token

    def sums_of(*arguments):
        values = values_of(*arguments)
        return jnp.sum(values), jnp.sum(values**2)

    def mapped(head, states):
        values = map_tokens(values_of, Head(head, False, 7, None), states, (), factor, wanted)
        return jnp.sum(values), jnp.sum(values**2)

    def total(head, states):
        return sum_tokens(sums_of, Head(head, False, 7, None), states, (), factor, wanted)

    clean = np.nan_to_num(states)
    values = (clean @ head['head']).sum(-1) * factor * wanted
    head_slope = np.einsum('rl,rld->d', factor * wanted, clean)[:, None].repeat(5, 1)
    state_slopes = (factor * wanted)[..., None] * head['head'].sum(-1)
    for function, passes in ((mapped, 2), (total, 1)):
        visited.clear()
        slopes, squares = jax.grad(function, (0, 1), has_aux=True)(head, states)
        jax.effects_barrier()
        assert visited == [7] * passes * -(-wanted.sum() // 7)
        np.testing.assert_allclose(squares, (values**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(slopes[0]['head'], head_slope, atol=1e-4)
        np.testing.assert_allclose(slopes[1], state_slopes, atol=1e-5)
        np.testing.assert_allclose(function(head, states)[0], values.sum(), rtol=1e-5)
