"""The value network: advantages per token are the same for any packing and devices; values approach returns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict
from test_learner import make_rows

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.value_network import ValueNetwork
from zeroplay_jax.objectives import advantages
from zeroplay_jax.policy import hf, sharding, transformer
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.settings.schema import ValueNetwork as ValueNetworkFields
from zeroplay_jax.types import POLICY


def make_policy(tmp_path_factory, **config):
    folder = tiny.make_folder(
        tmp_path_factory.mktemp('value_network') / 'policy', letters=tiny.LETTERS, **config
    )
    model = dataclasses.replace(hf.read_config(folder), logit_chunk=16)
    return model, hf.load(folder, model)


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory)


@pytest.fixture(scope='module')
def untied(tmp_path_factory):
    """A policy with an output layer of its own, which a value network leaves out."""
    return make_policy(tmp_path_factory, tie_word_embeddings=False)


def network_of(policy, mesh=(1, 1, 1), offload=False, **settings):
    model, params = policy
    fields = TrainedRole().model_dump() | ValueNetworkFields().model_dump()
    config = ConfigDict(fields | dict(learning_rate=3e-3, value_clip=0.0) | settings)
    mesh = sharding.make_mesh(*mesh)
    model = dataclasses.replace(model, mesh=mesh if mesh.size > 1 else None)
    placed = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    return ValueNetwork(model, mesh, config, placed, offload=offload)


def minibatches(rows, parts=2, micro_rows=2, tokens=60, order='arrival'):
    """Micro-batches of each part of the rows, whose advantages are rewards."""
    packed = []
    for part in np.array_split(np.arange(len(rows)), parts):
        packed.append(
            pack(
                [rows[index] for index in part],
                micro_rows=micro_rows,
                tokens=tokens,
                mode='token',
                order=order,
            )
        )
    return packed


def by_token(batch_lists, field):
    """Trajectory's tokens → the values of a field at its trained tokens, so that packings can be compared."""
    values = {}
    for batches in batch_lists:
        for batch in batches:
            for row in range(len(batch.tokens)):
                for segment in range(1, int(batch.segment[row].max()) + 1):
                    here = batch.segment[row] == segment
                    name = tuple(batch.tokens[row][here])
                    values[name] = getattr(batch, field)[row][here & batch.mask[row]]
    return values


