import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import close, differences, mean, shape_error

from zeroplay_jax.objectives import corrections

WRAPS = pytest.mark.parametrize('wrap', [jax.jit, lambda f: f], ids=['jit', 'plain'])

# k1 and k3 with the gradient of k2.
GRADIENTS = {'k1': 'grad_k1', 'k2': 'grad_k2', 'k3': 'grad_k3', 'k1+': 'grad_k2', 'k3+': 'grad_k2'}


@WRAPS
@pytest.mark.parametrize('kind', corrections.KL_KINDS)
def test_golden_kl(golden, kind, wrap):
    inputs, expected = golden['kl_and_tis']
    logp, ref = np.array([inputs['logp']]), np.array([inputs['ref_logp']])
    mask = np.ones(logp.shape, bool)
    value = wrap(functools.partial(corrections.kl, kind=kind))
    per_token, stats = value(logp, ref, mask)
    close(per_token[0], expected[kind.rstrip('+')])
    close(mean(stats['kl']), np.mean(expected[kind.rstrip('+')]))
    gradient = jax.grad(lambda x, y: value(x, y, mask)[0].sum(), (0, 1))(
        jnp.float32(logp), jnp.float32(ref)
    )
    close(gradient[0][0], expected[GRADIENTS[kind]])
    assert not np.any(gradient[1])


@pytest.mark.parametrize('kind', corrections.KL_KINDS)
def test_kl_matches_float64_and_its_differences(batch, kind):
    on = batch['mask']
    logp, ref = batch['logp'].astype(np.float64), batch['old_logp'].astype(np.float64)
    values = {
        'k1': lambda x: x - ref,
        'k2': lambda x: (x - ref) ** 2 / 2,
        'k3': lambda x: np.exp(ref - x) + x - ref - 1,
    }
    close(
        corrections.kl(batch['logp'], ref, on, kind)[0],
        np.where(on, values[kind.rstrip('+')](logp), 0),
    )
    pulls = values['k2' if kind.endswith('+') else kind]
    gradient = jax.grad(lambda x: corrections.kl(x, ref, on, kind)[0].sum())(batch['logp'])
    close(gradient, differences(lambda x: pulls(x)[on].sum(), logp))


@pytest.mark.parametrize(
    'gap, value', [(-3.0, 10.0), (-50.0, 10.0), (50.0, 10.0), (5.0, np.exp(-5) + 4)]
)
def test_k3_is_held_within_ten(gap, value):
    close(
        corrections.kl(jnp.array([[gap]]), jnp.zeros((1, 1)), jnp.ones((1, 1), bool))[0], [[value]]
    )


def test_k3_keeps_its_digits_where_policies_agree():
    gap = 1e-4
    value = corrections.kl(jnp.full((1, 1), gap), jnp.zeros((1, 1)), jnp.ones((1, 1), bool), 'k3')[
        0
    ]
    close(value, [[gap**2 / 2]], rtol=1e-3, atol=0)


def test_in_expectation_k2_pulls_as_the_kl_and_k1_not_at_all():
    """Over all tokens of a small vocabulary, each weighted by its probability."""
    rng = np.random.default_rng(3)
    logits, ref = rng.normal(size=(2, 5))
    log_softmax = lambda z: z - np.log(np.sum(np.exp(z)))
    exact = differences(
        lambda z: np.sum(np.exp(log_softmax(z)) * (log_softmax(z) - log_softmax(ref))), logits
    )
    p = jax.nn.softmax(jnp.float32(logits))

    def expected(z, kind):
        logp, other = jax.nn.log_softmax(z)[None], jnp.float32(log_softmax(ref))[None]
        return jnp.sum(p * corrections.kl(logp, other, np.ones((1, 5), bool), kind)[0][0])

    for kind in ('k2', 'k1+', 'k3+'):
        close(jax.grad(expected)(jnp.float32(logits), kind), exact)
    close(jax.grad(expected)(jnp.float32(logits), 'k1'), np.zeros(5))


