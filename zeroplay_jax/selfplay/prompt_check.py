"""Measures the prompts of a sample of the real inputs before a run, and refuses or warns if many are too long.

It needs the tokenizer and no weights. A run drops tasks whose prompt is too long: a few of them do no harm, but if
most are dropped, almost nothing is trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from zeroplay_jax.rollout.scheduler import run_to_end
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.answers import prompt_fields
from zeroplay_jax.selfplay.context import Role, RolloutContext
from zeroplay_jax.selfplay.recipe import Recipe, trained_roles
from zeroplay_jax.settings.kinds import HOPS_CHECKPOINT, OPEN_CHECKPOINT, Problem, refuse
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.tools.registry import BUILT_IN
from zeroplay_jax.types import Question, TaskDropped, Trajectory, UserError

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.schedule import Step
    from zeroplay_jax.types import Task

# Shares of too long prompts of a role above which the run is refused, or warned about.
_REFUSED_SHARE = 0.5
_WARNED_SHARE = 0.1
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
      ConfigError: one line with the field to change.
      UserError: an episode asks for a prompt with other fields than it has.
    """
    warnings = _unexplained_tools(context)
    asked = recipe.evaluated_role
    lengths = []
    for question in questions:
        fields = prompt_fields(context, asked, question)
        lengths.append(len(context.prompt_ids(asked, **fields)))
    measured = [(asked, lengths, 'of the evaluation questions', 0.0)]
    for name, lengths in _training_lengths(recipe, context).items():
        measured.append((name, lengths, f'of the first prompts of role {name}', _REFUSED_SHARE))
    for name, lengths, description, refused_share in measured:
        limit = context.roles[name].prompt_tokens
        too_long = sum(length > limit for length in lengths) / max(len(lengths), 1)
        if too_long <= min(refused_share, _WARNED_SHARE):
            continue
        longest = max(lengths)
        share = f'{too_long * 100:.0f} %'
        problem = f'too short for {share} {description}: the longest has {longest} tokens, and {limit} fit'
        fix = f'raise it by {longest - limit}'
        if config.policy.path in ('', str(HOPS_CHECKPOINT), str(OPEN_CHECKPOINT)):
            fix += ', or take a model for real text (config.policy.path): its tokenizer needs fewer'
        field = _field(config, context.roles[name])
        if too_long > refused_share:
            refuse(config, [Problem(field, f'{problem}; {fix}')])
        warnings.append(f'config.{field}: {problem}; {fix}')
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


def _training_lengths(recipe: Recipe, context: RolloutContext) -> dict[str, list[int]]:
    """Returns the tokens of the first prompts of each role; of one without any, those of its instructions alone."""
    hosts = Hosts()
    # Values that episodes share while they are measured stay in this process.
    hosts.index, hosts.count = 0, 1
    probe = _Probe(context.scheduler, context.roles, context.prompts, hosts=hosts)
    run_to_end(_run_episodes(recipe, probe, recipe.first_tasks()))
    for name, role in context.roles.items():
        if name not in probe.lengths:
            empty_fields = dict.fromkeys(context.prompts[role.prompt].inputs, '')
            probe.lengths[name] = [len(context.prompt_ids(name, **empty_fields))]
    return probe.lengths


async def _run_episodes(recipe: Recipe, probe: _Probe, tasks: Sequence[tuple[Step, Task]]) -> None:
    """Runs episodes up to their first request, which `probe` records; raises a UserError of one, no other error."""
    episodes = [recipe.episode(probe, step, task) for step, task in tasks]
    # A real error will occur again in the run, which reports it with its step.
    ends = asyncio.gather(*episodes, return_exceptions=True)
    with contextlib.suppress(TimeoutError):
        for end in await asyncio.wait_for(ends, _SECONDS):
            if isinstance(end, UserError):
                raise end


def _field(config: Config, role: Role) -> str:
    """Returns the config field that limits the prompts of a role."""
    # A role without tools has one turn; its prompt may take all of the slot that the reply leaves free.
    if not role.env.tools:
        return 'sampler.context'
    if role.name in trained_roles(config) and config[role.name].prompt_tokens:
        return f'{role.name}.prompt_tokens'
    return 'rollout.prompt_tokens'
