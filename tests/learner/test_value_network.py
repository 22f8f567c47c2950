"""The value network: advantages per token are the same for any packing and devices; values approach returns."""

import dataclasses

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from pytest import approx
from updates import make_rows, on_mesh, same

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.value_network import ValueNetwork
from zeroplay_jax.objectives import advantages
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.settings.schema import ValueNetwork as ValueNetworkFields
from zeroplay_jax.types import POLICY

VALUE, VARIANCE = 'value_network/value', 'value_network/explained_variance'
LOSS, SQUARES = 'value_network/loss', 'value_network/squared_error'


@pytest.fixture
def rows(policy):
    return make_rows(policy[0])


def network_of(policy, mesh=(1, 1, 1), offload=False):
    fields = TrainedRole().model_dump() | ValueNetworkFields().model_dump()
    config = ConfigDict(fields | dict(learning_rate=3e-3, value_clip=0.0))
    model, params = on_mesh(policy, mesh)
    return ValueNetwork(model, sharding.make_mesh(*mesh), config, params, offload=offload)


def minibatches(rows, micro_rows=2, tokens=60, order='arrival'):
    """Micro-batches of both halves of the rows, whose advantages are rewards."""
    packing = dict(micro_rows=micro_rows, tokens=tokens, mode='token', order=order)
    return [pack(half, **packing) for half in (rows[:5], rows[5:])]


def estimate_of(network, rows, whitens=True, **packing):
    return network.estimate(minibatches(rows, **packing), Hosts(), whitens=whitens)


def update(network, estimate):
    return [network.update(batches) for batches in estimate.value_minibatches]


def trained(policy):
    """A value network whose values are no longer 0."""
    network = network_of(policy)
    estimate = estimate_of(network, make_rows(policy[0]), whitens=False)
    for _ in range(3):
        update(network, estimate)
    return network


@pytest.fixture(scope='module')
def network(policy):
    """A trained one; not to be updated."""
    return trained(policy)


def by_token(batch_lists, field):
    """Trajectory's tokens → the values of a field at its trained tokens, so that packings can be compared."""
    values = {}
    for batch in sum(batch_lists, []):
        for row, segments in enumerate(batch.segment):
            for segment in set(segments[segments > 0]):
                here = segments == segment
                name = tuple(batch.tokens[row][here])
                values[name] = getattr(batch, field)[row][here & batch.mask[row]]
    return values


def at_trained(batch_lists, field):
    """The values of a field at all trained tokens."""
    return np.concatenate([*by_token(batch_lists, field).values()])


def assert_close(left, right, tolerance):
    assert left.keys() == right.keys()
    for name, values in left.items():
        np.testing.assert_allclose(values, right[name], rtol=tolerance, atol=tolerance)


def test_first_values_are_zero_and_advantages_are_rewards(policy, rows):
    estimate = estimate_of(network_of(policy), rows, whitens=False)
    assert estimate.stats[VALUE] == (0.0, 1.0)
    assert estimate.stats[VARIANCE][0] == approx(0, abs=1e-9)
    plain = minibatches(rows)
    np.testing.assert_array_equal(
        at_trained(estimate.minibatches, 'advantage'), at_trained(plain, 'advantage')
    )
    # Nothing else of the batches changes.
    for before, after in zip(sum(plain, []), sum(estimate.minibatches, []), strict=True):
        same(dataclasses.replace(after, advantage=before.advantage), before)


def test_whitened_advantages_are_those_over_all_tokens_of_the_step(network, rows):
    plain, whitened = (estimate_of(network, rows, whitens) for whitens in (False, True))
    expected = at_trained(plain.minibatches, 'advantage').astype(np.float64)
    expected = advantages.whiten(expected, np.ones(len(expected)))
    given = at_trained(whitened.minibatches, 'advantage')
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-4)


