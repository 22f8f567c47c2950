"""Requests whose rollouts search, on a sampler of a few slots."""

import dataclasses
import itertools
import time

import jax
import numpy as np
import tiny

from zeroplay_jax.policy import hf, sharding, transformer
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.rollout.weights import WeightStore
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import POLICY

CONFIG = SamplerConfig(slots=4, context=96, chunk=8, fill_rows=2, burst=4, put_rows=2, put_tokens=6)
PAGED = dataclasses.replace(CONFIG, page=16, token_budget=12)
# Nats per token between two shapes of the programs, or two kernels: they add up in another order.
TOLERANCE = 1e-5
# Fields of decoders with windows and two rotary embeddings, and of mixtures of experts.
GEMMA = dict(
    architectures=['Gemma3ForCausalLM'],
    model_type='gemma3_text',
    hidden_act=None,
    hidden_activation='gelu_pytorch_tanh',
    sliding_window=16,
    sliding_window_pattern=2,
    rope_local_base_freq=100.0,
    query_pre_attn_scalar=24,
    head_dim=16,
)
EXPERTS = dict(
    architectures=['Qwen3MoeForCausalLM'],
    model_type='qwen3_moe',
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    norm_topk_prob=True,
)


def make_policy(folder, **fields):
    """(codec, model, parameters) of a few letters."""
    tiny.make_folder(folder, letters=tiny.LETTERS, **fields)
    model = hf.read_config(folder)
    return Codec(folder), model, hf.load(folder, model)


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


class Forgetful(Environment):
    """Three tokens of every turn are its thoughts."""

    def retained_tokens(self, turn_ids):
        return [int(i) for i in turn_ids[3:]]


def requests(env, count=7, samples=3, temperature=1.0):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 8, rng.integers(4, 19)).astype(np.int32) for _ in range(count)]
    return [Request('policy', p, (3, i), env, samples, temperature) for i, p in enumerate(prompts)]


def make_pool(policy, config=CONFIG, mesh=None):
    codec, model, _ = policy
    config = dataclasses.replace(config, eos=codec.eos_ids)
    return SlotPool(Sampler(model, config, mesh or sharding.make_mesh()), seed=5)


def make_scheduler(policy, config=CONFIG, mesh=None, versions=1, **options):
    """(scheduler, its pool) with version 1 of the weights, and room for so many versions."""
    pool = make_pool(policy, config, mesh)
    scheduler = Scheduler({'policy': pool}, WeightStore({'policy': versions}), **options)
    params = policy[2]
    if mesh is not None:
        params = jax.device_put(params, sharding.parameter_shardings(params, mesh))
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


def contexts_of(rollouts):
    return [context for t in rollouts for context in t.contexts]


def same(a, b, tolerance=0.0):
    """All contexts have the same tokens and records, and log-probs within a tolerance."""
    assert [[t.text for t in x.turns] for x in a] == [[t.text for t in x.turns] for x in b]
    for x, y in zip(contexts_of(a), contexts_of(b), strict=True):
        np.testing.assert_array_equal(x.tokens, y.tokens)
        np.testing.assert_array_equal(x.source, y.source)
        np.testing.assert_array_equal(x.experts, y.experts)
        np.testing.assert_array_equal(x.kept, y.kept)
        assert x.finish == y.finish
        assert np.abs(x.logp - y.logp).max() <= tolerance


score = jax.jit(transformer.score, static_argnums=0)
# One shape for all, so that a model has one program.
ROWS, LENGTH = 8, 256


def scores(policy, sequences):
    """The trainer's log-probs of sequences of ids."""
    _, model, params = policy
    results = []
    for first in range(0, len(sequences), ROWS):
        rows = sequences[first : first + ROWS]
        tokens = np.zeros((ROWS, LENGTH), np.int32)
        for row, ids in zip(tokens, rows):
            row[: len(ids)] = ids
        positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
        # What follows a row has no effect on it: attention is causal.
        logp, _ = score(model, params, tokens, positions, np.ones_like(tokens))
        results += [np.asarray(values[: len(ids)]) for values, ids in zip(logp, rows)]
    return results


def check_log_probs(policy, rollouts):
    """What was sampled has the trainer's log-probs, in every context."""
    contexts = contexts_of(rollouts)
    for t, logp in zip(contexts, scores(policy, [t.tokens for t in contexts]), strict=True):
        sampled = t.source == POLICY
        np.testing.assert_allclose(t.logp[sampled], logp[sampled], rtol=0, atol=1e-4)


def check_idle(pool):
    """Every page and slot was given back."""
    for shard in pool.placement.shards:
        allocator = shard.allocator
        assert shard.is_idle and allocator.available == allocator.count == len({*allocator.free})
