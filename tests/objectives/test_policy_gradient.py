import functools

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
    make,
    mean,
    run,
    shape_error,
    spread,
    weights,
)

from zeroplay_jax.objectives import aggregation
from zeroplay_jax.objectives import policy_gradient as pg

GOLDEN_MODES = {
    'token': 'token-mean',
    'seq_mean_token_sum': 'seq-mean-token-sum',
    'seq_mean_token_mean': 'seq-mean-token-mean',
    'constant': 'seq-mean-token-sum-norm(len=4)',
}
WRAPS = pytest.mark.parametrize('wrap', [jax.jit, lambda f: f], ids=['jit', 'plain'])


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


def value_and_grad(loss, arrays):
    weight = aggregation.token_weights(arrays[3], None, 'seq_mean_token_mean')
    return jax.jit(
        jax.value_and_grad(lambda logp: aggregation.aggregate(loss(logp, *arrays[1:])[0], weight))
    )(arrays[0])


# Golden vectors


@WRAPS
def test_golden_clip_and_dual_clip(golden, wrap):
    inputs, expected = golden['ppo_clip_dual_clip_aggregation']
    *arrays, mask, _ = tensors(inputs)
    clips = dict(clip_low=inputs['clip_low'], clip_high=inputs['clip_high'])
    per_token, stats = wrap(functools.partial(pg.token_pg, dual_clip=inputs['dual_c'], **clips))(
        *arrays, mask
    )
    assert per_token.dtype == jnp.float32
    close(per_token, np.where(mask, expected['token_loss'], 0))
    close(mean(stats['ratio']), np.array(expected['ratio'])[mask].mean())
    # Clipped: ratio 1.49 at A > 0, ratio 0.55 at A < 0. Bounded: ratio 4.48 at A < 0.
    assert stats['clip_share'] == (2, 7) and stats['dual_clip_share'] == (1, 7)
    for mode, name in GOLDEN_MODES.items():
        weight = aggregation.token_weights(mask, None, mode, 4.0 if mode == 'constant' else None)
        close(wrap(aggregation.aggregate)(per_token, weight), expected['loss'][name])
    plain, _ = wrap(functools.partial(pg.token_pg, **clips))(*arrays, mask)
    close(
        aggregation.aggregate(plain, aggregation.token_weights(mask, None, 'token')),
        expected['loss']['no_dual_clip_token-mean'],
    )


@pytest.mark.parametrize('width', ['narrow', 'wide'])
@WRAPS
def test_golden_sequence_ratio_with_absurd_values_at_masked_places(golden, width, wrap):
    inputs, expected = golden['dspo_gspo_loss']
    low, high = inputs[f'clip_{width}']
    arrays = tensors(inputs)
    loss = wrap(functools.partial(pg.sequence_pg, clip_low=low, clip_high=high))
    value, gradient = value_and_grad(loss, arrays)
    close(value, expected[f'loss_{width}'])
    close(gradient, expected[f'grad_logp_{width}'])
    if width == 'narrow':
        assert not np.any(gradient)
    _, stats = loss(*arrays)
    # The third rollout has nothing to learn from and is not counted.
    assert stats['clip_share'] == (sum(expected[f'clipped_{width}']), 2)
    close(mean(stats['sequence_ratio']), np.mean(expected['s'][:2]))
    close(np.log(expected['s']), expected['log_s'])


def test_golden_grpo_with_absurd_values_at_masked_places(golden):
    inputs, expected = golden['dspo_gspo_loss']
    *arrays, mask, _ = tensors(inputs)
    per_token, _ = pg.token_pg(*arrays, mask, clip_low=0.2, clip_high=0.2)
    for mode, name in (('seq_mean_token_mean', 'seq_mean_token_mean'), ('token', 'token_mean')):
        wanted = expected[f'grpo_token_ratio_loss_clip0.2_{name}']
        close(aggregation.aggregate(per_token, aggregation.token_weights(mask, None, mode)), wanted)


@WRAPS
def test_golden_geometric_mean(golden, wrap):
    inputs, expected = golden['gmpo_loss']
    low, high = inputs['clip_log']
    arrays = tensors(inputs)
    loss = wrap(functools.partial(pg.geometric_pg, clip_low=low, clip_high=high))
    close(value_and_grad(loss, arrays)[0], expected['loss'])
    per_token, stats = loss(*arrays)
    wanted = -np.array(inputs['adv'])[:, None] * np.array(expected['geo_ratio'])[:, None]
    close(per_token, np.where(arrays[3], wanted, 0))
    close(mean(stats['sequence_ratio']), np.mean(expected['geo_ratio']))