def test_a_value_is_read_where_its_token_is_predicted(policy, rows):
    """The value before token t is that of the state at t - 1 of this rollout alone."""
    model, params = policy
    # An output layer of its own is left out.
    params = params | {'head': params['embedding'].T}
    network = trained((dataclasses.replace(model, tied=False), params))
    estimate = estimate_of(network, rows, whitens=False)
    layers = dict(network.state['params'])
    assert set(layers) == set(params) - {'head'} | {'value'}
    output = layers.pop('value')
    longest = max(len(row.trajectory.tokens) for row in rows)
    # What follows a row has no effect on it: attention is causal.
    tokens = np.stack([np.resize(row.trajectory.tokens, longest) for row in rows])
    positions = np.broadcast_to(np.arange(longest), tokens.shape)
    hidden = jax.jit(transformer.hidden, static_argnums=0)
    states = hidden(model, layers, tokens, positions, np.ones_like(tokens))
    outputs = np.asarray(states @ output['kernel'] + output['bias'])
    expected = {}
    for row, row_outputs in zip(rows, outputs, strict=True):
        trained_positions = np.flatnonzero(row.trajectory.source == POLICY)
        expected[tuple(row.trajectory.tokens)] = row_outputs[trained_positions - 1, 0]
    assert_close(by_token(estimate.value_minibatches, 'old_values'), expected, 2e-4)


@pytest.mark.parametrize(
    'mesh, offload, packing',
    [
        ((1, 1, 1), False, dict(micro_rows=4, tokens=120)),
        ((1, 1, 1), False, dict(micro_rows=1, tokens=30, order='longest_first')),
        ((2, 2, 1), True, dict(micro_rows=4)),
    ],
)
def test_packing_devices_and_offload_change_neither_values_nor_updates(
    policy, rows, mesh, offload, packing
):
    networks = [network_of(policy), network_of(policy, mesh, offload)]
    for _ in range(2):
        estimates = [
            estimate_of(network, rows, **options)
            for network, options in zip(networks, ({}, packing))
        ]
        assert_close(*[by_token(each.minibatches, 'advantage') for each in estimates], 1e-3)
        for left, right in zip(*map(update, networks, estimates), strict=True):
            assert left.keys() == right.keys()
            for name, (total, _) in left.items():
                assert right[name][0] == approx(total, rel=1e-3, abs=1e-4), name
            # A mean over the tokens of the minibatch.
            total, count = left[SQUARES]
            assert left[LOSS][0] == approx(0.5 * total / count, rel=1e-5)
    if offload:
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(networks[1].state)}
        assert kinds == {'pinned_host'}


def test_values_approach_the_returns(policy, rows):
    network = network_of(policy)
    for _ in range(25):
        estimate = estimate_of(network, rows, whitens=False)
        update(network, estimate)
    assert estimate.stats[VARIANCE][0] > 0.9


def test_nothing_to_learn_from_changes_nothing(network, rows):
    """A minibatch without tokens, and a gradient that is not finite."""
    before = jax.tree.map(np.array, network.state)
    estimate = network.estimate([*minibatches(rows), []], Hosts(), whitens=True)
    assert estimate.minibatches[-1] == estimate.value_minibatches[-1] == []
    assert network.update([]) == {}
    nothing = network.estimate([[], []], Hosts(), whitens=True)
    assert nothing == ([[], []], [[], []], False, {})
    batch = estimate.value_minibatches[0][0]
    broken = dataclasses.replace(batch, returns=np.full_like(batch.returns, np.inf))
    assert network.update([broken])['value_network/nonfinite_updates'] == (1.0, 1.0)
    same(network.state, before)


def test_without_rewards_and_values_nothing_is_learnt(policy, network, rows):
    """All rewards are 0 and the first values too: no token has an advantage."""
    for row in rows:
        row.advantage = 0.0
    estimate = estimate_of(network_of(policy), rows)
    assert not estimate.is_informative
    assert not at_trained(estimate.minibatches, 'advantage').any()
    # Where a reward was expected, its absence teaches; equal rewards have no variance to explain.
    estimate = estimate_of(network, rows)
    assert estimate.is_informative and set(estimate.stats) == {VALUE}
