"""Who plays: a role is a set of weights, a prompt, an environment and a temperature, as data."""

from __future__ import annotations

import dataclasses

from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.scheduler import Request, Scheduler
from zeroplay_jax.rollout.search import SearchEnv
from zeroplay_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Role:
    """A player.

    Attributes:
      name: its name in metrics and logs.
      weights: which set of weights it plays with (a lane of the scheduler).
      prompt: its entry in rollout/prompts.py.
      env: tools, limits and the tags that end its episode.
      temperature: of its rollouts; 0 is greedy.
    """

    name: str
    weights: str
    prompt: str
    env: SearchEnv
    temperature: float = 1.0


class TaskDropped(Exception):
    """Ends an episode that cannot be played; `reason` is its code in the metrics."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Table:
    """The players around one scheduler: what an episode or an evaluation needs to ask one of them.

    Attributes:
      prompts: which set of prompts they read.
      prompt_tokens: longest prompt.
    """

    scheduler: Scheduler
    roles: dict[str, Role]
    prompts: str
    prompt_tokens: int

    async def ask(
        self,
        role: str,
        identity: tuple[int, ...],
        samples: int = 1,
        temperature: float | None = None,
        **fields: object,
    ) -> list[Trajectory]:
        """`samples` rollouts of a role on a prompt with these fields (all of them foreign text).

        Raises:
          TaskDropped('prompt_too_long').
        """
        player = self.roles[role]
        prompt = player.env.codec.render(
            prompts.messages(self.prompts, player.prompt, player.env.tools.instructions, **fields)
        )
        if len(prompt) > self.prompt_tokens:
            raise TaskDropped('prompt_too_long')
        heat = player.temperature if temperature is None else temperature
        return await self.scheduler.rollout(Request(player.weights, prompt, identity, player.env, samples, heat))
