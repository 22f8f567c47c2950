"""Losses of tokens that were drawn from a few ids, against float64 and against the sum over all outcomes."""

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
from zeroplay_jax.types import POLICY, PROMPT, Row, Trajectory

TEMPERATURE = 0.7


def reference(states, head, tokens, kept, advantages, weights, entropy_coef):
    """float64: (loss, entropies, gradient by the head) of −weight · (advantage · log p + coefficient · H) per token."""
    total, entropies, by_head = 0.0, [], np.zeros(head.shape)
    for state, token, ids, advantage, weight in zip(states, tokens, kept, advantages, weights):
        logits = state @ head[:, ids] / TEMPERATURE
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        logp = np.log(probs)
        entropy = -np.sum(probs * logp)
        drawn = np.array(ids) == token
        total -= weight * (advantage * logp[drawn][0] + entropy_coef * entropy)
        by_logits = advantage * (drawn - probs) - entropy_coef * probs * (logp + entropy)
        by_head[:, ids] -= weight * np.outer(state, by_logits) / TEMPERATURE
        entropies.append(entropy)
    return total, np.array(entropies), by_head


def test_log_probs_entropies_and_gradient_are_those_in_float64(policy):
    # A head of its own: the gradient of the embedding has other parts, too.
    model = dataclasses.replace(policy[0], tied=False)
    params = policy[1] | {'head': policy[1]['embedding'].T}
    rows = [truncated(row, model.vocab_size) for row in make_rows(model)]
    (batch,) = pack(rows, micro_rows=9, tokens=25, mode='token')
    kept = batch.for_devices().kept
    config = config_of(loss='reinforce', temperature=TEMPERATURE, entropy_coef=0.1)
    value, stats, gradients = gradient((model, params), config, [batch])
    states = transformer.hidden(model, params, batch.tokens, batch.positions, batch.segment)
    b, at = np.nonzero(batch.mask)
    expected, entropies, by_head = reference(
        np.asarray(states, np.float64)[b, at - 1],
        np.asarray(params['head'], np.float64),
        batch.tokens[b, at],
        [ids[ids >= 0] for ids in kept[b, at]],
        batch.advantage[b, at],
        batch.weight[b, at],
        0.1,
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(stats['entropy'][0], entropies.sum(), rtol=1e-5)
    assert np.abs(gradients['head'] - by_head).max() <= 1e-5 * np.abs(by_head).max()
    # Of ids that no token could be, nothing is learnt.
    never = np.setdiff1d(np.arange(model.vocab_size), kept)
    assert not gradients['head'][:, never].any()


def test_the_gradient_is_that_of_the_mean_over_all_outcomes(policy):
    """∇ Σ_a π(a) A(a) over the kept ids a equals Σ_a π(a) A(a) ∇ log π(a), which rollouts estimate."""
    model, params = policy
    prompt, ids = np.array([3, 1, 4], np.int32), np.array([2, 7, 11, 5])
    advantages = np.random.default_rng(0).normal(size=len(ids))

    def probs_of(params):
        states = transformer.hidden(
            model, params, prompt[None], np.arange(3)[None], np.ones((1, 3))
        )
        logits = transformer.logits(model, params, states[0, -1:])[0] / TEMPERATURE
        return jax.nn.softmax(logits[ids])

    probs = np.asarray(probs_of(params))
    rows = []
    for token, advantage in zip(ids, len(ids) * probs * advantages):
        trajectory = Trajectory(
            tokens=np.append(prompt, token).astype(np.int32),
            source=np.array([PROMPT] * 3 + [POLICY], np.int8),
            logp=np.zeros(4, np.float32),
            turns=(),
            finish='eos',
            weights='r',
            version=0,
            identity=(int(token),),
            kept=np.stack([np.full(len(ids), 3), ids], 1).astype(np.int32),
        )
        rows.append(Row('r', trajectory, 0.0, 0, advantage=float(advantage)))
    batches = pack(rows, micro_rows=4, tokens=9, mode='token')
    config = config_of(loss='reinforce', temperature=TEMPERATURE)
    *_, gradients = gradient(policy, config, batches)
    expected = jax.grad(lambda params: -jnp.sum(probs_of(params) * advantages))(params)
    assert tiny.gap(gradients, expected) <= 1e-5


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
        for weights in (params, teacher):
            states = transformer.hidden(
                model, weights, batch.tokens, batch.positions, batch.segment
            )
            logits = transformer.logits(model, weights, states[b, at - 1])
            logps.append(np.asarray(logits, np.float64) / TEMPERATURE)
        for student, of_teacher, ids in zip(*logps, batch.for_devices().kept[b, at]):
            p, q = (z[ids[ids >= 0]] for z in (student, of_teacher))
            p, q = (z - np.log(np.exp(z).sum()) for z in (p, q))
            divergences.append(np.sum(np.exp(p) * (p - q)))
    np.testing.assert_allclose(value, np.mean(divergences), rtol=1e-4)
