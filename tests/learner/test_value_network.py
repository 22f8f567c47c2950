"""The value network: advantages per token are the same for any packing and devices; values approach returns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict
from pytest import approx
from updates import make_rows, on_mesh, same

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.value_network import ValueNetwork
from zeroplay_jax.objectives import advantages
from zeroplay_jax.policy import hf, sharding, transformer
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.settings.schema import ValueNetwork as ValueNetworkFields
from zeroplay_jax.types import POLICY

VALUE, VARIANCE = 'value_network/value', 'value_network/explained_variance'
LOSS, SQUARES = 'value_network/loss', 'value_network/squared_error'


@pytest.fixture(scope='module')
def untied(tmp_path_factory):
    """A policy with an output layer of its own, which a value network leaves out."""
    path = tmp_path_factory.mktemp('untied') / 'policy'
    tiny.make_folder(path, letters=tiny.LETTERS, tie_word_embeddings=False)
    model = dataclasses.replace(hf.read_config(path), logit_chunk=16)
    return model, hf.load(path, model)


@pytest.fixture
def rows(policy):
    return make_rows(policy[0])


def network_of(policy, mesh=(1, 1, 1), offload=False):
    fields = TrainedRole().model_dump() | ValueNetworkFields().model_dump()
    config = ConfigDict(fields | dict(learning_rate=3e-3, value_clip=0.0))
    model, params = on_mesh(policy, mesh)
    return ValueNetwork(model, sharding.make_mesh(*mesh), config, params, offload=offload)


def minibatches(rows, parts=2, micro_rows=2, tokens=60, order='arrival'):
    """Micro-batches of each part of the rows, whose advantages are rewards."""
    packed = []
    for indices in np.array_split(np.arange(len(rows)), parts):
        part = [rows[index] for index in indices]
        packed.append(pack(part, micro_rows=micro_rows, tokens=tokens, mode='token', order=order))
    return packed


def estimate_of(network, rows, whitens=True, hosts=None, **packing):
    return network.estimate(minibatches(rows, **packing), hosts or Hosts(), whitens=whitens)


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
        for row in range(len(batch.tokens)):
            for segment in range(1, int(batch.segment[row].max()) + 1):
                here = batch.segment[row] == segment
                name = tuple(batch.tokens[row][here])
                values[name] = getattr(batch, field)[row][here & batch.mask[row]]
    return values


def assert_close(left, right, tolerance, absolute=None):
    assert left.keys() == right.keys()
    for name, values in left.items():
        np.testing.assert_allclose(values, right[name], rtol=tolerance, atol=absolute or tolerance)


def test_first_values_are_zero_and_advantages_are_rewards(policy, rows):
    estimate = estimate_of(network_of(policy), rows, whitens=False)
    assert estimate.stats[VALUE] == (0.0, 1.0)
    assert estimate.stats[VARIANCE][0] == approx(0, abs=1e-9)
    plain = sum(minibatches(rows), [])
    for before, after in zip(plain, sum(estimate.minibatches, []), strict=True):
        np.testing.assert_array_equal(after.advantage[after.mask], before.advantage[before.mask])
        assert not after.advantage[~after.mask].any()
        # Nothing else of the batch changes.
        same(dataclasses.replace(after, advantage=before.advantage), before)


def test_whitened_advantages_are_those_over_all_tokens_of_the_step(network, rows):
    estimate = estimate_of(network, rows)
    given, expected, values = [], [], []
    batches = zip(sum(estimate.minibatches, []), sum(estimate.value_minibatches, []), strict=True)
    for batch, value_batch in batches:
        given.append(batch.advantage[batch.mask])
        expected.append((value_batch.returns - value_batch.old_values)[batch.mask])
        values.append(value_batch.old_values)
    assert np.ptp(np.concatenate(values)) > 0
    expected = np.concatenate(expected).astype(np.float64)
    whitened = advantages.whiten(expected, np.ones(len(expected)))
    np.testing.assert_allclose(np.concatenate(given), whitened, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    'name, options, tolerance',
    [
        ('untied', {}, 2e-4),
        ('policy', dict(dtype=jnp.bfloat16, scan=True, remat=True), 2e-2),
    ],
)
def test_a_value_is_read_where_its_token_is_predicted(name, options, tolerance, rows, request):
    """The value before token t is that of the state at t - 1 of this rollout alone."""
    model, params = request.getfixturevalue(name)
    model = dataclasses.replace(model, **options)
    network = trained((model, params))
    estimate = estimate_of(network, rows, whitens=False)
    values = by_token(estimate.value_minibatches, 'old_values')
    layers = dict(network.state['params'])
    # The policy's weights are copied, and its output layer is left out.
    assert set(layers) == set(params) - {'head'} | {'value'}
    assert not np.array_equal(layers['embedding'], params['embedding'])
    output = layers.pop('value')
    longest = max(len(row.trajectory.tokens) for row in rows)
    # What follows a row has no effect on it: attention is causal.
    tokens = np.stack([np.resize(row.trajectory.tokens, longest) for row in rows])
    positions = np.broadcast_to(np.arange(longest), tokens.shape)
    hidden = jax.jit(transformer.hidden, static_argnums=0)
    states = hidden(model, layers, tokens, positions, np.ones_like(tokens))
    outputs = states.astype(jnp.float32) @ output['kernel'] + output['bias']
    expected = {}
    for row, row_outputs in zip(rows, np.asarray(outputs), strict=True):
        trained_positions = np.flatnonzero(row.trajectory.source == POLICY)
        expected[tuple(row.trajectory.tokens)] = row_outputs[trained_positions - 1, 0]
    assert_close(values, expected, tolerance)


@pytest.mark.parametrize(
    'packing',
    [
        dict(micro_rows=4, tokens=120, parts=1),
        dict(micro_rows=1, tokens=30, order='longest_first'),
    ],
)
def test_packing_changes_neither_advantages_nor_returns(network, rows, packing):
    one, other = estimate_of(network, rows), estimate_of(network, rows, **packing)
    for field in ('advantage', 'returns', 'old_values'):
        part = 'minibatches' if field == 'advantage' else 'value_minibatches'
        given = [by_token(getattr(estimate, part), field) for estimate in (one, other)]
        assert any(values.any() for values in given[0].values())
        assert_close(*given, 2e-4, 2e-5)


@pytest.mark.parametrize(
    'mesh, offload',
    [
        pytest.param((1, 2, 2), False, marks=pytest.mark.long),
        ((2, 2, 1), True),
    ],
)
def test_devices_change_neither_values_nor_updates(policy, rows, mesh, offload):
    networks = [network_of(policy), network_of(policy, mesh, offload)]
    for _ in range(2):
        estimates = [estimate_of(network, rows, micro_rows=4) for network in networks]
        assert_close(*[by_token(each.minibatches, 'advantage') for each in estimates], 1e-3)
        stats = map(update, networks, estimates)
        for left, right in zip(*stats, strict=True):
            assert left.keys() == right.keys()
            for name, (total, _) in left.items():
                assert right[name][0] == approx(total, rel=1e-3, abs=1e-4), name
    if offload:
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(networks[1].state)}
        assert kinds == {'pinned_host'}


def test_values_approach_the_returns(policy, rows):
    network = network_of(policy)
    variances, errors = [], []
    for _ in range(25):
        estimate = estimate_of(network, rows, whitens=False)
        variances.append(estimate.stats[VARIANCE][0])
        total, count = update(network, estimate)[-1][SQUARES]
        errors.append(total / count)
    assert variances[0] == approx(0, abs=1e-6) and variances[-1] > 0.9
    assert errors[-1] < 0.1 * errors[0]


def test_the_loss_of_a_minibatch_is_a_mean_over_its_tokens_however_it_is_cut(policy, rows):
    losses = []
    for micro_rows, tokens in ((2, 60), (4, 120)):
        network = network_of(policy)
        packing = dict(parts=1, micro_rows=micro_rows, tokens=tokens)
        (stats,) = update(network, estimate_of(network, rows, whitens=False, **packing))
        total, count = stats[SQUARES]
        assert stats[LOSS][0] == approx(0.5 * total / count, rel=1e-5)
        losses.append([stats[LOSS][0], stats['value_network/gradient_norm'][0]])
    np.testing.assert_allclose(losses, [losses[0]] * 2, rtol=1e-4)


def test_nothing_to_learn_from_changes_nothing(network, rows):
    """A minibatch without tokens, and a gradient that is not finite."""
    before = jax.tree.map(np.array, network.state)
    estimate = network.estimate([*minibatches(rows, parts=1), []], Hosts(), whitens=True)
    for parts in (estimate.minibatches, estimate.value_minibatches):
        assert [bool(part) for part in parts] == [True, False]
    assert network.update(estimate.value_minibatches[1]) == {}
    nothing = network.estimate([[], []], Hosts(), whitens=True)
    assert nothing == ([[], []], [[], []], False, {})
    batch = estimate.value_minibatches[0][0]
    broken = dataclasses.replace(batch, returns=np.full_like(batch.returns, np.inf))
    assert network.update([broken])['value_network/nonfinite_updates'] == (1.0, 1.0)
    same(network.state, before)


def test_without_rewards_and_values_nothing_is_learnt(policy, network, rows):
    """All rewards are 0 and the first values too: no token has an advantage."""
    fresh = network_of(policy)
    assert estimate_of(fresh, rows).is_informative
    for row in rows:
        row.advantage = 0.0
    estimate = estimate_of(fresh, rows)
    assert not estimate.is_informative
    assert not any(batch.advantage.any() for batch in sum(estimate.minibatches, []))
    # Where a reward was expected, its absence teaches.
    assert estimate_of(network, rows).is_informative
    # Equal rewards have no variance to explain.
    assert set(estimate_of(network, rows).stats) == {VALUE}
