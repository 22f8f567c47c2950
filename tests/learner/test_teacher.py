"""The teacher's view: the same tokens behind another prompt, held against the student's place by place."""

import dataclasses

import jax
import numpy as np
import pytest
from updates import (
    DISTILS,
    TEACHER_TOKENS,
    config_of,
    gradient,
    learner_of,
    mean,
    other,
    packed,
    role,
    taught_rows,
    thinking,
)

from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.learner.loss import loss
from zeroplay_jax.policy import transformer
from zeroplay_jax.types import POLICY, UserError


def test_every_policy_token_is_held_against_the_same_token_of_the_teacher(policy):
    rows = taught_rows(policy[0])
    for batch in packed(rows):
        for b, at in zip(*np.nonzero(batch.teacher.weight)):
            place = batch.teacher.teacher_index[b, at]
            assert batch.mask[b, at] and batch.teacher.tokens[b, place] == batch.tokens[b, at]
            # what predicts it stands one place before, in both views, and in the same episode
            assert batch.teacher.teacher_index[b, at - 1] == place - 1
            assert set(batch.teacher.segment[b, place - 1 : place + 1]) == {batch.segment[b, at]}
    total = sum(float(b.teacher.weight.sum()) for b in packed(rows))
    assert total == pytest.approx(1.0, abs=1e-6)


def test_rows_without_a_prompt_for_the_teacher_are_packed_without_it(policy):
    rows = taught_rows(policy[0])
    for row in rows[::2]:
        row.teacher_prompt = None
    (batch,) = packed(rows, 7, 25, 45)
    (alone,) = packed(rows, 7, 25, teacher_tokens=0)
    np.testing.assert_array_equal(alone.tokens, batch.tokens)
    row_numbers, places = np.nonzero(batch.teacher.weight)
    assert len({*zip(row_numbers, batch.segment[row_numbers, places])}) == len(rows[1::2])


@pytest.mark.parametrize('change', [dataclasses.replace, thinking])
def test_against_probabilities_in_float64(policy, change):
    """With K the whole vocabulary the term is the mean of KL(student ‖ teacher), each behind its own prompt.

    Where thoughts leave the context, both read what was sampled in the context in which it was sampled.
    """
    model, params = policy
    rows, teacher = list(map(change, taught_rows(model, 3))), other(params)

    @jax.jit
    def logits(weights, ids):
        states = transformer.hidden(model, weights, ids, np.arange(60)[None], np.ones((1, 60)))
        return transformer.logits(model, weights, states[0])

    def logp(weights, ids):
        # One length, so that there is one program; what follows has no effect.
        z = np.asarray(logits(weights, np.resize(ids, (1, 60))), np.float64) / 0.7
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    values = []
    for row in rows:
        own = row.trajectory.contexts[0].prompt_tokens
        for t in row.trajectory.contexts:
            p = logp(params, t.tokens)
            q = logp(teacher, np.concatenate([row.teacher_prompt, t.tokens[own:]]))
            for j in np.flatnonzero(t.source == POLICY):
                a, b = p[j - 1], q[j - 1 + len(row.teacher_prompt) - own]
                values.append(np.sum(np.exp(a) * (a - b)))
    config = config_of(**DISTILS | dict(distill_top_k=model.vocab_size, temperature=0.7))
    value, *_ = gradient(policy, config, packed(rows), teacher=teacher, alpha=0.3)
    assert value == pytest.approx(0.3 * np.mean(values), rel=1e-4)


def test_the_teacher_follows_its_student_and_is_kept(policy):
    config = role(**DISTILS, distill_ema_rate=0.05, learning_rate=1e-2)
    learner = learner_of(policy, config, (4, 60), teacher_tokens=TEACHER_TOKENS)
    embedding = lambda params: np.asarray(params['embedding'])
    first = embedding(policy[1])
    stats = learner.update('r', packed(taught_rows(policy[0])), 0.5)
    assert stats['distill_divergence'][1] > 0 and 0 <= mean(stats['distill_tail_mass']) < 1
    np.testing.assert_array_equal(embedding(learner.state['teacher']), first)
    learner.update_ema_teacher()
    updated = embedding(learner.params)
    want = 0.95 * first + 0.05 * updated
    np.testing.assert_allclose(embedding(learner.state['teacher']), want, atol=1e-7)
    assert np.abs(updated - first).max() > 1e-4


def test_what_does_not_fit_the_teachers_row_is_refused(policy):
    with pytest.raises(UserError, match='privileged.tokens=30'):
        packed(taught_rows(policy[0]), teacher_tokens=30)


def test_the_logits_of_a_batch_never_exist_at_once(policy):
    model = dataclasses.replace(policy[0], vocab_size=151_936, logit_chunk=128)
    params = jax.eval_shape(lambda key: transformer.init(model, key), jax.random.key(0))
    config = config_of(**DISTILS)
    rows, length = 2, 1024
    batch = Batch.blank((rows, length), length)

    def total(student, teacher):
        return loss(model, config, student, batch, batch.old_logp, teacher, 1.0)[0]

    compiled = jax.jit(jax.grad(total)).lower(params, params).compile()
    logits_bytes = rows * length * model.vocab_size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < logits_bytes
