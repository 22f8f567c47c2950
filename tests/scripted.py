"""A rollout context in which every role writes what the test says, and the trajectories to script it with."""

import asyncio
import types

import numpy as np
from trajectories import make_trajectory

from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.judge import judgements_of_episode
from zeroplay_jax.selfplay.library import Library
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import Outcome, TaskDropped, ToolCall, Turn


def trajectory(*turns, finish='answer'):
    return make_trajectory(*turns, finish=finish)


def search_call(queries, documents=(), error=None):
    """A valid search: one tuple of passages per query."""
    return ToolCall('search', {'query_list': list(queries)}, documents=documents, error=error)


def final(finish='answer', **tags):
    """One turn with these tags."""
    text = '<think> so</think>' + ''.join(f'<{tag}> {value}</{tag}>' for tag, value in tags.items())
    return trajectory(Turn(text), finish=finish)


def searching(*searches, **tags):
    """Searches as (query, passages found), then a turn with these tags."""
    search_turns = [
        Turn(f'<think> t</think><search> {query}</search>', search_call([query], (tuple(found),)))
        for query, found in searches
    ]
    return trajectory(*search_turns, *final(**tags).turns)


def lost(answer='Tarva'):
    """One that answers although its tool failed."""
    search = Turn('<think> t</think><search> x</search>', search_call(['x'], error='timeout'))
    return trajectory(search, *final(answer=answer).turns)


class Material:
    """Questions and answers in place of those of the training worlds."""

    def __init__(self, questions=(), answers=()):
        self._questions = list(questions)
        self._answers = list(answers)

    def questions(self, per_hop, hops):
        return self._questions

    def answers(self):
        return self._answers


def library(documents=(), worlds=None):
    """A library without a corpus: scripted roles search nothing."""
    return Library(None, None, documents, (), worlds=worlds)


class ScriptedContext:
    """Returns scripted trajectories, per role in turn or by a function of the fields; records every request."""

    def __init__(self, judge=None, **scripts):
        self.scripts = {}
        for role, script in scripts.items():
            self.scripts[role] = script if callable(script) else list(script)
        self.asked = []
        self.judge = judge
        codec = types.SimpleNamespace(encode_plain=str.split)
        limits = Limits(max_turns=2, turn_tokens=64, observation_tokens=64)
        tools = {'search': SearchTool(None)}
        env = Environment(codec, syntax_of('search_r1'), limits, tools)
        self.roles = {}
        for name in ('solver', 'checker'):
            self.roles[name] = types.SimpleNamespace(env=env, prompt_tokens=10_000)
        self.hosts = Hosts()

    def prompt_ids(self, role, prompt='', **fields):
        words = ' '.join(map(str, fields.values())).split()
        return np.arange(len(words), dtype=np.int32)

    async def ask(self, role, identity, samples=1, temperature=None, prompt='', **fields):
        self.asked.append((role, tuple(identity), samples, fields))
        script = self.scripts[role]
        if callable(script):
            return [script(fields) for _ in range(samples)]
        trajectories = script[:samples]
        self.scripts[role] = script[samples:]
        assert len(trajectories) == samples, f'{role} was asked once too often'
        return trajectories


def phase(name, steps=1):
    """The phase that the schedule of turns has of this name."""
    return Phase(name, steps, () if name == 'generate' else (name,))


def run_episodes(recipe, context, step, tasks):
    """Outcomes of the tasks of a step, run together and guarded as the collector does."""
    context.episodes = types.SimpleNamespace(recipe=recipe)

    async def guarded(task):
        judgements_of_episode.set([])
        try:
            return await recipe.episode(context, step, task)
        except TaskDropped as drop:
            return Outcome(drop=drop.reason)

    async def run_all():
        return await asyncio.gather(*map(guarded, tasks))

    return asyncio.run(run_all())
