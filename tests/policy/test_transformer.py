"""The decoder's promises beside parity: scores, rematerialisation, mixed precision."""

import dataclasses
import functools

import jax
import jax.extend
import numpy as np
import pytest
import tiny
from small_policies import EVERY_SWITCH, fill_and_decode, logits, packed, sampler_of

from zeroplay_jax.policy import transformer
from zeroplay_jax.rollout.sampler import SlotPut

score = jax.jit(transformer.score, static_argnums=(0, 5))


@pytest.fixture(scope='module')
def params():
    return tiny.random_params(EVERY_SWITCH)


# Scoring


def test_score_is_the_log_softmax_of_the_place_before(params):
    inputs = packed(EVERY_SWITCH, segments=2)
    logp, entropy = score(EVERY_SWITCH, params, *inputs, 0.7)
    z = logits(EVERY_SWITCH, params, *inputs).astype(np.float64) / 0.7
    z -= np.log(np.exp(z).sum(-1, keepdims=True))
    expected = np.take_along_axis(z[:, :-1], inputs[0][:, 1:, None], 2)[..., 0]
    np.testing.assert_allclose(logp[:, 1:], expected, atol=1e-5)
    np.testing.assert_allclose(entropy[:, 1:], -(np.exp(z) * z).sum(-1)[:, :-1], atol=1e-5)
    assert not logp[:, 0].any() and not entropy[:, 0].any()


# Rematerialisation


def test_what_is_kept_for_the_backward_pass(params):
    """All, or the layers' inputs alone: at a length where attention scores weigh most."""
    inputs = packed(EVERY_SWITCH, rows=1, length=256, segments=2)

    def kept(**change):
        config = dataclasses.replace(EVERY_SWITCH, **change)
        forward = lambda p: transformer.hidden(config, p, *inputs)
        pull = jax.eval_shape(lambda p: jax.vjp(forward, p)[1], params)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    nothing = kept(remat=True)
    assert kept() > 4 * nothing
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    assert nothing < weights + (EVERY_SWITCH.layers + 2) * 256 * 32 * 4 + 4 * 256 * 256 * 4


# Mixed precision


def float_types(variables):
    types = [str(getattr(variable.aval, 'dtype', '')) for variable in variables]
    return {name for name in types if 'float' in name}


def primitives(jaxpr):
    """(name, dtypes of the inputs, dtypes of the outputs) of every operation, inner ones too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, float_types(equation.invars), float_types(equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


def test_bfloat16_computes_products_and_nothing_delicate_with_it(params):
    config = dataclasses.replace(EVERY_SWITCH, dtype='bfloat16')
    program = jax.make_jaxpr(functools.partial(transformer.score, config))(
        params, *packed(EVERY_SWITCH, segments=2)
    )
    products, delicate = [], {}
    for name, inputs, outputs in primitives(program.jaxpr):
        if name == 'dot_general':
            products.append((inputs, outputs))
        elif name in ('exp', 'log', 'rsqrt', 'cos', 'sin', 'reduce_sum'):
            delicate.setdefault(name, set()).update(inputs)
    assert len(products) == 2 * 9 + 1 and all(inputs == {'bfloat16'} for inputs, _ in products)
    assert len(delicate) == 6 and set().union(*delicate.values()) == {'float32'}
    # Scores of attention and logits leave their products in float32.
    assert sum(outputs == {'float32'} for _, outputs in products) == 2 + 1
    assert [str(value.dtype) for value in program.out_avals] == ['float32', 'float32']


# Log-probs of tokens that a bfloat16 policy samples, against what the trainer finds for them: both round differently
# at every layer. Nats per token; measured here: 0.036 and 0.008.
BFLOAT16_MAX, BFLOAT16_MEAN = 0.1, 0.02


def test_bfloat16_sampler_and_trainer_agree_within_the_stated_tolerance(params):
    config = dataclasses.replace(EVERY_SWITCH, dtype='bfloat16')
    slots, prompt, length = 8, 12, 76
    shape = dict(slots=slots, context=80, chunk=8, fill_rows=8, burst=8, put_rows=8, put_tokens=16)
    sampler = sampler_of(config, **shape)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (slots, prompt)).astype(np.int32)
    keys = np.array([[slot, 7] for slot in range(slots)], np.uint32)
    sampler.put([SlotPut(slot, tokens[slot], 0, length, 1.0, keys[slot]) for slot in range(slots)])
    _, logp = fill_and_decode(sampler, params, np.full(slots, length))
    rows = np.asarray(sampler.state.tokens)[:, :length]
    positions = np.broadcast_to(np.arange(length), rows.shape)

    def gap(dtype):
        again = dataclasses.replace(config, dtype=dtype)
        trainer, _ = score(again, params, rows, positions, np.ones_like(rows), 1.0)
        return np.abs(np.asarray(trainer)[:, prompt:] - logp)

    assert 0 < gap('bfloat16').max() <= BFLOAT16_MAX
    assert gap('bfloat16').mean() <= BFLOAT16_MEAN and gap('float32').mean() <= BFLOAT16_MEAN
