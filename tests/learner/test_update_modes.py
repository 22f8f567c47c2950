"""What an update reads, scores and packs is a matter of memory and speed: the gradients stay the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_learner import close, gradient, make_rows, role
from test_teacher import DISTILS, TEACHER_TOKENS, packed, taught_rows

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import hf, sharding
from zeroplay_jax.policy.head import Head, map_tokens
from zeroplay_jax.types import POLICY

# Least and largest error of bfloat16 gradients on several devices, as a multiple of that on one device. An error is the
# norm of the difference to float32 gradients, relative to the norm, of the worst parameter. The roundings themselves
# depend on XLA: products of the devices are summed in another order, and other operations are fused.
# Measured: 0.0436 on one device; with a model axis of two 0.0438 (JAX 0.10) and 0.0348 (JAX 0.12), where they
# differ from the gradients on one device by 0.0089 and 0.0442.
BFLOAT16_DEVICES = (0.5, 1.2)


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    folder = tiny.make_folder(tmp_path_factory.mktemp('modes') / 'policy', letters=tiny.LETTERS)
    model = dataclasses.replace(hf.read_config(folder), logit_chunk=16)
    return model, hf.load(folder, model)


def on_mesh(policy, place, **fields):
    model, params = policy
    model = dataclasses.replace(model, mesh=place if place.size > 1 else None, **fields)
    return model, jax.device_put(
        params, sharding.parameter_shardings(params, place, training_layout=True)
    )


def accumulated(policy, batches, mesh=(1, 1, 1), weights='masters', **fields):
    """Gradients of the micro-batches, as the learner's own program accumulates them."""
    place = sharding.make_mesh(*mesh)
    model, params = on_mesh(policy, place, **fields)
    config = role()
    learner = Learner(model, place, {'r': config}, params, batches[0].tokens.shape, weights=weights)
    programs = learner._role_updates['r']
    gradients, stats = programs.zero_gradients()
    readable = learner.readable_weights()
    for batch in batches:
        batch = sharding.put_rows(batch, sharding.rows(place))
        gradients, stats = programs.accumulate(
            readable, gradients, stats, batch, batch.old_logp, None, jnp.float32(0), None
        )
    return jax.device_get(gradients), jax.device_get(stats)


def gap(ours, theirs):
    """Largest relative difference of a parameter's gradient, by norm."""
    gaps = jax.tree.map(
        lambda a, b: float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-12)), ours, theirs
    )
    return max(jax.tree.leaves(gaps))


@pytest.fixture(scope='module')
def batches(policy):
    return pack(make_rows(policy[0], 16), micro_rows=8, tokens=50, mode='token')


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('scan', [False, True])
def test_published_weights_give_the_gradients_of_the_masters_bit_for_bit(
    policy, batches, dtype, scan
):
    """On one device; the gradients stay float32, the embedding's sum over tokens included."""
    fields = dict(dtype=dtype, scan=scan)
    ours, our_stats = accumulated(policy, batches, weights='published', **fields)
    theirs, their_stats = accumulated(policy, batches, weights='masters', **fields)
    assert {x.dtype for x in jax.tree.leaves(ours)} == {np.dtype('float32')}
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    jax.tree.map(np.testing.assert_array_equal, our_stats, their_stats)
    assert np.abs(ours['embedding']).max() > 0


@pytest.fixture(scope='module')
def on_one_device(policy, batches):
    """Gradients and statistics in bfloat16, and gradients in float32."""
    gradients, stats = accumulated(policy, batches, dtype='bfloat16', scan=True, remat=True)
    exact, _ = accumulated(policy, batches)
    return gradients, stats, exact


