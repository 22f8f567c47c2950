"""What an update reads, scores and packs is a matter of memory and speed: the gradients stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from updates import (
    DISTILS,
    TEACHER_TOKENS,
    batches_of,
    config_of,
    gradient,
    learner_of,
    make_rows,
    on_mesh,
    packed,
    role,
    same,
    taught_rows,
)

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.policy import sharding
from zeroplay_jax.types import POLICY


def accumulated(policy, batches, mesh=(1, 1, 1), weights='masters', **fields):
    """Gradients and statistics of the micro-batches, as the learner's own program accumulates them."""
    shape = batches[0].tokens.shape
    learner = learner_of(on_mesh(policy, mesh, **fields), role(), shape, mesh, weights=weights)
    programs = learner._role_updates['r']
    gradients, stats = programs.zero_gradients()
    readable = learner.update_weights()
    for batch in batches:
        batch = sharding.put_rows(batch, sharding.rows(sharding.make_mesh(*mesh)))
        gradients, stats = programs.accumulate(
            readable, gradients, stats, batch, batch.old_logp, None, jnp.float32(0), None
        )
    return jax.device_get(gradients), jax.device_get(stats)


@pytest.fixture(scope='module')
def batches(policy):
    return batches_of(policy, 16, micro_rows=8)


def test_published_weights_give_the_gradients_of_the_masters_bit_for_bit(policy, batches):
    """On one device; the gradients stay float32, the embedding's sum over tokens included."""
    fields = dict(dtype='bfloat16', scan=True, remat=True)
    ours, our_stats = accumulated(policy, batches, weights='published', **fields)
    theirs, their_stats = accumulated(policy, batches, weights='masters', **fields)
    assert {x.dtype for x in jax.tree.leaves(ours)} == {np.dtype('float32')}
    same((ours, our_stats), (theirs, their_stats))
    assert np.abs(ours['embedding']).max() > 0


def test_no_trained_token_at_all_is_no_gradient(policy):
    (batch,) = batches_of(policy, 4)
    batch.mask[:], batch.weight[:] = False, 0
    _, stats, gradients = gradient(policy, config_of(), [batch], logits='trained')
    assert not any(np.any(x) for x in jax.tree.leaves(gradients))
    assert stats['entropy'] == (0, 0)


def test_the_next_update_reads_the_weights_that_the_last_one_made(policy):
    """Publishing between updates or not: the same steps."""
    low = on_mesh(policy, dtype='bfloat16')
    batches = batches_of(policy)
    states = []
    for weights, publishes in (('masters', False), ('published', False), ('published', True)):
        learner = learner_of(low, role(learning_rate=1e-2), weights=weights)
        first = jax.device_get(learner.state)
        for _ in range(3):
            if publishes:
                learner.sampler_weights(learner.view())
            learner.update('r', batches)
        states.append(jax.device_get(learner.state))
    # What was published is not read in place of a state that was restored.
    learner.sampler_weights(learner.view())
    learner.restore(first)
    for _ in range(3):
        learner.update('r', batches)
    states.append(jax.device_get(learner.state))
    for other in states[1:]:
        same(other, states[0])


# Packing


def placed(batches, rows):
    """(micro-batch, row, start) of every trajectory, found by its tokens."""
    places = {}
    for number, batch in enumerate(batches):
        starts = (batch.positions == 0) & (batch.segment > 0)
        for line, start in np.argwhere(starts).tolist():
            for index, row in enumerate(rows):
                tokens = row.trajectory.tokens
                if np.array_equal(batch.tokens[line, start : start + len(tokens)], tokens):
                    places[index] = (number, line, start)
    return places


def packed_rows(rows, order='longest_first', micro_rows=1, tokens=40):
    return pack(rows, micro_rows=micro_rows, tokens=tokens, mode='token', order=order)


def test_longest_first_fills_rows_better_and_keeps_every_token(policy):
    rows = make_rows(policy[0], 60)
    arrival, sorted_batches = packed_rows(rows, 'arrival'), packed_rows(rows)
    assert len(sorted_batches) < len(arrival)
    places = placed(sorted_batches, rows)
    assert len(places) == len(rows)
    for name in ('mask', 'weight', 'advantage', 'old_logp'):
        totals = [sum(getattr(b, name).sum() for b in x) for x in (arrival, sorted_batches)]
        assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    tokens = sum((row.trajectory.source == POLICY).sum() for row in rows)
    assert sum(b.mask.sum() for b in sorted_batches) == tokens
    # Equal lengths stay in order: the same batch packs the same in every process and in every run.
    lengths = [len(row.trajectory.tokens) for row in rows]
    for length in set(lengths):
        alike = [i for i, n in enumerate(lengths) if n == length]
        assert [places[i] for i in alike] == sorted(places[i] for i in alike)


# State that rests in the memory of hosts

MESH = (2, 2, 1)


def offloading(policy, offload):
    config = role(**DISTILS, kl_coef=0.1, learning_rate=1e-2, distill_ema_rate=0.1)
    options = dict(teacher_tokens=TEACHER_TOKENS, offload=offload)
    return learner_of(on_mesh(policy, MESH), config, (4, 60), MESH, **options)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def improve(learner, model, updates=2):
    for _ in range(updates):
        learner.update('r', packed(taught_rows(model)), 0.5)
        learner.update_ema_teacher()


def test_updates_are_the_same_bit_for_bit_and_leave_nothing_on_the_devices(policy, tmp_path):
    plain, resting = offloading(policy, False), offloading(policy, True)
    assert kinds(resting.state) == kinds(resting.reference) == {'pinned_host'}
    assert kinds(plain.state) == {'device'}
    improve(plain, policy[0])
    improve(resting, policy[0])
    assert kinds(resting.state) == {'pinned_host'}
    sampled = resting.sampler_weights(resting.view())
    assert kinds(sampled) == {'device'}
    same(resting.state, plain.state)
    same(sampled, plain.sampler_weights(plain.view()))
    moved = np.asarray(plain.params['embedding']) - np.asarray(policy[1]['embedding'])
    assert np.abs(moved).max() > 1e-3
    # A checkpoint passes between runs with and without.
    for source, target in ((resting, plain), (plain, resting)):
        checkpoints = Checkpointer(tmp_path / str(source is plain), keep=1)
        checkpoints.save(1, {'r': source.state}, {})
        checkpoints.wait()
        improve(target, policy[0], 1)
        states, _ = checkpoints.restore({'r': target.state})
        target.restore(states['r'])
        checkpoints.close()
        same(target.state, source.state)
    assert kinds(resting.state) == {'pinned_host'} and kinds(plain.state) == {'device'}
