"""Updates of adapters: the base stays, nothing else does; layout, micro-batches and offload change nothing."""

import jax
import numpy as np
from test_update_modes import improve
from updates import (
    DISTILS,
    SCALE,
    TEACHER_TOKENS,
    batches_of,
    learner_of,
    other,
    role,
    same,
)

from zeroplay_jax.learner.weights_view import FrozenBase
from zeroplay_jax.policy import adapters, sharding
from zeroplay_jax.policy.adapters import A, B
from zeroplay_jax.settings.schema import LINEARS


def make_learner(policy, changes=DISTILS, **options):
    """(base, learner of an adapter)."""
    model, params = policy
    base = FrozenBase.of(params, sharding.make_mesh(), SCALE)
    # Not fresh: where B is 0, A has no gradient.
    adapter = other(adapters.init(base.params, LINEARS, 2, 0, 'r'))
    config = role(**dict(learning_rate=1e-2) | changes)
    options |= dict(teacher_tokens=TEACHER_TOKENS, base=base)
    return base, learner_of((model, adapter), config, (4, 60), **options)


def arrays(tree):
    return jax.tree.map(np.array, tree)


def num_bytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_an_update_changes_the_adapter_and_never_the_base(policy):
    base, learner = make_learner(policy)
    before, first = arrays(base.params), arrays(learner.params)
    held = {id(x) for x in jax.tree.leaves(base.params)}
    improve(learner, policy[0])
    same(base.params, before)
    # Samplers read the arrays of the base themselves, and no copy of them.
    shared, adapter = adapters.split(learner.sampler_weights(learner.view()))
    assert {id(x) for x in jax.tree.leaves(shared)} == held
    same(adapter, learner.params)
    for ours, theirs in zip(jax.tree.leaves(learner.params), jax.tree.leaves(first), strict=True):
        assert (np.asarray(ours) != theirs).all()
    # Adapter, two moments, and a teacher of twice the rank: nothing of the size of the base.
    state = {name: part for name, part in learner.state.items() if name != 'teacher'}
    size = num_bytes(first)
    assert 3 * size <= num_bytes(state) <= 3 * size + 64
    assert num_bytes(learner.state['teacher']) == 2 * size
    assert size < num_bytes(before) / 4


def test_offload_published_weights_and_a_restored_state_change_no_bit(policy):
    _, plain = make_learner(policy)
    improve(plain, policy[0])
    for options in ({'offload': True}, {'weights': 'published'}):
        _, other = make_learner(policy, **options)
        improve(other, policy[0], 1)
        state = arrays(other.state)
        improve(other, policy[0], 1)
        same(other.state, plain.state)
        other.restore(state)
        improve(other, policy[0], 1)
        same(other.state, plain.state)


def test_the_reference_is_the_base(policy):
    _, learner = make_learner(policy, dict(kl_coef=0.1))
    assert learner.reference is None
    batches = batches_of(policy, tokens=60)
    assert learner.update('r', batches)['kl'][0] > 0.1
    fresh = jax.tree.map(np.zeros_like, learner.params)
    learner.restore(learner.state | {'params': fresh})
    assert learner.update('r', batches)['kl'][0] == 0


def test_adapters_do_not_decay(policy):
    """A decay of A and B would pull the policy to the base: the role's own is not theirs."""
    updated = []
    for decay in (0.0, 0.5):
        _, learner = make_learner(policy, dict(weight_decay=decay))
        learner.update('r', batches_of(policy, tokens=60))
        updated.append(arrays(learner.params))
    same(*updated)


def products(tree):
    factors = [linear for layer in tree.values() for linear in layer.values()]
    return [np.asarray(f[A], np.float64) @ np.asarray(f[B], np.float64) for f in factors]


def test_the_teacher_is_the_average_of_products(policy):
    """π-Play eq. 10 on whole weights, W + s·A·B: against the dense average in float64."""
    changes = DISTILS | {'learning_rate': 3e-3, 'distill_ema_rate': 0.05}
    _, learner = make_learner(policy, changes)
    exact = products(learner.params)
    for _ in range(5):
        improve(learner, policy[0], 1)
        exact = [0.95 * x + 0.05 * y for x, y in zip(exact, products(learner.params))]
    teacher, student = products(learner.state['teacher']), products(learner.params)
    error = sum(np.linalg.norm(x - y) ** 2 for x, y in zip(teacher, exact, strict=True))
    size = sum(np.linalg.norm(x - y) ** 2 for x, y in zip(student, exact, strict=True))
    # Of the distance between student and exact teacher.
    assert np.sqrt(error / size) < 0.01
