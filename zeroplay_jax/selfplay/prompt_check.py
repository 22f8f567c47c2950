"""Measures the prompts of a sample of the real inputs before a run, and refuses or warns if many are too long.

It needs the tokenizer and no weights. A run drops tasks whose prompt is too long: a few of them do no harm, but if
most are dropped, almost nothing is trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from zeroplay_jax.rollout.scheduler import run_to_end
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.answers import prompt_fields
from zeroplay_jax.selfplay.context import Role, RolloutContext
from zeroplay_jax.selfplay.recipe import Recipe, trained_roles
from zeroplay_jax.settings.kinds import HOPS_CHECKPOINT, OPEN_CHECKPOINT, fail, leaves
from zeroplay_jax.settings.rollouts import written_tokens
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.tools.registry import BUILT_IN
from zeroplay_jax.types import Question, TaskDropped, Trajectory, UserError

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.schedule import Step
    from zeroplay_jax.types import Task

# Shares of too long prompts of a role above which the run is refused, or warned about.
_REFUSED_SHARE = 0.5
_WARNED_SHARE = 0.1
# The suggested limit holds this percentage of the measured prompts, rounded up to a multiple.
_PERCENTILE = 95
_MULTIPLE = 16
# Seconds after which episodes that wait for something other than a rollout are cancelled.
_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class _Probe(RolloutContext):
    """A context whose requests are measured and not run.

    Attributes:
      lengths: role → tokens of each prompt.
    """

    lengths: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    async def ask(
        self,
        role: str,
        identity: tuple[int, ...],
        samples: int = 1,
        temperature: float | None = None,
        prompt: str = '',
        **fields: object,
    ) -> list[Trajectory]:
        """Records the length of the prompt, and ends the episode by raising TaskDropped('measured')."""
        ids = self.prompt_ids(role, prompt, **fields)
        self.lengths.setdefault(role, []).append(len(ids))
        raise TaskDropped('measured')

    async def log_probs(self, *_: object, **__: object) -> list[np.ndarray]:
        """Ends the episode as `ask` does."""
        raise TaskDropped('measured')


@dataclasses.dataclass(frozen=True)
class _Measurement:
    """Prompt lengths of a role.

    Attributes:
      role: the role.
      lengths: tokens of each measured prompt.
      description: names the prompts in messages.
      required: the limit in tokens that would be enough, rounded up: for all evaluation questions, or for 95 % of the
        training prompts.
    """

    role: Role
    lengths: Sequence[int]
    description: str
    required: int

    @property
    def too_long(self) -> float:
        """Share of the prompts that are longer than the role allows."""
        return float(np.mean(np.array(self.lengths) > self.role.prompt_tokens))


def check_prompts(
    config, recipe: Recipe, context: RolloutContext, questions: Sequence[Question]
) -> list[str]:
    """Refuses a config under which most prompts of some role, or any evaluation question, are too long.

    Runs episodes up to their first request, in an event loop of its own; no rollout is sampled.

    Args:
      recipe: ready for its first step; its first tasks are measured (`Recipe.first_tasks`).
      context: the roles in training. Its slots need no weights.
      questions: questions of the evaluation. None may be too long, because leaving one out would change which
        questions the result averages over.

    Returns:
      A warning for each role with many, but not most, prompts too long, or with tools that its prompt does not name.

    Raises:
      ConfigError: one line with the fields to change and the values that they need.
      UserError: an episode asks for a prompt with other fields than it has.
    """
    refused = []
    warnings = _unexplained_tools(context)
    evaluation = _evaluation_prompts(recipe, context, questions)
    if evaluation and evaluation.too_long:
        refused.append(evaluation)
    for measurement in _training_prompts(recipe, context):
        if measurement.too_long > _REFUSED_SHARE:
            refused.append(measurement)
        elif measurement.too_long > _WARNED_SHARE:
            warnings.append(_problem(measurement) + f'; {_fix(config, [measurement])}')
    if refused:
        worst = _worst_per_field(config, refused)
        problem = '; '.join(_problem(measurement) for measurement in worst)
        field = _field(config, worst[0].role)
        limit = leaves(config)[field]
        # The error gives every field the largest value that any role requires, so that no second error follows.
        fail(field, limit, problem, _fix(config, worst))
    return warnings


def _unexplained_tools(context: RolloutContext) -> list[str]:
    """Returns a warning for each role whose prompt does not explain a tool that is not built in."""
    warnings = []
    for name, role in context.roles.items():
        # Built-in checkpoints know the built-in tools without an explanation.
        unknown = [tool for tool in role.env.tools if tool not in BUILT_IN]
        prompt = context.prompts[role.prompt]
        if unknown and 'tools' not in prompt.fields and not prompt.tools:
            warnings.append(
                f'role {name} can call {", ".join(unknown)}, but its prompt {role.prompt!r} names no tools, so that '
                'it will not; take config.prompts=full, or a prompt with the field {tools}'
            )
    return warnings


def _worst_per_field(config: Config, measurements: Sequence[_Measurement]) -> list[_Measurement]:
    """Returns for each config field that limits prompts the measurement that requires its largest value."""
    worst: dict[str, _Measurement] = {}
    for measurement in measurements:
        field = _field(config, measurement.role)
        if field not in worst or measurement.required > worst[field].required:
            worst[field] = measurement
    return list(worst.values())


# ---- measurement -------------------------------------------------------------------------------------


def _evaluation_prompts(
    recipe: Recipe, context: RolloutContext, questions: Sequence[Question]
) -> _Measurement | None:
    """Measures the prompts of all evaluation questions; returns None without questions."""
    if not questions:
        return None
    role = recipe.evaluated_role
    lengths = []
    for question in questions:
        fields = prompt_fields(context, role, question)
        lengths.append(len(context.prompt_ids(role, **fields)))
    return _Measurement(
        context.roles[role], lengths, 'of the evaluation questions', _rounded_up(max(lengths))
    )


def _training_prompts(recipe: Recipe, context: RolloutContext) -> list[_Measurement]:
    """Measures the first prompts of the run, by role; a role without any is measured with an empty prompt.

    An empty prompt is the role's template with empty fields.
    """
    hosts = Hosts()
    # Values that episodes share while they are measured stay in this process.
    hosts.index, hosts.count = 0, 1
    probe = _Probe(
        scheduler=context.scheduler,
        roles=context.roles,
        prompts=context.prompts,
        hosts=hosts,
    )
    run_to_end(_run_episodes(recipe, probe, recipe.first_tasks()))
    measurements = []
    for name, role in context.roles.items():
        lengths = probe.lengths.get(name)
        description = f'of {len(lengths or ())} measured prompts of role {name}'
        if not lengths:
            # The inputs of this role are known only during the run, but its instructions must fit.
            empty_fields = dict.fromkeys(context.prompts[role.prompt].inputs, '')
            lengths = [len(context.prompt_ids(name, **empty_fields))]
            description = f'of the instructions of role {name} alone'
        percentile = np.percentile(lengths, _PERCENTILE, method='higher')
        measurements.append(_Measurement(role, lengths, description, _rounded_up(int(percentile))))
    return measurements


async def _run_episodes(recipe: Recipe, probe: _Probe, tasks: Sequence[tuple[Step, Task]]) -> None:
    """Runs episodes up to their first request, which `probe` records; raises a UserError of one, no other error."""
    episodes = [asyncio.ensure_future(recipe.episode(probe, step, task)) for step, task in tasks]
    if not episodes:
        return
    done, pending = await asyncio.wait(episodes, timeout=_SECONDS)
    for episode in pending:
        episode.cancel()
    # All exceptions are retrieved, so that asyncio does not print them. A real error will occur again in the run, which
    # reports it with its step.
    errors = [episode.exception() for episode in done]
    for error in errors:
        if isinstance(error, UserError):
            raise error


def _rounded_up(tokens: int) -> int:
    return math.ceil(tokens / _MULTIPLE) * _MULTIPLE


# ---- messages ----------------------------------------------------------------------------------------


def _field(config: Config, role: Role) -> str:
    """Returns the config field that limits the prompts of a role."""
    # A role without tools has one turn; its prompt may take all of the slot that the reply leaves free.
    if not role.env.tools:
        return 'sampler.context'
    if role.name in trained_roles(config) and config[role.name].prompt_tokens:
        return f'{role.name}.prompt_tokens'
    return 'rollout.prompt_tokens'


def _problem(measurement: _Measurement) -> str:
    """Returns the part of a message that states which prompts are too long."""
    longest = max(measurement.lengths)
    share = f'{measurement.too_long:.0%}'.replace('%', ' %')
    return (
        f'too short for {share} {measurement.description}: the longest has {longest} tokens, and '
        f'{measurement.role.prompt_tokens} fit'
    )


def _fix(config: Config, measurements: Sequence[_Measurement]) -> str:
    """Returns the part of a message that lists the fields to set so that the measured prompts fit.

    A longer prompt or slot can exceed further limits, which are then listed as well.
    """
    values = {}
    context = config.sampler.context
    required_context = 0
    for measurement in measurements:
        field = _field(config, measurement.role)
        if field != 'sampler.context':
            values[field] = measurement.required
            # The limit of a role is at most that of all roles.
            if measurement.required > config.rollout.prompt_tokens:
                values['rollout.prompt_tokens'] = measurement.required
            reply_tokens = written_tokens(config.rollout)
        else:
            # The prompt limit of a role without tools is the slot less the reply (`role_environment`).
            reply_tokens = context - measurement.role.prompt_tokens
        required_context = max(required_context, measurement.required + reply_tokens)
    if required_context > context:
        values['sampler.context'] = context = required_context
    # A packed row must hold a whole rollout, and a teacher's row its prompt as well.
    if config.micro.tokens < context:
        values['micro.tokens'] = context
    distills = any(config[role].distill_top_k for role in trained_roles(config))
    teacher_tokens = config.privileged.prompt_tokens + context
    if distills and config.privileged.tokens < teacher_tokens:
        values['privileged.tokens'] = teacher_tokens
    settings = ' '.join(f'--config.{name}={value}' for name, value in values.items())
    fix = f'give {settings}'
    if config.policy.path in ('', str(HOPS_CHECKPOINT), str(OPEN_CHECKPOINT)):
        fix += (
            ', or a model for real text (config.policy.path): the built-in tokenizer needs far more tokens '
            'for real text'
        )
    return fix
