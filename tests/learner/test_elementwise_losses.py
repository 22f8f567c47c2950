"""Losses of single tokens have their gradient computed with the logits: the same gradient, with fewer products."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import updates
from updates import DISTILS, batches_of, config_of, other, packed, taught_rows

from zeroplay_jax.learner.loss import loss
from zeroplay_jax.learner.weights_view import FrozenBase
from zeroplay_jax.objectives import masking
from zeroplay_jax.objectives.losses import PolicyLoss
from zeroplay_jax.policy import adapters, sharding
from zeroplay_jax.policy.head import Head, map_tokens, sum_tokens
from zeroplay_jax.settings.schema import LINEARS

# No product of the layers has two of these sizes as its axes.
CHUNK, HIDDEN, VOCAB = 14, 32, 26
LOGITS, STATES, HEAD = {CHUNK, VOCAB}, {CHUNK, HIDDEN}, {HIDDEN, VOCAB}

# Relative, by norm of a parameter's gradient.
FLOAT32 = 1e-6
# In bfloat16 XLA fuses other operations around the same products, and rounds at other places.
BFLOAT16 = 0.02


@pytest.fixture(scope='module')
def policy(policy):
    model = dataclasses.replace(policy[0], logit_chunk=CHUNK)
    assert (model.hidden_size, model.vocab_size) == (HIDDEN, VOCAB)
    return model, policy[1]


def by_rows(config):
    """The same loss, called with whole rows."""
    policy_loss = dataclasses.replace(config.policy_loss, elementwise=False)
    return dataclasses.replace(config, policy_loss=policy_loss)


def on_policy(batch, seed=0):
    """The batch with ratios on both sides of the clips, and another sampler."""
    rng = np.random.default_rng(seed)
    change = lambda scale: np.where(batch.mask, rng.normal(size=batch.mask.shape) * scale, 0)
    old_logp = np.where(batch.mask, -3 + change(0.5), 0).astype(np.float32)
    sampler_logp = (old_logp + change(0.5)).astype(np.float32)
    return dataclasses.replace(batch, old_logp=old_logp, sampler_logp=sampler_logp)


def gradient(policy, config, batch, **options):
    """(gradient of the loss times a number, statistics)."""
    _, stats, gradients = updates.gradient(policy, config, [batch], scale=-8.0, **options)
    return gradients, stats


def assert_close(ours, theirs, tolerance):
    gradients, stats = ours
    expected_gradients, expected_stats = theirs
    assert tiny.gap(gradients, expected_gradients) <= tolerance
    assert all(np.linalg.norm(x) > 0 for x in jax.tree.leaves(expected_gradients))
    assert stats.keys() == expected_stats.keys()
    for name, (total, count) in expected_stats.items():
        assert stats[name][0] == pytest.approx(total, rel=tolerance, abs=1e-5), name
        assert stats[name][1] == count


def check(policy, config, batch, tolerance=FLOAT32, **options):
    """Checks that the gradient and the statistics are those of whole rows; returns them."""
    ours = gradient(policy, config, on_policy(batch), **options)
    assert_close(ours, gradient(policy, by_rows(config), on_policy(batch), **options), tolerance)
    return ours


# A policy loss with all other terms of single tokens.
TERMS = dict(kl_coef=0.1, entropy_coef=0.01, tis_cap=1.5, tis_level='token', dual_clip=1.2)


@pytest.fixture
def wide(policy):
    (batch,) = batches_of(policy, 16, micro_rows=8, tokens=60)
    return batch


@pytest.fixture
def small(policy):
    (batch,) = batches_of(policy, 4, tokens=60)
    return batch


@pytest.mark.parametrize(
    'name,logits,mesh', [('reinforce', 'all', (1, 1, 1)), ('token_pg', 'trained', (2, 2, 2))]
)
def test_the_gradient_and_the_statistics_are_those_of_whole_rows(policy, wide, name, logits, mesh):
    check(policy, config_of(loss=name, **TERMS), wide, mesh=mesh, logits=logits)


def test_bfloat16_is_rounded_as_for_whole_rows(policy, wide):
    config = config_of(loss='reinforce', **TERMS)
    options = dict(dtype='bfloat16', scan=True, remat=True)
    gradients, _ = check(policy, config, wide, BFLOAT16, **options)
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {np.dtype('float32')}


def test_distillation_has_the_gradient_of_whole_rows(policy):
    rows = taught_rows(policy[0], 8)
    for number, row in enumerate(rows):
        row.advantage = 0.5 - number % 3
    (batch,) = packed(rows, micro_rows=8)
    config = config_of(**DISTILS, **TERMS)
    options = dict(mesh=(2, 2, 1), teacher=other(policy[1]), logits='trained')
    assert 'distill_tail_mass' in check(policy, config, batch, **options)[1]


# Products with the output head


def head_products(function, *arguments):
    """(logits, gradients of the states, gradients of the head): their products in the compiled program."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    shapes = re.findall(r'= f32\[(\d+),(\d+)\]\S* dot\(', text)
    sizes = [{int(rows), int(columns)} for rows, columns in shapes]
    return tuple(sizes.count(axes) for axes in (LOGITS, STATES, HEAD))


