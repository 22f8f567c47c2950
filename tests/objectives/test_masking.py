import jax
import numpy as np
import pytest
from batches import ARRAYS, LOSSES, run, weights


@pytest.mark.parametrize('rubbish', [np.nan, -np.inf, 1e30])
@pytest.mark.parametrize('name', LOSSES)
def test_masked_places_reach_neither_value_nor_gradient_nor_statistics(batch, name, rubbish):
    dirty = batch | {k: np.where(batch['mask'], batch[k], np.float32(rubbish)) for k in ARRAYS}
    results = [run(name, b, weights(batch, 'token')) for b in (batch, dirty)]
    for clean, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.all(np.isfinite(clean))
        np.testing.assert_array_equal(clean, other)
    _, gradient, _ = results[1]
    assert not np.any(np.asarray(gradient)[~batch['mask']])


@pytest.mark.parametrize('name', LOSSES)
def test_neither_statistics_nor_old_log_probs_have_a_gradient(batch, name):
    logp, *arrays = batch.values()

    def statistics(logp):
        return sum(value for value, _ in LOSSES[name](logp, *arrays)[1].values())

    assert not np.any(jax.grad(statistics)(logp))
    if not name.startswith('importance'):
        loss = lambda old: LOSSES[name](logp, old, *arrays[1:])[0].sum()
        assert not np.any(jax.grad(loss)(arrays[0]))
