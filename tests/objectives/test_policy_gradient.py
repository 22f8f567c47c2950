import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
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
OF_SEQUENCES = 'seq_mean_token_mean'


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
    plain, _ = pg.token_pg(*arrays, mask, dual_clip=0.0, **clips)
    close(averaged(plain, mask), expected['loss']['no_dual_clip_token-mean'])


@pytest.mark.parametrize(
    'record, function, kind',
    [
        ('dspo_gspo_loss', pg.sequence_pg, 'narrow'),
        ('dspo_gspo_loss', pg.sequence_pg, 'wide'),
        ('gmpo_loss', pg.geometric_pg, 'log'),
        ('cispo_loss', pg.cispo, 'token'),
    ],
)
def test_golden_losses_with_absurd_values_at_masked_places(golden, record, function, kind):
    inputs, expected = golden[record]
    logp, *arrays = tensors(inputs)
    low, high = inputs[f'clip_{kind}']
    mode = 'token' if kind == 'token' else OF_SEQUENCES

    def value(logp):
        per_token, stats = function(logp, *arrays, clip_low=low, clip_high=high)
        return averaged(per_token, arrays[2], mode), stats

    (value, stats), gradient = jax.value_and_grad(value, has_aux=True)(logp)
    close(value, expected[f'loss_{kind}'])
    if kind != 'log':
        close(gradient, expected[f'grad_logp_{kind}'])
        assert stats['clip_share'][0] == np.sum(expected[f'clipped_{kind}'])


# Against float64, rollout by rollout. `now` is logp where the gradient is taken.


def token_reference(logp, old, a, now):
    """Sum of the clipped losses of one rollout's trained tokens."""
    total = 0.0
    for ratio in np.exp(np.clip(logp - old, -20, 20)):
        loss = -min(a * ratio, a * min(max(ratio, 1 - CLIPS['clip_low']), 1 + CLIPS['clip_high']))
        total += min(loss, -a * 3.0) if a < 0 else loss
    return total


def sequence_reference(logp, old, a, now):
    """|y| times min(s·A, clip(s)·A), negated."""
    s = np.exp(np.mean(logp - old))
    return -len(logp) * min(s * a, a * min(max(s, 1 - CLIPS['clip_low']), 1 + CLIPS['clip_high']))


def geometric_reference(logp, old, a, now):
    """|y| times A·exp(mean of the pessimistically clipped log-ratios), negated."""
    bounded = [
        min(x * a, min(max(x, -CLIPS['clip_low']), CLIPS['clip_high']) * a) / a
        for x in (logp - old)
    ]
    return -len(logp) * a * np.exp(np.mean(bounded))


def cispo_reference(logp, old, a, now):
    """The clipped importance weight of each token is a constant of the gradient."""
    ratio = np.exp(np.clip(now - old, -20, 20))
    weight = np.clip(ratio, 1 - CLIPS['clip_low'], 1 + CLIPS['clip_high'])
    return -np.sum(weight * a * logp)


REFERENCES = {
    'cispo': cispo_reference,
    'token_pg': token_reference,
    'sequence_pg': sequence_reference,
    'geometric_pg': geometric_reference,
    'reinforce': lambda logp, old, a, now: -a * np.sum(logp),
}


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
@pytest.mark.parametrize('name', POLICY_LOSSES)
def test_value_and_gradient_match_float64(batch, name, mode):
    now, old = (batch[key].astype(np.float64) for key in ('logp', 'old_logp'))

    def reference(logp):
        losses = []
        for row, on in enumerate(batch['mask']):
            advantage = float(batch['advantage'][row, 0])
            parts = (array[row, on] for array in (logp, old))
            loss = REFERENCES[name](*parts, advantage, now[row, on]) if on.any() else 0
            losses.append(loss)
        return average(losses, batch['mask'].sum(1), mode)

    value, gradient, _ = run(name, batch, weights(batch, mode))
    close(value, reference(now))
    # A sequence ratio is differentiated through each token's own share: the formula's gradient under the mean only.
    if mode == OF_SEQUENCES or POLICY_LOSSES[name].elementwise:
        close(gradient, differences(reference, now))


# What the objectives have in common


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
@pytest.mark.parametrize('name', [name for name in POLICY_LOSSES if POLICY_LOSSES[name].uses_ratio])
def test_ratio_one_has_the_gradient_of_reinforce(batch, name, mode):
    batch['old_logp'] = batch['logp']
    weight = weights(batch, mode)
    _, gradient, stats = run(name, batch, weight)
    close(gradient, -batch['advantage'] * weight)
    assert stats['clip_share'][0] == 0


@pytest.mark.parametrize(
    'name, high, low',
    [
        ('token_pg', 3.0, 0.8),
        ('sequence_pg', np.exp(10.0), 0.8),
        ('geometric_pg', np.exp(10.0), np.exp(-0.2)),
    ],
)
def test_an_extreme_rollout_stays_finite(name, high, low):
    """Two rollouts of one token each: one log-ratio far above every bound, the other far below."""
    logp, ones = jnp.array([[300.0, -300.0]]), np.ones((1, 2), np.float32)

    def loss(logp):
        per_token, _ = LOSSES[name](logp, 0 * ones, -ones, ones > 0, np.array([[1, 2]]))
        return per_token.sum(), per_token

    gradient, per_token = jax.grad(loss, has_aux=True)(logp)
    close(per_token, [[high, low]])
    assert np.array_equal(gradient, [[0.0, 0.0]])