def test_geometric_mean_over_all_rollouts_is_a_matter_of_the_total(batch):
    """The paper divides by rollouts without a trained token too."""
    own, _, _ = run('geometric_pg', batch, weights(batch, 'seq_mean_token_mean'))
    every, _, _ = run('geometric_pg', batch, weights(batch, 'seq_mean_token_mean', total=6.0))
    close(6 * every, 5 * own)


def test_golden_hrpo_objectives(golden):
    """Dr. Zero eq. 2 is 'seq_mean_token_sum' and its code 'token', each with the sign of a loss."""
    inputs, expected = golden['hrpo']
    lengths = np.array(inputs['seq_len'])
    mask = np.arange(lengths.max()) < lengths[:, None]
    logp = np.broadcast_to((np.array(inputs['seq_logprob_sum']) / lengths)[:, None], mask.shape)
    advantage = spread(expected['advantage_code_ddof1'], mask)
    per_token, stats = pg.reinforce(logp, logp, advantage, mask)
    close(
        aggregation.aggregate(
            per_token, aggregation.token_weights(mask, None, 'seq_mean_token_sum')
        ),
        -expected['J_paper_mean_over_N_of_A_times_seq_logprob'],
    )
    close(
        aggregation.aggregate(per_token, aggregation.token_weights(mask, None, 'token')),
        -expected['J_code_token_mean'],
    )
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
    losses = [
        REFERENCES[name](
            logp[row, on],
            batch['old_logp'][row, on].astype(np.float64),
            float(batch['advantage'][row, 0]),
        )
        if on.any()
        else 0.0
        for row, on in enumerate(batch['mask'])
    ]
    return average(losses, batch['mask'].sum(1), mode)


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
@pytest.mark.parametrize('name', REFERENCES)
def test_value_and_gradient_match_float64(batch, name, mode):
    value, gradient, _ = run(name, batch, weights(batch, mode))
    close(value, reference(name, batch, mode))
    assert not np.any(np.asarray(gradient)[~batch['mask']])
    # A sequence ratio is differentiated through each token's own share: the formula's gradient under the mean only.
    # The weights of CISPO are constants of its gradient, which has a test of its own.
    if name == 'cispo':
        return
    if mode == 'seq_mean_token_mean' or name in ('token_pg', 'reinforce'):
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

    def loss(logp):
        per_token, stats = pg.cispo(logp, *arrays[1:], clip_low=low, clip_high=high)
        return aggregation.aggregate(per_token, weight), (per_token, stats)

    weight = aggregation.token_weights(arrays[3], None, 'token')
    (value, (per_token, stats)), gradient = jax.value_and_grad(loss, has_aux=True)(arrays[0])
    close(per_token, expected['token_loss'])
    close(value, expected['loss_token_mean'])
    close(gradient, expected['grad_logp_token_mean'])
    assert stats['clip_share'] == (expected['clipped_tokens'], arrays[3].sum())


@pytest.mark.parametrize('dual_clip', [None, 1.05])
def test_other_dual_clips_match_float64(batch, dual_clip):
    per_token, _ = pg.token_pg(
        *(batch[k] for k in ('logp', 'old_logp', 'advantage', 'mask')), dual_clip=dual_clip, **CLIPS
    )
    for row, on in enumerate(batch['mask']):
        rollout = (batch[k][row, on].astype(np.float64) for k in ('logp', 'old_logp'))
        close(
            np.sum(per_token[row]),
            token_reference(*rollout, float(batch['advantage'][row, 0]), dual_clip),
        )


def test_zero_dual_clip_is_off(batch):
    arrays = (batch['logp'], batch['old_logp'], batch['advantage'], batch['mask'])
    off, zero = (
        pg.token_pg(*arrays, clip_low=0.2, clip_high=0.2, dual_clip=c)[0] for c in (None, 0.0)
    )
    assert np.array_equal(off, zero)


# What the objectives have in common


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
@pytest.mark.parametrize('name', ['token_pg', 'sequence_pg', 'geometric_pg', 'cispo'])
def test_ratio_one_has_the_gradient_of_reinforce(batch, name, mode):
    batch['old_logp'] = batch['logp']
    weight = weights(batch, mode)
    _, gradient, stats = run(name, batch, weight)
    close(gradient, run('reinforce', batch, weight)[1])
    close(gradient, -batch['advantage'] * weight)
    assert stats['clip_share'][0] == 0


def test_rollouts_of_one_token_have_the_same_ratio_in_all_senses():
    batch = make()
    batch['mask'] &= np.cumsum(batch['mask'], 1) == 1
    weight = weights(batch, 'token')
    # Dual clip and the geometric mean's bound differ beyond the ordinary clip: stay within it.
    batch['old_logp'] = batch['logp'] - np.float32(0.1) * np.sign(batch['advantage'])
    results = [run(name, batch, weight)[:2] for name in ('token_pg', 'sequence_pg', 'geometric_pg')]
    for value, gradient in results[1:]:
        close(value, results[0][0])
        close(gradient, results[0][1])


