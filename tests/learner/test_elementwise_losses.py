"""Losses of single tokens have their gradient computed with the logits: the same gradient, with fewer products."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
import updates
from updates import DISTILS, batches_of, config_of, other, packed, taught_rows

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
