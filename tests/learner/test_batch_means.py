"""Means over the batch that a loss declares are the same however the batch is cut."""

import jax.numpy as jnp
import numpy as np
import pytest
from updates import batches_of, learner_of, make_rows, role

from zeroplay_jax.learner.means import with_means
from zeroplay_jax.learner.role_update import step_loss
from zeroplay_jax.objectives import masking
from zeroplay_jax.objectives.checks import check_loss
from zeroplay_jax.objectives.losses import LossError, PolicyLoss
from zeroplay_jax.policy import sharding
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


def settings_of(elementwise):
    settings = role()
    with settings.ignore_type():
        settings.loss = PolicyLoss(centred, elementwise=elementwise, batch_means=moments)
    return settings


def score(weights, batch, base):
    return batch.old_logp - 0.3 * batch.advantage


@pytest.mark.fault('K', 'declared means over the batch, cut and packed in other ways')
def test_means_are_those_of_the_batch(policy):
    (whole,) = batches_of(policy, micro_rows=16, tokens=25)
    ratio = np.exp(score(None, whole, None) - whole.old_logp)[whole.mask]
    expected = {'advantage': whole.advantage[whole.mask].mean(), 'ratio': ratio.mean()}
    for micro, tokens, mesh in [(1, 25, (1, 1, 1)), (4, 60, (2, 2, 1)), (8, 25, (2, 2, 2))]:
        batches = batches_of(policy, micro_rows=micro, tokens=tokens)
        place = sharding.rows(sharding.make_mesh(*mesh))
        batches = [sharding.put_rows(batch, place) for batch in batches]
        for batch in with_means(DECLARED, batches, score, {}):
            for name, mean in expected.items():
                np.testing.assert_allclose(batch.means[name], mean, rtol=1e-5)
                assert batch.means[name].shape == (micro, tokens)


def test_the_update_and_policy_loss_read_the_same_means(policy):
    """The value is that of one micro-batch for both forms of the loss."""
    model, params = policy
    rows = make_rows(model)
    settings = settings_of(False)
    (value, stats), (split, _) = (
        step_loss(model, settings, params, params, micro_batches(rows, settings, shape))
        for shape in ((16, 25), (2, 60))
    )
    assert float(split) == pytest.approx(float(value), rel=1e-5)

    learner = learner_of(policy, settings_of(True), (4, 60))
    update = learner.update('r', batches_of(policy, tokens=60))
    assert update['loss'][0] == pytest.approx(float(value), rel=1e-5)
    assert update['mean_ratio'][0] == pytest.approx(float(stats['mean_ratio'][0]), rel=1e-5)


def test_a_declared_loss_passes_and_its_means_are_tried():
    check_loss(PolicyLoss(centred, elementwise=True, batch_means=moments))

    def of_rows(logp, old_logp, advantage, mask, segment):
        values = jnp.ones_like(logp)
        return {'advantage': (advantage - advantage.mean(), mask), 'ratio': (values, values)}

    with pytest.raises(LossError, match='centred: .*means advantage of a rollout depend on'):
        check_loss(PolicyLoss(centred, batch_means=of_rows))
