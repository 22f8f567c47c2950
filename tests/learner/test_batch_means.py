"""Means over the batch that a loss declares are the same however the batch is cut."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from updates import batches_of, learner_of, make_rows, mean, on_mesh, role

from zeroplay_jax.learner.role_update import step_loss
from zeroplay_jax.objectives import masking
from zeroplay_jax.objectives.checks import check_loss
from zeroplay_jax.objectives.losses import LossError, PolicyLoss
from zeroplay_jax.policy import transformer
from zeroplay_jax.selfplay.update import micro_batches


def moments(logp, old_logp, advantage, mask, segment):
    ratio = jnp.exp(logp - old_logp)
    return {'advantage': (advantage, mask), 'ratio': (ratio, jnp.ones_like(ratio))}


def centred(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip, means):
    mask, logp, old_logp, advantage = masking.masked('centred', mask, logp, old_logp, advantage)
    ratio = jnp.exp(logp - old_logp) / means['ratio']
    shifted = jnp.where(mask, advantage - means['advantage'], 0.0)
    return -shifted * ratio, {'mean_ratio': masking.total(means['ratio'], mask)}


DECLARED = PolicyLoss(centred, batch_means=moments)


def test_means_are_those_of_the_batch_however_it_is_cut(policy):
    """In policy_loss with whole rows, and in updates with single tokens."""
    model, params = policy
    rows, settings = make_rows(model), role()
    with settings.ignore_type():
        settings.loss = DECLARED
    (whole,) = micro_batches(rows, settings, (16, 25))
    logp, _ = transformer.score(model, params, whole.tokens, whole.positions, whole.segment, 1.0)
    expected = np.exp(logp - whole.old_logp)[whole.mask].mean()
    value, _ = step_loss(model, settings, params, params, [whole])
    split = micro_batches(rows, settings, (2, 60))
    split_value, stats = step_loss(model, settings, params, params, split)
    assert float(split_value) == pytest.approx(float(value), rel=1e-5)
    assert mean(stats['mean_ratio']) == pytest.approx(expected, rel=1e-5)

    with settings.ignore_type():
        settings.loss = dataclasses.replace(DECLARED, elementwise=True)
    for mesh in ((1, 1, 1), (2, 2, 1)):
        learner = learner_of(on_mesh(policy, mesh), settings, (4, 60), mesh)
        update = learner.update('r', batches_of(policy, tokens=60))
        assert update['loss'][0] == pytest.approx(float(value), rel=1e-5)
        assert mean(update['mean_ratio']) == pytest.approx(expected, rel=1e-5)


def test_a_declared_loss_passes_and_its_means_are_tried():
    check_loss(dataclasses.replace(DECLARED, elementwise=True))

    def of_rows(logp, old_logp, advantage, mask, segment):
        values = jnp.ones_like(logp)
        return {'advantage': (advantage - advantage.mean(), mask), 'ratio': (values, values)}

    with pytest.raises(LossError, match='centred: .*means advantage of a rollout depend on'):
        check_loss(PolicyLoss(centred, batch_means=of_rows))
