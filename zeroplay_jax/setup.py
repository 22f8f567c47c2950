"""From a config to the parts of a run. Nothing here trains; `train` and `evaluate` begin with it."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import types
from collections.abc import Iterable

import jax

from zeroplay_jax.learner.learner import Learner, publisher
from zeroplay_jax.policy import hf, sharding
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig
from zeroplay_jax.rollout.scheduler import Lane, Scheduler
from zeroplay_jax.rollout.search import Limits, SearchEnv
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.rollout.tools import family
from zeroplay_jax.rules import BUILT_IN
from zeroplay_jax.selfplay import corpus as corpora
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.judge import Judge, RuleJudge, TextJudge, endpoint_writer, policy_writer
from zeroplay_jax.selfplay.roles import Role, Seat, Table
from zeroplay_jax.types import UserError

# Fields of config.policy that say how a model is computed, not what it is.
_TECHNIQUE = ('dtype', 'remat', 'remat_policy', 'attention', 'scan', 'logit_chunk')


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    folder: pathlib.Path
    model: ModelConfig
    mesh: jax.sharding.Mesh
    params: Params  # the loaded ones, float32, as an update holds them
    corpus: corpora.Corpus
    table: Table

    def publish(self, lanes: Iterable[str], params: Params | None = None) -> None:
        """Hands weights (the loaded ones unless others are given) to the players of these lanes."""
        params = self.params if params is None else params
        view = publisher(self.model, self.mesh, params)(params)
        for lane in lanes:
            self.table.scheduler.publish(lane, view, 0)

    @property
    def exam(self) -> Table:
        """The players in an evaluation: they search the held-out passages too, and those nowhere else."""
        search = self.corpus.search_held_out
        roles = {
            name: dataclasses.replace(role, env=dataclasses.replace(role.env, search=search))
            for name, role in self.table.roles.items()
            if role.env.search is not None
        }
        return dataclasses.replace(self.table, roles=roles)


def recipe_module(config) -> types.ModuleType:
    """The module of `config.recipe`."""
    return importlib.import_module(f'zeroplay_jax.selfplay.recipes.{config.recipe}')


def build(config, extra_lane: str = '') -> Parts:
    """Loads the policy, opens or indexes the corpus and seats the players of `config.recipe`.

    `extra_lane` names slots for further weights of the same shape, where an evaluation needs them.
    """
    folder = pathlib.Path(config.policy.path or BUILT_IN)
    model = hf.read_config(folder, **{name: config.policy[name] for name in _TECHNIQUE})
    mesh = sharding.make_mesh(**config.mesh)
    sharding.local_mesh(
        mesh
    )  # a mesh that no sampler could run on stops before the weights are read
    codec = Codec(folder)
    corpus = corpora.build(
        config
    )  # before the weights are read: a bad line of its files stops here
    params = hf.load(
        folder, model, mesh, owned=True, progress=config.progress and jax.process_index() == 0
    )
    table = _table(config, model, mesh, codec, corpus, extra_lane)
    return Parts(folder, model, mesh, params, corpus, table)


def load_like(parts: Parts, folder: str) -> Params:
    """Weights of another folder, for the same compiled programs.

    Raises:
      UserError: a model of another shape.
    """
    other = hf.read_config(folder, **{name: getattr(parts.model, name) for name in _TECHNIQUE})
    if other != parts.model:
        raise UserError(
            f'{folder}: its model differs in shape from {parts.folder}; take two checkpoints of one model'
        )
    return hf.load(folder, parts.model, parts.mesh, owned=True)


def weights_of(config) -> dict[str, str]:
    """Trained role → name of its weights: its own, or one for all."""
    shared = config.weights == 'shared'
    return {role: 'policy' if shared else role for role in recipe_module(config).TRAINED}


def _table(config, model, mesh, codec, corpus, extra_lane) -> Table:
    sampler = SamplerConfig(**config.sampler, eos=codec.eos_ids)
    tools, c, trained = family(config.tools.family), config.rollout, weights_of(config)
    mesh = sharding.local_mesh(mesh)
    limits = Limits(c.max_turns, c.turn_tokens, c.observation_tokens)
    lanes: dict[str, Lane] = {}
    roles: dict[str, Role] = {}
    seats = [seat for seat in recipe_module(config).SEATS if seat.role != 'judge']
    if config.judge.kind == 'policy':
        seats.append(Seat('judge', 'judge_answer', finals=(), plays_as='initial', searches=False))
    for seat in seats:
        own = (
            limits
            if seat.searches
            else Limits(1, config.judge.tokens if seat.role == 'judge' else c.turn_tokens, 0)
        )
        search = corpus.search if seat.searches else None
        env = SearchEnv(
            codec, tools, own, search, seat.finals, config.tools.max_queries, c.drop_thinking
        )
        weights = 'initial' if seat.plays_as == 'initial' else trained[seat.plays_as or seat.role]
        heat = config[seat.role].temperature if seat.role in trained else 0.0
        longest = c.prompt_tokens if seat.searches else config.sampler.context - own.turn_tokens
        roles[seat.role] = Role(seat.role, weights, seat.prompt, env, heat, longest)
        lanes.setdefault(weights, Lane(Sampler(model, sampler, mesh), config.seed))
    if extra_lane:
        lanes[extra_lane] = Lane(Sampler(model, sampler, mesh), config.seed)
    scheduler = Scheduler(lanes, deterministic=c.deterministic, tool_timeout=c.tool_timeout)
    table = Table(scheduler, roles, config.prompts)
    return dataclasses.replace(table, judge=_judge(config, corpus, table))


def _judge(config, corpus, table) -> Judge:
    c = config.judge
    if c.kind == 'rule':
        return RuleJudge(lambda: (d.title for d in corpus.documents), c.rubrics)
    writes = (
        policy_writer(table, c.temperature)
        if c.kind == 'policy'
        else endpoint_writer(c, config.prompts)
    )
    return TextJudge(writes, c.rubrics, c.most_failed)


def learners(config, parts: Parts) -> dict[str, Learner]:
    """One learner per set of trained weights, all begun from the same."""
    roles_of: dict[str, dict] = {}
    for role, weights in weights_of(config).items():
        roles_of.setdefault(weights, {})[role] = config[role]
    shape = (config.micro.rows, config.micro.tokens)
    return {
        weights: Learner(
            # One device needs no word on where rows lie.
            dataclasses.replace(parts.model, mesh=parts.mesh if parts.mesh.size > 1 else None),
            parts.mesh,
            roles,
            parts.params,
            shape,
            shared_optimizer=config.shared_optimizer,
            teacher_tokens=config.privileged.tokens,
            offload=config.offload,
        )
        for weights, roles in roles_of.items()
    }


def engine(config, parts: Parts) -> Engine:
    """The engine of `config.recipe`, ready to play its first step."""
    recipe = recipe_module(config).Recipe(config, parts.corpus)
    if 'initial' in parts.table.scheduler.lanes:
        parts.publish(['initial'])
    corpus = parts.corpus  # and nothing else of them: the engine must not keep the loaded weights

    def searches() -> dict[str, float]:
        corpus.check()
        # Only what is a function of the run: seconds and hits of the cache depend on when it was stopped.
        return {'search/failed': corpus.client.metrics()['search/failed']}

    return Engine(
        config, recipe, parts.table, learners(config, parts), weights_of(config), searches
    )
