"""State that rests in the hosts' memory: the same numbers, and nothing on the devices that is not needed."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from test_learner import role
from test_teacher import DISTILS, TEACHER_TOKENS, packed, taught_rows

from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import hf, sharding

MESH = (2, 2, 1)


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    folder = tiny.make_folder(tmp_path_factory.mktemp('offload') / 'policy', letters=tiny.LETTERS)
    model = dataclasses.replace(hf.read_config(folder), logit_chunk=16)
    return model, hf.load(folder, model, sharding.make_mesh(*MESH), training_layout=True)


def learner(policy, offload):
    config = role(**DISTILS, kl_coef=0.1, learning_rate=1e-2, distill_ema_rate=0.1)
    place = sharding.make_mesh(*MESH)
    model = dataclasses.replace(policy[0], mesh=place)
    return Learner(
        model,
        place,
        {'r': config},
        policy[1],
        (4, 60),
        teacher_tokens=TEACHER_TOKENS,
        offload=offload,
    )


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def improve(one, model):
    for _ in range(2):
        one.update('r', packed(taught_rows(model), micro_rows=4), 0.5)
        one.update_ema_teacher()


def test_updates_are_the_same_bit_for_bit_and_leave_nothing_on_the_devices(policy):
    plain, resting = learner(policy, False), learner(policy, True)
    assert kinds(resting.state) == kinds(resting.reference) == {'pinned_host'}
    assert kinds(plain.state) == {'device'}
    improve(plain, policy[0])
    improve(resting, policy[0])
    assert kinds(resting.state) == {'pinned_host'} and kinds(resting.published()) == {'device'}
    equal(resting.state, plain.state)
    equal(resting.published(), plain.published())
    assert (
        np.abs(np.asarray(plain.params['embedding']) - np.asarray(policy[1]['embedding'])).max()
        > 1e-3
    )


def test_a_checkpoint_passes_between_runs_with_and_without(policy, tmp_path):
    plain, resting = learner(policy, False), learner(policy, True)
    improve(resting, policy[0])
    for source, target in ((resting, plain), (plain, resting)):
        checkpoints = Checkpointer(tmp_path / str(source is plain), keep=1)
        checkpoints.save(1, {'r': source.state}, {})
        checkpoints.wait()
        states, _ = checkpoints.restore({'r': target.state})
        target.restore(states['r'])
        checkpoints.close()
        equal(target.state, source.state)
    assert kinds(resting.state) == {'pinned_host'} and kinds(plain.state) == {'device'}
    improve(plain, policy[0])
    improve(resting, policy[0])
    equal(resting.state, plain.state)
