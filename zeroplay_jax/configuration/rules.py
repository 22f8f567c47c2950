"""Refuses combinations of settings that cannot work; `Recipe.check` has the rules of one recipe.

A rule is a function of (config, recipe). It raises ConfigError: one line with the field, its value, the problem and the
fix.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
import re
from collections.abc import Callable

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.configuration.places import (
    check_adapter_folders,
    check_addresses,
    check_checkpoint,
    check_documents,
    check_files,
    check_retrieval,
    fetch_addresses,
)
from zeroplay_jax.mini import world
from zeroplay_jax.objectives import rewards
from zeroplay_jax.objectives.registry import BUILT_IN_LOSSES, LossProperties
from zeroplay_jax.retrieval.command import similar_path
from zeroplay_jax.rollout.prompts import select
from zeroplay_jax.selfplay.recipe import INITIAL_WEIGHTS, Recipe, recipe_class, trained_roles
from zeroplay_jax.settings.kinds import (
    ConfigError,
    Section,
    fail,
    prompts_text,
)
from zeroplay_jax.settings.rollouts import SamplerConfig, written_tokens
from zeroplay_jax.settings.schema import Adapters, Config, ValueNetwork
from zeroplay_jax.tools.registry import check_name as check_tool_name

# ---- adapters (policy.adapters) --------------------------------------------------------------------


def check_adapters(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses settings of adapters without a rank, and several adapters of shared weights."""
    settings = config.policy.adapters
    trained = trained_roles(config)
    folders = {role: config[role].adapter for role in trained if config[role].adapter}
    if not settings.rank:
        for role, folder in folders.items():
            problem = 'full fine-tuning has no adapters'
            fail(f'{role}.adapter', folder, problem, 'set policy.adapters.rank to its rank')
        problem = 'full fine-tuning has neither adapters nor a frozen base'
        fix = 'set policy.adapters.rank to a rank, or take it away'
        _refuse_changes('policy.adapters', settings, Adapters(), problem, fix)
        return
    if config.weights == 'shared' and len({config[role].adapter for role in trained}) > 1:
        role = next(iter(folders))
        problem = 'the roles share their weights (weights=shared)'
        fail(f'{role}.adapter', folders[role], problem, 'give all of them the same folder')


# ---- rollouts of the next step (rollout.ahead) -----------------------------------------------------


