"""Roles at run time, and the context in which episodes ask them for rollouts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.requests import EpisodeBatch, Request
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.runtime.hosts import Hosts, sums
from zeroplay_jax.selfplay.judge import Judge
from zeroplay_jax.selfplay.rows import from_bytes, to_bytes
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.types import Outcome, TaskDropped, Trajectory

# Default of `Role.prompt_tokens`: no limit but that of the slot.
_NO_LIMIT = 1 << 30


@dataclasses.dataclass(frozen=True)
class Role:
    """A role of a recipe at run time.

    Attributes:
      name: name in metrics and logs.
      weights: name of its weights (a slot pool of the scheduler).
      prompt: name of its prompt.
      env: tools, limits and the tags that terminate its episode.
      temperature: temperature of its rollouts unless a request sets another; 0 is greedy.
      prompt_tokens: largest allowed length of a prompt, in tokens.
    """

    name: str
    weights: str
    prompt: str
    env: Environment
    temperature: float = 1.0
    prompt_tokens: int = _NO_LIMIT

    def with_tools(self, tools: Mapping[str, Tool]) -> Role:
        """Returns the role with its tools replaced by those of the same names in `tools` (over other documents)."""
        # Names stay the same, so that prompts and the syntax of calls do not change with the corpus.
        role_tools = {name: tools[name] for name in self.env.tools}
        env = dataclasses.replace(self.env, tools=role_tools)
        return dataclasses.replace(self, env=env)


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """Roles that share a scheduler; episodes and evaluations get their rollouts from it.

    Attributes:
      scheduler: runs the rollouts.
      roles: roles by name.
      prompts: prompt name → template.
      judge: the judge of `config.judge`; None if the context needs no verdicts.
      hosts: the processes that share the episodes of a step.
    """

    scheduler: Scheduler
    roles: dict[str, Role]
    prompts: Mapping[str, str]
    judge: Judge | None = None
    hosts: Hosts = dataclasses.field(default_factory=Hosts)

    @property
    def judge_stats(self) -> collections.Counter[str]:
        """This process's counts of judgements since the start (`Judge.stats`); empty without a judge."""
        return self.judge.stats if self.judge else collections.Counter()

    def gather_judge_stats(self, stats: collections.Counter[str]) -> collections.Counter[str]:
        """Returns counts of judgements, summed over processes; all processes must call it.

        Args:
          stats: counts of this process, such as a difference of two `judge_stats`.

        Raises:
          UserError: too many of these judgements failed (`config.judge.max_failure_rate`).
        """
        total = sums(self.hosts.gather(stats))
        # The total is checked, so that all processes decide alike.
        if self.judge:
            self.judge.check_failure_rate(total)
        return total

    def run_episodes(
        self,
        episodes: Mapping[tuple[int, ...], Callable[[], Coroutine[Any, Any, Outcome]]],
        on_episode_end: Callable[[], None],
    ) -> list[Outcome]:
        """Runs episodes and returns their outcomes, in the order of `episodes`, on every process.

        Each process runs the episodes whose identity it owns, and gets the rows of all. All processes must call it with
        the same identities. An exception of an episode is raised on all processes.

        Args:
          episodes: identity → function that makes the episode's coroutine.
          on_episode_end: called after each episode of this process.
        """
        batch = EpisodeBatch()
        batch.report_ends(on_episode_end)
        self.start_episodes(batch, episodes)
        return self.await_episodes(batch, list(episodes))

    def start_episodes(
        self,
        batch: EpisodeBatch,
        episodes: Mapping[tuple[int, ...], Callable[[], Coroutine[Any, Any, Outcome]]],
    ) -> None:
        """Adds this process's share of episodes to a batch; `await_episodes` runs them, as of any batch."""
        coroutines = []
        for identity, make_episode in episodes.items():
            # Coroutines of other processes are not created, because one that is never awaited causes a warning.
            if self.hosts.owns(identity):
                coroutines.append(make_episode())
        self.scheduler.start(batch, coroutines)

    def await_episodes(
        self, batch: EpisodeBatch, identities: Sequence[tuple[int, ...]], has_others: bool = False
    ) -> list[Outcome]:
        """Runs the episodes of a batch to their end; returns their outcomes as `run_episodes` does.

        Args:
          batch: of `start_episodes`.
          identities: of all episodes that were added since the last call, those of other processes included.
          has_others: whether episodes of another batch are in progress, in any process. They continue while this
            process waits for the others.
        """
        if self.hosts.count == 1:
            return self.scheduler.wait(batch)

        meeting = self.hosts.meeting() if has_others else None
        messages: list[bytes] = []

        def run_local() -> None:
            if meeting is None:
                messages.append(to_bytes(self.scheduler.wait(batch)))
                return
            try:
                outcomes = self.scheduler.wait(batch, also=meeting.is_complete)
                messages.append(to_bytes(outcomes))
            finally:
                # After an error as well: the other processes must not wait for this one.
                meeting.arrive()

        # An exception is raised everywhere before any process waits for the rows of the failed one.
        self.hosts.run_on_all_and_gather(run_local)
        if meeting is not None:
            meeting.close()
        # This process reads its outcomes back, too, so that all processes compute with equal ones.
        outcomes = [iter(from_bytes(message)) for message in self.hosts.gather_bytes(messages[0])]
        # The order of `identities` is the same on all processes; the order of completion is not.
        return [next(outcomes[self.hosts.owner(identity)]) for identity in identities]

    def prompt_ids(
        self, role: str, prompt: str = '', **fields: object
    ) -> Int[np.ndarray, ' tokens']:
        """Returns the ids, int32 [tokens], of a prompt for a role.

        Args:
          prompt: name of the prompt; '': the role's own.
          fields: values of all fields of the prompt but {tools}; they are encoded as untrusted text.
        """
        asked_role = self.roles[role]
        template = self.prompts[prompt or asked_role.prompt]
        # The field {tools} explains the tools of the role; it is empty for a role without tools.
        explanation = asked_role.env.syntax.explain(asked_role.env.tools)
        escaped_fields = {
            name: asked_role.env.escaped(str(value)) for name, value in fields.items()
        }
        messages = prompts.fill(template, explanation, **escaped_fields)
        return asked_role.env.codec.render(messages)

    async def ask(
        self,
        role: str,
        identity: tuple[int, ...],
        samples: int = 1,
        temperature: float | None = None,
        prompt: str = '',
        **fields: object,
    ) -> list[Trajectory]:
        """Returns `samples` rollouts of a role on a prompt, in sample order.

        Args:
          identity: names the request within the run; all randomness derives from it, so it must be unique.
          temperature: None: the role's.
          prompt: name of the prompt; '': the role's own.
          fields: values of all fields of the prompt but {tools}; they are encoded as untrusted text.

        Raises:
          TaskDropped('prompt_too_long'): the prompt is longer than `Role.prompt_tokens`.
        """
        asked_role = self.roles[role]
        ids = self.prompt_ids(role, prompt, **fields)
        # Prompts are never truncated: cutting one from the left, as Search-R1 does, may remove the question.
        if len(ids) > asked_role.prompt_tokens:
            raise TaskDropped('prompt_too_long')
        if temperature is None:
            temperature = asked_role.temperature
        request = Request(
            weights=asked_role.weights,
            prompt=ids,
            identity=identity,
            env=asked_role.env,
            samples=samples,
            temperature=temperature,
        )
        return await self.scheduler.rollout(request)
