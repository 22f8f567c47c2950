import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
    ARRAYS,
    CLIPS,
    LOSSES,
    SEQUENCE_MODES,
    average,
    close,
    differences,
    mean,
    run,
    spread,
    weights,
)

from zeroplay_jax.objectives import aggregation
from zeroplay_jax.objectives import policy_gradient as pg
from zeroplay_jax.objectives.losses import POLICY_LOSSES

GOLDEN_MODES = {
    'token': 'token-mean',
    'seq_mean_token_sum': 'seq-mean-token-sum',
    'seq_mean_token_mean': 'seq-mean-token-mean',
    'constant': 'seq-mean-token-sum-norm(len=4)',
}


def tensors(inputs):
    """(logp, old_logp, advantage, mask, segment) of a golden record, one rollout per row."""
    mask = np.array(inputs['mask'], bool)
    return (
        np.array(inputs['new_logp'], np.float32),
        np.array(inputs['old_logp'], np.float32),
        spread(inputs['adv'], mask),
        mask,
        np.ones(mask.shape, np.int32),
    )


def averaged(per_token, mask, mode='token', total=None):
    """The loss of rollouts of one row each."""
    return aggregation.aggregate(per_token, aggregation.token_weights(mask, None, mode, total))


def value_and_grad(loss, arrays, mode='seq_mean_token_mean'):
    """(loss, gradient, losses of the tokens, statistics)."""

    def of_sequences(logp):
        per_token, stats = loss(logp, *arrays[1:])
        return averaged(per_token, arrays[3], mode), (per_token, stats)

    program = jax.jit(jax.value_and_grad(of_sequences, has_aux=True))
    (value, extra), gradient = program(arrays[0])
    return value, gradient, *extra


# Golden vectors


def test_golden_clip_and_dual_clip(golden):
    inputs, expected = golden['ppo_clip_dual_clip_aggregation']
    *arrays, mask, _ = tensors(inputs)
    clips = dict(clip_low=inputs['clip_low'], clip_high=inputs['clip_high'])
    per_token, stats = pg.token_pg(*arrays, mask, dual_clip=inputs['dual_c'], **clips)
    assert per_token.dtype == jnp.float32
    close(per_token, np.where(mask, expected['token_loss'], 0))
    close(mean(stats['ratio']), np.array(expected['ratio'])[mask].mean())
    # Clipped: ratio 1.49 at A > 0, ratio 0.55 at A < 0. Bounded: ratio 4.48 at A < 0.
    assert stats['clip_share'] == (2, 7) and stats['dual_clip_share'] == (1, 7)
    for mode, name in GOLDEN_MODES.items():
        total = 4.0 if mode == 'constant' else None
        close(averaged(per_token, mask, mode, total), expected['loss'][name])
    plain, _ = pg.token_pg(*arrays, mask, **clips)
    close(averaged(plain, mask), expected['loss']['no_dual_clip_token-mean'])


@pytest.mark.parametrize('width', ['narrow', 'wide'])
def test_golden_sequence_ratio_with_absurd_values_at_masked_places(golden, width):
    inputs, expected = golden['dspo_gspo_loss']
    low, high = inputs[f'clip_{width}']
    loss = functools.partial(pg.sequence_pg, clip_low=low, clip_high=high)
    value, gradient, _, stats = value_and_grad(loss, tensors(inputs))
    close(value, expected[f'loss_{width}'])
    close(gradient, expected[f'grad_logp_{width}'])
    # The third rollout has nothing to learn from and is not counted.
    assert stats['clip_share'] == (sum(expected[f'clipped_{width}']), 2)
    close(mean(stats['sequence_ratio']), np.mean(expected['s'][:2]))


def test_golden_geometric_mean(golden):
    inputs, expected = golden['gmpo_loss']
    low, high = inputs['clip_log']
    arrays = tensors(inputs)
    loss = functools.partial(pg.geometric_pg, clip_low=low, clip_high=high)
    value, _, per_token, stats = value_and_grad(loss, arrays)
    close(value, expected['loss'])
    wanted = -np.array(inputs['adv'])[:, None] * np.array(expected['geo_ratio'])[:, None]
    close(per_token, np.where(arrays[3], wanted, 0))
    close(mean(stats['sequence_ratio']), np.mean(expected['geo_ratio']))


