"""Refuses combinations of settings that cannot work; `Recipe.check` has the rules of one recipe.

A rule is a function of (config, recipe). It raises ConfigError: one line with the field, its value, the problem and the
fix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.configuration.adapter_rules import check_adapters
from zeroplay_jax.configuration.address_rules import check_addresses
from zeroplay_jax.configuration.ahead_rules import check_ahead
from zeroplay_jax.configuration.bucket_rules import fetch_addresses
from zeroplay_jax.configuration.checkpoint_rules import check_checkpoint
from zeroplay_jax.configuration.file_rules import check_documents, check_files, check_retrieval
from zeroplay_jax.configuration.held_out_rules import check_held_out
from zeroplay_jax.configuration.judge_rules import check_judge
from zeroplay_jax.configuration.loss_properties import imported_loss, is_per_token, uses_ratio
from zeroplay_jax.configuration.page_rules import check_pages, sampler_axes
from zeroplay_jax.configuration.value_network_rules import check_value_networks
from zeroplay_jax.configuration.watching_rules import check_writers
from zeroplay_jax.mini import world
from zeroplay_jax.objectives import rewards
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay.recipe import INITIAL_WEIGHTS, Recipe, RoleSpec, recipe_class
from zeroplay_jax.settings.errors import ConfigError, fail
from zeroplay_jax.settings.rollouts import written_tokens
from zeroplay_jax.tools.registry import check_name as check_tool_name


def check(config: ConfigDict, has_evaluation: bool = True, is_training: bool = True) -> None:
    """Refuses a config that cannot run. Checks that files exist, without reading them.

    Args:
      config: config of a run; missing sections of its recipe are added to it.
      has_evaluation: whether the command evaluates on the questions of the config; a corpus other than the miniature
        worlds then needs `eval.file`.
      is_training: whether the command trains, for which a recipe may need documents.

    Raises:
      ConfigError: one line; the first problem.
    """
    fields.add_missing_sections(config)
    # Types and bounds are checked first, because the rules below calculate with the values.
    fields.check_values(config)
    recipe = recipe_class(config.recipe)
    for rule in RULES:
        rule(config, recipe)
    if is_training:
        check_documents(config, recipe)
    recipe.check(config)
    if has_evaluation:
        check_evaluation(config)


def check_evaluation(config: ConfigDict) -> None:
    """Refuses a corpus other than the miniature worlds without questions to evaluate on."""
    if config.retrieval.kind != 'world' and not config.eval.file:
        fix = 'name JSON lines of questions with answers to evaluate on'
        fail('eval.file', '', 'a corpus of your own has no questions yet', fix)


def _trained(config: ConfigDict, recipe: type[Recipe]) -> Iterator[tuple[RoleSpec, ConfigDict]]:
    """Yields the trained roles with their settings."""
    for specification in recipe.roles(config):
        if specification.is_trained:
            yield specification, config[specification.name]


# ---- rollouts ----------------------------------------------------------------------------------------


def _check_lengths(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses lengths and counts that do not fit into each other: turns, slots, packed rows, hops, passages."""
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
    for specification, settings in _trained(config, recipe):
        if settings.prompt_tokens > rollout.prompt_tokens:
            problem = f'more than rollout.prompt_tokens={rollout.prompt_tokens} of all roles'
            name = f'{specification.name}.prompt_tokens'
            fail(name, settings.prompt_tokens, problem, 'raise that too')
    # A prefill writes a whole chunk into the cache of a slot.
    if config.sampler.chunk > context:
        fix = f'give at most {context} (sampler.context)'
        fail('sampler.chunk', config.sampler.chunk, 'longer than a slot', fix)
    # Packing never splits a trajectory over two rows: attention would not reach across.
    if config.micro.tokens < context:
        problem = f'a trajectory of {context} tokens (sampler.context) does not fit in a row'
        fail('micro.tokens', config.micro.tokens, problem, f'give {context} or more')
    hops = max(hop for hop, share in enumerate(config.schedule.hop_ratio, 1) if share)
    if turns < hops:
        problem = f'a {hops}-hop question takes {hops - 1} searches and a turn to write it'
        fail('rollout.max_turns', turns, problem, f'give {hops} or more, or ask for fewer hops')
    if config.retrieval.overfetch < config.tools.top_k:
        problem = f'fewer candidates than passages shown (tools.top_k={config.tools.top_k})'
        fix = f'give {config.tools.top_k} or more'
        fail('retrieval.overfetch', config.retrieval.overfetch, problem, fix)
    if config.reward.overlong_buffer > context:
        problem = f'longer than a slot (sampler.context={context})'
        fail('reward.overlong_buffer', config.reward.overlong_buffer, problem, 'give less')


