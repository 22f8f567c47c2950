"""Two roles on one set of weights: each with its own loss, with one set of optimiser moments or two."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from test_learner import make_rows, role

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import hf, sharding


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    folder = tiny.make_folder(tmp_path_factory.mktemp('shared') / 'policy', letters=tiny.LETTERS)
    model = dataclasses.replace(hf.read_config(folder), logit_chunk=16)
    return model, hf.load(folder, model)


@pytest.mark.parametrize('shared', [False, True])
def test_roles_train_the_same_weights(policy, shared):
    model, params = policy
    roles = {
        'solver': role(loss='token_pg', warmup_steps=5),
        'proposer': role(loss='reinforce', aggregation='seq_mean_token_sum', warmup_steps=0),
    }
    learner = Learner(model, sharding.make_mesh(), roles, params, (4, 50), shared_optimizer=shared)
    assert set(learner.state['opt']) == ({'solver'} if shared else {'solver', 'proposer'})
    batches = pack(make_rows(model), micro_rows=4, tokens=50, mode='token')
    learner.update('solver', batches)
    between = jax.device_get(learner.state)
    learner.update('proposer', batches)
    moved = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - b).max()), learner.state, between
    )
    assert moved['params']['embedding'] > 0
    assert (max(jax.tree.leaves(moved['opt']['solver'])) > 0) == shared


def test_all_scores_are_dispatched_before_one_is_read(policy, monkeypatch):
    model, params = policy
    batches = pack(make_rows(model), micro_rows=1, tokens=50, mode='token')
    learner = Learner(model, sharding.make_mesh(), {'r': role(old_logp='trainer')}, params, (1, 50))
    reads = []
    read = sharding.local_rows
    monkeypatch.setattr(sharding, 'local_rows', lambda x: reads.append(len(x)) or read(x))
    learner.recompute_old_logp('r', batches)
    assert reads == [len(batches)] and len(batches) > 1


def test_ratios_can_be_taken_against_the_trainers_own_log_probs(policy):
    model, params = policy
    rows = make_rows(model)
    batches = pack(rows, micro_rows=4, tokens=50, mode='token')
    learner = Learner(
        model, sharding.make_mesh(), {'r': role(tis_cap=2.0, old_logp='trainer')}, params, (4, 50)
    )
    again = learner.recompute_old_logp('r', batches)
    for old, new in zip(batches, again, strict=True):
        np.testing.assert_array_equal(new.sampler_logp, old.old_logp)
        assert (new.old_logp[~new.mask] == 0).all() and np.abs(
            new.old_logp - old.old_logp
        ).max() > 0.1
    stats = learner.update('r', again)
    assert stats['ratio'][0] / stats['ratio'][1] == pytest.approx(1.0, abs=1e-5)
    weight = next(v for k, v in stats.items() if k == 'importance')
    assert weight[0] / weight[1] != pytest.approx(1.0, abs=1e-3)
