"""From a config to the parts of a run. Nothing here trains; `train` and `evaluate` begin with it."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import types

import jax

from zeroplay_jax.config import BUILT_IN
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import hf, sharding
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig
from zeroplay_jax.rollout.scheduler import Lane, Scheduler
from zeroplay_jax.rollout.search import Limits, SearchEnv
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.rollout.tools import family
from zeroplay_jax.selfplay import corpus as corpora
from zeroplay_jax.selfplay.roles import Role, Table


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    folder: pathlib.Path
    model: ModelConfig
    mesh: jax.sharding.Mesh
    params: Params
    corpus: corpora.Corpus
    table: Table

    @property
    def exam(self) -> Table:
        """The players in an evaluation: they search the held-out passages too, and those nowhere else."""
        search = self.corpus.search_held_out
        roles = {
            name: dataclasses.replace(role, env=dataclasses.replace(role.env, search=search))
            for name, role in self.table.roles.items()
        }
        return dataclasses.replace(self.table, roles=roles)


def recipe_module(config) -> types.ModuleType:
    """The module of `config.recipe`."""
    return importlib.import_module(f'zeroplay_jax.selfplay.recipes.{config.recipe}')


def build(config) -> Parts:
    """Loads the policy, indexes the corpus and seats the players of `config.recipe`."""
    folder = pathlib.Path(config.policy.path or BUILT_IN)
    model = hf.read_config(
        folder, dtype=config.policy.dtype, remat=config.policy.remat, logit_chunk=config.policy.logit_chunk
    )
    mesh = sharding.make_mesh(**config.mesh)
    params = hf.load(folder, model, mesh)
    codec = Codec(folder)
    corpus = corpora.build(config)
    sampler = SamplerConfig(**config.sampler, eos=codec.eos_ids)
    limits = Limits(config.rollout.max_turns, config.rollout.turn_tokens, config.rollout.observation_tokens)
    tools = family(config.tools.family)
    lanes, roles = {}, {}
    for name, finals in recipe_module(config).FINALS.items():
        env = SearchEnv(codec, tools, limits, corpus.search, finals, config.tools.max_queries)
        roles[name] = Role(name, name, name, env, config[name].temperature)
        lanes[name] = Lane(Sampler(model, sampler, mesh), config.seed)
    scheduler = Scheduler(lanes, deterministic=config.rollout.deterministic, tool_timeout=config.rollout.tool_timeout)
    table = Table(scheduler, roles, config.prompts, config.rollout.prompt_tokens)
    return Parts(folder, model, mesh, params, corpus, table)


def learners(config, parts: Parts) -> dict[str, Learner]:
    """One learner per trained role, all begun from the same weights."""
    shape = (config.micro.rows, config.micro.tokens)
    return {
        name: Learner(parts.model, parts.mesh, config[name], parts.params, shape)
        for name in recipe_module(config).ROLES
    }