def _check_tools(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses unknown tools, a role's tool that is not in tools.names, and a bad MCP address."""
    names = tuple(config.tools.names)
    for name in names:
        check_tool_name(name)
    for specification in recipe.roles(config):
        for name in specification.tools or ():
            # External tools and MCP servers bring names that are known only once they are loaded.
            is_external = any(':' in entry or entry == 'mcp' for entry in names)
            if name not in names and not is_external:
                problem = f'role {specification.name} uses the tool {name!r}'
                fail('tools.names', names, problem, f'add {name!r}')


def _check_roles(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses roles without a prompt or without weights, and an unknown evaluated role."""
    roles = recipe.roles(config)
    trained = [role.name for role in roles if role.is_trained]
    try:
        templates = prompts.select(config.prompts, recipe.prompts)
    except KeyError:
        problem = f'recipe {config.recipe} has no prompts of this set'
        fail('prompts', config.prompts, problem, 'take the other set')
    for role in roles:
        if role.weights_from and role.weights_from not in (*trained, INITIAL_WEIGHTS):
            raise ConfigError(
                f'config.recipe={config.recipe}: role {role.name} takes its weights from '
                f'{role.weights_from!r}; name one of {", ".join((*trained, INITIAL_WEIGHTS))}'
            )
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
                rewards.resolve_answer_metric(metric)
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
    """Refuses group settings of a trained role that give meaningless advantages or that its recipe lacks."""
    for specification, settings in _trained(config, recipe):
        role = specification.name
        # A group of equal rewards has deviation 0: without a baseline its advantages are the reward
        # divided by the epsilon.
        if settings.baseline == 'none' and settings.scale == 'std':
            problem = 'without a baseline, dividing by the deviation inflates equal rewards'
            fail(f'{role}.baseline', 'none', problem, f'set {role}.scale=none too')
        is_relative = settings.baseline in ('mean', 'loo') or settings.scale == 'std'
        is_alone = settings.samples < 2 and not specification.groups_span_prompts
        # A role that is never trained may have one sample.
        if is_relative and is_alone and settings.train_iterations != 0:
            problem = 'a rollout is compared with the others of the same prompt'
            fix = f'give 2 or more, or {role}.baseline={role}.scale=none'
            fail(f'{role}.samples', settings.samples, problem, fix)
        if settings.filter_groups and role not in recipe.filterable_roles:
            problem = f'recipe {config.recipe} does not filter groups of this role'
            fail(f'{role}.filter_groups', True, problem, 'set it to false')
        if settings.filter_groups and is_alone:
            problem = 'a single rollout has no reward variance, and the filter would leave nothing'
            fix = f'give 2 or more, or {role}.filter_groups=false'
            fail(f'{role}.samples', settings.samples, problem, fix)


def _check_updates(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses losses, minibatches and corrections of a trained role that contradict each other."""
    for specification, settings in _trained(config, recipe):
        role = specification.name
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
        if settings.minibatches > 1 and not uses_ratio(settings.loss):
            problem = (
                f'{settings.loss} has no ratio, and later updates see rollouts of older weights'
            )
            fix = f'give 1, or set {role}.loss to token_pg'
            fail(f'{role}.minibatches', settings.minibatches, problem, fix)
        # With drop_thinking every context of a rollout becomes a separate row. Sums over tokens do not change; means
        # over sequences and sequence ratios would count contexts, not rollouts.
        splits_rollouts = config.rollout.drop_thinking
        has_token_ratio = not splits_rollouts or is_per_token(settings.loss)
        if splits_rollouts and not (has_token_ratio and settings.aggregation == 'token'):
            problem = (
                f'{settings.loss} over {settings.aggregation} is defined on whole rollouts, and every '
                'context would count as one'
            )
            fix = f'set {role}.loss to token_pg and {role}.aggregation to token'
            fail('rollout.drop_thinking', True, problem, fix)
        carries = settings.filter_groups and settings.surplus == 'carry'
        if carries and settings.old_logp == 'trainer':
            problem = 'carried-over groups would be scored by newer weights, which hides their age'
            fix = f'take sampler, or set {role}.surplus to drop'
            fail(f'{role}.old_logp', 'trainer', problem, fix)
    if config.shared_optimizer and config.weights == 'separate':
        problem = 'separate weights have separate optimisers'
        fail('shared_optimizer', True, problem, 'set weights to shared')


def _check_distillation(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a teacher without prompts, without weight or without enough tokens."""
    for specification, settings in _trained(config, recipe):
        role = specification.name
        if not settings.distill_top_k:
            continue
        if role not in recipe.distillable_roles:
            problem = f'the prompts of {role} in recipe {config.recipe} have no construction path'
            fix = 'give 0, or take recipe drzero or piplay'
            fail(f'{role}.distill_top_k', settings.distill_top_k, problem, fix)
        # The teacher would cost a forward pass per step and change nothing.
        if not any(settings.distill_coef):
            value = tuple(settings.distill_coef)
            fail(f'{role}.distill_coef', value, 'the teacher has no weight', 'give a weight')
        if config.rollout.drop_thinking:
            problem = 'a teacher reads one context per rollout'
            fix = f'set it to false, or {role}.distill_top_k to 0'
            fail('rollout.drop_thinking', True, problem, fix)
        needed = config.privileged.prompt_tokens + config.sampler.context
        if config.privileged.tokens < needed:
            problem = f"a teacher's prompt and a rollout take up to {needed} tokens"
            fail('privileged.tokens', config.privileged.tokens, problem, f'give {needed} or more')


# ---- devices and processes ---------------------------------------------------------------------------


def _check_division(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses rows, slots and lengths that the mesh or the TPU kernel cannot divide, and an unused remat_policy."""
    mesh = config.mesh
    # −1 means all remaining devices, so only one axis can have it.
    if list(mesh.values()).count(-1) > 1:
        sizes = ', '.join(f'{axis}={size}' for axis, size in mesh.items())
        raise ConfigError(f'config.mesh: {sizes}: only one axis can be -1; give the others numbers')
    cache_axes = sampler_axes(config)
    mesh_size = math.prod(mesh.values())
    if config.distributed.mode == 'off' and 0 < mesh_size < config.cpu_devices:
        problem = f'the mesh has {mesh_size} of these devices'
        fail('cpu_devices', config.cpu_devices, problem, 'set mesh.replica=-1')
    divided = (
        ('micro.rows', ('replica', 'fsdp')),
        ('sampler.slots', cache_axes),
        ('sampler.pages', cache_axes),
        ('sampler.token_budget', cache_axes),
    )
    for name, axes in divided:
        section, field = name.split('.')
        value = config[section][field]
        shards = math.prod(mesh[axis] for axis in axes)
        # An axis of -1 is resolved later, when the devices are known; make_mesh checks it then.
        if shards > 0 and value % shards:
            axis_names = ' · '.join(f'mesh.{axis}' for axis in axes)
            fix = f'give a multiple of {shards}, such as {value + shards - value % shards}'
            fail(name, value, f'cannot be split evenly over {shards} devices ({axis_names})', fix)
    # Block size of the TPU kernel.
    if config.policy.attention == 'splash':
        lengths = ['micro.tokens']
        if any(settings.distill_top_k for _, settings in _trained(config, recipe)):
            lengths.append('privileged.tokens')
        for name in lengths:
            section, field = name.split('.')
            if config[section][field] % 128:
                problem = 'policy.attention=splash works in steps of 128'
                fail(name, config[section][field], problem, 'give a multiple')
    if config.policy.remat_policy != 'nothing_saveable' and not config.policy.remat:
        problem = 'without policy.remat nothing is recomputed'
        fail('policy.remat_policy', config.policy.remat_policy, problem, 'set policy.remat to true')


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
    # Every process rolls out with whole weights, so a replica must not span processes.
    if config.mesh.replica != -1 and config.mesh.replica % settings.processes:
        problem = f'{settings.processes} processes cannot hold whole replicas each'
        fix = 'choose a multiple of distributed.processes'
        fail('mesh.replica', config.mesh.replica, problem, fix)


Rule = Callable[[ConfigDict, type[Recipe]], None]
# The order is that in which problems are reported: values first, files on the disk last.
RULES: tuple[Rule, ...] = (
    _check_lengths,
    check_pages,
    _check_tools,
    _check_roles,
    _check_rewards,
    _check_worlds,
    check_value_networks,
    _check_groups,
    _check_division,
    _check_processes,
    _check_updates,
    check_ahead,
    check_writers,
    _check_distillation,
    check_judge,
    fetch_addresses,
    check_adapters,
    check_retrieval,
    check_held_out,
    check_addresses,
    check_files,
    check_checkpoint,
)
