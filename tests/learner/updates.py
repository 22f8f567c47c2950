"""Rollouts of random tokens, their batches, and the gradient of a step: what tests of updates share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import tiny

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.loss import LossConfig, loss
from zeroplay_jax.learner.weights_view import FrozenBase
from zeroplay_jax.policy import sharding
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.types import ENV, POLICY, PROMPT, Row, Trajectory

TEACHER_TOKENS = 100
DISTILS = dict(distill_top_k=4, distill_coef=(1.0,), loss='token_pg')
# The scale of adapters.
SCALE = 4.0


def make_rows(model, count=9, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        n = int(rng.integers(8, 25))
        source = rng.choice([POLICY, ENV], n, p=(0.7, 0.3)).astype(np.int8)
        source[: int(rng.integers(1, 5))] = PROMPT
        logp = np.where(source == POLICY, -rng.uniform(1, 4, n), 0).astype(np.float32)
        tokens = rng.integers(0, model.vocab_size, n).astype(np.int32)
        trajectory = Trajectory(tokens, source, logp, (), 'eos', 'r', 0, (i,))
        rows.append(Row('r', trajectory, 0.0, i, advantage=float(rng.normal())))
    return rows


def taught_rows(model, count=7):
    rows = make_rows(model, count)
    rng = np.random.default_rng(1)
    for row in rows:
        row.advantage = 0.0
        length = int(rng.integers(3, 20))
        row.teacher_prompt = rng.integers(0, model.vocab_size, length).astype(np.int32)
    return rows


def thinking(row):
    """A rollout with a context before its last one, of which two tokens were retained."""
    last = row.trajectory
    prompt = last.tokens[: last.prompt_tokens]
    turn = last.tokens[::-1][:6]
    first = dataclasses.replace(
        last,
        tokens=np.concatenate([prompt, turn]),
        source=np.repeat([PROMPT, POLICY], [len(prompt), 6]).astype(np.int8),
        logp=np.repeat([0, -2], [len(prompt), 6]).astype(np.float32),
    )
    kept = [PROMPT, PROMPT]
    later = dataclasses.replace(
        last,
        tokens=np.concatenate([prompt, turn[-2:], last.tokens[len(prompt) :]]),
        source=np.concatenate([last.source[: len(prompt)], kept, last.source[len(prompt) :]]),
        logp=np.insert(last.logp, len(prompt), [0, 0]),
        earlier=(first,),
    )
    return dataclasses.replace(row, trajectory=later)


def truncated(row, vocabulary, seed=0):
    """The row with a set of random ids for every sampled token, which is one of them."""
    rng = np.random.default_rng(seed)
    trajectory, pairs = row.trajectory, []
    for position in np.flatnonzero(trajectory.source == POLICY):
        ids = rng.permutation(vocabulary)[: rng.integers(0, 9)]
        for token in {int(trajectory.tokens[position]), *ids.tolist()}:
            pairs.append((position, token))
    kept = np.array(pairs, np.int32)
    return dataclasses.replace(row, trajectory=dataclasses.replace(trajectory, kept=kept))


def batches_of(policy, count=9, micro_rows=4, tokens=50, mode='token'):
    rows = make_rows(policy[0], count)
    return pack(rows, micro_rows=micro_rows, tokens=tokens, mode=mode)


def packed(rows, micro_rows=4, tokens=60, teacher_tokens=TEACHER_TOKENS):
    return pack(
        rows, micro_rows=micro_rows, tokens=tokens, mode='token', teacher_tokens=teacher_tokens
    )


def other(params, seed=0):
    """Weights near these."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype('f'), params)


def role(**changes):
    return ml_collections.ConfigDict(
        TrainedRole().model_dump() | dict(learning_rate=0.01) | changes
    )


def on_mesh(policy, mesh=(1, 1, 1), **fields):
    model, params = policy
    place = sharding.make_mesh(*mesh)
    model = dataclasses.replace(model, mesh=place if place.size > 1 else None, **fields)
    layout = sharding.parameter_shardings(params, place, training_layout=True)
    return model, jax.device_put(params, layout)


def learner_of(policy, config, shape=(4, 50), mesh=(1, 1, 1), **options):
    model, params = policy
    return Learner(model, sharding.make_mesh(*mesh), {'r': config}, params, shape, **options)


def mean(stat):
    total, count = stat
    return total / count


def same(left, right):
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(left), jax.device_get(right))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradient(model, config, params, batch, teacher, alpha, base):
    """One program per shape for all tests."""

    def value(params):
        reference = batch.old_logp - 0.3
        sampler_logp = batch.old_logp + 0.5 * jnp.sin(batch.tokens)
        sampled = dataclasses.replace(batch, sampler_logp=sampler_logp)
        return loss(model, config, params, sampled, reference, teacher, alpha, base)

    return jax.value_and_grad(value, has_aux=True)(params)


def gradient(policy, config, batches, mesh=(1, 1, 1), teacher=None, base=None, alpha=0.7, **fields):
    """(loss, statistics, gradient), summed over micro-batches; `base` are the weights of an adapter."""
    model, params = on_mesh(policy, mesh, **fields)
    place = sharding.make_mesh(*mesh)
    if base is not None:
        _, whole = on_mesh((policy[0], base), mesh)
        base = FrozenBase.of(whole, place, SCALE).params
    # In the memory of the host: it goes to any devices.
    teacher = jax.device_get(teacher)
    parts = []
    for batch in batches:
        batch = jax.device_put(batch.for_devices(), sharding.rows(place))
        parts.append(_gradient(model, config, params, batch, teacher, alpha, base))
    (value, stats), gradients = jax.tree.map(lambda *x: sum(x), *jax.device_get(parts))
    return value, stats, gradients


def close(given, expected, tolerance=1e-5):
    """Compares losses, statistics and gradients, of which every parameter has some."""
    value, stats, gradients = given
    expected_value, expected_stats, expected_gradients = expected
    assert abs(value - expected_value) <= 1e-6 * max(1, abs(expected_value))
    assert stats.keys() == expected_stats.keys()
    for name, (total, count) in expected_stats.items():
        assert stats[name] == (pytest.approx(total, rel=tolerance, abs=1e-4), count), name
    assert tiny.gap(gradients, expected_gradients) <= tolerance
    assert all(np.linalg.norm(x) > 0 for x in jax.tree.leaves(expected_gradients))


def config_of(**changes):
    return LossConfig.of(role(**changes))
