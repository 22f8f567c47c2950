"""Losses of tokens that were drawn from a few ids, against their definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from updates import (
    DISTILS,
    config_of,
    gradient,
    make_rows,
    other,
    packed,
    taught_rows,
    truncated,
)

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.policy import transformer

TEMPERATURE = 0.7


def kept_mask(kept, vocab_size):
    """Ids that a token was drawn from, [tokens, vocab_size], of a record in which -1 is none."""
    ids = np.arange(vocab_size)
    return (np.asarray(kept)[..., None] == ids).any(1)


def test_loss_entropies_and_gradient_are_those_of_the_definition(policy):
    # A head of its own, whose gradient has no part of the embedding's.
    model = dataclasses.replace(policy[0], tied=False)
    params = policy[1] | {'head': policy[1]['embedding'].T}
    rows = [truncated(row, model.vocab_size) for row in make_rows(model)]
    (batch,) = pack(rows, micro_rows=9, tokens=25, mode='token')
    b, at = np.nonzero(batch.mask)
    is_kept = kept_mask(batch.for_devices().kept[b, at], model.vocab_size)

    def definition(params):
        """(−Σ weight · (advantage · log p + coefficient · entropy), sum of the entropies)."""
        states = transformer.hidden(model, params, batch.tokens, batch.positions, batch.segment)
        logits = transformer.logits(model, params, states[b, at - 1]) / TEMPERATURE
        logp = jax.nn.log_softmax(jnp.where(is_kept, logits, -1e9))
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
        drawn = jnp.take_along_axis(logp, batch.tokens[b, at][:, None], 1)[:, 0]
        terms = batch.advantage[b, at] * drawn + 0.1 * entropy
        return -jnp.sum(batch.weight[b, at] * terms), jnp.sum(entropy)

    config = config_of(loss='reinforce', temperature=TEMPERATURE, entropy_coef=0.1)
    value, stats, gradients = gradient((model, params), config, [batch])
    by_definition = jax.jit(jax.value_and_grad(definition, has_aux=True))
    (expected, entropy), expected_gradients = by_definition(params)
    np.testing.assert_allclose([value, stats['entropy'][0]], [expected, entropy], rtol=1e-5)
    assert tiny.gap(gradients, expected_gradients) <= 1e-5
    # Of ids that no token could be, nothing is learnt.
    assert not gradients['head'][:, ~is_kept.any(0)].any()


def test_student_and_teacher_are_compared_within_the_ids(policy):
    """With K the whole vocabulary the divergence is the mean of KL(student ‖ teacher) of these ids."""
    model, params = policy
    rows, teacher = [], other(params)
    for row in taught_rows(model, 3):
        # The prompts are the same, so that one pass gives both.
        prompt = row.trajectory.tokens[: row.trajectory.prompt_tokens]
        rows.append(truncated(dataclasses.replace(row, teacher_prompt=prompt), model.vocab_size))
    batches = packed(rows)
    config = config_of(**DISTILS | dict(distill_top_k=model.vocab_size, temperature=TEMPERATURE))
    value, *_ = gradient(policy, config, batches, teacher=teacher, alpha=1.0)
    divergences = []
    for batch in batches:
        logps = []
        b, at = np.nonzero(batch.mask)
        is_kept = kept_mask(batch.for_devices().kept[b, at], model.vocab_size)
        for weights in (params, teacher):
            states = transformer.hidden(
                model, weights, batch.tokens, batch.positions, batch.segment
            )
            logits = transformer.logits(model, weights, states[b, at - 1])
            within = np.where(is_kept, np.asarray(logits, np.float64) / TEMPERATURE, -1e9)
            logps.append(within - np.log(np.exp(within).sum(1, keepdims=True)))
        p, q = logps
        divergences.append(np.sum(np.exp(p) * (p - q), 1))
    np.testing.assert_allclose(value, np.concatenate(divergences).mean(), rtol=1e-4)
