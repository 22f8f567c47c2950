"""Requests whose rollouts search, on a sampler of a few slots."""

import dataclasses
import itertools
import time

import jax
import numpy as np
import tiny

from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.weights import WeightStore
from zeroplay_jax.tools.search import SearchTool

CONFIG = SamplerConfig(slots=4, context=96, chunk=8, fill_rows=2, burst=4, put_rows=2, put_tokens=6)
# Hundreds are enough.
MOST_ROUNDS = 3000


def echo(queries):
    """A page is a function of the query."""
    return [[{'id': 0, 'title': q[:3], 'text': q[::-1]}] for q in queries]


_calls = itertools.count()


def late_echo(queries):
    """The same after a time that depends on the clock of others."""
    time.sleep(0.02 * (next(_calls) % 3))
    return echo(queries)


def make_env(codec, search=echo, **limits):
    bounds = Limits(**(dict(max_turns=4, turn_tokens=16, observation_tokens=14) | limits))
    return Environment(codec, tiny.EchoSyntax(), bounds, {'search': SearchTool(search)})


def requests(env, count=7, samples=3, temperature=1.0):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 8, rng.integers(4, 19)).astype(np.int32) for _ in range(count)]
    return [Request('policy', p, (3, i), env, samples, temperature) for i, p in enumerate(prompts)]


def on_mesh(policy, mesh):
    codec, model, params = policy
    return codec, model, jax.device_put(params, sharding.parameter_shardings(params, mesh))


def make_pool(policy, config=CONFIG, mesh=None):
    codec, model, _ = policy
    config = dataclasses.replace(config, eos=codec.eos_ids)
    return SlotPool(Sampler(model, config, mesh or sharding.make_mesh()), seed=5)


def make_scheduler(policy, config=CONFIG, mesh=None, versions=1, **options):
    """(scheduler, its pool) with version 1 of the weights, and room for so many versions."""
    pool = make_pool(policy, config, mesh)
    scheduler = Scheduler({'policy': pool}, WeightStore({'policy': versions}), **options)
    one_round = scheduler._round

    def bounded_round():
        assert scheduler.stats['rounds'] < MOST_ROUNDS, 'a turn never ends'
        return one_round()

    scheduler._round = bounded_round
    params = policy[2] if mesh is None else on_mesh(policy, mesh)[2]
    scheduler.weights.publish('policy', params, 1)
    return scheduler, pool


def flat(groups):
    return [trajectory for group in groups for trajectory in group]


def play(scheduler, reqs, order=1):
    """Rollouts of requests that are made in this order, and returned in that of the list."""
    return flat(scheduler.run([scheduler.rollout(r) for r in reqs[::order]])[::order])


def run(policy, reqs=None, config=CONFIG, mesh=None, order=1, **options):
    """The same with a scheduler of its own; the usual requests where none are given."""
    scheduler, _ = make_scheduler(policy, config, mesh, **options)
    return play(scheduler, requests(make_env(policy[0])) if reqs is None else reqs, order)


def start(scheduler, name, reqs, version):
    """Begins a run of this name with requests that a version of the weights plays."""
    reqs = [dataclasses.replace(r, version=version, owner=name) for r in reqs]
    scheduler.start(name, [scheduler.rollout(r) for r in reqs])


def searches(rollouts):
    return [call for t in rollouts for call in t.calls_of('search')]


def same(a, b, tolerance=0.0):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.tokens, y.tokens)
        np.testing.assert_array_equal(x.source, y.source)
        assert x.finish == y.finish and [t.text for t in x.turns] == [t.text for t in y.turns]
        assert np.abs(x.logp - y.logp).max() <= tolerance


def check_requests_alone_count(policy, expected, config=CONFIG):
    """Neither the order of requests nor their neighbours nor the time of tools changes a bit of these rollouts."""
    same(expected, run(policy, config=config, order=-1))
    same(expected[9:12], run(policy, requests(make_env(policy[0]))[3:4], config))
    same(expected, run(policy, requests(make_env(policy[0], late_echo)), config))
