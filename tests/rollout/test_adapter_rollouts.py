"""One pool for all roles: rollouts with different adapters, or none, each have the tokens that they have alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from request_cases import flat, make_env, make_pool, requests, run, same, start
from test_versions import LAYOUTS

from zeroplay_jax.policy import adapters, sharding
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.weights import AdapterStore
from zeroplay_jax.settings.schema import LINEARS

# Name of weights and version → seed of its adapter; 'initial' is the base.
WEIGHTS = {('first', 1): 1, ('first', 2): 2, ('second', 1): 3, ('initial', 0): None}


def joined(base, seed):
    if seed is None:
        return base
    adapter = adapters.init(base, LINEARS, 3, seed, 'role')
    rng = np.random.default_rng(seed)
    trained = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype('f'), adapter)
    return adapters.join(base, trained)


def placed(tree, mesh):
    return jax.device_put(tree, sharding.replicated(mesh))


def make_scheduler(policy, config, mesh):
    base = placed(policy[2] | {adapters.SCALE: jnp.full(1, 2.0)}, mesh)
    weights = AdapterStore({'first': 2, 'second': 1})
    weights.pin({'first': 1})
    pool = make_pool(policy, config, mesh)
    scheduler = Scheduler(dict.fromkeys(('first', 'second', 'initial'), pool), weights)
    for (name, version), seed in WEIGHTS.items():
        scheduler.weights.publish(name, placed(joined(base, seed), mesh), version)
    return scheduler


def play(policy, reqs_of, config, mesh):
    """{name, version: trajectories} of requests that are in the pool at the same time."""
    scheduler = make_scheduler(policy, config, mesh)
    for key, reqs in reqs_of.items():
        start(scheduler, key, reqs, version=key[1])
    return {key: flat(scheduler.wait(key)) for key in reqs_of}


@pytest.mark.parametrize(
    'layout', ['slots', 'pages', pytest.param('shards', marks=pytest.mark.long)]
)
def test_rollouts_are_those_they_are_alone_and_those_of_merged_weights(policy, layout):
    config, shards = LAYOUTS[layout]
    mesh = sharding.make_mesh(replica=shards)
    base = policy[2] | {adapters.SCALE: jnp.full(1, 2.0)}
    reqs_of = {}
    for number, (name, version) in enumerate(WEIGHTS):
        reqs = requests(make_env(policy[0]), 3)
        reqs_of[name, version] = [
            dataclasses.replace(r, weights=name, identity=(number, i)) for i, r in enumerate(reqs)
        ]
    together = play(policy, reqs_of, config, mesh)
    tokens = set()
    for (name, version), ours in together.items():
        reqs = reqs_of[name, version]
        assert {(t.weights, t.version) for t in ours} == {(name, version)}
        same(ours, play(policy, {(name, version): reqs}, config, mesh)[name, version])
        # The base has the bits of a pool without adapters; merged weights round differently.
        seed = WEIGHTS[name, version]
        whole = policy[2] if seed is None else adapters.merged(joined(base, seed))
        plain = [dataclasses.replace(r, weights='policy') for r in reqs]
        alone = run((*policy[:2], placed(whole, mesh)), plain, config, mesh)
        same(ours, alone, tolerance=0.0 if seed is None else 1e-3)
        tokens.add(str([t.tokens.tolist() for t in ours]))
    assert len(tokens) == len(WEIGHTS)
