"""Builds the objects of a run from a config. Nothing here trains; training and evaluation both start with `build`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.configuration.places import read_policy
from zeroplay_jax.configuration.rules import check_replicas, check_shards
from zeroplay_jax.extras import load_extra
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.weights_view import FrozenBase, published
from zeroplay_jax.policy import adapter_config, adapters, hf, sharding
from zeroplay_jax.policy.stored_tensors import checked_headers
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.retrieval.jax_options import all_devices
from zeroplay_jax.rollout.prompts import Prompt, select
from zeroplay_jax.rollout.sampler import Sampler
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tokens import Codec, open_codec
from zeroplay_jax.rollout.weights import MOMENT, AdapterStore, WeightStore
from zeroplay_jax.runtime.devices import divide_cpu
from zeroplay_jax.selfplay import library_builder, prompt_check
from zeroplay_jax.selfplay.context import REPLAYS, Role, RolloutContext
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.judge import (
    GRADE_PROMPT,
    Judge,
    RuleJudge,
    policy_writer,
)
from zeroplay_jax.selfplay.library import Library
from zeroplay_jax.selfplay.recipe import (
    INITIAL_WEIGHTS,
    Recipe,
    RoleSpec,
    recipe_class,
    trained_roles,
    weights_of_roles,
)
from zeroplay_jax.selfplay.role_environment import (
    print_template_notes,
    role_environment,
    template_record,
)
from zeroplay_jax.settings.kinds import (
    BUILT_IN_CHECKPOINT,
    ENGLISH_CHECKPOINT,
    Problem,
    is_server,
    refuse,
    warn,
)
from zeroplay_jax.settings.rollouts import ALL_IDS, SamplerConfig, most_kept
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.tools.registry import build_tools
from zeroplay_jax.types import UserError

if TYPE_CHECKING:
    from zeroplay_jax.learner.value_network import ValueNetwork

# Fields of config.policy that change how a model is computed, not its weights or their shapes.
_COMPUTATION_FIELDS = (
    'dtype',
    'remat',
    'attention',
    'scan',
    'logit_chunk',
    'logits',
)
# The judge that config.judge.kind='policy' adds to the roles of any recipe.
_JUDGE = RoleSpec('judge', 'judge.answer', terminal_tags=(), weights_from=INITIAL_WEIGHTS, tools=())
# The same for grades, with `judge.grade_tokens`: a reply may have another length there.
_GRADER = dataclasses.replace(_JUDGE, name='judge_grader', prompt=GRADE_PROMPT)


@dataclasses.dataclass(frozen=True)
class PolicyFolder:
    """A checkpoint folder without its weights.

    Attributes:
      folder: the folder.
      model: its architecture.
      mesh: devices of the learner, to load the weights on.
      codec: its tokenizer.
    """

    folder: pathlib.Path
    model: ModelConfig
    mesh: jax.sharding.Mesh
    codec: Codec


@dataclasses.dataclass(frozen=True)
class RunContext(PolicyFolder):
    """The objects of a run.

    Attributes:
      params: the loaded weights, float32, in the learner's layout; {} after a caller has released them, and with
        adapters, whose weights are in `base`.
      library: documents, corpora and evaluation questions.
      rollouts: roles in training.
      evaluation: the same roles over held-out documents, with the same scheduler.
      check_and_reset_failures: `failure_check`.
      recipe: the recipe of a training run; None for an evaluation.
      base: the frozen weights under the adapters of a training run; None in others.
      template: what was chosen for the chat template (`role_environment.template_record`).
    """

    params: Params
    library: Library
    rollouts: RolloutContext
    evaluation: RolloutContext
    check_and_reset_failures: Callable[[], dict[str, float]]
    recipe: Recipe | None = None
    base: FrozenBase | None = None
    template: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def publish_weights(self, pools: Iterable[str], params: Params | None = None) -> None:
        """Copies weights into the slot pools of these names as version 0; `params`: None for the loaded ones."""
        if params is None and self.base is not None:
            of_sampler = self.base.sampler_params
        else:
            params = self.params if params is None else params
            of_sampler = published(self.model, self.mesh, params)
        for name in pools:
            self.rollouts.scheduler.weights.publish(name, of_sampler, 0)


def open_policy(config: Config, date: str = '') -> PolicyFolder:
    """Returns architecture, tokenizer and mesh of `config.policy` and `config.mesh`, without loading the weights.

    Args:
      date: the day that the chat template gets, as 2026-11-25; '' for today.

    Raises:
      UserError: files that cannot be used, or a mesh that no sampler can use.
    """
    folder = pathlib.Path(config.policy.path or BUILT_IN_CHECKPOINT)
    computation = {name: config.policy[name] for name in _COMPUTATION_FIELDS}
    model, warning = read_policy(config, **computation)
    if warning and jax.process_index() == 0:
        warn(warning)
    # Before the documents are read; the weights themselves come last.
    checked_headers(adapter_config.base_folder(folder), model)
    if config.policy.adapters.rank:
        hf.check_linears(model, config.policy.adapters.linears, 'config.policy.adapters.linears')
    divide_cpu(config.cpu_devices)
    # Before JAX is asked for processes, which fails where there is no device.
    all_devices()
    check_replicas(config, jax.process_count())
    mesh = sharding.make_mesh(**dict(config.mesh))
    # Refused here: reading the weights, which comes later, may take minutes. An evaluation has no rows to train on.
    check_shards(config, -1, sharding.data_shards(mesh) // jax.process_count())
    codec = open_codec(folder, date)
    if jax.process_index() == 0:
        print_template_notes(config, codec)
    return PolicyFolder(folder, model, mesh, codec)


def _open_served() -> PolicyFolder:
    """Returns what stands in for a model at a server: texts pass through this tokenizer, and no limit depends on it."""
    folder = ENGLISH_CHECKPOINT
    return PolicyFolder(folder, hf.read_config(folder), sharding.make_mesh(), open_codec(folder))


def build(
    config: ConfigDict | Config,
    extra_weights: str = '',
    for_training: bool = False,
    before_weights: Callable[[RolloutContext], None] | None = None,
    date: str = '',
    judgements: Sequence[str] = (),
) -> RunContext:
    """Returns the objects of a run: weights, documents, search index, tools, and the roles of `config.recipe`.

    The slots (device memory of the rollouts) cannot sample yet: they get weights from `RunContext.publish_weights` or
    `build_engine`.

    Args:
      extra_weights: name of further weights of the same shape that an evaluation publishes later, which get slots of
        their own; '' for none.
      for_training: whether to construct the recipe, which reads its input files, and to measure its prompts. The first
        process prints a warning if more than 10 % of a role's prompts exceed their limit.
      before_weights: called with the evaluation's roles before the weights are read, for checks that need them.
      date: as of `open_policy`.
      judgements: what an evaluation asks of the judge (`Recipe.judgements`); a server is asked for an example of each.

    Raises:
      UserError: files that cannot be used, a judge without verdicts, objects that do not fit together, or (with
        `for_training`) most prompts of a role or any evaluation question too long.
    """
    config = frozen(config)
    # Everything that can fail comes before the weights, cheapest first: reading the weights of a large model takes
    # minutes.
    uses_adapters = for_training and config.policy.adapters.rank > 0
    if uses_adapters:
        check_base(config)
    opened = _open_served() if is_server(config.policy.path) else open_policy(config, date)
    recipe_type = recipe_class(config.recipe)
    # Raises at an unusable line in a file of the user.
    library = library_builder.build_library(config, recipe_type.has_open_tasks)
    # Builds the tools too, and raises if an MCP server does not answer.
    rollouts, evaluation = _rollout_contexts(
        config, recipe_type, opened, library, extra_weights, uses_adapters
    )
    is_first_process = jax.process_index() == 0
    recipe = None
    if for_training:
        recipe = recipe_type(config, library)
        warnings = prompt_check.check_prompts(config, recipe, rollouts, library.evaluation_items)
        if is_first_process:
            for warning in warnings:
                warn(warning)
        judgements = recipe_type.judgements(config)
    if before_weights is not None:
        before_weights(evaluation)
    if config.judge.kind == 'endpoint' and is_first_process:
        # Only a run with such a judge loads this code.
        from zeroplay_jax.selfplay.judge_endpoint import check_judge

        check_judge(rollouts, config.judge, judgements)
    shows_progress = config.progress and is_first_process
    params, base = load_weights(
        config, opened.folder, opened.model, opened.mesh, uses_adapters, shows_progress
    )
    return RunContext(
        **vars(opened),
        params=params,
        library=library,
        rollouts=rollouts,
        evaluation=evaluation,
        check_and_reset_failures=failure_check(config, library, rollouts, evaluation),
        recipe=recipe,
        base=base,
        template=template_record(config, opened.codec),
    )


def load_like(run: RunContext, folder: str) -> Params:
    """Returns the weights of another checkpoint folder, for the compiled programs of `run`.

    Raises:
      UserError: a model of another shape.
    """
    # The same computation fields as the run's model: only differences in shape make the two unequal.
    computation = {name: getattr(run.model, name) for name in _COMPUTATION_FIELDS}
    other_model = hf.read_config(folder, **computation)
    if other_model != run.model:
        raise UserError(
            f'{folder}: its model differs in shape from {run.folder}; take two checkpoints of one model'
        )
    return hf.load(folder, run.model, run.mesh, training_layout=True)


def _rollout_contexts(
    config: Config,
    recipe: type[Recipe],
    opened: PolicyFolder,
    library: Library,
    extra_weights: str,
    uses_adapters: bool,
) -> tuple[RolloutContext, RolloutContext]:
    """Returns the roles for training, and the same roles for evaluation, whose tools read the held-out corpus.

    Both share slots and weights. `extra_weights` is as in `build`, `uses_adapters` as in `rollout_context`.
    """
    specifications = list(recipe.roles(config))
    if config.judge.kind == 'policy':
        specifications.append(_JUDGE)
        if config.judge.grade_tokens:
            specifications.append(_GRADER)
    training_tools = build_tools(config, library.training)
    evaluation_tools = training_tools
    # With one corpus for both the tools are shared, and with them the cache of search results.
    if library.held_out is not library.training:
        evaluation_tools = build_tools(config, library.held_out)
    templates = select(config.prompts, recipe.prompts)
    rollouts = rollout_context(
        config,
        specifications,
        opened,
        training_tools,
        templates,
        weights_of_roles(config),
        extra_weights,
        uses_adapters,
    )
    for role in rollouts.roles.values():
        # Raises if the chat template cannot write the messages, or the schemas of the tools.
        rollouts.prompt_ids(role.name, **dict.fromkeys(templates[role.prompt].inputs, ''))
    judge = _judge(config, library, templates, for_training=True)
    rollouts = dataclasses.replace(rollouts, judge=judge).bound()
    held_out_roles = {
        name: role.with_tools(evaluation_tools) for name, role in rollouts.roles.items()
    }
    judge = _judge(config, library, templates)
    return rollouts, dataclasses.replace(rollouts, roles=held_out_roles, judge=judge).bound()


def failure_check(
    config: Config, library: Library, *contexts: RolloutContext
) -> Callable[[], dict[str, float]]:
    """Returns a function that stops a run whose searches or tools failed too often since its last call.

    Call it before rollouts are trained on or results of an evaluation are used. It resets the counts, and returns
    `library_builder.SEARCH_COUNTS`.

    Raises (the function):
      UserError: more failures than `retrieval.max_failure_rate` or `tools.max_failure_rate` allows.
    """
    tools: dict[int, Tool] = {}
    for context in contexts:
        for role in context.roles.values():
            for tool in role.env.tools.values():
                # Two roles may have different tools of one name.
                tools[id(tool)] = tool
    workers = contexts[0].scheduler.workers
    limits = config.tools.max_failure_rate, config.retrieval.max_failure_rate

    def check_and_reset() -> dict[str, float]:
        counts = library_builder.check_and_reset_failures(library)
        workers.check_failure_rate(*limits, tools.values())
        return counts

    return check_and_reset


def rollout_context(
    config: Config,
    specifications: Iterable[RoleSpec],
    opened: PolicyFolder,
    tools: Mapping[str, Tool],
    templates: Mapping[str, Prompt],
    weights: Mapping[str, str],
    extra_weights: str = '',
    uses_adapters: bool = False,
) -> RolloutContext:
    """Returns the roles with a new scheduler and one slot pool per set of weights or, with adapters, for all roles.

    A model at a server has none.

    `judge` is None.

    The scheduler has no weights before `WeightStore.publish`.

    Args:
      tools: all tools of the run, by name.
      templates: prompts by name.
      weights: trained role → name of its weights.
      extra_weights: name of further weights that get slots of their own; '' for none.
      uses_adapters: whether the weights are adapters over one base (`policy.adapters`).
    """
    model = None
    if is_server(config.policy.path):
        model = load_extra('served_policy').ServedModel(config)
    roles: dict[str, Role] = {}
    for specification in specifications:
        role = _role(config, specification, opened.codec, tools, weights)
        roles[role.name] = role
    kept = max((most_kept(*role.truncation) for role in roles.values()), default=0)
    sampler_config = SamplerConfig(**dict(config.sampler), eos=opened.codec.eos_ids, kept=kept)
    sampler_mesh = sharding.local_mesh(opened.mesh)
    pools: dict[str, SlotPool] = {}

    def make_pool() -> SlotPool:
        sampler = Sampler(opened.model, sampler_config, sampler_mesh)
        return SlotPool(sampler, config.seed)

    store_type = AdapterStore if uses_adapters else WeightStore
    capacity = versions_in_use(config, weights)
    shared_pool = make_pool() if uses_adapters else None
    for role in roles.values():
        if MOMENT in role.weights:
            # A snapshot is replaced between phases, when no rollouts are in progress.
            capacity[role.weights] = 1
        # Roles of the same weights share slots, so that no role leaves slots idle for another.
        if role.weights not in pools and model is None:
            pools[role.weights] = shared_pool or make_pool()
    if extra_weights:
        pools[extra_weights] = make_pool()
    overlap = config.rollout.overlap
    scheduler = Scheduler(
        pools,
        store_type(capacity),
        deterministic=config.rollout.deterministic,
        tool_timeout=config.rollout.tool_timeout,
        # On a CPU the device is the host: there is no time to gain.
        overlap=overlap == 'on' or overlap == 'auto' and jax.default_backend() != 'cpu',
    )
    replays = REPLAYS if config.rollout.failed == 'retry' else 0
    return RolloutContext(scheduler, roles, templates, replays=replays, model=model)


def _role(
    config: Config,
    specification: RoleSpec,
    codec: Codec,
    tools: Mapping[str, Tool],
    weights: Mapping[str, str],
) -> Role:
    """Returns a role at run time: its environment, weights, temperature and prompt limit; arguments as above."""
    reply_tokens = 0
    judge_roles = recipe_class(config.recipe).judge_roles
    if specification.name in (_JUDGE.name, _GRADER.name, *judge_roles.values()):
        reply_tokens = config.judge.tokens
    env, prompt_tokens = role_environment(config, specification, codec, tools, reply_tokens)
    grades = specification.name in (_GRADER.name, judge_roles.get(GRADE_PROMPT))
    if grades and config.judge.grade_tokens:
        # The slot is shared by prompt and reply. The prompt may be as long as that of other judgements, so that a
        # longer limit of the reply does not refuse answers; a reply that fills the slot gives no verdict.
        limits = dataclasses.replace(env.limits, turn_tokens=config.judge.grade_tokens)
        env = dataclasses.replace(env, limits=limits)
    source, *moment = (specification.weights_from or specification.name).split(MOMENT)
    weights_name = MOMENT.join([weights.get(source, source), *moment])
    # Roles that are not trained only check and judge. They are greedy unless a request sets a temperature.
    temperature, truncation = 0.0, ALL_IDS
    if specification.is_trained:
        settings = config[specification.name]
        temperature, truncation = settings.temperature, (settings.top_p, settings.top_k)
    return Role(
        name=specification.name,
        weights=weights_name,
        prompt=specification.prompt,
        env=env,
        temperature=temperature,
        prompt_tokens=prompt_tokens,
        truncation=truncation,
    )


def _judge(config: Config, library: Library, templates, for_training: bool = False) -> Judge:
    """Returns the judge of `config.judge.kind`, in training with the judges among the roles of the recipe."""
    settings = config.judge
    fewest, most = settings.rubrics
    if settings.kind == 'rule':
        # Titles are listed at the first judgement: those of an encyclopedia would be read from disk.
        return RuleJudge(
            lambda: [document.title for document in library.documents],
            (fewest, most),
            settings.max_failure_rate,
        )
    if settings.kind == 'policy':
        roles = {GRADE_PROMPT: _GRADER.name} if settings.grade_tokens else {}
        samples = {}
        if for_training:
            roles |= recipe_class(config.recipe).judge_roles
            samples = {role: config[role].samples for role in trained_roles(config)}
        writer = policy_writer(settings.temperature, roles, samples)
    else:
        from zeroplay_jax.selfplay.judge_endpoint import endpoint_writer

        writer = endpoint_writer(settings, templates)
    drops_failed = for_training and config.rollout.failed != 'keep'
    judge = Judge(writer, (fewest, most), settings.max_failure_rate, drops_failed)
    if settings.kind == 'policy':
        judge.remedy = 'take a policy that writes verdicts, or raise config.judge.tokens'
    return judge


def build_engine(config: ConfigDict | Config, run: RunContext) -> Engine:
    """Returns the engine of `config.recipe`, ready for its first step; publishes all weights to their slots.

    Args:
      run: a run with loaded weights. The learners copy them, so the caller may release `params` afterwards.
    """
    config = frozen(config)
    recipe_type = recipe_class(config.recipe)
    recipe = run.recipe or recipe_type(config, run.library)
    if INITIAL_WEIGHTS in run.rollouts.scheduler.pools:
        run.publish_weights([INITIAL_WEIGHTS])
    # A local name, because the function below must not keep the loaded weights alive through `run`.
    check_and_reset = run.check_and_reset_failures
    trained_specifications = {
        specification.name: specification
        for specification in recipe_type.roles(config)
        if specification.is_trained
    }
    return Engine(
        config,
        recipe,
        run.rollouts,
        build_learners(config, run.model, run.mesh, run.params, run.base),
        weights_of_roles(config),
        trained_specifications,
        lambda: {'search/failed': check_and_reset()['failed']},
        build_value_networks(config, run.model, run.mesh, run.params),
    )


def check_base(config: Config) -> None:
    """Raises ConfigError if the base of a training run with adapters is an adapter itself."""
    # Not a rule about configs: an evaluation with the same config takes the folder of a trained adapter.
    if adapter_config.is_adapter(config.policy.path):
        text = 'an adapter, and new ones need a base; name the folder of its base, and the adapter in <role>.adapter'
        refuse(config, [Problem('policy.path', text)])


def load_weights(
    config: Config,
    folder: pathlib.Path,
    model: ModelConfig,
    mesh: Mesh,
    uses_adapters: bool,
    shows_progress: bool,
) -> tuple[Params, FrozenBase | None]:
    """Returns (whole weights in the learner's layout, None) or, with adapters, ({}, the base); of a server nothing."""
    if is_server(config.policy.path):
        return {}, None
    if not uses_adapters:
        return hf.load(folder, model, mesh, training_layout=True, progress=shows_progress), None
    settings = config.policy.adapters
    # Updates and samplers read the same arrays, so there is no float32 copy.
    params = hf.load(
        folder,
        model,
        mesh,
        progress=shows_progress,
        matrix_dtype=model.dtype,
        quantized=settings.quantize == 'int8',
    )
    base = FrozenBase.of(params, mesh, settings.alpha / settings.rank)
    return {}, base


def initial_adapter(config: Config, base: FrozenBase, model: ModelConfig, weights: str) -> Params:
    """Returns the adapter that weights of a name start from: the one in a folder, or a fresh one."""
    # Roles that share their weights name the same folder (configuration/rules.py).
    folders = {
        config[role].adapter for role, name in weights_of_roles(config).items() if name == weights
    }
    folder = folders.pop()
    if folder:
        return hf.load_adapter(folder, model)
    settings = config.policy.adapters
    return adapters.init(base.params, settings.linears, settings.rank, config.seed, weights)


def versions_in_use(config: Config, weights: Mapping[str, str]) -> dict[str, int]:
    """Returns name of weights → number of versions that can be in use at the same time."""
    versions: dict[str, int] = {}
    for name in weights.values():
        # With `rollout.ahead` the rollouts in progress are at most one training step old, and a step makes one version
        # for each role that trains the weights.
        if name not in versions or config.rollout.ahead:
            versions[name] = versions.get(name, 1 if config.rollout.ahead else 0) + 1
    return versions


def build_learners(
    config, model: ModelConfig, mesh: Mesh, params: Params, base: FrozenBase | None
) -> dict[str, Learner]:
    """Returns one learner per set of trained weights, by name, all initialised with the loaded weights."""
    roles_of_weights: dict[str, dict] = {}
    for role, weights in weights_of_roles(config).items():
        roles_of_weights.setdefault(weights, {})[role] = config[role]
    micro_batch_shape = (config.micro.rows, config.micro.tokens)
    # One device needs no layout constraints, and the compiled program is simpler without them.
    model = dataclasses.replace(model, mesh=mesh if mesh.size > 1 else None)
    # Each learner copies `params`, because an update donates the buffers of its weights.
    learners: dict[str, Learner] = {}
    for weights, roles in roles_of_weights.items():
        initial = params
        if base is not None:
            initial = initial_adapter(config, base, model, weights)
        learners[weights] = Learner(
            model,
            mesh,
            roles,
            initial,
            micro_batch_shape,
            shared_optimizer=config.shared_optimizer,
            teacher_tokens=config.privileged.tokens,
            offload=config.offload,
            weights=config.micro.weights,
            base=base,
        )
    return learners


def build_value_networks(
    config, model: ModelConfig, mesh: Mesh, params: Params
) -> dict[str, ValueNetwork]:
    """Returns the value network of every role with `baseline=value`, initialised with the loaded weights."""
    model = dataclasses.replace(model, mesh=mesh if mesh.size > 1 else None)
    networks: dict[str, ValueNetwork] = {}
    for role in trained_roles(config):
        if config[role].baseline == 'value':
            from zeroplay_jax.learner.value_network import ValueNetwork

            # The optimiser is the role's, but for the rate.
            settings = ConfigDict(config[role].to_dict() | config.value_network.to_dict())
            settings.learning_rate = settings.learning_rate or 10 * config[role].learning_rate
            networks[role] = ValueNetwork(model, mesh, settings, params, offload=config.offload)
    return networks