def test_golden_sampler_trainer_gap(golden):
    inputs, expected = golden['kl_and_tis']
    trainer, sampler = np.array([inputs['trainer_logp']]), np.array([inputs['sampler_logp']])
    stats = corrections.agreement(trainer, sampler, np.ones(trainer.shape, bool))
    close(mean(stats['prob_gap']), expected['sampler_trainer_mean_abs_prob_diff'])
    close(mean(stats['ratio']), np.mean(expected['tis_raw']))
    log_ratio = trainer - sampler
    close(mean(stats['approx_kl']), np.mean(np.exp(log_ratio) - 1 - log_ratio))


@WRAPS
def test_golden_truncated_importance(golden, wrap):
    inputs, expected = golden['kl_and_tis']
    trainer, sampler = np.array([inputs['trainer_logp']]), np.array([inputs['sampler_logp']])
    mask = np.ones(trainer.shape, bool)
    weight = wrap(functools.partial(corrections.truncated_importance, cap=inputs['cap']))
    given, stats = weight(trainer, sampler, mask)
    close(given[0], expected['tis_truncated'])
    assert stats['importance_capped'] == (1, 4)
    close(mean(stats['importance']), np.mean(expected['tis_truncated']))
    uncapped, stats = corrections.truncated_importance(trainer, sampler, mask, cap=100.0)
    close(uncapped[0], expected['tis_raw'])
    assert stats['importance_capped'] == (0, 4)
    capped, _ = corrections.truncated_importance(trainer + 9, sampler, mask)
    assert (capped == 2).all()
    product, _ = corrections.truncated_importance(trainer, sampler, mask, level='sequence')
    close(product, np.full((1, 4), expected['tis_seq_product']))


def test_importance_of_a_sequence_is_that_of_its_segment():
    sampler = np.zeros((1, 6), np.float32)
    trainer = np.array([[0.1, 9.0, 0.2, -0.3, 0.5, np.nan]], np.float32)
    mask = np.array([[True, False, True, True, True, False]])
    weight, stats = corrections.truncated_importance(
        trainer, sampler, mask, 1.3, 'sequence', np.array([[1, 1, 1, 2, 3, 0]])
    )
    close(weight, [[1.3, 0, 1.3, np.exp(-0.3), 1.3, 0]])
    assert stats['importance_capped'] == (3, 4)


def test_importance_weights_are_constants(batch):
    def loss(logp):
        return corrections.truncated_importance(logp, batch['old_logp'], batch['mask'])[0].sum()

    assert not np.any(jax.grad(loss)(batch['logp']))


def test_where_sampler_and_trainer_agree_the_weights_are_one(batch):
    for level in corrections.LEVELS:
        weight, _ = corrections.truncated_importance(
            batch['logp'], batch['logp'], batch['mask'], level=level
        )
        assert np.array_equal(weight, batch['mask'])


def test_an_extreme_gap_stays_finite():
    ones = jnp.ones((1, 2), bool)
    weight, _ = corrections.truncated_importance(
        jnp.array([[0.0, -300.0]]), jnp.array([[-300.0, 0.0]]), ones, 1e12
    )
    close(weight, [[np.exp(20), np.exp(-20)]], atol=0)


def test_entropy_is_raised(batch):
    per_token, stats = corrections.entropy_bonus(batch['logp'], batch['mask'])
    close(per_token, np.where(batch['mask'], -batch['logp'], 0))
    close(mean(stats['entropy']), batch['logp'][batch['mask']].mean())


ONE = np.ones((1, 2), np.float32)
MASK = np.ones((1, 2), bool)
SEGMENT = np.ones(2, np.int32)


@pytest.mark.parametrize(
    'call, message',
    [
        (lambda: corrections.kl(ONE, ONE, MASK, 'k4'), "kind is 'k4'"),
        (lambda: corrections.kl(ONE, ONE, MASK, 'k2+'), "kind is 'k2\\+'"),
        (lambda: corrections.kl(ONE, ONE, MASK[:, :1]), 'every array must be'),
        (lambda: corrections.agreement(ONE, ONE.T, MASK), 'every array must be'),
        (lambda: corrections.truncated_importance(ONE, ONE, MASK, level='turn'), "level is 'turn'"),
        (lambda: corrections.truncated_importance(ONE, ONE, MASK, 0.0), 'must be positive'),
        (
            lambda: corrections.truncated_importance(ONE, ONE, MASK, 2.0, 'sequence', SEGMENT),
            'every array must be',
        ),
    ],
)
def test_bad_options_are_one_clear_line(call, message):
    with shape_error(message):
        call()
