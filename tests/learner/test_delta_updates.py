"""Updates of gated delta nets: rollouts in one row do not see each other, and devices change nothing."""

import jax
import numpy as np
import pytest
import tiny
from test_learner import close, gradient, learner_of, make_rows, role

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.policy import hf


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp('delta') / 'policy'
    model = hf.read_config(tiny.make_folder(folder, letters=tiny.LETTERS, **tiny.DELTA))
    return model, hf.load(folder, model)


def test_packing_micro_batches_and_devices_change_nothing(policy):
    rows = make_rows(policy[0], 16)
    whole = gradient(policy, pack(rows, micro_rows=16, tokens=25, mode='token'))
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(whole[1]))
    packed = pack(rows[::-1], micro_rows=4, tokens=80, mode='token')
    close(gradient(policy, packed, (2, 2, 2)), whole, 1e-4)


def test_an_update_changes_all_weights(policy):
    learner = learner_of(policy, role(warmup_steps=0), (4, 80))
    batches = pack(make_rows(policy[0], 16), micro_rows=4, tokens=80, mode='token')
    learner.update('r', batches)
    changed = jax.tree.map(lambda x, y: (np.asarray(x) != y).any(), learner.params, policy[1])
    assert all(jax.tree.leaves(changed))