@pytest.mark.parametrize(
    'mesh',
    [
        pytest.param((1, 4, 1), marks=pytest.mark.long),
        (2, 2, 2),
        pytest.param((4, 1, 2), marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize('weights', ['masters', 'published'])
def test_bfloat16_on_several_devices_is_as_exact_as_on_one(
    policy, batches, on_one_device, mesh, weights
):
    fields = dict(dtype='bfloat16', scan=True, remat=True)
    ours, our_stats = accumulated(policy, batches, mesh, weights=weights, **fields)
    theirs, their_stats, exact = on_one_device
    own_error = gap(theirs, exact)
    # The rounding is really there.
    assert own_error > 1e-3
    least, most = (factor * own_error for factor in BFLOAT16_DEVICES)
    assert least <= gap(ours, exact) <= most
    for name in ('loss', 'entropy'):
        assert our_stats[name][0] == pytest.approx(their_stats[name][0], rel=0.01, abs=1e-3)


@pytest.mark.parametrize('mesh', [(1, 1, 1), (1, 4, 1), (2, 2, 2), (8, 1, 1)], ids=str)
def test_logits_of_trained_tokens_alone_give_the_same_gradients(policy, batches, mesh):
    """Also where the devices have unequal numbers of trained tokens, or none."""
    # Copies: the batches serve other tests of the module too.
    batches = [dataclasses.replace(b, mask=b.mask.copy(), weight=b.weight.copy()) for b in batches]
    for batch in batches:
        batch.mask[0], batch.weight[0] = False, 0
    model = dataclasses.replace(policy[0], mesh=sharding.make_mesh(*mesh), logits='trained')
    model = model if np.prod(mesh) > 1 else dataclasses.replace(model, mesh=None)
    close(gradient((model, policy[1]), batches, mesh), gradient(policy, batches))


def test_no_trained_token_at_all_is_no_gradient(policy):
    rows = make_rows(policy[0], 4)
    (batch,) = pack(rows, micro_rows=4, tokens=50, mode='token')
    batch.mask[:], batch.weight[:] = False, 0
    gradients, stats = accumulated(policy, [batch], logits='trained')
    assert not any(np.any(x) for x in jax.tree.leaves(gradients))
    assert stats['entropy'] == (0, 0)


def test_logits_are_computed_for_trained_tokens_only(policy):
    """The loop over chunks ends after the last trained token: a NaN in the other hidden states is never read."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(3, 40, 8)).astype(np.float32)
    wanted = rng.random((3, 40)) < 0.2
    wanted[1] = False
    states[~wanted] = np.nan
    head = {'head': rng.normal(size=(8, 5)).astype(np.float32)}
    factor = rng.normal(size=wanted.shape).astype(np.float32)
    visited = []

    def function(head, chunk_states, shared, per_token):
        jax.debug.callback(visited.append, chunk_states.shape[0])
        return jnp.sum(chunk_states @ head['head'], -1) * per_token

    def score(head, states):
        values = map_tokens(function, Head(head, False, 7, None), states, (), factor, wanted)
        return jnp.sum(values), values

    slopes, values = jax.grad(score, (0, 1), has_aux=True)(head, states)
    jax.effects_barrier()
    # Once forward and once backward.
    assert visited == [7] * 2 * -(-wanted.sum() // 7)
    clean = np.nan_to_num(states)
    np.testing.assert_allclose(values, (clean @ head['head']).sum(-1) * factor * wanted, atol=1e-5)
    expected = np.einsum('rl,rld->d', factor * wanted, clean)[:, None].repeat(5, 1)
    np.testing.assert_allclose(slopes[0]['head'], expected, atol=1e-4)
    expected = (factor * wanted)[..., None] * head['head'].sum(-1)
    np.testing.assert_allclose(slopes[1], expected, atol=1e-5)


def test_distillation_with_trained_logits_and_published_weights(policy):
    """Teacher, reference and student, on several devices: the updates have the same loss and the same gradient."""
    rows = taught_rows(policy[0])
    rng = np.random.default_rng(3)
    for row in rows:
        row.advantage = float(rng.normal())
    config = role(**DISTILS, kl_coef=0.1, learning_rate=1e-2, distill_ema_rate=0.1)
    place = sharding.make_mesh(2, 2, 1)
    results = []
    for logits, weights in (('all', 'masters'), ('trained', 'published')):
        model, params = on_mesh(policy, place, logits=logits)
        learner = Learner(
            model,
            place,
            {'r': config},
            params,
            (4, 60),
            teacher_tokens=TEACHER_TOKENS,
            weights=weights,
        )
        for _ in range(2):
            learner.published()
            stats = learner.update('r', packed(rows, micro_rows=4), 0.5)
            learner.update_ema_teacher()
        results.append(stats)
    for name in ('loss', 'kl', 'distill_divergence', 'gradient_norm', 'entropy'):
        ours, theirs = (stats[name][0] for stats in results)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize('offload', [False, True])
def test_the_next_update_reads_the_weights_that_the_last_one_made(policy, offload):
    """Publishing between updates or not, moved to host memory or not: the same steps."""
    model = dataclasses.replace(policy[0], dtype='bfloat16')
    batches = pack(make_rows(model), micro_rows=4, tokens=50, mode='token')
    states = []
    for weights, publishes in (('masters', False), ('published', False), ('published', True)):
        learner = Learner(
            model,
            sharding.make_mesh(),
            {'r': role(learning_rate=1e-2)},
            policy[1],
            (4, 50),
            weights=weights,
            offload=offload,
        )
        for _ in range(3):
            if publishes:
                learner.published()
            learner.update('r', batches)
        states.append(jax.device_get(learner.state))
    for other in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, states[0])


# Packing


def placed(batches, rows):
    """(micro-batch, row, start) of every trajectory, found by its tokens."""
    places = {}
    for index, row in enumerate(rows):
        tokens = row.trajectory.tokens
        for number, batch in enumerate(batches):
            for line in range(len(batch.tokens)):
                for start in np.flatnonzero(
                    (batch.positions[line] == 0) & (batch.segment[line] > 0)
                ):
                    if np.array_equal(batch.tokens[line, start : start + len(tokens)], tokens):
                        places[index] = (number, line, int(start))
    return places


def test_longest_first_fills_rows_better_and_keeps_every_token(policy):
    rows = make_rows(policy[0], 60)
    arrival = pack(rows, micro_rows=1, tokens=40, mode='token')
    sorted_batches = pack(rows, micro_rows=1, tokens=40, mode='token', order='longest_first')
    assert len(sorted_batches) < len(arrival)
    assert len(placed(sorted_batches, rows)) == len(rows)
    for name in ('mask', 'weight', 'advantage', 'old_logp'):
        totals = [sum(getattr(b, name).sum() for b in x) for x in (arrival, sorted_batches)]
        assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    tokens = sum((row.trajectory.source == POLICY).sum() for row in rows)
    assert sum(b.mask.sum() for b in sorted_batches) == tokens


def test_longest_first_is_a_function_of_the_rows_in_their_order(policy):
    """Equal lengths stay in order: the same batch packs the same in every process and in every run."""
    rows = make_rows(policy[0], 40)
    one, two = (
        pack(list(rows), micro_rows=2, tokens=50, mode='token', order='longest_first')
        for _ in range(2)
    )
    for a, b in zip(one, two, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    lengths = [len(row.trajectory.tokens) for row in rows]
    places = placed(one, rows)
    for length in set(lengths):
        same = [i for i, n in enumerate(lengths) if n == length]
        assert [places[i] for i in same] == sorted(places[i] for i in same)


def test_longest_first_gives_the_same_gradients(policy):
    rows = make_rows(policy[0], 20)
    base = pack(rows, micro_rows=4, tokens=50, mode='seq_mean_token_mean')
    ordered = pack(rows, micro_rows=4, tokens=50, mode='seq_mean_token_mean', order='longest_first')
    close(gradient(policy, ordered), gradient(policy, base))


def test_an_unknown_order_is_refused(policy):
    with pytest.raises(ValueError, match="order is 'shortest'"):
        pack(make_rows(policy[0]), micro_rows=1, tokens=50, mode='token', order='shortest')