def assert_close(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name, values in left.items():
        np.testing.assert_allclose(values, right[name], **tolerance)


def trained(policy, steps=3, **options):
    """A value network whose values are no longer 0."""
    network = network_of(policy, **options)
    estimate = network.estimate(minibatches(make_rows(policy[0])), Hosts(), whitens=False)
    for _ in range(steps):
        for batches in estimate.value_minibatches:
            network.update(batches)
    return network


def test_first_values_are_zero_and_advantages_are_rewards(policy):
    rows = make_rows(policy[0])
    plain = minibatches(rows)
    estimate = network_of(policy).estimate(plain, Hosts(), whitens=False)
    assert estimate.stats['value_network/value'] == (0.0, 1.0)
    assert estimate.stats['value_network/explained_variance'][0] == pytest.approx(0, abs=1e-9)
    for before, after in zip(sum(plain, []), sum(estimate.minibatches, []), strict=True):
        np.testing.assert_array_equal(after.advantage[after.mask], before.advantage[before.mask])
        assert not after.advantage[~after.mask].any()
        # Nothing else of the batch changes.
        same = dataclasses.replace(after, advantage=before.advantage)
        jax.tree.map(np.testing.assert_array_equal, same, before)


def test_whitened_advantages_are_those_over_all_tokens_of_the_step(policy):
    network = trained(policy)
    plain = minibatches(make_rows(policy[0]))
    estimate = network.estimate(plain, Hosts(), whitens=True)
    given, expected = [], []
    for part, value_part in zip(estimate.minibatches, estimate.value_minibatches, strict=True):
        for batch, value_batch in zip(part, value_part, strict=True):
            given.append(batch.advantage[batch.mask])
            expected.append((value_batch.returns - value_batch.old_values)[batch.mask])
    expected = np.concatenate(expected).astype(np.float64)
    assert np.ptp(np.concatenate([b.old_values for p in estimate.value_minibatches for b in p])) > 0
    whitened = advantages.whiten(expected, np.ones(len(expected)))
    np.testing.assert_allclose(np.concatenate(given), whitened, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', ['policy', 'untied'])
@pytest.mark.parametrize('options', [{}, dict(scan=True, remat=True), dict(dtype=jnp.bfloat16)])
def test_a_value_is_read_where_its_token_is_predicted(name, options, request):
    """The value before token t is that of the state at t - 1 of this rollout alone."""
    model, params = request.getfixturevalue(name)
    model = dataclasses.replace(model, **options)
    network = trained((model, params))
    rows = make_rows(model)
    estimate = network.estimate(minibatches(rows), Hosts(), whitens=False)
    values = by_token(estimate.value_minibatches, 'old_values')
    weights = network.state['params']
    layers = {key: value for key, value in weights.items() if key != 'value'}
    longest = max(len(row.trajectory.tokens) for row in rows)
    # What follows a row has no effect on it: attention is causal.
    tokens = np.stack([np.resize(row.trajectory.tokens, longest) for row in rows])
    positions = np.broadcast_to(np.arange(longest), tokens.shape)
    hidden = jax.jit(transformer.hidden, static_argnums=0)
    states = hidden(model, layers, tokens, positions, np.ones_like(tokens))
    outputs = states.astype(jnp.float32) @ weights['value']['kernel'] + weights['value']['bias']
    for row, row_outputs in zip(rows, np.asarray(outputs), strict=True):
        trained_positions = np.flatnonzero(row.trajectory.source == POLICY)
        expected = row_outputs[trained_positions - 1, 0]
        tolerance = 2e-2 if 'dtype' in options else 2e-4
        np.testing.assert_allclose(
            values[tuple(row.trajectory.tokens)], expected, rtol=tolerance, atol=tolerance
        )


def test_a_token_changes_the_values_after_it_and_not_its_own(policy):
    network = trained(policy)
    (row,) = make_rows(policy[0], count=1)
    positions = np.flatnonzero(row.trajectory.source == POLICY)
    changed = positions[1]
    other_tokens = row.trajectory.tokens.copy()
    other_tokens[changed] = (other_tokens[changed] + 1) % policy[0].vocab_size
    other = dataclasses.replace(
        row, trajectory=dataclasses.replace(row.trajectory, tokens=other_tokens)
    )
    values = []
    for each in (row, other):
        packed = minibatches([each], parts=1, micro_rows=1)
        ((batch,),) = network.estimate(packed, Hosts(), whitens=False).value_minibatches
        values.append(batch.old_values[0])
    np.testing.assert_array_equal(values[0][: changed + 1], values[1][: changed + 1])
    after = positions[2]
    assert abs(values[0][after] - values[1][after]) > 1e-6


@pytest.mark.parametrize(
    'packing',
    [
        dict(micro_rows=4, tokens=120),
        dict(micro_rows=1, tokens=30, order='longest_first'),
        dict(parts=1),
    ],
)
def test_packing_changes_neither_advantages_nor_returns(policy, packing):
    network = trained(policy)
    rows = make_rows(policy[0])
    one = network.estimate(minibatches(rows), Hosts(), whitens=True)
    other = network.estimate(minibatches(rows, **packing), Hosts(), whitens=True)
    tolerance = dict(rtol=2e-4, atol=2e-5)
    assert_close(
        by_token(one.minibatches, 'advantage'),
        by_token(other.minibatches, 'advantage'),
        **tolerance,
    )
    for field in ('returns', 'old_values'):
        given = [by_token(each.value_minibatches, field) for each in (one, other)]
        assert any(values.any() for values in given[0].values())
        assert_close(*given, **tolerance)


@pytest.mark.parametrize(
    'mesh, offload',
    [
        pytest.param((2, 1, 1), False, marks=pytest.mark.long),
        pytest.param((1, 2, 2), False, marks=pytest.mark.long),
        ((2, 2, 1), True),
    ],
)
def test_devices_change_neither_values_nor_updates(policy, mesh, offload):
    rows = minibatches(make_rows(policy[0]), micro_rows=4)
    one, many = network_of(policy), network_of(policy, mesh=mesh, offload=offload)
    for _ in range(2):
        estimates = [network.estimate(rows, Hosts(), whitens=True) for network in (one, many)]
        given = [by_token(each.minibatches, 'advantage') for each in estimates]
        assert_close(*given, rtol=1e-3, atol=1e-3)
        stats = []
        for network, estimate in zip((one, many), estimates, strict=True):
            stats.append([network.update(batches) for batches in estimate.value_minibatches])
        for left, right in zip(*stats, strict=True):
            assert left.keys() == right.keys()
            for name, (total, _) in left.items():
                assert right[name][0] == pytest.approx(total, rel=1e-3, abs=1e-4), name
    if offload:
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(many.state)}
        assert kinds == {'pinned_host'}


def test_values_approach_the_returns(policy):
    network = network_of(policy)
    rows = minibatches(make_rows(policy[0]))
    variances, errors = [], []
    for _ in range(25):
        estimate = network.estimate(rows, Hosts(), whitens=False)
        variances.append(estimate.stats['value_network/explained_variance'][0])
        for batches in estimate.value_minibatches:
            total, count = network.update(batches)['value_network/squared_error']
        errors.append(total / count)
    assert variances[0] == pytest.approx(0, abs=1e-6) and variances[-1] > 0.9
    assert errors[-1] < 0.1 * errors[0]


def test_the_loss_of_a_minibatch_is_a_mean_over_its_tokens_however_it_is_cut(policy):
    rows = make_rows(policy[0])
    losses = []
    for micro_rows, tokens in ((1, 30), (2, 60), (8, 120)):
        network = network_of(policy)
        packed = minibatches(rows, parts=1, micro_rows=micro_rows, tokens=tokens)
        (batches,) = network.estimate(packed, Hosts(), whitens=False).value_minibatches
        stats = network.update(batches)
        total, count = stats['value_network/squared_error']
        assert stats['value_network/loss'][0] == pytest.approx(0.5 * total / count, rel=1e-5)
        losses.append([stats['value_network/loss'][0], stats['value_network/gradient_norm'][0]])
    np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=1e-4)


