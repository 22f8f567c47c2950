"""Gated delta nets: the chunked form against the recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zeroplay_jax.policy import delta


def recurrence(q, k, v, log_decay, rate, segment):
    """What the tokens of a row read, one after another in float64: every segment begins with a memory of zeros."""
    read = np.zeros(v.shape)
    for t in range(len(segment)):
        if t == 0 or segment[t] != segment[t - 1]:
            memory = np.zeros((*k.shape[1:], v.shape[-1]))
        memory = memory * np.exp(log_decay[t])[:, None, None]
        error = v[t] - np.einsum('hk,hkv->hv', k[t], memory)
        memory = memory + np.einsum('hk,hv->hkv', k[t], rate[t][:, None] * error)
        read[t] = np.einsum('hk,hkv->hv', q[t], memory)
    return read, memory


@pytest.mark.parametrize('scale', [0.01, 1.0, 30.0])
def test_chunks_with_segments_are_the_recurrence(scale):
    """Decays from almost none to almost all; segments end within chunks, at their ends, and after several."""
    rng = np.random.default_rng(0)
    rows, length, heads = 2, 150, 3
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(rng.normal(size=(rows, length, heads, 8))) for _ in range(2))
    # The same key again and again: what is written depends most on what was written before.
    k[:, 20:60] = k[:, 20:21]
    v = rng.normal(size=(rows, length, heads, 5))
    log_decay = -scale * rng.uniform(size=(rows, length, heads))
    rate = rng.uniform(size=(rows, length, heads))
    segment = np.stack([np.repeat([1, 2, 3, 0], [64, 6, 70, 10]), np.repeat([1, 2], [130, 20])])
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, rate)]
    memory = jnp.zeros((rows, heads, 8, 5))
    ours, last = jax.jit(delta.chunked)(*arrays, jnp.asarray(segment), memory)
    for row in range(rows):
        theirs, theirs_last = recurrence(
            *(x[row] for x in (q, k, v, log_decay, rate)), segment[row]
        )
        assert np.abs(theirs).max() > 0.3
        # Logarithms of decays add up to larger numbers.
        tolerance = 3e-6 * max(1, scale / 5)
        np.testing.assert_allclose(ours[row], theirs, atol=tolerance)
        np.testing.assert_allclose(last[row], theirs_last, atol=tolerance)
