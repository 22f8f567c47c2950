"""Refuses combinations of settings that cannot work.

A rule is a function of (config, recipe) that yields what is wrong. Rules between the fields of one section stand at the
section (`Section.conflicts`), those about files, folders and addresses in places.py, those of one recipe in
`Recipe.check`.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields, places
from zeroplay_jax.mini import world
from zeroplay_jax.objectives import rewards
from zeroplay_jax.objectives.registry import BUILT_IN_LOSSES, LossProperties
from zeroplay_jax.rollout.prompts import select
from zeroplay_jax.selfplay.recipe import INITIAL_WEIGHTS, Recipe, recipe_class, trained_roles
from zeroplay_jax.settings.kinds import (
    PROMPT_SETS,
    ConfigError,
    Problem,
    Section,
    changes,
    leaves,
    line_about,
    prompts_text,
    refuse,
)
from zeroplay_jax.settings.rollouts import SamplerConfig, written_tokens
from zeroplay_jax.settings.schema import Config, Mesh, TrainedRole, ValueNetwork
from zeroplay_jax.tools.registry import check_name as check_tool_name
from zeroplay_jax.types import UserError

Rule = Callable[[Config, type[Recipe]], Iterable[Problem] | None]


def check(
    config: ConfigDict,
    has_evaluation: bool = True,
    is_training: bool = True,
    has_files: bool = True,
) -> None:
    """Refuses a config that cannot run. Checks that files exist, without reading them.

    Args:
      config: config of a run; it gets the fields of its recipe (`fields.fit_to_recipe`), local copies of what lies in a
        bucket or on the Hub, and the text of its prompts.
      has_evaluation: whether the command evaluates on the questions of the config; a corpus other than the miniature
        worlds then needs `eval.file`.
      is_training: whether the command trains, for which a recipe may need documents.
      has_files: whether the files are on this machine; without them no rule about them counts.

    Raises:
      ConfigError: one line; the first problem.
    """
    fields.fit_to_recipe(config)
    fields.check_values(config)
    if has_files:
        # A mistake is told before anything is downloaded.
        if unread := places.elsewhere(config):
            for line in lines(config, has_evaluation, is_training, unread=unread):
                raise ConfigError(line)
        places.fetch(config)
    for line in lines(config, has_evaluation, is_training, has_files):
        raise ConfigError(line)
    # The text takes the place of its file.
    config.prompts = prompts_text(config.prompts)


def lines(
    config: ConfigDict,
    has_evaluation: bool = True,
    is_training: bool = True,
    has_files: bool = True,
    unread: Collection[str] = (),
) -> Iterator[str]:
    """Yields a line about every mistake of a config with the fields of its recipe, one for a field.

    Args:
      has_evaluation, is_training, has_files: as of `check`.
      unread: fields about which nothing is said.
    """
    told = {*unread}
    sound = config.copy_and_resolve_references()
    if 'prompts' in told and sound.prompts not in PROMPT_SETS:
        sound.prompts = 'full'
    defaults = fields.leaves(fields.default_config(config.recipe))
    for problem in fields.problems(config):
        if problem.field not in told:
            yield line_about(config, problem)
        told.add(problem.field)
        # The rules calculate with the values.
        if problem.field in defaults:
            sound.update_from_flattened_dict({problem.field: defaults[problem.field]})
    if told - {*unread} - defaults.keys():
        return
    checked, recipe = fields.frozen(sound), recipe_class(config.recipe)
    rules: list[Rule] = [*RULES]
    if has_files:
        rules += places.RULES
    if is_training:
        rules += TRAINING
    if is_training and has_files:
        rules.append(places.documents)
    rules.append(of_recipe)
    if has_evaluation:
        rules.append(evaluation)
    for rule in rules:
        try:
            for problem in rule(checked, recipe) or ():
                if problem.field not in told:
                    yield line_about(checked, problem)
                told.add(problem.field)
        except UserError as error:
            yield str(error)


def _sections(config: Section, prefix: str = '') -> Iterator[tuple[str, Section]]:
    """Yields (dotted name, section) of all sections, those in others too."""
    for name, value in config.items():
        if isinstance(value, Section):
            yield f'{prefix}{name}', value
            yield from _sections(value, f'{prefix}{name}.')


def conflicts(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Fields of one section that contradict each other."""
    for name, section in _sections(config):
        for problem in section.conflicts():
            yield Problem(f'{name}.{problem.field}', problem.text)


