"""Who plays: a role is a set of weights, a prompt, an environment and a temperature, as data."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.scheduler import Request, Scheduler
from zeroplay_jax.rollout.search import SearchEnv
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay import rows
from zeroplay_jax.selfplay.judge import Judge
from zeroplay_jax.types import Outcome, TaskDropped, Trajectory


@dataclasses.dataclass(frozen=True)
class Seat:
    """A place at the table of a recipe.

    Attributes:
      role: its name in metrics, logs and, if it is trained, in the config.
      prompt: its entry in rollout/prompts.py.
      finals: tags whose closing ends its episode.
      plays_as: the trained role whose weights it plays with; '' is itself, 'initial' the weights of the start.
      searches: whether it has the search tool; without it, it has one turn.
    """

    role: str
    prompt: str
    finals: tuple[str, ...] = ('answer',)
    plays_as: str = ''
    searches: bool = True


@dataclasses.dataclass(frozen=True)
class Role:
    """A player.

    Attributes:
      name: its name in metrics and logs.
      weights: which set of weights it plays with (a lane of the scheduler).
      prompt: its entry in rollout/prompts.py.
      env: tools, limits and the tags that end its episode.
      temperature: of its rollouts; 0 is greedy.
      prompt_tokens: its longest prompt.
    """

    name: str
    weights: str
    prompt: str
    env: SearchEnv
    temperature: float = 1.0
    prompt_tokens: int = 1 << 30


@dataclasses.dataclass(frozen=True)
class Table:
    """The players around one scheduler: what an episode or an evaluation needs to ask one of them.

    Attributes:
      prompts: which set of prompts they read.
      judge: who says what is right where no rule does.
      hosts: the processes that share the episodes of a step.
    """

    scheduler: Scheduler
    roles: dict[str, Role]
    prompts: str
    judge: Judge | None = None
    hosts: Hosts = dataclasses.field(default_factory=Hosts)

    @property
    def judge_stats(self) -> collections.Counter[str]:
        """What the judge was asked and could not say, by reason code."""
        return self.judge.stats if self.judge else collections.Counter()

    def play(
        self,
        episodes: Mapping[tuple[int, ...], Callable[[], Coroutine[Any, Any, Outcome]]],
        done: Callable[[], None],
    ) -> list[Outcome]:
        """Plays episodes by identity, every process its own, and returns all outcomes in their order everywhere."""
        own = [name for name in episodes if self.hosts.owns(name)]
        play = lambda: self.scheduler.run([episodes[name]() for name in own], done)
        if self.hosts.count == 1:
            return play()
        told = self.hosts.run_on_all_and_gather(
            lambda: [[name, rows.outcome_state(o)] for name, o in zip(own, play())]
        )
        found = {tuple(name): rows.outcome_restore(o) for host in told for name, o in host}
        return [found[name] for name in episodes]

    def prompt(self, role: str, prompt: str = '', **fields: object) -> np.ndarray:
        """Ids, int32 [P], of a role's prompt (or another entry of its set) with these fields, all foreign text."""
        player = self.roles[role]
        chat = prompts.messages(
            self.prompts, prompt or player.prompt, player.env.tools.instructions, **fields
        )
        return player.env.codec.render(chat)

    async def ask(
        self,
        role: str,
        identity: tuple[int, ...],
        samples: int = 1,
        temperature: float | None = None,
        prompt: str = '',
        **fields: object,
    ) -> list[Trajectory]:
        """`samples` rollouts of a role on its prompt (or another of its set) with these fields, all foreign text.

        Raises:
          TaskDropped('prompt_too_long').
        """
        player = self.roles[role]
        ids = self.prompt(role, prompt, **fields)
        if len(ids) > player.prompt_tokens:
            raise TaskDropped('prompt_too_long')
        heat = player.temperature if temperature is None else temperature
        return await self.scheduler.rollout(
            Request(player.weights, ids, identity, player.env, samples, heat)
        )
