"""Meshes: one rule per parameter, the same numbers on every mesh, and a shape that does not divide is named."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from small_policies import EVERY_SWITCH, packed

from zeroplay_jax.policy import sharding, transformer

CONFIG = dataclasses.replace(
    EVERY_SWITCH, layers=1, heads=8, kv_heads=4, windows=(8,), logit_chunk=32
)
ROWS, LENGTH = 8, 24
LONG_MESHES = ((1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 8, 1), (4, 1, 2))
MESHES = [(1, 2, 2), (8, 1, 1), (2, 2, 2), (1, 2, 4)]
MESHES += [pytest.param(mesh, marks=pytest.mark.long) for mesh in LONG_MESHES]


@pytest.fixture(scope='module')
def setting():
    """Parameters of every size, packed rows and token weights."""
    weight = np.random.default_rng(0).normal(size=(ROWS, LENGTH)).astype(np.float32)
    return tiny.random_params(CONFIG), packed(CONFIG, ROWS, LENGTH, segments=2), weight


def loss(config, params, inputs, weight):
    logp, entropy = transformer.score(config, params, *inputs)
    return jnp.sum(logp * weight) + jnp.sum(entropy)


def on_mesh(setting, shape):
    """Loss and gradients on a mesh."""
    params, inputs, weight = setting
    mesh = sharding.make_mesh(*shape)
    config = dataclasses.replace(CONFIG, mesh=mesh)
    places = sharding.parameter_shardings(params, mesh, training_layout=True)
    rows = sharding.rows(mesh)
    step = jax.jit(
        jax.value_and_grad(functools.partial(loss, config)),
        in_shardings=(places, rows, rows),
        out_shardings=(sharding.replicated(mesh), places),
    )
    arrays = jax.device_put((inputs, weight), rows)
    value, gradients = step(jax.device_put(params, places), *arrays)
    for gradient, place in zip(jax.tree.leaves(gradients), jax.tree.leaves(places), strict=True):
        assert gradient.sharding.is_equivalent_to(place, gradient.ndim), str(gradient.sharding)
    return float(value), jax.device_get(gradients)


@pytest.fixture(scope='module')
def alone(setting):
    return on_mesh(setting, (1, 1, 1))


@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_loss_and_gradients_are_the_same_on_every_mesh(setting, alone, mesh):
    value, gradients = on_mesh(setting, mesh)
    assert abs(value - alone[0]) <= 1e-6 * abs(alone[0])
    assert tiny.gap(gradients, alone[1]) <= 1e-5


def test_rows_stay_where_they_are_and_the_head_comes_to_them_once(setting):
    """No collective carries logits; every device multiplies its own rows' chunk; the head's gradient adds up once."""
    _, inputs, weight = setting
    vocab, chunk = 4096, 16
    config = dataclasses.replace(CONFIG, windows=(), vocab_size=vocab, logit_chunk=chunk)
    params = jax.eval_shape(functools.partial(transformer.init, config), jax.random.key(0))
    mesh = sharding.make_mesh(1, 4, 1)
    places, rows = sharding.parameter_shardings(params, mesh), sharding.rows(mesh)

    def program(mesh):
        gradient = jax.grad(functools.partial(loss, dataclasses.replace(config, mesh=mesh)))
        step = jax.jit(gradient, in_shardings=(places, rows, rows), out_shardings=places)
        return step.lower(params, inputs, weight).compile().as_text()

    def moved(text):
        collectives = 'all-reduce|all-gather|reduce-scatter|all-to-all'
        return re.findall(rf'= (.*) (?:{collectives})\(', text)

    logits = re.compile(rf'\[(?:{chunk}|{4 * chunk}),{vocab}\]')
    with_mesh = program(mesh)
    assert f'f32[{chunk},{vocab}]' in with_mesh
    assert not any(logits.search(line) for line in moved(with_mesh))
    assert sum(f'[32,{vocab}]' in line for line in moved(with_mesh)) == 2
    # What XLA does without the mesh.
    assert any(logits.search(line) for line in moved(program(None)))


def test_what_an_update_owns_is_split_over_the_replicas_and_what_is_played_with_is_not(setting):
    params, mesh = setting[0], sharding.make_mesh(2, 2, 2)
    trained, played = (
        sharding.parameter_shardings(params, mesh, is_own) for is_own in (True, False)
    )
    rows, columns = params['layer_0']['q']['kernel'].shape
    for places, parts in ((trained, 4), (played, 2)):
        shard = places['layer_0']['q']['kernel'].shard_shape((rows, columns))
        assert shard == (rows // parts, columns // 2)
    assert all('replica' not in str(place.spec) for place in jax.tree.leaves(played))
    # 6 divides by 'fsdp' and not by both: it stays with 'fsdp'.
    place = sharding.parameter_sharding('layer_0/q/kernel', (6, 8), mesh, training_layout=True)
    assert place.spec[0] == 'fsdp'


def test_every_parameter_has_exactly_one_rule(setting, monkeypatch):
    sharding.parameter_shardings(setting[0], sharding.make_mesh(1, 2, 2))
    with pytest.raises(ValueError, match="'layer_0/q/extra' is matched by 0"):
        sharding.parameter_spec('layer_0/q/extra')
    monkeypatch.setattr(sharding, 'RULES', (*sharding.RULES, ('head.*', sharding.P())))
    with pytest.raises(ValueError, match="'head' is matched by 2"):
        sharding.parameter_shardings(setting[0], sharding.make_mesh(1, 2, 2))


def test_optimiser_state_and_average_lie_as_their_parameters(setting):
    params, mesh = setting[0], sharding.make_mesh(1, 2, 2)
    own = sharding.parameter_shardings(params, mesh)
    begin = lambda p: dict(params=p, opt=optax.adamw(1e-3).init(p), ema=p, step=jnp.int32(0))
    shapes = jax.eval_shape(begin, params)
    state = jax.jit(begin, out_shardings=sharding.state_shardings(shapes, params, mesh))(params)
    adam = state['opt'][0]
    for tree in (state['params'], adam.mu, adam.nu, state['ema']):
        for array, place in zip(jax.tree.leaves(tree), jax.tree.leaves(own), strict=True):
            assert array.sharding.is_equivalent_to(place, array.ndim)
    assert state['step'].sharding.is_fully_replicated and adam.count.sharding.is_fully_replicated
    kernel = adam.mu['layer_0']['q']['kernel']
    assert kernel.addressable_shards[0].data.size == kernel.size // 4


def test_a_mesh_that_does_not_divide_a_shape_or_cuts_through_heads_is_refused(setting):
    for mesh, message in (
        ((1, 3, 1), "32 .* axis 'fsdp' of 3"),
        ((1, 1, 5), "64 .* axis 'model' of 5"),
    ):
        with pytest.raises(sharding.UserError, match=f"parameter 'embedding': {message}"):
            sharding.parameter_shardings(setting[0], sharding.make_mesh(*mesh))
    with pytest.raises(sharding.UserError, match="num_key_value_heads=4 .* axis 'model' of 8"):
        sharding.check_heads(8, 4, 8)
    sharding.check_heads(8, 4, 4)