def _trained(config: Config) -> list[tuple[str, TrainedRole]]:
    """Returns the trained roles with their settings."""
    return [(role, config[role]) for role in trained_roles(config)]


def lengths(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Lengths and counts that do not fit into each other: turns, slots, packed rows, passages."""
    rollout = config.rollout
    context = config.sampler.context
    # Observations are not counted: one that does not fit ends its rollout, which the metric truncated_rate counts.
    needed = rollout.prompt_tokens + written_tokens(rollout)
    if context < needed:
        written = f'{rollout.max_turns} · {rollout.turn_tokens} turn'
        if rollout.response_tokens:
            written = f'at most {rollout.response_tokens} response'
        text = f'too short for {rollout.prompt_tokens} prompt + {written} tokens = {needed}'
        yield Problem('sampler.context', f'{text}; give {needed} or shrink config.rollout')
    for role, settings in _trained(config):
        if settings.prompt_tokens > rollout.prompt_tokens:
            text = f'more than rollout.prompt_tokens={rollout.prompt_tokens} of all roles; raise that too'
            yield Problem(f'{role}.prompt_tokens', text)
    # A prefill writes a whole chunk into the cache of a slot.
    if config.sampler.chunk > context:
        text = f'longer than a slot; give at most {context} (sampler.context)'
        yield Problem('sampler.chunk', text)
    if config.judge.kind == 'policy' and config.judge.tokens >= context:
        text = f'a reply leaves no room for a prompt in a slot of {context} (sampler.context); give less'
        yield Problem('judge.tokens', text)


def ahead(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Rollouts in progress during an update, and losses that ignore their age."""
    if not config.rollout.ahead:
        return
    if config.offload:
        text = 'rollouts are in progress during an update, which frees their cache; set it to false, or rollout.ahead=0'
        yield Problem('offload', text)
    for role, settings in _trained(config):
        # With old_logp=sampler the ratio would contain the age of the rollouts: the clip range would be spent on it,
        # and losses without a ratio would ignore it. With old_logp=trainer the ratio begins at 1, and the truncated
        # importance weight corrects the age alone.
        if settings.old_logp != 'trainer' or not settings.tis_cap:
            text = f'rollouts of older weights (rollout.ahead=1) need {role}.old_logp=trainer and a cap; give 2.0'
            yield Problem(f'{role}.tis_cap', text)


def tools(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Unknown tools, one that is named twice, and a role's tool that is not named."""
    names = config.tools.names
    for name in names:
        check_tool_name(name)
        if names.count(name) > 1:
            yield Problem('tools.names', f'names {name!r} twice; name every tool once')
    # External tools and MCP servers bring names that are known only once they are loaded.
    if any(':' in name or name == 'mcp' for name in names):
        return
    for role in recipe.roles(config):
        for name in role.tools or ():
            if name not in names:
                yield Problem('tools.names', f'role {role.name} uses {name!r}; add it')


def roles(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Roles without a prompt or without weights, prompts that do not fit, and an unknown evaluated role."""
    specifications = recipe.roles(config)
    trained = [role.name for role in specifications if role.is_trained]
    read = None
    # The record of a run, whose policy is evaluated with another recipe, has the text.
    if '\n' not in config.prompts:
        prompts = (role.prompt for role in specifications)
        read = {*recipe.prompts, *recipe.further_prompts, *prompts}
    try:
        templates = select(config.prompts, recipe.prompts, read)
    except KeyError:
        text = f'recipe {config.recipe} has no prompts of this set; declare them in Recipe.prompts'
        yield Problem('prompts', text)
        return
    for name, prompt in templates.items():
        if prompt.tools and config.tools.syntax != 'qwen':
            text = (
                f'not the calls of the schemas that [{name}] gives to the chat template; give qwen'
            )
            yield Problem('tools.syntax', text)
    for role in specifications:
        source, *moment = role.weights_from.split('@', 1)
        is_snapshot = source in trained and re.fullmatch('best|[1-9][0-9]*', ''.join(moment))
        if source and not is_snapshot and role.weights_from not in (*trained, INITIAL_WEIGHTS):
            text = (
                f'role {role.name} takes its weights from {role.weights_from!r}; name one of '
                f'{", ".join((*trained, INITIAL_WEIGHTS))}, or of the trained ones at the end of an iteration '
                '(solver@3) or at their best (solver@best)'
            )
            yield Problem('recipe', text)
        if moment == ['best'] and not config.checkpoint.best:
            text = f'role {role.name} samples with the weights of the best evaluation; name its metric, such as em/mean'
            yield Problem('checkpoint.best', text)
        if role.prompt not in templates:
            text = f'role {role.name} has the prompt {role.prompt!r}; declare it in Recipe.prompts'
            yield Problem('recipe', text)
    if recipe.evaluated_role not in [role.name for role in specifications]:
        text = f'it evaluates {recipe.evaluated_role!r}, no role of it; set Recipe.evaluated_role'
        yield Problem('recipe', text)


def metrics(config: Config, recipe: type[Recipe]) -> None:
    """Unknown reward functions; imports those of other packages."""
    try:
        rewards.resolve_difficulty(config.reward.difficulty)
        for metric in (config.reward.answer, config.eval.metric):
            if metric not in ('none', 'judge'):
                rewards.try_answer_metric(metric)
    except ValueError as error:
        raise ConfigError(f'config.reward, config.eval.metric: {error}') from None


def worlds(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """More worlds than there are names for."""
    for name in ('train', 'evaluation'):
        # No name occurs in two worlds, so that held-out facts stay out of training; the number of names is limited.
        available = world.worlds_available(name)
        if sum(config.world[name]) > available:
            text = f'the names suffice for {available} worlds, numbered from 0; first + count may be that at most'
            yield Problem(f'world.{name}', text)


def judge(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """A rule that would compare other text than the sentences of the worlds' plain form, and reject everything."""
    is_rule_elsewhere = config.judge.kind == 'rule' and config.retrieval.kind != 'world'
    if is_rule_elsewhere and recipe.judgements(config):
        text = 'the rule works in miniature worlds only; give policy or endpoint'
        yield Problem('judge.kind', text)


def writers(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """A writer whose package is not installed."""
    for name in config.log.writers:
        # TensorBoard is a requirement of this package.
        if name != 'tensorboard' and not _is_installed(name):
            text = f'the package {name} is not installed; install it with .venv/bin/pip install {name}, or leave it out'
            yield Problem('log.writers', text)


def _is_installed(name: str) -> bool:
    # wandb leaves a folder of its name in the current one, which Python takes for a package without files.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def of_recipe(config: Config, recipe: type[Recipe]) -> Iterable[Problem] | None:
    """What only the recipe knows."""
    return recipe.check(config)


def evaluation(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """A corpus other than the miniature worlds without questions to evaluate on."""
    if config.retrieval.kind != 'world' and not config.eval.file:
        text = 'a corpus of your own has no questions yet; name JSON lines of questions with answers to evaluate on'
        yield Problem('eval.file', text)


def properties_of(loss: str) -> LossProperties:
    """Returns the properties of a loss. Imports JAX for one of another package; built-in ones do not need it here."""
    if ':' not in loss:
        return BUILT_IN_LOSSES[loss]
    from zeroplay_jax.objectives import losses

    try:
        return losses.resolve_loss(loss)
    except ValueError as error:
        raise ConfigError(f'config.<role>.loss: {error}') from None


def advantages(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Functions that are no advantages, and settings that do not go with an advantage per turn or per token."""
    for role, settings in _trained(config):
        name = settings.advantage
        if ':' in name:
            if settings.baseline == 'value':
                text = 'a value network computes the advantages from returns; take group or turn, or another baseline'
                yield Problem(f'{role}.advantage', text)
                continue
            # Its module loads JAX, and only functions of others need it.
            from zeroplay_jax.objectives.advantages import resolve_advantage

            # Whether it is per turn is known when it has been called.
            try:
                resolve_advantage(name)
            except ValueError as error:
                raise ConfigError(f'config.{role}.advantage: {error}') from None
            continue
        if name == 'turn' and role not in recipe.turn_reward_roles:
            text = f'recipe {config.recipe} gives {role} none per turn; take group, or set Recipe.turn_reward_roles'
            yield Problem(f'{role}.advantage', text)
            continue
        if name == 'turn' and settings.scale != 'none' and settings.baseline != 'value':
            text = f'dividing the advantages of turns by their deviation would bias them; set {role}.scale=none'
            yield Problem(f'{role}.scale', text)
        is_fine = name == 'turn' or settings.baseline == 'value'
        if is_fine and not properties_of(settings.loss).ratio_per_token:
            giver = 'a value network' if settings.baseline == 'value' else name
            text = (
                f'a ratio per rollout has one advantage, and {giver} gives several; take token_pg'
            )
            yield Problem(f'{role}.loss', text)


def value_networks(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Settings that do not go with a value network, and a section `value_network` that nothing reads."""
    with_values = [role for role, settings in _trained(config) if settings.baseline == 'value']
    for role in with_values:
        if config.policy.adapters.rank:
            text = 'a value network has whole weights, and the run trains adapters; take mean, or no adapters'
            yield Problem(f'{role}.baseline', text)
    settings = config.value_network
    if not with_values:
        text = 'no trained role has a value network; set baseline=value of one'
        for problem in changes(settings, ValueNetwork(), text):
            yield Problem(f'value_network.{problem.field}', text)
    elif config.rollout.drop_thinking:
        for name in ('discount', 'gae_lambda'):
            if settings[name] < 1:
                text = 'with rollout.drop_thinking every context of a rollout ends with its reward; give 1'
                yield Problem(f'value_network.{name}', text)


def groups(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Group settings of a trained role that give meaningless advantages."""
    span_prompts = {role.name for role in recipe.roles(config) if role.groups_span_prompts}
    for role, settings in _trained(config):
        is_relative = settings.baseline in ('mean', 'loo') or settings.scale == 'std'
        is_alone = settings.samples < 2 and role not in span_prompts
        # A role that is never trained may have one sample.
        if is_relative and is_alone and settings.train_iterations != 0:
            text = 'a rollout is compared with the others of the same prompt; give 2 or more, or'
            yield Problem(f'{role}.samples', f'{text} {role}.baseline={role}.scale=none')
        if settings.filter_groups and is_alone:
            text = 'a single rollout has no reward variance, and the filter would leave nothing; give 2 or more'
            yield Problem(f'{role}.samples', text)


def updates(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Losses and optimisers that contradict other settings."""
    drops_thinking = config.rollout.drop_thinking
    for role, settings in _trained(config):
        # A missing function is reported now, not after the weights were loaded.
        properties = properties_of(settings.loss)
        if settings.minibatches > 1 and not properties.uses_ratio:
            text = f'{settings.loss} has no ratio, and later updates see rollouts of older weights; give 1'
            yield Problem(f'{role}.minibatches', text)
        is_whole = not (properties.ratio_per_token or getattr(properties, 'rollout_values', True))
        if drops_thinking and is_whole:
            text = f'{settings.loss} is defined on whole rollouts; declare PolicyLoss.rollout_values, or take token_pg'
            yield Problem('rollout.drop_thinking', text)
        if drops_thinking and settings.tis_cap and settings.tis_level == 'sequence':
            text = 'with rollout.drop_thinking every context of a rollout would get its own weight; take token'
            yield Problem(f'{role}.tis_level', text)
    if config.shared_optimizer and config.weights == 'separate':
        text = 'separate weights have separate optimisers; set weights to shared'
        yield Problem('shared_optimizer', text)


def adapters(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Adapters without a rank, and several adapters of shared weights."""
    folders = {role: settings.adapter for role, settings in _trained(config)}
    for role, folder in folders.items():
        if folder and not config.policy.adapters.rank:
            text = 'full fine-tuning has no adapters; set policy.adapters.rank to its rank'
            yield Problem(f'{role}.adapter', text)
        if folder and config.weights == 'shared' and len({*folders.values()}) > 1:
            text = (
                'the roles share their weights (weights=shared); give all of them the same folder'
            )
            yield Problem(f'{role}.adapter', text)


def teachers(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Rows too short for a rollout, and for a teacher's prompt with one."""
    # Packing never splits a trajectory over two rows: attention would not reach across.
    context = config.sampler.context
    if config.micro.tokens < context:
        text = f'a trajectory of {context} tokens (sampler.context) does not fit in a row; give {context} or more'
        yield Problem('micro.tokens', text)
    if any(settings.distill_top_k for _, settings in _trained(config)):
        needed = config.privileged.prompt_tokens + context
        if config.privileged.tokens < needed:
            text = f"a teacher's prompt and a rollout take up to {needed} tokens; give {needed} or more"
            yield Problem('privileged.tokens', text)


def corpus(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """A corpus without the file that training needs."""
    needed = recipe.needed_file
    if config.retrieval.kind != 'world' and needed and not config.inputs[needed]:
        text = (
            f'{config.recipe} needs {needed}, and only miniature worlds have their own; name a file'
        )
        yield Problem(f'inputs.{needed}', text)


def hops(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Fewer turns than the questions take that a proposer writes about documents or answers."""
    most = max(hop for hop, share in enumerate(config.schedule.hop_ratio, 1) if share)
    if {'documents', 'answers'} & set(recipe.input_files) and config.rollout.max_turns < most:
        text = f'a {most}-hop question (schedule.hop_ratio) takes {most - 1} searches and a turn to write it'
        yield Problem('rollout.max_turns', f'{text}; give {most} or more, or ask for fewer hops')


def division(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Rows, slots and lengths that the mesh or the TPU kernel cannot divide."""
    mesh, processes = config.mesh, config.distributed
    mesh_size = math.prod(mesh.values())
    is_known = processes.mode == 'off' and -1 not in mesh.values()
    if is_known and mesh_size < config.cpu_devices:
        text = f'the mesh has {mesh_size} of these devices; set mesh.replica=-1'
        yield Problem('cpu_devices', text)
    row_shards = mesh.replica * mesh.fsdp
    # Each of several processes samples on its own replicas, whose number is known when they have met.
    is_alone = processes.mode == 'off'
    yield from _shards(config, row_shards, row_shards if is_alone else mesh.fsdp)
    if processes.mode == 'coordinator':
        yield from _replicas(config, processes.processes)
    if config.policy.attention == 'splash':
        names = {'micro.tokens': config.micro.tokens}
        if any(settings.distill_top_k for _, settings in _trained(config)):
            names['privileged.tokens'] = config.privileged.tokens
        for name, value in names.items():
            # Block size of the TPU kernel.
            if value % 128:
                text = 'policy.attention=splash works in steps of 128; give a multiple'
                yield Problem(name, text)


def _shards(config: ConfigDict | Config, row_shards: int, cache_shards: int) -> Iterator[Problem]:
    """As `check_shards`."""
    divided = (
        ('micro.rows', row_shards),
        ('sampler.slots', cache_shards),
        ('sampler.pages', cache_shards),
        ('sampler.token_budget', cache_shards),
    )
    values = leaves(config)
    for name, shards in divided:
        value = values[name]
        if shards > 0 and value % shards:
            axes = 'mesh.replica · mesh.fsdp'
            if name != 'micro.rows' and config.distributed.mode != 'off':
                axes += ' of a process'
            more = value + shards - value % shards
            text = f'cannot be split evenly over {shards} devices ({axes}); give a multiple of {shards}, such as {more}'
            yield Problem(name, text)
    yield from SamplerConfig(**config.sampler).conflicts(max(cache_shards, 1))


def _replicas(config: ConfigDict | Config, processes: int) -> Iterator[Problem]:
    """As `check_replicas`."""
    if config.mesh.replica != -1 and config.mesh.replica % processes:
        text = f'{processes} processes cannot hold whole replicas each, whatever the other axes'
        yield Problem('mesh.replica', f'{text}; give a multiple of {processes}')


def check_shards(config: ConfigDict | Config, row_shards: int, cache_shards: int) -> None:
    """Refuses rows, slots and pages that devices cannot divide, and slots, pages and steps that do not fit each other.

    Args:
      row_shards: parts into which the rows of an update are split; below 0: not known before there are devices.
      cache_shards: parts into which the slots of a process are split; below 0: not known.

    Raises:
      ConfigError: one line.
    """
    refuse(config, _shards(config, row_shards, cache_shards))


def check_free_axes(config: ConfigDict) -> None:
    """Refuses a mesh of which two axes are -1."""
    problems = Mesh(**config.mesh).conflicts()
    refuse(config, (Problem(f'mesh.{axis}', text) for axis, text in problems))


def check_replicas(config: ConfigDict | Config, processes: int) -> None:
    """Refuses a known number of replicas that processes cannot share: each rolls out on whole ones of its own."""
    refuse(config, _replicas(config, processes))


# The order is that in which problems are reported: fields of a section first.
RULES: tuple[Rule, ...] = (
    conflicts,
    lengths,
    tools,
    metrics,
    worlds,
    value_networks,
    advantages,
    groups,
    division,
    updates,
    ahead,
    writers,
    judge,
    roles,
    adapters,
    places.addresses,
    places.world_files,
)
# Those about what only training reads.
TRAINING: tuple[Rule, ...] = (
    teachers,
    lambda config, recipe: recipe.check_judge_roles(config),
    corpus,
    hops,
)
