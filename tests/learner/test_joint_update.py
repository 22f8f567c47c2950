"""Several roles in one pass: every role learns what it would learn alone, whatever the other one does."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import tiny
from test_adapter_updates import RANK, arrays, load, same
from test_learner import make_rows, role

from zeroplay_jax.learner.batch import JointBatch
from zeroplay_jax.learner.joint_update import JointUpdate, joint_groups
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.packing import RoleRows, pack, pack_roles
from zeroplay_jax.policy import adapters
from zeroplay_jax.settings.adapters import LINEARS

# Different losses, coefficients, clips, denominators and schedules, as in SSP.
ROLES = {
    'solver': role(kl_coef=0.1, clip_low=0.3, entropy_coef=0.01, learning_rate=1e-2, clip_norm=0.1),
    'proposer': role(loss='reinforce', learning_rate=3e-3, warmup_steps=4),
}
MODES = {'solver': 'seq_mean_token_mean', 'proposer': 'seq_mean_token_sum'}
SHAPE = (4, 60)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp('joint') / 'policy', letters=tiny.LETTERS)


def make_learners(folder, mesh=(1, 1, 1), **options):
    model, base = load(folder, mesh)
    learners = {}
    for number, (name, config) in enumerate(ROLES.items()):
        adapter = trained_adapter(base, name, number)
        learners[name] = Learner(
            model, base.mesh, {name: config}, adapter, SHAPE, base=base, **options
        )
    return learners


def trained_adapter(base, name, seed):
    """Not fresh: where B is 0, A has no gradient."""
    rng = np.random.default_rng(seed)
    fresh = adapters.init(base.params, LINEARS, RANK, 0, name)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype('f'), fresh)


def rows_of(learners, counts=(9, 5)):
    model = next(iter(learners.values())).model
    return {
        name: make_rows(model, count, seed)
        for seed, (name, count) in enumerate(zip(ROLES, counts, strict=True))
    }


def pack_jointly(rows):
    roles = [RoleRows(own, MODES[name], 50.0) for name, own in rows.items()]
    return pack_roles(roles, micro_rows=SHAPE[0], tokens=SHAPE[1], order='longest_first')


def update_alone(learners, rows):
    stats = {}
    for name, own in rows.items():
        packed = pack(
            own,
            micro_rows=SHAPE[0],
            tokens=SHAPE[1],
            mode=MODES[name],
            total=50.0,
            order='longest_first',
        )
        stats[name] = learners[name].update(name, packed)
    return stats


def close(learner, state):
    """The first moment after one update is the clipped gradient times a constant."""
    # Sums have another order than in the separate updates: over two devices, or as XLA fuses the joint program
    # (measured with JAX 0.12: 1.2e-6).
    tolerance = 2e-6
    for name in learner.state['opt']:
        ours, theirs = (
            optax.tree_utils.tree_get(x['opt'][name], 'mu') for x in (learner.state, state)
        )
        assert distance(ours, theirs) <= tolerance
    assert distance(learner.state['params'], state['params']) <= tolerance


def distance(ours, theirs):
    difference = jax.tree.map(np.subtract, arrays(ours), arrays(theirs))
    return float(optax.tree.norm(difference) / optax.tree.norm(theirs))


@pytest.fixture(scope='module')
def alone(folder):
    """Statistics and states after separate updates."""
    learners = make_learners(folder)
    stats = update_alone(learners, rows_of(learners))
    return stats, {name: arrays(learner.state) for name, learner in learners.items()}


@pytest.mark.parametrize(
    'mesh,options',
    [((1, 1, 1), {}), ((2, 1, 1), {}), ((1, 1, 1), {'offload': True, 'weights': 'published'})],
)
def test_every_role_learns_what_it_learns_alone(folder, alone, mesh, options):
    learners = make_learners(folder, mesh, **options)
    batches = pack_jointly(rows_of(learners))
    # Rows of both roles are packed together, which takes fewer rows.
    assert any(len(batch.roles) == 2 for batch in batches)
    assert any(len({*row} & {0, 1}) == 2 for batch in batches for row in batch.batch.adapter)
    joint = JointUpdate(learners)
    stats = joint.update(batches, list(ROLES))
    separate_stats, separate_states = alone
    for name, learner in learners.items():
        close(learner, separate_states[name])
        assert stats[name].keys() == separate_stats[name].keys()
        for statistic, value in separate_stats[name].items():
            np.testing.assert_allclose(stats[name][statistic], value, rtol=2e-5, atol=1e-6)
    # Other rows, another division into micro-batches: the same program.
    joint.update(pack_jointly(rows_of(learners, (30, 2))), list(ROLES))
    assert joint._accumulate._cache_size() == 1


def test_a_role_without_rows_stays_as_it_is(folder, alone):
    learners = make_learners(folder)
    before = arrays(learners['proposer'].state)
    rows = rows_of(learners) | {'proposer': []}
    joint = JointUpdate(learners)
    stats = joint.update(pack_jointly(rows), list(ROLES))
    assert stats['proposer'] == {'skipped_updates': (1.0, 1.0)}
    same(learners['proposer'].state, before)
    close(learners['solver'], alone[1]['solver'])
    # A role that has no update of this number is not updated, and has no statistics.
    after = arrays(learners['solver'].state)
    assert list(joint.update(pack_jointly(rows_of(learners)), ['proposer'])) == ['proposer']
    same(learners['solver'].state, after)
    close(learners['proposer'], alone[1]['proposer'])


@pytest.mark.parametrize('bad', ROLES)
def test_a_gradient_that_is_not_finite_skips_its_own_role_only(folder, alone, bad):
    learners = make_learners(folder)
    before = arrays(learners[bad].state)
    rows = rows_of(learners)
    rows[bad][1].advantage = float('nan')
    stats = JointUpdate(learners).update(pack_jointly(rows), list(ROLES))
    assert stats[bad]['skipped_updates'] == (1.0, 1.0)
    same(learners[bad].state, before)
    (good,) = set(ROLES) - {bad}
    assert stats[good]['skipped_updates'] == (0.0, 1.0)
    close(learners[good], alone[1][good])


def test_ratios_are_taken_against_the_log_probs_of_the_own_adapter(folder):
    learners = make_learners(folder)
    rows = rows_of(learners)
    again = JointUpdate(learners).recompute_old_logp(pack_jointly(rows))
    for index, (name, learner) in enumerate(learners.items()):
        own = [batch.of_role(index) for batch in again]
        masked = [
            dataclasses.replace(batch, old_logp=batch.sampler_logp, sampler_logp=batch.old_logp)
            for batch in own
        ]
        for batch, alone in zip(own, learner.recompute_old_logp(name, masked), strict=True):
            np.testing.assert_allclose(
                batch.old_logp[batch.mask], alone.old_logp[batch.mask], rtol=1e-5
            )
            assert np.abs(batch.old_logp - batch.sampler_logp)[batch.mask].max() > 0.1


def test_processes_pack_their_own_rows_of_the_same_micro_batches(folder):
    """Two parts, each with half of the rows of a micro-batch, are the batch of one process."""
    from zeroplay_jax.learner.packing import BatchPart

    learners = make_learners(folder)
    roles = [RoleRows(own, MODES[name], 50.0) for name, own in rows_of(learners).items()]
    whole = pack_roles(roles, micro_rows=4, tokens=60)
    parts = []
    for held in ((0, 1), (2, 3)):
        fetch = lambda rows, places, held=held: [
            row if place in held else None for row, place in zip(rows, places, strict=True)
        ]
        parts.append(pack_roles(roles, micro_rows=4, tokens=60, part=BatchPart(held, fetch)))
    for batch, first, second in zip(whole, *parts, strict=True):
        assert batch.roles == first.roles == second.roles
        both = jax.tree.map(lambda x, y: np.concatenate([x, y]), first.batch, second.batch)
        same(both, batch.batch)
        assert isinstance(first, JointBatch)


def test_roles_are_joined_only_where_one_program_serves_them(folder):
    learners = make_learners(folder)
    assert joint_groups(learners, ROLES) == [('solver', 'proposer')]
    changes = {'temperature': 0.5, 'old_logp': 'trainer', 'distill_top_k': 5}
    for field, value in (changes | {'loss': 'test_batch_means:DECLARED'}).items():
        changed = ROLES | {'proposer': role(**{field: value})}
        assert joint_groups(learners, changed) == [('solver',), ('proposer',)]
    shared = dict.fromkeys(ROLES, learners['solver'])
    assert joint_groups(shared, ROLES) == [('solver',), ('proposer',)]