def value_of(model, config, teacher=None, base=None):
    """Returns the function (params, batch) → (loss, statistics)."""

    def value(params, batch):
        return loss(model, config, params, batch, batch.old_logp, teacher, 0.7, base)

    return value


@pytest.mark.parametrize(
    'changes,products',
    [
        (dict(loss='token_pg', **TERMS), (1, 1, 1)),
        (dict(loss='sequence_pg'), (2, 1, 1)),
        (dict(tis_cap=2.0, tis_level='sequence'), (2, 1, 1)),
    ],
)
def test_products_with_the_head(policy, small, changes, products):
    """The logits are computed once, and twice where a loss couples tokens."""
    value = value_of(policy[0], config_of(**changes))
    assert head_products(jax.grad(value, has_aux=True), policy[1], small) == products


def test_without_a_gradient_the_logits_alone_are_computed(policy, small):
    model = dataclasses.replace(policy[0], logits='trained')
    value = value_of(model, config_of())
    assert head_products(value, policy[1], small) == (1, 0, 0)


def test_products_with_the_heads_of_student_and_teacher(policy):
    model, params = policy
    (batch,) = packed(taught_rows(model, 4), micro_rows=4)
    value = value_of(model, config_of(**DISTILS), teacher=params)
    assert head_products(jax.grad(value, has_aux=True), params, batch) == (2, 1, 1)


def test_a_frozen_head_has_no_gradient(policy, small):
    """Logits and the gradient of the states remain."""
    model, params = policy
    adapter = other(adapters.init(params, LINEARS, 2, 0, 'r'))
    config = config_of(**TERMS)
    base = FrozenBase.of(params, sharding.make_mesh(), scale=4.0).params
    value = jax.grad(value_of(model, config, base=base), has_aux=True)
    assert head_products(value, adapter, small) == (1, 1, 0)
    check((model, adapter), config, small, base=params)


# The sum over tokens


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

    clean = np.nan_to_num(states)
    values = (clean @ head['head']).sum(-1) * factor * wanted
    head_slope = np.einsum('rl,rld->d', factor * wanted, clean)[:, None].repeat(5, 1)
    state_slopes = (factor * wanted)[..., None] * head['head'].sum(-1)
    for function, passes in ((mapped, 2), (total, 1)):
        visited.clear()
        slopes, squares = jax.grad(function, (0, 1), has_aux=True)(head, states)
        jax.effects_barrier()
        assert visited == [7] * passes * -(-wanted.sum() // 7)
        np.testing.assert_allclose(squares, (values**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(slopes[0]['head'], head_slope, atol=1e-4)
        np.testing.assert_allclose(slopes[1], state_slopes, atol=1e-5)
        np.testing.assert_allclose(function(head, states)[0], values.sum(), rtol=1e-5)


def test_statistics_of_a_sum_have_no_gradient():
    """A loss that used one would be wrong: the gradient is that of the loss alone, computed before it is used."""
    states = np.ones((1, 4, 2), np.float32)
    head = {'head': np.ones((2, 3), np.float32)}

    def function(head, chunk_states, shared, per_token):
        value = jnp.sum(chunk_states @ head['head'])
        return value, value

    def statistic(head):
        return sum_tokens(function, Head(head, False, 2, None), states, (), ())[1]

    assert not jax.grad(statistic)(head)['head'].any()


def looped(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
    """A loss of a user with a loop that begins with constants."""
    mask, logp, advantage = masking.masked('looped', mask, logp, advantage)
    total = jax.lax.fori_loop(0, 3, lambda _, x: x + logp, jnp.zeros(logp.shape))
    return jnp.where(mask, -advantage * total, 0.0), {'total': masking.total(total, mask)}


def test_an_elementwise_loss_may_loop_on_several_devices(policy, wide):
    config = dataclasses.replace(config_of(), policy_loss=PolicyLoss(looped, elementwise=True))
    _, stats = gradient(policy, config, wide, mesh=(2, 2, 1))
    assert stats['total'][1] == wide.mask.sum()
