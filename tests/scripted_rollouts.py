"""A policy that plays a script, through the real sampler and scheduler."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from zeroplay_jax.policy import hf, sharding
from zeroplay_jax.rollout import sampler, slot_state
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tokens import Codec

CONFIG = SamplerConfig(
    slots=2, context=4096, chunk=256, fill_rows=1, burst=32, put_rows=2, put_tokens=256
)


class ScriptedSampler(Sampler):
    """The sampler, with tokens that the test chose in place of drawn ones."""

    def script(self, pool, turns_of):
        self.pool, self.turns_of = pool, turns_of

    def decode(self, params, *_):
        PLAN.clear()
        for slot, rollout in enumerate(self.pool.rollouts):
            if rollout is not None:
                turns = self.turns_of[rollout.identity]
                turn = turns[min(len(rollout.turns), len(turns) - 1)]
                PLAN[slot] = (rollout.turn_start, turn)
        age = self.age if self.config.is_paged else None
        state, chunk = self.programs['decode'](params, self.state, self.table, age)
        self.state = state
        jax.block_until_ready(chunk)  # the plan is read until the chunk is ready
        return chunk


PLAN = {}  # slot → (where its turn starts, tokens of the turn)


def _planned(positions):
    tokens = np.zeros(len(positions), np.int32)
    for slot, position in enumerate(np.asarray(positions)):
        start, turn = PLAN.get(slot, (0, []))
        if 0 <= position - start < len(turn):
            tokens[slot] = turn[position - start]
    return tokens


def _scripted_sample(logits, temperature, key, position):
    shape = jax.ShapeDtypeStruct(position.shape, jnp.int32)
    token = jax.pure_callback(_planned, shape, position)
    return token, jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]


@contextlib.contextmanager
def scripted_policy(folder):
    """(codec, model, parameters) of a tiny policy; inside, programs draw the tokens of the script."""
    tiny.make_folder(folder, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    codec, model = Codec(folder), hf.read_config(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_state, 'sample', _scripted_sample)
        sampler.programs.cache_clear()  # nothing compiled with another `sample`, before or after
        yield codec, model, hf.load(folder, model)
        sampler.programs.cache_clear()


def scripted_scheduler(policy, turns, sizes, **options):
    """A scheduler of the weights `policy`; `turns`: identity of a rollout → the tokens of its turns."""
    codec, model, params = policy
    config = dataclasses.replace(CONFIG, eos=codec.eos_ids, **sizes)
    sampler = ScriptedSampler(model, config, sharding.make_mesh())
    pool = SlotPool(sampler, seed=0)
    sampler.script(pool, turns)
    scheduler = Scheduler({'policy': pool}, **options)
    scheduler.weights.publish('policy', params, 0)
    return scheduler


def play(policy, syntax, tools, scripts, order=1, slots=2, searched=(0, ''), **options):
    """Rollouts whose turns are `scripts` (texts), one request each."""
    codec = policy[0]
    turns = {(i, 0): [codec.encode(text) for text in script] for i, script in enumerate(scripts)}
    scheduler = scripted_scheduler(policy, turns, dict(slots=slots), **options)
    env = Environment(codec, syntax_of(syntax), Limits(12, 300, 1200), tools, searched=searched)
    prompt = env.prompt_ids(Prompt('{tools}\nQuestion: {question}'), question='q')
    requests = [Request('policy', prompt, (i,), env) for i in range(len(scripts))]
    results = scheduler.run([scheduler.rollout(request) for request in requests[::order]])
    return [trajectory for (trajectory,) in results][::order]
