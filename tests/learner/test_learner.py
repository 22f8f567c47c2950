"""The update: retrieved text teaches nothing, NaN stays out, and each term of the loss moves weights as it should."""

import jax
import numpy as np
import optax
import pytest
import tiny
from updates import batches_of, config_of, gradient, learner_of, make_rows, mean, other, role, same

from zeroplay_jax.learner import optimizer
from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.objectives import aggregation, policy_gradient
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.types import POLICY


def test_log_probs_are_those_of_the_temperature(policy):
    temperature = 0.5
    model, params = policy
    (batch,) = batches_of(policy, micro_rows=9, tokens=25)
    config = config_of(loss='reinforce', temperature=temperature)
    value, *_ = gradient(policy, config, [batch])
    states = transformer.hidden(model, params, batch.tokens, batch.positions, batch.segment)
    logits = transformer.logits(model, params, states[:, :-1].reshape(-1, states.shape[-1]))
    scaled = np.asarray(logits, np.float64) / temperature
    logp = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    predicted = np.take_along_axis(logp, batch.tokens[:, 1:].reshape(-1, 1), -1)
    predicted = predicted.reshape(batch.mask[:, 1:].shape)
    terms = np.asarray(batch.weight * batch.advantage, np.float64)[:, 1:] * predicted
    np.testing.assert_allclose(value, -terms[np.asarray(batch.mask)[:, 1:]].sum(), rtol=1e-5)


def sampled_in(batch, rows):
    """Where the policy sampled a token of a batch with all trajectories, by the authors that these name."""
    trajectories = {row.trajectory.tokens.tobytes(): row.trajectory for row in rows}
    sampled = np.zeros_like(batch.mask)
    for row, numbers in enumerate(batch.segment):
        for number in np.unique(numbers[numbers > 0]):
            places = np.flatnonzero(numbers == number)
            trajectory = trajectories.pop(batch.tokens[row, places].tobytes())
            sampled[row, places] = trajectory.source == POLICY
            np.testing.assert_array_equal(batch.positions[row, places], np.arange(len(places)))
    assert not trajectories and sampled.any()
    return sampled


@pytest.mark.parametrize('tokens', [25, 200])
def test_the_tokens_that_teach_are_those_that_the_policy_sampled(policy, tokens):
    rows = make_rows(policy[0])
    (batch,) = pack(rows, micro_rows=9, tokens=tokens, mode='token')
    np.testing.assert_array_equal(batch.mask, sampled_in(batch, rows))


def test_retrieved_text_gets_exactly_zero_gradient(policy):
    """The derivative of the loss by the log-prob of a retrieved or prompt token is exactly 0."""
    rows = make_rows(policy[0], 4)
    (batch,) = pack(rows, micro_rows=4, tokens=25, mode='token')

    def value(logp):
        per_token, _ = policy_gradient.token_pg(
            logp, batch.old_logp, batch.advantage, batch.mask, clip_low=0.2, clip_high=0.2
        )
        return aggregation.aggregate(per_token, batch.weight)

    slope = np.asarray(jax.grad(value)(batch.old_logp + 0.01))
    sampled = sampled_in(batch, rows)
    assert (slope[~sampled] == 0).all() and (slope[sampled] != 0).any()


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(policy):
    learner = learner_of(policy, role())
    batches = batches_of(policy)
    learner.update('r', batches)
    before = jax.device_get(learner.state)
    batches[0].advantage[batches[0].mask] = np.inf
    stats = learner.update('r', batches)
    assert stats['skipped_updates'] == (1.0, 1.0) and stats['gradient_norm'][1] == 0
    # Nor does an update without anything to learn from.
    assert learner.update('r', []) == {'skipped_updates': (1.0, 1.0)}
    same(learner.state, before)


def test_kl_pulls_back_to_the_first_weights(policy):
    batches = batches_of(policy, 6, micro_rows=3)
    for batch in batches:
        batch.advantage[:] = 0
    learner = learner_of(policy, role(kl_coef=1.0, learning_rate=1e-3), (3, 50))
    learner.restore(learner.state | {'params': other(policy[1])})
    kl = [mean(learner.update('r', batches)['kl']) for _ in range(6)]
    assert kl[-1] < 0.8 * kl[0]