def test_golden_hrpo_objectives(golden):
    """Dr. Zero eq. 2 is 'seq_mean_token_sum' and its code 'token', each with the sign of a loss."""
    inputs, expected = golden['hrpo']
    lengths = np.array(inputs['seq_len'])
    mask = np.arange(lengths.max()) < lengths[:, None]
    logp = spread(np.array(inputs['seq_logprob_sum']) / lengths, mask)
    advantage = spread(expected['advantage_code_ddof1'], mask)
    per_token, stats = pg.reinforce(logp, logp, advantage, mask)
    of_paper = averaged(per_token, mask, 'seq_mean_token_sum')
    close(of_paper, -expected['J_paper_mean_over_N_of_A_times_seq_logprob'])
    close(averaged(per_token, mask), -expected['J_code_token_mean'])
    close(stats['logp'][0], sum(inputs['seq_logprob_sum']))


# Against float64, rollout by rollout


def token_reference(logp, old, a, dual_clip=3.0):
    """Sum of the clipped losses of one rollout's trained tokens."""
    total = 0.0
    for ratio in np.exp(np.clip(logp - old, -20, 20)):
        loss = -min(a * ratio, a * min(max(ratio, 1 - CLIPS['clip_low']), 1 + CLIPS['clip_high']))
        total += min(loss, -a * dual_clip) if dual_clip and a < 0 else loss
    return total


def sequence_reference(logp, old, a):
    """|y| times min(s·A, clip(s)·A), negated."""
    s = np.exp(np.mean(logp - old))
    return -len(logp) * min(s * a, a * min(max(s, 1 - CLIPS['clip_low']), 1 + CLIPS['clip_high']))


def geometric_reference(logp, old, a):
    """|y| times A·exp(mean of the pessimistically clipped log-ratios), negated."""
    bounded = [
        min(x * a, min(max(x, -CLIPS['clip_low']), CLIPS['clip_high']) * a) / a
        for x in (logp - old)
    ]
    return -len(logp) * a * np.exp(np.mean(bounded))


def cispo_weight(logp, old):
    """The clipped importance weight of each token, a constant of the gradient."""
    ratio = np.exp(np.clip(logp - old, -20, 20))
    return np.clip(ratio, 1 - CLIPS['clip_low'], 1 + CLIPS['clip_high'])


def cispo_reference(logp, old, a):
    return -np.sum(cispo_weight(logp, old) * a * logp)


REFERENCES = {
    'cispo': cispo_reference,
    'token_pg': token_reference,
    'sequence_pg': sequence_reference,
    'geometric_pg': geometric_reference,
    'reinforce': lambda logp, old, a: -a * np.sum(logp),
}


def reference(name, batch, mode, logp=None):
    logp = np.asarray(batch['logp'] if logp is None else logp, np.float64)
    old = batch['old_logp'].astype(np.float64)
    losses = []
    for row, on in enumerate(batch['mask']):
        advantage = float(batch['advantage'][row, 0])
        is_trained = on.any()
        losses.append(REFERENCES[name](logp[row, on], old[row, on], advantage) if is_trained else 0)
    return average(losses, batch['mask'].sum(1), mode)


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
@pytest.mark.parametrize('name', POLICY_LOSSES)
def test_value_and_gradient_match_float64(batch, name, mode):
    value, gradient, _ = run(name, batch, weights(batch, mode))
    close(value, reference(name, batch, mode))
    assert not np.any(np.asarray(gradient)[~batch['mask']])
    # A sequence ratio is differentiated through each token's own share: the formula's gradient under the mean only.
    # The weights of CISPO are constants of its gradient, which has a test of its own.
    if name == 'cispo':
        return
    if mode == 'seq_mean_token_mean' or POLICY_LOSSES[name].elementwise:
        close(gradient, differences(lambda logp: reference(name, batch, mode, logp), batch['logp']))


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
def test_cispo_has_the_gradient_of_its_formula_with_constant_weights(batch, mode):
    """Central differences of the float64 formula in which the importance weights are those of the current weights."""
    mask, old = batch['mask'], batch['old_logp'].astype(np.float64)
    constant = cispo_weight(batch['logp'].astype(np.float64), old)

    def objective(logp):
        losses = np.sum(-constant * batch['advantage'] * logp * mask, axis=1)
        return average(losses, mask.sum(1), mode)

    _, gradient, stats = run('cispo', batch, weights(batch, mode))
    close(gradient, differences(objective, batch['logp']))
    # Unlike PPO's clip, this one removes no gradient: every trained token has one.
    assert stats['clip_share'][0] > 0
    assert np.all(np.asarray(gradient)[mask] != 0)


