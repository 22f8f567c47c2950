import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import close, mean

from zeroplay_jax.objectives import corrections

# k1 and k3 with the gradient of k2.
GRADIENTS = {'k1': 'grad_k1', 'k2': 'grad_k2', 'k3': 'grad_k3', 'k1+': 'grad_k2', 'k3+': 'grad_k2'}


@pytest.mark.parametrize('kind', GRADIENTS)
def test_golden_kl(golden, kind):
    inputs, expected = golden['kl_and_tis']
    logp, ref = np.array([inputs['logp']]), np.array([inputs['ref_logp']])
    mask = np.ones(logp.shape, bool)

    def total(logp, ref):
        per_token, stats = corrections.kl(logp, ref, mask, kind)
        return per_token.sum(), (per_token, stats)

    gradients = jax.grad(total, (0, 1), has_aux=True)
    gradient, (per_token, stats) = gradients(*map(jnp.float32, (logp, ref)))
    close(per_token[0], expected[kind.rstrip('+')])
    close(mean(stats['kl']), np.mean(expected[kind.rstrip('+')]))
    close(gradient[0][0], expected[GRADIENTS[kind]])
    assert not np.any(gradient[1])


@pytest.mark.parametrize(
    'gap, value', [(-3.0, 10.0), (-50.0, 10.0), (50.0, 10.0), (5.0, np.exp(-5) + 4)]
)
def test_k3_is_held_within_ten(gap, value):
    close(corrections.kl(gap * ONE, 0 * ONE, MASK)[0], value * ONE)


def test_k3_keeps_its_digits_where_policies_agree():
    per_token, _ = corrections.kl(1e-4 * ONE, 0 * ONE, MASK, 'k3')
    close(per_token, 1e-8 / 2 * ONE, rtol=1e-3, atol=0)


def test_golden_sampler_trainer_gap_and_truncated_importance(golden):
    inputs, expected = golden['kl_and_tis']
    trainer, sampler = (np.array([inputs[f'{name}_logp']]) for name in ('trainer', 'sampler'))
    mask = np.ones(trainer.shape, bool)
    stats = corrections.agreement(trainer, sampler, mask)
    close(mean(stats['prob_gap']), expected['sampler_trainer_mean_abs_prob_diff'])
    close(mean(stats['ratio']), np.mean(expected['tis_raw']))
    for cap, name, capped in ((inputs['cap'], 'tis_truncated', 1), (100.0, 'tis_raw', 0)):
        weight, stats = corrections.truncated_importance(trainer, sampler, mask, cap=cap)
        close(weight[0], expected[name])
        assert stats['importance_capped'] == (capped, 4)
        close(mean(stats['importance']), np.mean(expected[name]))
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


def test_an_extreme_gap_stays_finite():
    trainer, sampler = jnp.array([[0.0, -300.0]]), jnp.array([[-300.0, 0.0]])
    weight, _ = corrections.truncated_importance(trainer, sampler, MASK, 1e12)
    close(weight, [[np.exp(20), np.exp(-20)]], atol=0)


def test_entropy_is_raised(batch):
    per_token, stats = corrections.entropy_bonus(batch['logp'], batch['mask'])
    close(per_token, np.where(batch['mask'], -batch['logp'], 0))
    close(mean(stats['entropy']), batch['logp'][batch['mask']].mean())


ONE = np.ones((1, 2), np.float32)
MASK = np.ones((1, 2), bool)