def test_the_optimiser_warms_up_clips_and_leaves_norms_undecayed():
    tx = optimizer.make(role(warmup_steps=4, clip_norm=1.0, weight_decay=0.0, learning_rate=0.1))
    params = {'w': np.ones((2, 2), np.float32)}
    state, sizes = tx.init(params), []
    for _ in range(6):
        updates, state = tx.update({'w': np.full((2, 2), 1e6, np.float32)}, state, params)
        sizes.append(float(np.abs(updates['w']).max()))
    np.testing.assert_allclose(sizes, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rtol=1e-4)
    params = {'kernel': np.ones((2, 2)), 'scale': np.ones(2)}
    assert optimizer.matrices(params) == {'kernel': True, 'scale': False}


def test_one_program_for_any_number_of_micro_batches(policy):
    learner = learner_of(policy, role(), (2, 50))
    several = batches_of(policy, 9, micro_rows=2)
    norm = mean(learner.update('r', several)['gradient_norm'])
    whole = optax.tree.norm(gradient(policy, config_of(), several)[2])
    assert len(several) > 1 and norm == pytest.approx(float(whole), rel=1e-4)
    for count in (3, 30):
        learner.update('r', batches_of(policy, count, micro_rows=2))
    update = learner._role_updates['r']
    assert update.accumulate._cache_size() == 1 and update.apply._cache_size() == 1


def test_a_rollout_may_fill_a_row(policy):
    rows = make_rows(policy[0])
    longest = max(len(row.trajectory.tokens) for row in rows)
    batches = pack(rows, micro_rows=1, tokens=longest, mode='token')
    assert sum(batch.segment.max() for batch in batches) == len(rows)
    with pytest.raises(ValueError, match=f'micro.tokens={longest - 1}'):
        pack(rows, micro_rows=1, tokens=longest - 1, mode='token')


# Two roles on one set of weights, each with its own loss; and ratios to log-probs of the trainer


@pytest.mark.parametrize('shared', [False, True])
def test_roles_train_the_same_weights(policy, shared):
    model, params = policy
    roles = {'solver': role(), 'proposer': role(loss='reinforce')}
    learner = Learner(model, sharding.make_mesh(), roles, params, (4, 50), shared_optimizer=shared)
    assert set(learner.state['opt']) == ({'solver'} if shared else {'solver', 'proposer'})
    learner.update('solver', batches_of(policy))
    between = jax.device_get(learner.state)
    learner.update('proposer', batches_of(policy))
    assert (learner.params['embedding'] != between['params']['embedding']).any()
    assert (tiny.gap(learner.state['opt']['solver'], between['opt']['solver']) > 0) == shared


def test_ratios_can_be_taken_against_the_trainers_own_log_probs(policy):
    batches = batches_of(policy, micro_rows=2)
    learner = learner_of(policy, role(tis_cap=2.0, old_logp='trainer'), (2, 50))
    again = learner.recompute_old_logp('r', batches)
    for old, new in zip(batches, again, strict=True):
        np.testing.assert_array_equal(new.sampler_logp, old.old_logp)
        assert (new.old_logp[~new.mask] == 0).all()
        assert np.abs(new.old_logp - old.old_logp).max() > 0.1
    stats = learner.update('r', again)
    assert mean(stats['ratio']) == pytest.approx(1.0, abs=1e-5)
    ratios = [np.exp(batch.old_logp - batch.sampler_logp)[batch.mask] for batch in again]
    truncated = np.minimum(np.concatenate(ratios), 2.0)
    assert mean(stats['importance']) == pytest.approx(truncated.mean(), rel=1e-4)
    terms = np.concatenate([(batch.weight * batch.advantage)[batch.mask] for batch in again])
    assert mean(stats['loss']) == pytest.approx(-np.sum(terms * truncated), rel=1e-3)
