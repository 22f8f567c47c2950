import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zeroplay_jax.objectives import policy_gradient as pg

SEQUENCE_MODES = ('token', 'seq_mean_token_mean', 'seq_mean_token_sum')
GOLDEN_MODES = {
    'token': 'token-mean',
    'seq_mean_token_sum': 'seq-mean-token-sum',
    'seq_mean_token_mean': 'seq-mean-token-mean',
    'constant': 'seq-mean-token-sum-norm(len=4)',
}
CLIPS = dict(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def close(given, wanted):
    np.testing.assert_allclose(np.asarray(given), wanted, rtol=2e-5, atol=1e-6)


def spread(advantage, like):
    return np.broadcast_to(np.asarray(advantage, np.float32)[:, None], np.shape(like))


def mean(stat):
    return float(stat[0] / stat[1])


@pytest.fixture
def batch():
    """Six rollouts of unlike lengths with gaps in the mask (tool text); one has nothing to learn from."""
    rng = np.random.default_rng(0)
    lengths = (7, 4, 9, 1, 5, 6)
    shape = len(lengths), max(lengths)
    mask = np.arange(shape[1]) < np.array(lengths)[:, None]
    mask &= rng.random(shape) < 0.8
    mask[3], mask[4] = mask[3] | (np.arange(shape[1]) == 0), False
    old = -rng.exponential(1.5, shape)
    return dict(
        logp=(old + rng.normal(0, 0.4, shape)).astype(np.float32),
        old_logp=old.astype(np.float32),
        advantage=spread(rng.normal(size=shape[0]), mask).copy(),
        mask=mask,
    )


def reference(batch, mode, clip_low, clip_high, dual_clip, logp=None):
    """The loss once more, rollout by rollout in float64 Python."""
    logp = np.asarray(batch['logp'] if logp is None else logp, np.float64)
    sums, lengths = [], []
    for row in range(len(logp)):
        losses = []
        for t in np.flatnonzero(batch['mask'][row]):
            a = float(batch['advantage'][row, t])
            ratio = np.exp(np.clip(logp[row, t] - float(batch['old_logp'][row, t]), -20, 20))
            loss = -min(a * ratio, a * min(max(ratio, 1 - clip_low), 1 + clip_high))
            losses.append(min(loss, -a * dual_clip) if dual_clip and a < 0 else loss)
        if losses:
            sums.append(sum(losses))
            lengths.append(len(losses))
    if mode == 'token':
        return sum(sums) / sum(lengths)
    if mode == 'seq_mean_token_sum':
        return sum(sums) / len(sums)
    return sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(sums)


@functools.partial(jax.jit, static_argnames=('clip_low', 'clip_high', 'dual_clip'))
def loss_of(batch, weights, **clips):
    """Scalar loss and its gradient with respect to logp."""

    def loss(logp):
        per_token, _ = pg.token_pg(logp, batch['old_logp'], batch['advantage'], batch['mask'], **clips)
        return pg.aggregate(per_token, weights)

    return jax.value_and_grad(loss)(batch['logp'])


@pytest.mark.parametrize('jit', [True, False])
def test_golden_clip_and_dual_clip(golden, jit):
    inputs, expected = golden['ppo_clip_dual_clip_aggregation']
    mask = np.array(inputs['mask'], bool)
    clips = dict(clip_low=inputs['clip_low'], clip_high=inputs['clip_high'])
    arrays = (np.array(inputs['new_logp']), np.array(inputs['old_logp']), spread(inputs['adv'], mask), mask)
    wrap = jax.jit if jit else lambda f: f
    per_token, stats = wrap(functools.partial(pg.token_pg, dual_clip=inputs['dual_c'], **clips))(*arrays)
    assert per_token.dtype == jnp.float32
    close(per_token, np.where(mask, expected['token_loss'], 0))
    close(mean(stats['ratio']), np.array(expected['ratio'])[mask].mean())
    # Clipped: ratio 1.49 at A > 0, ratio 0.55 at A < 0. Bounded: ratio 4.48 at A < 0.
    assert stats['clip_share'] == (2, 7) and stats['dual_clip_share'] == (1, 7)
    for mode, name in GOLDEN_MODES.items():
        weights = pg.token_weights(mask, None, mode, 4.0 if mode == 'constant' else None)
        close(wrap(pg.aggregate)(per_token, weights), expected['loss'][name])
    plain, _ = wrap(functools.partial(pg.token_pg, **clips))(*arrays)
    close(
        pg.aggregate(plain, pg.token_weights(mask, None, 'token')),
        expected['loss']['no_dual_clip_token-mean'],
    )


def test_golden_grpo_with_absurd_values_at_masked_places(golden):
    inputs, expected = golden['dspo_gspo_loss']
    mask = np.array(inputs['mask'], bool)
    per_token, _ = pg.token_pg(
        np.array(inputs['new_logp']),
        np.array(inputs['old_logp']),
        spread(inputs['adv'], mask),
        mask,
        clip_low=0.2,
        clip_high=0.2,
    )
    for mode, name in (('seq_mean_token_mean', 'seq_mean_token_mean'), ('token', 'token_mean')):
        wanted = expected[f'grpo_token_ratio_loss_clip0.2_{name}']
        close(pg.aggregate(per_token, pg.token_weights(mask, None, mode)), wanted)


def test_golden_hrpo_objectives(golden):
    """Dr. Zero eq. 2 is 'seq_mean_token_sum' and its code 'token', each with the sign of a loss."""
    inputs, expected = golden['hrpo']
    lengths = np.array(inputs['seq_len'])
    mask = np.arange(lengths.max()) < lengths[:, None]
    logp = np.broadcast_to((np.array(inputs['seq_logprob_sum']) / lengths)[:, None], mask.shape)
    per_token, stats = pg.reinforce(logp, spread(expected['advantage_code_ddof1'], mask), mask)
    close(
        pg.aggregate(per_token, pg.token_weights(mask, None, 'seq_mean_token_sum')),
        -expected['J_paper_mean_over_N_of_A_times_seq_logprob'],
    )
    close(pg.aggregate(per_token, pg.token_weights(mask, None, 'token')), -expected['J_code_token_mean'])
    close(stats['logp'][0], sum(inputs['seq_logprob_sum']))


@pytest.mark.parametrize('jit', [True, False])
@pytest.mark.parametrize('kind', ['k1', 'k2', 'k3'])
def test_golden_kl(golden, kind, jit):
    inputs, expected = golden['kl_and_tis']
    logp, ref = np.array([inputs['logp']]), np.array([inputs['ref_logp']])
    mask = np.ones(logp.shape, bool)
    value = functools.partial(pg.kl, kind=kind)
    value = jax.jit(value) if jit else value
    per_token, stats = value(logp, ref, mask)
    close(per_token[0], expected[kind])
    close(mean(stats['kl']), np.mean(expected[kind]))
    gradient = jax.grad(lambda x, y: value(x, y, mask)[0].sum(), (0, 1))(jnp.float32(logp), jnp.float32(ref))
    close(gradient[0][0], expected[f'grad_{kind}'])
    assert not np.any(gradient[1])


def test_golden_sampler_trainer_gap(golden):
    inputs, expected = golden['kl_and_tis']
    trainer, sampler = np.array([inputs['trainer_logp']]), np.array([inputs['sampler_logp']])
    stats = pg.agreement(trainer, sampler, np.ones(trainer.shape, bool))
    close(mean(stats['prob_gap']), expected['sampler_trainer_mean_abs_prob_diff'])
    close(mean(stats['ratio']), np.mean(expected['tis_raw']))
    log_ratio = trainer - sampler
    close(mean(stats['approx_kl']), np.mean(np.exp(log_ratio) - 1 - log_ratio))


@pytest.mark.parametrize('gap, value', [(-3.0, 10.0), (-50.0, 10.0), (50.0, 10.0), (5.0, np.exp(-5) + 4)])
def test_k3_is_held_within_ten(gap, value):
    close(pg.kl(jnp.array([[gap]]), jnp.zeros((1, 1)), jnp.ones((1, 1), bool))[0], [[value]])


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
@pytest.mark.parametrize('dual_clip', [None, 3.0, 1.05])
def test_value_and_gradient_match_float64_reference(batch, mode, dual_clip):
    clips = dict(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    value, gradient = loss_of(batch, pg.token_weights(batch['mask'], None, mode), **clips)
    close(value, reference(batch, mode, **clips))
    step = 1e-6
    wanted = np.zeros(batch['logp'].shape)
    for place in np.ndindex(wanted.shape):
        shift = np.zeros(wanted.shape)
        shift[place] = step
        up, down = (reference(batch, mode, logp=batch['logp'] + s, **clips) for s in (shift, -shift))
        wanted[place] = (up - down) / (2 * step)
    close(gradient, wanted)
    assert not np.any(np.asarray(gradient)[~batch['mask']])


def test_zero_dual_clip_is_off(batch):
    arrays = (batch['logp'], batch['old_logp'], batch['advantage'], batch['mask'])
    off, zero = (pg.token_pg(*arrays, clip_low=0.2, clip_high=0.2, dual_clip=c)[0] for c in (None, 0.0))
    assert np.array_equal(off, zero)


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
def test_ratio_one_has_the_gradient_of_reinforce(batch, mode):
    batch['old_logp'] = batch['logp']
    weights = pg.token_weights(batch['mask'], None, mode)
    _, gradient = loss_of(batch, weights, **CLIPS)

    def plain(logp):
        return pg.aggregate(pg.reinforce(logp, batch['advantage'], batch['mask'])[0], weights)

    close(gradient, jax.grad(plain)(batch['logp']))
    close(gradient, -batch['advantage'] * weights)


def test_equal_lengths_make_token_and_sequence_means_equal(batch):
    mask = np.ones_like(batch['mask'])
    weights = [pg.token_weights(mask, None, mode) for mode in ('token', 'seq_mean_token_mean')]
    np.testing.assert_allclose(*weights, rtol=1e-6)


def packed(batch, rows, length, order):
    """The batch's rollouts laid one behind another into rows, in a given order; the rest is rubbish."""
    names = ('logp', 'old_logp', 'advantage')
    result = {name: np.full((rows, length), np.nan, np.float32) for name in names}
    result['mask'] = np.zeros((rows, length), bool)
    sequence = np.full((rows, length), -1, np.int32)
    places = {}
    fill = np.zeros(rows, int)
    for index in order:
        size = batch['mask'].shape[1] - int(np.argmax(batch['mask'][index][::-1])) if batch['mask'][index].any() else 2
        row = int(np.flatnonzero(fill + size <= length)[0])
        span = slice(fill[row], fill[row] + size)
        for name in (*names, 'mask'):
            result[name][row, span] = batch[name][index, :size]
        sequence[row, span] = index
        places[index] = (row, span, size)
        fill[row] += size
    return result, sequence, places


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
@pytest.mark.parametrize(
    'rows, length, order', [(3, 16, range(6)), (8, 12, (5, 2, 0, 4, 1, 3)), (2, 40, (3, 1, 4, 0, 5, 2))]
)
@pytest.mark.parametrize('parts', [1, 2])
def test_packing_padding_order_and_micro_batches_change_nothing(batch, mode, rows, length, order, parts):
    value, gradient = loss_of(batch, pg.token_weights(batch['mask'], None, mode), **CLIPS)
    rest, sequence, places = packed(batch, rows, length, order)
    weights = pg.token_weights(rest['mask'], sequence, mode)
    cuts = [slice(rows * i // parts, rows * (i + 1) // parts) for i in range(parts)]
    results = [loss_of({k: v[cut] for k, v in rest.items()}, weights[cut], **CLIPS) for cut in cuts]
    close(sum(float(v) for v, _ in results), value)
    other = np.concatenate([g for _, g in results])
    for index, (row, span, size) in places.items():
        close(other[row, span], np.asarray(gradient)[index, :size])
    assert np.all(np.isfinite(other)) and not np.any(other[~rest['mask']])


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
def test_parts_with_the_denominator_of_the_whole_add_up(batch, mode):
    """As on several hosts: each sees its own rollouts, only the denominators are added up."""
    lengths = batch['mask'].sum(1)
    halves = [{k: v[:3] for k, v in batch.items()}, {k: v[3:] for k, v in batch.items()}]
    total = pg.denominator(lengths[:3], mode) + pg.denominator(lengths[3:], mode)
    values = [loss_of(h, pg.token_weights(h['mask'], None, mode, total), **CLIPS)[0] for h in halves]
    close(sum(values), loss_of(batch, pg.token_weights(batch['mask'], None, mode), **CLIPS)[0])


@pytest.mark.parametrize('mode', SEQUENCE_MODES)
def test_leaving_out_rollouts_of_advantage_zero_changes_nothing(batch, mode):
    batch['advantage'][[0, 2]] = 0
    whole = loss_of(batch, pg.token_weights(batch['mask'], None, mode), **CLIPS)[0]
    total = pg.denominator(batch['mask'].sum(1), mode)
    kept = {k: v[[1, 3, 4, 5]] for k, v in batch.items()}
    close(loss_of(kept, pg.token_weights(kept['mask'], None, mode, total), **CLIPS)[0], whole)


@pytest.mark.parametrize('rubbish', [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize('jit', [True, False])
def test_masked_places_reach_neither_value_nor_gradient_nor_statistics(batch, rubbish, jit):
    mask = batch['mask']
    dirty = {k: np.where(mask, v, np.float32(rubbish)) for k, v in batch.items() if k != 'mask'} | {'mask': mask}
    weights = pg.token_weights(mask, None, 'token')

    def total(logp, old_logp, advantage, data):
        loss, stats = pg.token_pg(logp, old_logp, advantage, data['mask'], **CLIPS)
        plain, more = pg.reinforce(logp, advantage, data['mask'])
        distance, most = pg.kl(logp, old_logp, data['mask'])
        return pg.aggregate(loss + plain + distance, weights), stats | more | most

    run = jax.value_and_grad(total, (0, 1, 2), has_aux=True)
    run = jax.jit(run) if jit else run
    names = ('logp', 'old_logp', 'advantage')
    clean_result, dirty_result = (run(*(data[n] for n in names), data) for data in (batch, dirty))
    for a, b in zip(jax.tree.leaves(clean_result), jax.tree.leaves(dirty_result), strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_array_equal(a, b)


def test_no_gradient_reaches_the_old_log_probs(batch):
    def loss(old):
        return pg.token_pg(batch['logp'], old, batch['advantage'], batch['mask'], **CLIPS)[0].sum()

    assert not np.any(jax.grad(loss)(batch['old_logp']))


def test_statistics_carry_no_gradient(batch):
    def total(logp):
        stats = pg.token_pg(logp, batch['old_logp'], batch['advantage'], batch['mask'], **CLIPS)[1]
        stats |= pg.reinforce(logp, batch['advantage'], batch['mask'])[1]
        stats |= pg.kl(logp, batch['old_logp'], batch['mask'])[1]
        return sum(value for value, _ in stats.values())

    assert not np.any(jax.grad(total)(batch['logp']))


def test_an_extreme_ratio_stays_finite():
    mask = np.ones((1, 2), bool)
    per_token, stats = pg.token_pg(
        jnp.array([[0.0, -300.0]]),
        jnp.array([[-300.0, 0.0]]),
        -jnp.ones((1, 2)),
        mask,
        clip_low=0.2,
        clip_high=0.2,
    )
    close(per_token, [[np.exp(20), 0.8]])
    close(stats['ratio'][0], np.exp(20) + np.exp(-20))


def test_low_precision_inputs_are_computed_in_float32(batch):
    low = {k: jnp.asarray(v, jnp.bfloat16) for k, v in batch.items() if k != 'mask'}
    given, _ = pg.token_pg(**low, mask=batch['mask'], **CLIPS)
    wanted, _ = pg.token_pg(**{k: v.astype(jnp.float32) for k, v in low.items()}, mask=batch['mask'], **CLIPS)
    assert given.dtype == jnp.float32 and np.array_equal(given, wanted)


@pytest.mark.parametrize('mode', (*SEQUENCE_MODES, 'constant'))
def test_a_wholly_masked_batch_weighs_nothing(batch, mode):
    weights = pg.token_weights(np.zeros((2, 3), bool), None, mode, 5.0 if mode == 'constant' else None)
    assert weights.shape == (2, 3) and not np.any(weights)
    batch = {k: v[:2, :3] for k, v in batch.items()} | {'mask': np.zeros((2, 3), bool)}
    value, gradient = loss_of(batch, weights, **CLIPS)
    assert value == 0 and not np.any(gradient)


def test_weights_count_a_sequence_across_gaps_and_skip_empty_ones():
    mask = np.array([[1, 0, 1, 1, 0], [0, 0, 1, 0, 0]], bool)
    sequence = np.array([[4, 4, 4, 2, 2], [0, 0, 4, -1, -1]])
    close(pg.token_weights(mask, sequence, 'token'), mask / 4)
    close(pg.token_weights(mask, sequence, 'seq_mean_token_sum'), mask / 2)
    close(
        pg.token_weights(mask, sequence, 'seq_mean_token_mean'),
        [[1 / 6, 0, 1 / 6, 1 / 2, 0], [0, 0, 1 / 6, 0, 0]],
    )
    close(pg.token_weights(mask, sequence, 'constant', 8.0), mask / 8)
    assert pg.denominator(np.array([3, 1, 0]), 'token') == 4 and pg.denominator([3, 1, 0], 'seq_mean_token_sum') == 2


@pytest.mark.parametrize(
    'call',
    [
        lambda x, m: pg.token_pg(x, x, x[0], m, **CLIPS),
        lambda x, m: pg.token_pg(x[0], x[0], x[0], m[0], **CLIPS),
        lambda x, m: pg.token_pg(x, x[:1], x, m, **CLIPS),
        lambda x, m: pg.reinforce(x, x[:, :1], m),
        lambda x, m: pg.kl(x, x, m[:, :1]),
        lambda x, m: pg.agreement(x, x.T, m),
        lambda x, m: pg.aggregate(x, x[0]),
    ],
)
@pytest.mark.parametrize('jit', [True, False])
def test_shapes_are_checked_first(call, jit):
    call = jax.jit(call) if jit else call
    with pytest.raises(ValueError, match='every array must be') as error:
        call(jnp.zeros((2, 3)), jnp.ones((2, 3), bool))
    assert '\n' not in str(error.value)


ONE = np.ones((1, 2), bool)


@pytest.mark.parametrize(
    'call, message',
    [
        (lambda: pg.token_pg(ONE, ONE, ONE, ONE, clip_low=1.5, clip_high=0.2), 'clip_low'),
        (lambda: pg.token_pg(ONE, ONE, ONE, ONE, clip_low=0.2, clip_high=-0.2), 'clip_high'),
        (
            lambda: pg.token_pg(ONE, ONE, ONE, ONE, clip_low=0.2, clip_high=0.2, dual_clip=1.0),
            'must exceed 1',
        ),
        (lambda: pg.kl(ONE, ONE, ONE, 'k4'), "kind is 'k4'"),
        (lambda: pg.denominator([1], 'mean'), "mode 'mean'"),
        (lambda: pg.denominator([1], 'constant'), "mode 'constant'"),
        (lambda: pg.token_weights(ONE, None, 'mean'), "mode is 'mean'"),
        (lambda: pg.token_weights(ONE, None, 'constant'), 'needs `total`'),
        (lambda: pg.token_weights(ONE, None, 'token', 0.0), 'must be positive'),
        (lambda: pg.token_weights(ONE, np.zeros((2, 2), int), 'token'), 'both must be'),
        (lambda: pg.token_weights(ONE[0], None, 'token'), 'both must be'),
        (lambda: pg.token_weights(ONE, np.array([[0, -1]]), 'token'), 'sequence -1'),
    ],
)
def test_bad_options_are_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert '\n' not in str(error.value)
