import functools

import jax
import numpy as np
import pytest
from batches import ARRAYS, LOSSES, MODES, run, weights

from zeroplay_jax.objectives import aggregation

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