def test_golden_cispo_with_absurd_values_at_masked_places(golden):
    inputs, expected = golden['cispo_loss']
    arrays = tensors(inputs)
    low, high = inputs['clip']
    loss = functools.partial(pg.cispo, clip_low=low, clip_high=high)
    value, gradient, per_token, stats = value_and_grad(loss, arrays, 'token')
    close(per_token, expected['token_loss'])
    close(value, expected['loss_token_mean'])
    close(gradient, expected['grad_logp_token_mean'])
    assert stats['clip_share'] == (expected['clipped_tokens'], arrays[3].sum())


@pytest.mark.parametrize('dual_clip', [None, 0.0, 1.05])
def test_other_dual_clips_match_float64(batch, dual_clip):
    arrays = [batch[name] for name in (*ARRAYS, 'mask')]
    per_token, _ = pg.token_pg(*arrays, dual_clip=dual_clip, **CLIPS)
    for row, on in enumerate(batch['mask']):
        logp, old = (batch[name][row, on].astype(np.float64) for name in ('logp', 'old_logp'))
        advantage = float(batch['advantage'][row, 0])
        close(np.sum(per_token[row]), token_reference(logp, old, advantage, dual_clip))


# What the objectives have in common


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
@pytest.mark.parametrize('name', [name for name in POLICY_LOSSES if POLICY_LOSSES[name].uses_ratio])
def test_ratio_one_has_the_gradient_of_reinforce(batch, name, mode):
    batch['old_logp'] = batch['logp']
    weight = weights(batch, mode)
    _, gradient, stats = run(name, batch, weight)
    close(gradient, run('reinforce', batch, weight)[1])
    close(gradient, -batch['advantage'] * weight)
    assert stats['clip_share'][0] == 0


def test_an_extreme_ratio_stays_finite():
    mask = np.ones((1, 2), bool)
    logp, old = jnp.array([[0.0, -300.0]]), jnp.array([[-300.0, 0.0]])
    per_token, stats = pg.token_pg(logp, old, -jnp.ones((1, 2)), mask, clip_low=0.2, clip_high=0.2)
    close(per_token, [[np.exp(20), 0.8]])
    close(stats['ratio'][0], np.exp(20) + np.exp(-20))


@pytest.mark.parametrize('name, low', [('sequence_pg', 0.8), ('geometric_pg', np.exp(-0.2))])
def test_an_extreme_rollout_stays_finite(name, low):
    """Two rollouts of one token each: one log-ratio far above every bound, the other far below."""
    logp, old = jnp.array([[300.0, -300.0]]), jnp.zeros((1, 2))

    def loss(logp):
        per_token, _ = LOSSES[name](logp, old, -ONE, MASK, np.array([[1, 2]]))
        return per_token.sum(), per_token

    gradient, per_token = jax.grad(loss, has_aux=True)(logp)
    close(per_token, [[np.exp(10.0), low]])
    assert np.array_equal(gradient, [[0.0, 0.0]])


ONE = np.ones((1, 2), np.float32)
MASK = np.ones((1, 2), bool)
