"""Chunks of tokens that the output head is multiplied with."""

import jax
import jax.numpy as jnp
import numpy as np

from zeroplay_jax.policy.head import Head, map_tokens, sum_tokens


def test_wanted_tokens_alone_are_visited():
    """Once in a sum, and twice, forward and backward, in a map: a NaN in the other states is never read."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(3, 40, 8)).astype(np.float32)
    wanted = rng.random((3, 40)) < 0.2
    wanted[1] = False
    states[~wanted] = np.nan
    head = {'head': rng.normal(size=(8, 5)).astype(np.float32)}
    factor = rng.normal(size=wanted.shape).astype(np.float32)
    visited = []

    def values_of(head, chunk_states, shared, per_token):
        jax.debug.callback(visited.append, chunk_states.shape[0])
        return jnp.sum(chunk_states @ head['head'], -1) * per_token

    def sums_of(*arguments):
        values = values_of(*arguments)
        return jnp.sum(values), jnp.sum(values**2)

    def mapped(head, states):
        values = map_tokens(values_of, Head(head, False, 7, None), states, (), factor, wanted)
        return jnp.sum(values), jnp.sum(values**2)

    def total(head, states):
        return sum_tokens(sums_of, Head(head, False, 7, None), states, (), factor, wanted)

    def scaled(head, states, function):
        value, squares = function(head, states)
        return -8 * value, squares

    clean = np.nan_to_num(states)
    values = (clean @ head['head']).sum(-1) * factor * wanted
    head_slope = np.einsum('rl,rld->d', factor * wanted, clean)[:, None].repeat(5, 1)
    state_slopes = (factor * wanted)[..., None] * head['head'].sum(-1)
    for function, passes in ((mapped, 2), (total, 1)):
        visited.clear()
        slopes, squares = jax.grad(scaled, (0, 1), has_aux=True)(head, states, function)
        jax.effects_barrier()
        assert visited == [7] * passes * -(-wanted.sum() // 7)
        np.testing.assert_allclose(squares, (values**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(slopes[0]['head'], -8 * head_slope, atol=1e-3)
        np.testing.assert_allclose(slopes[1], -8 * state_slopes, atol=1e-4)
        np.testing.assert_allclose(function(head, states)[0], values.sum(), rtol=1e-5)
