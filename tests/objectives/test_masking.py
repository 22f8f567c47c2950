import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import ARRAYS, LOSSES, MODES, close, run, weights

from zeroplay_jax.objectives import aggregation, masking

NAMES = ('logp', 'old_logp', 'advantage', 'mask', 'segment')


@functools.partial(jax.jit, static_argnames='name')
def everything(name, batch, weight):
    """((loss, statistics), gradients with respect to logp, old_logp and advantage)."""

    def total(*arrays):
        per_token, stats = LOSSES[name](*arrays, batch['mask'], batch['segment'])
        return aggregation.aggregate(per_token, weight), stats

    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*(batch[k] for k in ARRAYS))


@pytest.mark.parametrize('rubbish', [np.nan, -np.inf, 1e30])
@pytest.mark.parametrize('name', LOSSES)
def test_masked_places_reach_neither_value_nor_gradient_nor_statistics(batch, name, rubbish):
    dirty = batch | {k: np.where(batch['mask'], batch[k], np.float32(rubbish)) for k in ARRAYS}
    results = [everything(name, b, weights(batch, 'token')) for b in (batch, dirty)]
    for clean, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.all(np.isfinite(clean))
        np.testing.assert_array_equal(clean, other)
    assert not any(np.any(np.asarray(gradient)[~batch['mask']]) for gradient in results[1][1])


@pytest.mark.parametrize('name', LOSSES)
def test_a_loss_is_float32_and_the_same_with_and_without_jit(batch, name):
    low = batch | {k: jnp.asarray(batch[k], jnp.bfloat16) for k in ARRAYS}
    high = low | {k: low[k].astype(jnp.float32) for k in ARRAYS}
    given, wanted = (LOSSES[name](*(b[k] for k in NAMES)) for b in (low, high))
    jitted = jax.jit(LOSSES[name])(*(low[k] for k in NAMES))
    for a, b, c in zip(*map(jax.tree.leaves, (given, wanted, jitted)), strict=True):
        assert a.dtype == c.dtype == jnp.float32
        np.testing.assert_array_equal(a, b)
        close(a, c)


@pytest.mark.parametrize('name', LOSSES)
def test_neither_statistics_nor_old_log_probs_have_a_gradient(batch, name):
    logp, *arrays = (batch[key] for key in NAMES)

    def statistics(logp):
        return sum(value for value, _ in LOSSES[name](logp, *arrays)[1].values())

    assert not np.any(jax.grad(statistics)(logp))
    if not name.startswith('importance'):
        loss = lambda old: LOSSES[name](logp, old, *arrays[1:])[0].sum()
        assert not np.any(jax.grad(loss)(arrays[0]))


@pytest.mark.parametrize('name', LOSSES)
def test_a_wholly_masked_batch_is_nothing(batch, name):
    batch['mask'][:] = False
    for mode in MODES:
        value, gradient, stats = run(name, batch, weights(batch, mode))
        assert value == 0 and not np.any(gradient)
        assert all(count == 0 and total == 0 for total, count in stats.values())


@pytest.mark.parametrize('name', LOSSES)
def test_shapes_are_checked_first(batch, name):
    arrays = [batch[k] for k in NAMES]
    for wrong in (arrays[0][0], arrays[0][:, :1], arrays[0].T):
        with pytest.raises(ValueError, match='every array must be'):
            LOSSES[name](wrong, *arrays[1:])


def test_segment_sum_and_spread():
    values = jnp.array([[1.0, 2, 4, 8], [16, 32, 64, 128]])
    segment = jnp.array([[1, 1, 2, 0], [4, 3, 3, 3]])
    sums = masking.segment_sum(values, segment)
    assert np.array_equal(sums, [[8, 3, 4, 0, 0], [0, 0, 0, 224, 16]])
    assert np.array_equal(masking.spread(sums, segment), [[3, 3, 4, 8], [16, 224, 224, 224]])
    trained = masking.segment_sum(values > 2, segment)
    assert np.array_equal(trained, [[1, 0, 1, 0, 0], [0, 0, 0, 3, 1]])
