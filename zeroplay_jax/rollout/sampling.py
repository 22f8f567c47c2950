"""How the next token of every row is drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def sample(
    logits: Float[Array, 'rows vocab'],
    temperature: Float[Array, ' rows'],
    key: UInt32[Array, 'rows 2'],
    position: Int[Array, ' rows'],
) -> tuple[Int[Array, ' rows'], Float[Array, ' rows']]:
    """Samples a token per row; returns tokens and their log-probs under softmax(logits / temperature).

    The noise is a function of the request's key and of the position (the index that the sampled token will have) alone.
    Temperature 0 takes the most likely token and reports its log-prob at temperature 1.
    """
    is_sampled = temperature > 0
    # Greedy rows divide by 1: a division by 0 would make their log-probs NaN.
    divisor = jnp.where(is_sampled, temperature, 1.0)
    scaled_logits = logits / divisor[:, None]
    vocabulary = scaled_logits.shape[1]

    def row_noise(position_key):
        return jax.random.gumbel(position_key, (vocabulary,))

    def gumbel_noise(_):
        # Each row has a key of its own: its sample must not depend on the slot or on other rows.
        request_keys = jax.random.wrap_key_data(key)
        position_keys = jax.vmap(jax.random.fold_in)(request_keys, position)
        noise = jax.vmap(row_noise)(position_keys)
        return jnp.where(is_sampled[:, None], noise, 0.0)

    def no_noise(_):
        return jnp.zeros_like(scaled_logits)

    # Greedy batches skip the noise, which costs as much as the head on a CPU.
    noisy_logits = scaled_logits + jax.lax.cond(jnp.any(is_sampled), gumbel_noise, no_noise, None)
    # The first maximum, found by two plain reductions: several times faster on a CPU than argmax.
    # Other tokens become the last id, so that a row of NaN still yields a valid token.
    best = jnp.max(noisy_logits, -1, keepdims=True)
    token_ids = jnp.arange(vocabulary, dtype=jnp.int32)
    candidate_ids = jnp.where(noisy_logits == best, token_ids, vocabulary - 1)
    token = jnp.min(candidate_ids, -1)
    # The log-prob excludes the noise: it is the denominator of the loss's importance ratio.
    token_logit = jnp.take_along_axis(scaled_logits, token[:, None], 1)[:, 0]
    logp = token_logit - jax.nn.logsumexp(scaled_logits, -1)
    return token, logp
