"""What an update reads, scores and packs is a matter of memory and speed: the gradients stay the same."""

import jax
from updates import (
    DISTILS,
    TEACHER_TOKENS,
    batches_of,
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


def test_longest_first_fills_rows_better(policy):
    """Of the same rollouts; invariances of updates pack them in both orders."""
    rows = make_rows(policy[0], 60)
    by_arrival, sorted_rows = (
        pack(rows, micro_rows=1, tokens=40, mode='token', order=order)
        for order in ('arrival', 'longest_first')
    )
    assert len(sorted_rows) < len(by_arrival)


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
    # A checkpoint passes between runs with and without.
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(1, {'r': plain.state}, {})
    checkpoints.wait()
    improve(resting, policy[0], 1)
    states, _ = checkpoints.restore({'r': resting.state})
    resting.restore(states['r'])
    checkpoints.close()
    same(resting.state, plain.state)
    assert kinds(resting.state) == {'pinned_host'}
