"""The environment of a rollout: when a turn ends, what it asked for, and what the policy reads next.

An environment knows text, tools and limits. It knows neither the sampler nor the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.rollout.tools import Tools
from zeroplay_jax.types import Json

# Queries → per query its passages, each {'id', 'title', 'text', 'score'}. Called from a thread.
Search = Callable[[Sequence[str]], Sequence[Sequence[Json]]]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of an episode, in tokens and assistant turns (the last turn cannot search)."""

    max_turns: int
    turn_tokens: int
    observation_tokens: int


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a turn that a stop string ended goes on: a search, an error to be read, or the end of the episode."""

    queries: tuple[str, ...] = ()
    error: str | None = None
    done: bool = False


@dataclasses.dataclass(frozen=True)
class SearchEnv:
    """Search tool for one role.

    Attributes:
      search: how queries are answered; None gives a role without tools (judge, rater).
      finals: tags whose closing ends the episode.
      max_queries: of one call, so many are run.
      drop_thinking: a turn's thoughts leave the context when it is over.
    """

    codec: Codec
    tools: Tools
    limits: Limits
    search: Search | None
    finals: tuple[str, ...] = ('answer',)
    max_queries: int = 3
    drop_thinking: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a turn."""
        finals = tuple(f'</{tag}>' for tag in self.finals)
        return finals if self.search is None else (self.tools.call_stop, *finals)

    def end_turn(self, text: str) -> Ending:
        """Reads a turn cut at a stop string."""
        if self.search is not None and text.endswith(self.tools.call_stop):
            queries, error = self.tools.parse(text)
            return Ending(queries[: self.max_queries], error)
        # An answer given inside a call that was never closed is no answer.
        opener = self.tools.call_stop.replace('/', '')
        return Ending(error='malformed' if opener in text else None, done=True)

    def remembered(self, ids: Sequence[int]) -> list[int]:
        """Ids of a turn as later turns see it: all, or what follows its thoughts and the blank after them."""
        text = b''.join(self.codec.token_bytes[int(i)] for i in ids)
        found = text.rfind(b'</think>')
        if not self.drop_thinking or found < 0:
            return [int(i) for i in ids]
        rest = text[found + len(b'</think>') :].lstrip()
        end = len(text)
        for at in range(
            len(ids) - 1, -1, -1
        ):  # tokens that lie in the rest whole stay as they were sampled
            begin = end - len(self.codec.token_bytes[int(ids[at])])
            if begin < len(text) - len(rest):
                break
            end = begin
        else:
            at = -1
        torn = rest[: end - (len(text) - len(rest))]
        return [
            *self.codec.encode_plain(torn.decode(errors='replace')),
            *(int(i) for i in ids[at + 1 :]),
        ]

    def observation(self, documents: Sequence[Sequence[Json]]) -> np.ndarray:
        """Ids of the passages found, int32 [n]; n ≤ observation_tokens where the tags alone fit."""
        return self.tools.observation(self.codec, documents, self.limits.observation_tokens)

    def error(self, code: str) -> np.ndarray:
        """Ids of the reply to a call that failed."""
        return self.tools.error(self.codec, code, self.limits.observation_tokens)
