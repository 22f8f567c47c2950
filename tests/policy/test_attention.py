"""The attention entry: what a place sees, by gradient and against a plain definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from zeroplay_jax.policy import attention, transformer


@pytest.mark.parametrize('window', [0, 1, 3, 50])
def test_a_place_sees_its_own_segments_past_within_the_window(window):
    segment = np.array([1, 1, 1, 1, 1, 2, 2, 2, 0, 0])
    mask = np.asarray(attention.packed_mask(jnp.asarray(segment[None]), window))[0]
    for q in range(10):
        for k in range(10):
            is_near = k <= q and (not window or q - k < window)
            assert mask[q, k] == (is_near and segment[k] == segment[q] > 0)


@pytest.mark.parametrize('window', [0, 3])
def test_a_hidden_state_depends_on_what_its_place_sees_and_on_nothing_else(window):
    """One layer: with more of them, what lies before the window comes in through the places between."""
    model = transformer.ModelConfig(
        'test', 16, 32, 64, layers=1, heads=4, kv_heads=2, head_dim=8, windows=(window,)
    )
    params = tiny.random_params(model)
    segment = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0]])
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0]])
    tokens = np.arange(12)[None]

    def state(shift, at):
        moved = params | {'embedding': jnp.asarray(params['embedding']).at[tokens[0]].add(shift)}
        return transformer.hidden(model, moved, tokens, positions, segment)[0, at].sum()

    gradient = jax.jit(jax.grad(state))
    for at in (4, 9):
        shift = gradient(np.zeros((12, model.hidden_size), np.float32), at)
        touched = np.flatnonzero(np.abs(np.asarray(shift)).sum(1))
        first = int(positions[0, at] + 1 - window) if window else 0
        assert touched.tolist() == list(range(at - positions[0, at] + max(first, 0), at + 1))
