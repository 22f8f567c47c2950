"""Adapters over a frozen base: a fresh one changes no bit, neighbours change no bit, values as with whole weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_policies import adapter_of, equal, packed

from zeroplay_jax.policy import adapters, attention, hf, transformer
from zeroplay_jax.policy.adapters import A, B
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


def test_fresh_adapters_differ_by_name_and_layer_only(policy):
    _, base = policy
    equal(fresh(base, 'solver', ('q',))['layer_1']['q'], fresh(base, 'solver')['layer_1']['q'])
    one, other = fresh(base, 'solver'), fresh(base, 'proposer')
    for a, b in ((one['layer_0'], one['layer_1']), (one['layer_0'], other['layer_0'])):
        assert (a['q'][A] != b['q'][A]).all() and not a['q'][B].any()


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


def test_gradients_are_those_of_the_dense_product(policy):
    """With W the kernel, G its gradient at W + s·A·B: dA = s·G·Bᵀ, dB = s·Aᵀ·G, by NumPy in float64."""
    model, base = policy
    model = dataclasses.replace(model, scan=True, remat=True)
    adapter, rows = trained(base, 'solver'), packed(model)

    def loss(params):
        logp, entropy = transformer.score(model, params, *rows)
        return jnp.sum(logp * np.linspace(0, 1, logp.size).reshape(logp.shape) + 0.1 * entropy)

    ours = jax.jit(jax.grad(lambda a: loss(adapters.join(base, a))))(adapter)
    dense = jax.jit(jax.grad(loss))(adapters.merged(adapters.join(base, adapter)))
    for layer, linears in adapter.items():
        for linear, factors in linears.items():
            g = np.asarray(dense[layer][linear]['kernel'], np.float64)
            wants = {A: SCALE * g @ factors[B].T, B: SCALE * factors[A].T @ g}
            for factor, want in wants.items():
                difference = np.linalg.norm(ours[layer][linear][factor] - want)
                assert difference <= 1e-4 * np.linalg.norm(want), (layer, linear, factor)


def products(tree):
    factors = [linear for layer in tree.values() for linear in layer.values()]
    return [np.asarray(f[A], np.float64) @ np.asarray(f[B], np.float64) for f in factors]


def check_products(teacher, expected, tolerance=1e-5):
    for product, wanted in zip(products(teacher), expected, strict=True):
        assert np.linalg.norm(product - wanted) <= tolerance * np.linalg.norm(wanted)


def test_averages_of_products(policy):
    """π-Play eq. 10 of the products: exact while the rank suffices, then the closest of that rank."""
    _, base = policy
    one, two, three = (trained(base, name) for name in ('first', 'second', 'last'))
    teacher = adapters.widened(one)
    check_products(teacher, products(one), 0)
    average = jax.jit(lambda t, s: adapters.average_products(t, s, 0.05))
    teacher = average(teacher, two)
    exact = [0.95 * x + 0.05 * y for x, y in zip(products(one), products(two))]
    check_products(teacher, exact)
    # Of three adapters the average has rank 9, and 6 are kept.
    teacher = average(teacher, three)
    exact = [0.95 * x + 0.05 * y for x, y in zip(exact, products(three))]
    for product, wanted in zip(products(teacher), exact, strict=True):
        rest = np.linalg.svd(wanted, compute_uv=False)[2 * RANK :]
        gap = np.linalg.norm(product - wanted)
        assert gap == pytest.approx(np.linalg.norm(rest), rel=1e-3)