def check_ahead(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses settings that cannot work with rollouts in progress during an update, and losses that ignore age."""
    if not config.rollout.ahead:
        return
    if config.offload:
        problem = 'rollouts are in progress during an update, which frees their cache'
        fail('offload', True, problem, 'set it to false, or rollout.ahead to 0')
    for role, settings in _trained(config):
        # With old_logp=sampler the ratio would contain the age of the rollouts: the clip range would be spent on it,
        # and losses without a ratio would ignore it. With old_logp=trainer the ratio begins at 1, and the truncated
        # importance weight corrects the age alone.
        if settings.old_logp != 'trainer' or not settings.tis_cap:
            problem = f'rollouts of older weights (rollout.ahead=1) need {role}.old_logp=trainer'
            fix = f'give a cap such as 2.0 and set {role}.old_logp to trainer'
            fail(f'{role}.tis_cap', settings.tis_cap, problem, fix)


# ---- advantages (<role>.advantage) -----------------------------------------------------------------


def check_advantages(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses functions that are no advantages, and settings that do not go with an advantage per turn."""
    for role, settings in _trained(config):
        name = settings.advantage
        if name == 'group':
            continue
        if ':' in name:
            if settings.baseline == 'value':
                problem = 'a value network computes the advantages from returns'
                fail(f'{role}.advantage', name, problem, 'take group or turn, or another baseline')
            # Its module loads JAX, and only functions of others need it.
            from zeroplay_jax.objectives.advantages import resolve_advantage

            # Whether it is per turn is known when it has been called.
            try:
                resolve_advantage(name)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            continue
        if role not in recipe.turn_reward_roles:
            problem = f'recipe {config.recipe} gives {role} no rewards per turn'
            fix = 'take group, or set Row.turn_rewards and Recipe.turn_reward_roles'
            fail(f'{role}.advantage', name, problem, fix)
        if settings.scale != 'none' and settings.baseline != 'value':
            problem = 'dividing the advantages of turns by their deviation would bias them'
            fail(f'{role}.scale', settings.scale, problem, f'set {role}.scale=none')
        if not properties_of(settings.loss).per_token:
            problem = f'a ratio per rollout has one advantage, and {name} gives one per turn'
            fail(f'{role}.loss', settings.loss, problem, 'take token_pg')


# ---- value networks (<role>.baseline=value) --------------------------------------------------------


def check_value_networks(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses settings that do not go with a value network, and a section `value_network` that nothing reads."""
    roles = [role for role, settings in _trained(config) if settings.baseline == 'value']
    for role in roles:
        settings = config[role]
        if settings.scale == 'std':
            problem = 'a value network compares tokens, not the rollouts of a group'
            fail(f'{role}.scale', 'std', problem, 'give batch, as PPO in verl, or none')
        if not properties_of(settings.loss).per_token:
            problem = (
                'a ratio per rollout has one advantage, and a value network gives one per token'
            )
            fail(f'{role}.loss', settings.loss, problem, 'take token_pg')
        if config.policy.adapters.rank:
            problem = 'a value network has whole weights, and the run trains adapters'
            fail(f'{role}.baseline', 'value', problem, 'take mean, or policy.adapters.rank=0')
    settings = config.value_network
    if roles and config.rollout.drop_thinking and settings.discount * settings.gae_lambda < 1:
        name = 'discount' if settings.discount < 1 else 'gae_lambda'
        problem = 'with rollout.drop_thinking every context of a rollout ends with its reward'
        fix = 'give 1, or rollout.drop_thinking=false'
        fail(f'value_network.{name}', settings[name], problem, fix)
    if not roles:
        problem = 'no trained role has a value network'
        fix = 'set baseline=value of one'
        _refuse_changes('value_network', settings, ValueNetwork(), problem, fix)


def _refuse_changes(
    name: str, settings: ConfigDict, defaults: Section, problem: str, fix: str
) -> None:
    """Refuses values that differ from the defaults, of a section that this run does not read."""
    for field, default in defaults.items():
        if settings[field] != default:
            fail(f'{name}.{field}', settings[field], problem, fix)


# ---- judges ----------------------------------------------------------------------------------------


def check_judge(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a judge that cannot answer for this corpus."""
    judge = config.judge
    # The rule compares sentences of the worlds' plain form; on other text it would reject everything.
    is_rule_elsewhere = judge.kind == 'rule' and config.retrieval.kind != 'world'
    if is_rule_elsewhere and recipe.judgements(config):
        fix = 'give policy or endpoint'
        fail('judge.kind', 'rule', 'the rule works in miniature worlds only', fix)
    if judge.kind == 'policy' and judge.tokens >= config.sampler.context:
        slot = f'a slot of {config.sampler.context} (sampler.context)'
        problem = f'a reply leaves no room for a prompt in {slot}'
        fail('judge.tokens', judge.tokens, problem, 'give less')


# ---- where metrics go ------------------------------------------------------------------------------


# TensorBoard is a requirement of this package.
_OPTIONAL = ('wandb', 'mlflow')


def check_writers(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a writer whose package is not installed."""
    names = tuple(config.log.writers)
    for name in names:
        if name in _OPTIONAL and not _is_installed(name):
            fix = f'install it with .venv/bin/pip install {name}, or leave it out'
            fail('log.writers', names, f'the package {name} is not installed', fix)


def _is_installed(name: str) -> bool:
    # wandb leaves a folder of its name in the current one, which Python takes for a package without files.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


# ---- passages that training does not read ----------------------------------------------------------


def check_held_out(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a list of held-out passages that is missing, or that training would read nevertheless."""
    path = config.retrieval.held_out
    if not path:
        return
    if config.retrieval.kind == 'world':
        problem = 'the miniature world holds out worlds, not passages'
        fail('retrieval.held_out', path, problem, 'leave it empty')
    if not pathlib.Path(path).is_file():
        fix = 'name JSON lines with "document_id"; python -m zeroplay_jax.extras.inputs cloze writes them'
        fail('retrieval.held_out', path, 'no such file', fix + similar_path(path))
    if 'documents' in recipe.input_files and not config.inputs.documents:
        problem = 'documents to ask about would be drawn from all passages'
        fix = 'name a file of documents in inputs.documents'
        fail('retrieval.held_out', path, problem, fix)


# ---- properties of losses --------------------------------------------------------------------------


def properties_of(loss: str) -> LossProperties:
    """Returns the properties of the loss that a config names."""
    return imported_loss(loss) if ':' in loss else BUILT_IN_LOSSES[loss]


def joins_contexts(loss: str) -> bool:
    """Returns whether a loss is defined on rollouts with several contexts, as all built-in ones are."""
    properties = properties_of(loss)
    return properties.per_token or bool(getattr(properties, 'rollout_values', True))


def imported_loss(name: str) -> LossProperties:
    """Returns a loss of another package. Imports JAX, which built-in losses do not need here."""
    from zeroplay_jax.objectives import losses

    try:
        return losses.resolve_loss(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


# ---- all rules -------------------------------------------------------------------------------------


def check(
    config: ConfigDict,
    has_evaluation: bool = True,
    is_training: bool = True,
    has_files: bool = True,
) -> None:
    """Refuses a config that cannot run. Checks that files exist, without reading them.

    Args:
      config: config of a run; it gets the fields of its recipe (`fields.fit_to_recipe`).
      has_evaluation: whether the command evaluates on the questions of the config; a corpus other than the miniature
        worlds then needs `eval.file`.
      is_training: whether the command trains, for which a recipe may need documents.
      has_files: whether the files are on this machine; without them FILE_RULES are left out.

    Raises:
      ConfigError: one line; the first problem.
    """
    fields.fit_to_recipe(config)
    # Types and bounds are checked first, because the rules below calculate with the values.
    fields.check_values(config)
    recipe = recipe_class(config.recipe)
    for rule in RULES:
        if has_files or rule not in FILE_RULES:
            rule(config, recipe)
    if is_training:
        check_training(config, recipe)
        check_hops(config, recipe)
        if has_files:
            check_documents(config, recipe)
    recipe.check(fields.frozen(config))
    if has_evaluation:
        check_evaluation(config)


def check_evaluation(config: ConfigDict) -> None:
    """Refuses a corpus other than the miniature worlds without questions to evaluate on."""
    if config.retrieval.kind != 'world' and not config.eval.file:
        fix = 'name JSON lines of questions with answers to evaluate on'
        fail('eval.file', '', 'a corpus of your own has no questions yet', fix)


def _trained(config: ConfigDict) -> list[tuple[str, ConfigDict]]:
    """Returns the trained roles with their settings."""
    return [(role, config[role]) for role in trained_roles(config)]


# ---- rollouts ----------------------------------------------------------------------------------------


def _check_lengths(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses lengths and counts that do not fit into each other: turns, slots, packed rows, passages."""
    rollout = config.rollout
    context = config.sampler.context
    turns = rollout.max_turns
    # Observations are not counted: one that does not fit ends its rollout, which the metric truncated_rate counts.
    needed = rollout.prompt_tokens + written_tokens(rollout)
    if context < needed:
        written = f'{turns} · {rollout.turn_tokens} turn'
        if rollout.response_tokens:
            written = f'at most {rollout.response_tokens} response'
        problem = f'too short for {rollout.prompt_tokens} prompt + {written} tokens = {needed}'
        fail('sampler.context', context, problem, f'give {needed} or shrink config.rollout')
    if 0 < rollout.response_tokens < rollout.turn_tokens:
        problem = f'a turn may have {rollout.turn_tokens} (rollout.turn_tokens)'
        fix = f'give {rollout.turn_tokens} or more, or 0 for no limit but the slot'
        fail('rollout.response_tokens', rollout.response_tokens, problem, fix)
    for role, settings in _trained(config):
        if settings.prompt_tokens > rollout.prompt_tokens:
            problem = f'more than rollout.prompt_tokens={rollout.prompt_tokens} of all roles'
            fail(f'{role}.prompt_tokens', settings.prompt_tokens, problem, 'raise that too')
    # A prefill writes a whole chunk into the cache of a slot.
    if config.sampler.chunk > context:
        fix = f'give at most {context} (sampler.context)'
        fail('sampler.chunk', config.sampler.chunk, 'longer than a slot', fix)
    if config.reward.overlong_buffer > context:
        problem = f'longer than a slot (sampler.context={context})'
        fail('reward.overlong_buffer', config.reward.overlong_buffer, problem, 'give less')


def check_training(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a teacher or rows too short for a rollout, and a corpus without the file that training needs."""
    _check_distillation(config, recipe)
    # Packing never splits a trajectory over two rows: attention would not reach across.
    context = config.sampler.context
    if config.micro.tokens < context:
        problem = f'a trajectory of {context} tokens (sampler.context) does not fit in a row'
        fail('micro.tokens', config.micro.tokens, problem, f'give {context} or more')
    recipe.check_judge_roles(config)
    needed = recipe.needed_file
    if config.retrieval.kind != 'world' and needed and not config.inputs[needed]:
        problem = f'{config.recipe} needs {needed}, and only miniature worlds have their own'
        fail(f'inputs.{needed}', '', problem, 'name a file')


def check_hops(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses fewer turns than the questions take that a proposer writes about documents or answers."""
    if not {'documents', 'answers'} & set(recipe.input_files):
        return
    turns = config.rollout.max_turns
    hops = max(hop for hop, share in enumerate(config.schedule.hop_ratio, 1) if share)
    if turns < hops:
        problem = f'a {hops}-hop question (schedule.hop_ratio) takes {hops - 1} searches and a turn to write it'
        fail('rollout.max_turns', turns, problem, f'give {hops} or more, or ask for fewer hops')


def _check_tools(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses unknown tools, a tool that is named twice, a role's tool that is not named, and a bad MCP address."""
    names = tuple(config.tools.names)
    for name in names:
        check_tool_name(name)
        if names.count(name) > 1:
            fail('tools.names', names, f'names {name!r} twice', 'name every tool once')
    for specification in recipe.roles(config):
        for name in specification.tools or ():
            # External tools and MCP servers bring names that are known only once they are loaded.
            is_external = any(':' in entry or entry == 'mcp' for entry in names)
            if name not in names and not is_external:
                problem = f'role {specification.name} uses the tool {name!r}'
                fail('tools.names', names, problem, f'add {name!r}')


def _check_roles(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses roles without a prompt or without weights, prompts that do not fit, and an unknown evaluated role."""
    roles = recipe.roles(config)
    trained = [role.name for role in roles if role.is_trained]
    read = None
    # The record of a run, whose policy is evaluated with another recipe, has the text.
    if '\n' not in config.prompts:
        read = {*recipe.prompts, *recipe.further_prompts, *(role.prompt for role in roles)}
    try:
        templates = select(config.prompts, recipe.prompts, read)
    except KeyError:
        problem = f'recipe {config.recipe} has no prompts of this set'
        fail(
            'prompts',
            config.prompts,
            problem,
            'declare them in Recipe.prompts, or take another set',
        )
    for name, prompt in templates.items():
        if prompt.tools and config.tools.syntax != 'qwen':
            problem = f'not the calls of the schemas that [{name}] gives to the chat template'
            fix = 'give qwen, or take tools = "template" away there'
            fail('tools.syntax', config.tools.syntax, problem, fix)
    # The text takes the place of its file.
    config.prompts = prompts_text(config.prompts)
    for role in roles:
        source, *moment = role.weights_from.split('@', 1)
        is_snapshot = source in trained and re.fullmatch('best|[1-9][0-9]*', ''.join(moment))
        if source and not is_snapshot and role.weights_from not in (*trained, INITIAL_WEIGHTS):
            raise ConfigError(
                f'config.recipe={config.recipe}: role {role.name} takes its weights from '
                f'{role.weights_from!r}; name one of {", ".join((*trained, INITIAL_WEIGHTS))}, or of the trained ones '
                'at the end of an iteration (solver@3) or at their best (solver@best)'
            )
        if moment == ['best'] and not config.checkpoint.best:
            problem = f'role {role.name} plays with the weights of the best evaluation'
            fail('checkpoint.best', '', problem, 'name its metric, such as em/mean')
        if role.prompt not in templates:
            raise ConfigError(
                f'config.recipe={config.recipe}: role {role.name} has the prompt {role.prompt!r}, and '
                'there is no such text; declare it in Recipe.prompts'
            )
    if recipe.evaluated_role not in [role.name for role in roles]:
        raise ConfigError(
            f'config.recipe={config.recipe}: it evaluates {recipe.evaluated_role!r}, which is not one of '
            'its roles; set Recipe.evaluated_role'
        )


def _check_rewards(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses unknown reward functions; imports those of other packages."""
    try:
        rewards.resolve_difficulty(config.reward.difficulty)
        for metric in (config.reward.answer, config.eval.metric):
            if metric not in ('none', 'judge'):
                rewards.try_answer_metric(metric)
    except ValueError as error:
        raise ConfigError(f'config.reward, config.eval.metric: {error}') from None


def _check_worlds(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses more worlds than there are names for."""
    for name in ('train', 'evaluation'):
        first, count = config.world[name]
        # No name occurs in two worlds, so that held-out facts stay out of training; the number of names is limited.
        available = world.worlds_available(name)
        if first + count > available:
            problem = f'the names suffice for {available} worlds, numbered from 0'
            fix = f'choose first + count of {available} or less'
            fail(f'world.{name}', tuple(config.world[name]), problem, fix)


# ---- training ----------------------------------------------------------------------------------------


def _check_groups(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses group settings of a trained role that give meaningless advantages."""
    span_prompts = {role.name for role in recipe.roles(config) if role.groups_span_prompts}
    for role, settings in _trained(config):
        # A group of equal rewards has deviation 0: without a baseline its advantages are the reward
        # divided by the epsilon.
        if settings.baseline == 'none' and settings.scale == 'std':
            problem = 'without a baseline, dividing by the deviation inflates equal rewards'
            fail(f'{role}.baseline', 'none', problem, f'set {role}.scale=none too')
        is_relative = settings.baseline in ('mean', 'loo') or settings.scale == 'std'
        is_alone = settings.samples < 2 and role not in span_prompts
        # A role that is never trained may have one sample.
        if is_relative and is_alone and settings.train_iterations != 0:
            problem = 'a rollout is compared with the others of the same prompt'
            fix = f'give 2 or more, or {role}.baseline={role}.scale=none'
            fail(f'{role}.samples', settings.samples, problem, fix)
        if settings.get('filter_groups') and is_alone:
            problem = 'a single rollout has no reward variance, and the filter would leave nothing'
            fix = f'give 2 or more, or {role}.filter_groups=false'
            fail(f'{role}.samples', settings.samples, problem, fix)


def _check_updates(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses losses, minibatches and corrections of a trained role that contradict each other."""
    for role, settings in _trained(config):
        if ':' in settings.loss:
            # A missing function is reported now, not after the weights were loaded.
            imported_loss(settings.loss)
        # Unequal minibatches would weigh rollouts differently, as SSP's code does. Those of a prompt stay together.
        if settings.batch % settings.minibatches:
            problem = (
                f'the {settings.batch} prompts of a step ({role}.batch) are not divisible by it'
            )
            fix = f'give a divisor of {settings.batch}'
            fail(f'{role}.minibatches', settings.minibatches, problem, fix)
        if settings.tis_cap and settings.old_logp == 'sampler':
            problem = (
                'the correction compares trainer and sampler, and only the sampler is evaluated'
            )
            fail(f'{role}.tis_cap', settings.tis_cap, problem, f'set {role}.old_logp to trainer')
        if settings.minibatches > 1 and not properties_of(settings.loss).uses_ratio:
            problem = (
                f'{settings.loss} has no ratio, and later updates see rollouts of older weights'
            )
            fix = f'give 1, or set {role}.loss to token_pg'
            fail(f'{role}.minibatches', settings.minibatches, problem, fix)
        if config.rollout.drop_thinking and not joins_contexts(settings.loss):
            problem = f'{settings.loss} is defined on whole rollouts, and every context would count as one'
            fix = f'declare PolicyLoss.rollout_values, or set {role}.loss to token_pg'
            fail('rollout.drop_thinking', True, problem, fix)
        if config.rollout.drop_thinking and settings.tis_cap and settings.tis_level == 'sequence':
            problem = (
                'with rollout.drop_thinking every context of a rollout would get its own weight'
            )
            fail(f'{role}.tis_level', 'sequence', problem, f'set {role}.tis_level to token')
        carries = settings.get('filter_groups') and settings.get('surplus') == 'carry'
        if carries and settings.old_logp == 'trainer':
            problem = 'carried-over groups would be scored by newer weights, which hides their age'
            fix = f'take sampler, or set {role}.surplus to drop'
            fail(f'{role}.old_logp', 'trainer', problem, fix)
    if config.shared_optimizer and config.weights == 'separate':
        problem = 'separate weights have separate optimisers'
        fail('shared_optimizer', True, problem, 'set weights to shared')


def _check_distillation(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a teacher without weight or without enough tokens."""
    for role, settings in _trained(config):
        if not settings.get('distill_top_k'):
            continue
        # The teacher would cost a forward pass per step and change nothing.
        if not any(settings.distill_coef):
            value = tuple(settings.distill_coef)
            fail(f'{role}.distill_coef', value, 'the teacher has no weight', 'give a weight')
        needed = config.privileged.prompt_tokens + config.sampler.context
        if config.privileged.tokens < needed:
            problem = f"a teacher's prompt and a rollout take up to {needed} tokens"
            fail('privileged.tokens', config.privileged.tokens, problem, f'give {needed} or more')


# ---- devices and processes ---------------------------------------------------------------------------


def check_free_axes(config: ConfigDict) -> None:
    """Refuses a mesh of which two axes are −1, which means all remaining devices."""
    mesh = config.mesh
    if list(mesh.values()).count(-1) > 1:
        sizes = ', '.join(f'{axis}={size}' for axis, size in mesh.items())
        raise ConfigError(f'config.mesh: {sizes}: only one axis can be -1; give the others numbers')


def _check_division(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses rows, slots and lengths that the mesh or the TPU kernel cannot divide, and an unused remat_policy."""
    mesh = config.mesh
    check_free_axes(config)
    mesh_size = math.prod(mesh.values())
    if config.distributed.mode == 'off' and 0 < mesh_size < config.cpu_devices:
        problem = f'the mesh has {mesh_size} of these devices'
        fail('cpu_devices', config.cpu_devices, problem, 'set mesh.replica=-1')
    row_shards = mesh.replica * mesh.fsdp
    # Each of several processes samples on its own replicas, whose number is known when they have met.
    is_alone = config.distributed.mode == 'off'
    check_shards(config, row_shards, row_shards if is_alone else mesh.fsdp)
    # Block size of the TPU kernel.
    if config.policy.attention == 'splash':
        lengths = ['micro.tokens']
        if any(settings.get('distill_top_k') for _, settings in _trained(config)):
            lengths.append('privileged.tokens')
        for name in lengths:
            section, field = name.split('.')
            if config[section][field] % 128:
                problem = 'policy.attention=splash works in steps of 128'
                fail(name, config[section][field], problem, 'give a multiple')
    if config.policy.remat_policy != 'nothing_saveable' and not config.policy.remat:
        problem = 'without policy.remat nothing is recomputed'
        fail('policy.remat_policy', config.policy.remat_policy, problem, 'set policy.remat to true')


def check_shards(config: ConfigDict | Config, row_shards: int, cache_shards: int) -> None:
    """Refuses rows, slots and pages that devices cannot divide, and slots, pages and steps that do not fit each other.

    Args:
      row_shards: parts into which the rows of an update are split; below 0: not known before there are devices.
      cache_shards: parts into which the slots of a process are split; below 0: not known.

    Raises:
      ConfigError: one line.
    """
    divided = (
        ('micro.rows', row_shards),
        ('sampler.slots', cache_shards),
        ('sampler.pages', cache_shards),
        ('sampler.token_budget', cache_shards),
    )
    for name, shards in divided:
        section, field = name.split('.')
        value = config[section][field]
        if shards > 0 and value % shards:
            axes = 'mesh.replica · mesh.fsdp'
            if name != 'micro.rows' and config.distributed.mode != 'off':
                axes += ' of a process'
            problem = f'cannot be split evenly over {shards} devices ({axes})'
            fix = f'give a multiple of {shards}, such as {value + shards - value % shards}'
            fail(name, value, problem, fix)
    SamplerConfig(**config.sampler).check(max(cache_shards, 1))


def _check_processes(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses numbers and addresses of processes that cannot work."""
    settings = config.distributed
    if settings.mode != 'coordinator':
        # Without an address each process would run alone, as the first one.
        if settings.processes > 1 and settings.mode == 'off':
            problem = 'the processes have no address to meet at'
            fail('distributed.processes', settings.processes, problem, 'set distributed.mode')
        return
    address = re.fullmatch(r'[^:\s]+:(\d+)', settings.coordinator)
    if not address or not 0 < int(address[1]) < 1 << 16:
        problem = 'not an address'
        fail(
            'distributed.coordinator', settings.coordinator, problem, 'give host:port of process 0'
        )
    if settings.process >= settings.processes:
        problem = f'there are {settings.processes}'
        fail('distributed.process', settings.process, problem, 'count from 0')
    check_replicas(config, settings.processes)


def check_replicas(config: ConfigDict | Config, processes: int) -> None:
    """Refuses a known number of replicas that processes cannot share: each rolls out on whole ones of its own."""
    if config.mesh.replica != -1 and config.mesh.replica % processes:
        problem = f'{processes} processes cannot hold whole replicas each, whatever the other axes'
        fail('mesh.replica', config.mesh.replica, problem, f'give a multiple of {processes}')


Rule = Callable[[ConfigDict, type[Recipe]], None]
# The order is that in which problems are reported: values first, files on the disk last.
RULES: tuple[Rule, ...] = (
    _check_lengths,
    _check_tools,
    _check_rewards,
    _check_worlds,
    check_value_networks,
    check_advantages,
    _check_groups,
    _check_division,
    _check_processes,
    _check_updates,
    check_ahead,
    check_writers,
    check_judge,
    fetch_addresses,
    _check_roles,
    check_adapters,
    check_adapter_folders,
    check_retrieval,
    check_held_out,
    check_addresses,
    check_files,
    check_checkpoint,
)
# Those about what lies on a disk or in a bucket.
FILE_RULES: tuple[Rule, ...] = (
    fetch_addresses,
    check_adapter_folders,
    check_retrieval,
    check_held_out,
    check_files,
    check_checkpoint,
)
