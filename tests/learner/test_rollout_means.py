"""A ratio per rollout covers all its contexts, however they are cut and packed."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from updates import learner_of, make_rows, mean, on_mesh, role

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.role_update import step_loss
from zeroplay_jax.objectives.losses import PolicyLoss
from zeroplay_jax.objectives.policy_gradient import sequence_pg
from zeroplay_jax.selfplay.update import micro_batches
from zeroplay_jax.types import ENV, POLICY, PROMPT, UserError

SETTINGS = dict(clip_low=0.4, clip_high=0.5, aggregation='seq_mean_token_mean')


def in_contexts(row):
    """The same sampled tokens in two contexts with the same tokens before each; those of the first are PROMPT later."""
    trajectory = row.trajectory
    cut = len(trajectory.tokens) // 2
    is_late = np.arange(len(trajectory.tokens)) >= cut
    is_sampled = trajectory.source == POLICY
    early = np.where(is_late & is_sampled, ENV, trajectory.source).astype(np.int8)
    late = np.where(~is_late & is_sampled, PROMPT, trajectory.source).astype(np.int8)
    contexts = []
    for source in (early, late):
        logp = np.where(source == POLICY, trajectory.logp, 0).astype(np.float32)
        contexts.append(dataclasses.replace(trajectory, source=source, logp=logp))
    first, last = contexts
    return dataclasses.replace(row, trajectory=dataclasses.replace(last, earlier=(first,)))


def parts(model):
    """Rows, and the same with every second rollout in two contexts."""
    rows = make_rows(model)
    return rows, [in_contexts(row) if index % 2 else row for index, row in enumerate(rows)]


def loss_and_gradient(policy, rows, settings, shape):
    model, params = policy
    batches = micro_batches(rows, settings, shape)
    return jax.value_and_grad(lambda p: step_loss(model, settings, p, params, batches)[0])(params)


@pytest.mark.parametrize(
    'loss,shape,mesh', [('sequence_pg', (1, 25), (2, 2, 1)), ('geometric_pg', (4, 60), (1, 1, 1))]
)
def test_contexts_of_a_rollout_have_its_ratio(policy, loss, shape, mesh):
    """Equal to the rollout in one context, cut into micro-batches, and in updates on several devices."""
    whole, split = parts(policy[0])
    settings = role(loss=loss, **SETTINGS)
    expected = loss_and_gradient(policy, whole, settings, (16, 25))
    given = loss_and_gradient(policy, split, settings, shape)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), given, expected
    )
    learner = learner_of(on_mesh(policy, mesh), settings, (4, 50), mesh)
    batches = pack(split, micro_rows=4, tokens=50, mode=SETTINGS['aggregation'])
    stats = learner.update('r', batches)
    assert mean(stats['loss']) == pytest.approx(float(expected[0]), rel=1e-4)
    norm = float(optax.tree.norm(expected[1]))
    assert mean(stats['gradient_norm']) == pytest.approx(norm, rel=1e-4)


def undeclared(logp, old_logp, advantage, mask, segment, **clips):
    return sequence_pg(logp, old_logp, advantage, mask, segment, **clips)


def test_a_loss_of_whole_rollouts_that_declares_nothing_is_refused(policy):
    settings = role()
    with settings.ignore_type():
        settings.loss = PolicyLoss(undeclared, ratio_per_token=False)
    learner = learner_of(policy, settings, (4, 50))
    _, split = parts(policy[0])
    with pytest.raises(UserError, match='declare PolicyLoss.rollout_values'):
        learner.update('r', pack(split, micro_rows=4, tokens=50, mode='token'))