def test_two_processes_share_denominators_and_moments(policy):
    """Each process sees half of the rows; gathered sums make the results those of one process."""
    network = trained(policy)
    rows = make_rows(policy[0], count=8)
    whole = network.estimate(minibatches(rows, parts=1), Hosts(), whitens=True)
    halves = [minibatches(part, parts=1) for part in (rows[:4], rows[4:])]
    gathered = record_of_two_processes(network, halves)
    results = []
    for half in halves:
        results.append(network.estimate(half, RecordedHosts(gathered), whitens=True))
    together = {}
    for result in results:
        together |= by_token(result.minibatches, 'advantage')
        assert result.stats['value_network/value'] == pytest.approx(
            whole.stats['value_network/value']
        )
        ratio = result.stats['value_network/explained_variance'][0]
        assert ratio == pytest.approx(whole.stats['value_network/explained_variance'][0], rel=1e-4)
    assert_close(together, by_token(whole.minibatches, 'advantage'), rtol=1e-3, atol=1e-3)
    weights = np.concatenate([b.weight[b.mask] for r in results for b in r.value_minibatches[0]])
    assert weights.sum() == pytest.approx(1, rel=1e-5) and len(set(weights)) == 1


class RecordedHosts:
    """Processes that gather the recorded values, call by call."""

    def __init__(self, gathered):
        self.rest = list(gathered)
        self.given = []

    def gather(self, value):
        self.given.append(value)
        if not self.rest:
            raise StopIteration
        return self.rest.pop(0)


def record_of_two_processes(network, halves):
    """The values that both processes give to `gather`, call by call: both are run again for every call, because its
    value may depend on the sums before it."""
    gathered = []
    while True:
        calls = []
        for half in halves:
            hosts = RecordedHosts(gathered)
            try:
                network.estimate(half, hosts, whitens=True)
            except StopIteration:
                calls.append(hosts.given[-1])
        if not calls:
            return gathered
        gathered.append(calls)


def test_a_minibatch_without_tokens_changes_nothing(policy):
    network = trained(policy)
    before = jax.tree.map(np.array, network.state)
    rows = make_rows(policy[0])
    estimate = network.estimate([*minibatches(rows, parts=1), []], Hosts(), whitens=True)
    assert [bool(part) for part in estimate.minibatches] == [True, False]
    assert [bool(part) for part in estimate.value_minibatches] == [True, False]
    assert network.update(estimate.value_minibatches[1]) == {}
    jax.tree.map(np.testing.assert_array_equal, network.state, before)
    nothing = network.estimate([[], []], Hosts(), whitens=True)
    assert nothing == ([[], []], [[], []], False, {})


def test_without_rewards_and_values_nothing_is_learnt(policy):
    """All rewards are 0 and the first values too: no token has an advantage."""
    rows = make_rows(policy[0])
    assert network_of(policy).estimate(minibatches(rows), Hosts(), whitens=True).is_informative
    for row in rows:
        row.advantage = 0.0
    estimate = network_of(policy).estimate(minibatches(rows), Hosts(), whitens=True)
    assert not estimate.is_informative
    assert not any(batch.advantage.any() for part in estimate.minibatches for batch in part)
    # Where a reward was expected, its absence teaches.
    assert trained(policy).estimate(minibatches(rows), Hosts(), whitens=True).is_informative


def test_equal_rewards_have_no_variance_to_explain(policy):
    rows = make_rows(policy[0])
    for row in rows:
        row.advantage = 1.0
    estimate = trained(policy).estimate(minibatches(rows), Hosts(), whitens=True)
    assert set(estimate.stats) == {'value_network/value'}


def test_a_gradient_that_is_not_finite_changes_nothing(policy):
    network = trained(policy)
    before = jax.tree.map(np.array, network.state)
    ((batch, *_), *_) = network.estimate(
        minibatches(make_rows(policy[0])), Hosts(), whitens=False
    ).value_minibatches
    broken = dataclasses.replace(batch, returns=np.full_like(batch.returns, np.inf))
    stats = network.update([broken])
    assert stats['value_network/nonfinite_updates'] == (1.0, 1.0)
    jax.tree.map(np.testing.assert_array_equal, network.state, before)


def test_a_restored_state_goes_on_bit_for_bit(policy):
    network, other = trained(policy), network_of(policy)
    other.restore(jax.tree.map(np.array, network.state))
    rows = minibatches(make_rows(policy[0]))
    for each in (network, other):
        for batches in each.estimate(rows, Hosts(), whitens=True).value_minibatches:
            each.update(batches)
    jax.tree.map(np.testing.assert_array_equal, network.state, other.state)


def test_the_policys_weights_are_copied_and_its_output_layer_is_left_out(untied):
    network = trained(untied)
    _, params = untied
    assert 'head' in params and 'value' not in params
    assert set(network.state['params']) == set(params) - {'head'} | {'value'}
    assert not np.array_equal(network.state['params']['embedding'], params['embedding'])
