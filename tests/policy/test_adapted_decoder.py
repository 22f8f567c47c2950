"""Adapters over a frozen base: a fresh one changes no bit, neighbours change no bit, values as with whole weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_policies import adapter_of, equal, packed

from zeroplay_jax.policy import adapters, attention, hf, transformer
from zeroplay_jax.settings.schema import LINEARS

RANK, SCALE = 3, 2.0


@pytest.fixture(scope='module')
def policy(published):
    model = dataclasses.replace(hf.read_config(published), logit_chunk=16)
    return model, hf.load(published, model) | {adapters.SCALE: jnp.full(1, SCALE)}


def fresh(base, name, linears=LINEARS):
    return adapters.init(base, linears, RANK, seed=0, name=name)


def trained(base, name):
    return adapter_of(base, seed=len(name), name=name)


def several(base, *names):
    scale = {adapters.SCALE: jnp.full(len(names), SCALE)}
    return adapters.join(base | scale, adapters.stack([trained(base, name) for name in names]))


def hidden(model, params, *rows):
    return jax.jit(lambda p: transformer.hidden(model, p, *rows))(params)


def rows(tree, selected):
    return jax.tree.map(lambda x: x[selected], tree)


@functools.cache
def decode_program(model):
    slots, chunk = 8, 6
    ids, _, _ = packed(model, slots, chunk + 1)
    shape = (model.kv_heads, model.head_dim, model.dtype)
    cache = attention.empty_cache(model.layers, slots, 16, *shape)
    buffer = attention.empty_buffer(model.layers, slots, 4, *shape)
    at = jnp.arange(slots)

    @jax.jit
    def run(params, adapter):
        _, new = transformer.hidden_chunk(
            model, params, ids[:, :chunk], at, 0 * at, cache, adapter=adapter
        )
        states, _ = transformer.hidden_step(
            model, params, ids[:, chunk], 0 * at + chunk, jnp.int32(0), new, buffer, adapter=adapter
        )
        return new, states

    return run


def decode(model, params, adapter=None):
    """Keys and values of a prefilled chunk, and hidden states of a decode step, of eight slots."""
    return decode_program(model)(params, adapter)


@pytest.mark.parametrize('mode', [{}, {'scan': True, 'remat': True}])
def test_a_fresh_adapter_changes_no_bit(policy, mode):
    model, base = policy
    model = dataclasses.replace(model, **mode)
    joined = adapters.join(base, fresh(base, 'solver'))
    equal(hidden(model, joined, *packed(model)), hidden(model, base, *packed(model)))
    if not mode:
        equal(decode(model, joined), decode(model, base))


def test_a_row_is_the_same_whatever_its_neighbours_use(policy):
    model, base = policy
    joined = several(base, 'first', 'second', 'third')
    at = np.arange(8)
    index = np.array([0, 1, 2, -1, 0, 1, 2, -1], np.int32)
    for changed in (index == index[0], at < 5, at == 7):
        other = np.where(changed, index, (index + 2) % 4 - 1).astype(np.int32)
        ours, theirs = decode(model, joined, index), decode(model, joined, other)
        equal(rows(ours, other == index), rows(theirs, other == index))
    equal(rows(ours, index < 0), rows(decode(model, base), index < 0))


def test_values_are_those_of_merged_weights(policy):
    model, base = policy
    joined = several(base, 'first', 'second')
    for number, name in enumerate(('first', 'second')):
        whole = adapters.merged(adapters.join(base, trained(base, name)))
        assert adapters.SCALE not in whole
        ours = decode(model, joined, np.full(8, number, np.int32))
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(decode(model, whole))):
            np.testing.assert_allclose(x, y, atol=2e-4)
        assert np.abs(decode(model, base)[1] - ours[1]).max() > 0.1