def test_sequence_ratio_needs_the_sequence_mean(batch):
    """Under the token mean a rollout counts by its length: documented, and the reason why GSPO fixes the mode."""
    by_token = reference('sequence_pg', batch, 'token')
    by_sequence = reference('sequence_pg', batch, 'seq_mean_token_mean')
    assert abs(by_token - by_sequence) > 1e-3


def test_one_noisy_token_moves_the_token_ratio_and_hardly_the_sequence_ratio():
    mask = np.ones((1, 100), bool)
    old, logp = np.zeros((1, 100), np.float32), np.zeros((1, 100), np.float32)
    logp[0, 3] = 5.0
    arrays = (logp, old, np.ones((1, 100), np.float32), mask)
    _, token = pg.token_pg(*arrays, **CLIPS)
    _, sequence = pg.sequence_pg(*arrays, np.ones((1, 100), np.int32), **CLIPS)
    assert token['clip_share'] == (1, 100) and sequence['clip_share'] == (0, 1)
    close(mean(sequence['sequence_ratio']), np.exp(0.05))


def test_clip_share_counts_rollouts_not_tokens(batch):
    batch['old_logp'] = batch['logp'] - np.float32(1.0)
    _, stats = LOSSES['sequence_pg'](
        *(batch[k] for k in ('logp', 'old_logp', 'advantage', 'mask', 'segment'))
    )
    raised = batch['mask'].any(1) & (batch['advantage'][:, 0] > 0)
    assert stats['clip_share'] == (raised.sum(), 5)
    close(mean(stats['sequence_ratio']), np.e)


def test_an_extreme_ratio_stays_finite():
    mask = np.ones((1, 2), bool)
    logp, old = jnp.array([[0.0, -300.0]]), jnp.array([[-300.0, 0.0]])
    per_token, stats = pg.token_pg(logp, old, -jnp.ones((1, 2)), mask, clip_low=0.2, clip_high=0.2)
    close(per_token, [[np.exp(20), 0.8]])
    close(stats['ratio'][0], np.exp(20) + np.exp(-20))


@pytest.mark.parametrize('name', ['sequence_pg', 'geometric_pg'])
def test_an_extreme_rollout_stays_finite(name):
    """Two rollouts of one token each: one log-ratio far above every bound, the other far below."""
    logp, old = jnp.array([[300.0, -300.0]]), jnp.zeros((1, 2))
    loss = lambda x: LOSSES[name](
        x, old, -jnp.ones((1, 2)), np.ones((1, 2), bool), np.array([[1, 2]])
    )[0]
    close(loss(logp), [[np.exp(10.0), 0.8 if name == 'sequence_pg' else np.exp(-0.2)]])
    assert np.array_equal(jax.grad(lambda x: loss(x).sum())(logp), [[0.0, 0.0]])


ONE = np.ones((1, 2), np.float32)
MASK = np.ones((1, 2), bool)
SEGMENT = np.ones((1, 2), np.int32)


@pytest.mark.parametrize(
    'call, message',
    [
        (
            lambda: pg.token_pg(ONE, ONE, ONE, MASK, clip_low=1.5, clip_high=0.2),
            'token_pg: needs 0 ≤ clip_low',
        ),
        (lambda: pg.token_pg(ONE, ONE, ONE, MASK, clip_low=0.2, clip_high=-0.2), 'clip_high'),
        (
            lambda: pg.token_pg(ONE, ONE, ONE, MASK, clip_low=0.2, clip_high=0.2, dual_clip=1.0),
            'must exceed 1',
        ),
        (
            lambda: pg.sequence_pg(ONE, ONE, ONE, MASK, SEGMENT, clip_low=-0.1, clip_high=0.2),
            'sequence_pg: needs 0 ≤',
        ),
        (
            lambda: pg.geometric_pg(ONE, ONE, ONE, MASK, SEGMENT, clip_low=0.4, clip_high=-0.1),
            'geometric_pg: needs',
        ),
        (
            lambda: pg.cispo(ONE, ONE, ONE, MASK, clip_low=1.1, clip_high=0.2),
            'cispo: needs 0 ≤',
        ),
        (
            lambda: pg.sequence_pg(ONE, ONE, ONE, MASK, SEGMENT[0], **CLIPS),
            'sequence_pg: every array must be',
        ),
        (
            lambda: pg.geometric_pg(ONE, ONE, ONE, MASK, SEGMENT[:, :1], **CLIPS),
            'geometric_pg: every array must be',
        ),
    ],
)
def test_bad_options_are_one_clear_line(call, message):
    with shape_error(message):
        call()
