"""Requests for rollouts, and what the host records of these while they run."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.pages import OwnedPages
from zeroplay_jax.rollout.tokens import StopMatcher
from zeroplay_jax.settings.rollouts import ALL_IDS
from zeroplay_jax.types import POLICY, PROMPT, ToolCall, Trajectory, Turn

# `Request.version` of the newest weights.
NEWEST = -1
# `Rollout.slot` of a rollout that has none.
NO_SLOT = -1


@dataclasses.dataclass(frozen=True)
class Request:
    """Rollouts of one prompt.

    Attributes:
      weights: name of the weights.
      prompt: int32 ids; those of `before` where it is given.
      identity: names the request within the run; smaller identities are served first.
      env: tools and limits.
      samples: number of rollouts.
      temperature: 0 is greedy decoding.
      truncation: (top_p, top_k) as of `config.<role>`, which greedy decoding does not read.
      version: version of the weights that all samples are drawn from; NEWEST: the newest when the request is made.
      owner: the episodes that made the request, as given to `Scheduler.start`; None for others.
      before: the rollout so far that every sample goes on from (rollout/continuing.py); None: there is none. Limits
        count what is sampled from here on.
    """

    weights: str
    prompt: Int[np.ndarray, ' tokens']
    identity: tuple[int, ...]
    env: Environment
    samples: int = 1
    temperature: float = 1.0
    truncation: tuple[float, int] = ALL_IDS
    version: int = NEWEST
    owner: object = None
    before: Trajectory | None = None

    def capacity(self, context: int) -> int:
        """Length at which a rollout ends: that of a slot, or less with a limit of the response."""
        response_tokens = self.env.limits.response_tokens
        if not response_tokens:
            return context
        return min(len(self.prompt) + response_tokens, context)

    def turn_limit(self, start: int, context: int) -> int:
        """Length at which a turn that begins at position `start` is cut."""
        return min(start + self.env.limits.turn_tokens, self.capacity(context))


class Prefix:
    """Tokens that several rollouts begin with, and whose keys and values they share: the prompt of a request.

    Attributes:
      request: the request of these rollouts.
      tokens: int32 ids.
      waiting: rollouts that have no slot yet.
      shard: data shard of all its rollouts, which share pages.
      pages: pages of the tokens, while rollouts wait for a slot.
      holder_slot: slot of the rollout that prefills these pages.
      is_cached: whether the keys and values in these pages are valid.
    """

    def __init__(self, request: Request):
        self.request = request
        self.tokens = request.prompt
        self.waiting: collections.deque[Rollout] = collections.deque()
        self.shard = 0
        self.pages: OwnedPages | None = None
        self.holder_slot = 0
        self.is_cached = False

    def first_limit(self, context: int) -> int:
        """Length at which the first turn of every rollout is cut."""
        return self.request.turn_limit(len(self.tokens), context)


class Rollout:
    """One sample of a request: the host's copy of its tokens, and the turn in progress.

    It has tokens, slot and pages from `enter` on.

    Attributes:
      future: resolved with the trajectory when the rollout has ended.
      slot: its slot; NO_SLOT before `enter`.
      pages: its pages of the cache.
      is_running: whether a turn is in progress on the device.
      is_evicted: whether its pages were given to another rollout, see rollout/placement.py.
      put_start: position from which tokens are put when the next turn begins.
      turns: ended turns of the current context and of the earlier ones.
      starts: as of `Trajectory`.
      old_turns: number of turns before this request.
      earlier: trajectories of the contexts before the current one, see `end_context`.
      tool_states: as of `Trajectory`.
      experts: record of its tokens when its pages were given away; as of `Trajectory`.
      kept: parts of `Trajectory.kept`.
    """

    def __init__(self, prefix: Prefix, sample: int, future: asyncio.Future):
        self.prefix = prefix
        self.request = prefix.request
        self.env = prefix.request.env
        self.identity = (*prefix.request.identity, sample)
        self.future = future
        self.is_running = False
        self.is_evicted = False
        self.put_start = 0
        self.slot = NO_SLOT
        self.turns: list[Turn] = []
        self.starts: list[int] = []
        self.earlier: list[Trajectory] = []
        self.experts: np.ndarray | None = None
        self.kept: list[np.ndarray] = []
        self.tool_states: list[dict[str, Any]] = [{}]
        before = self.request.before
        if before is not None:
            self.turns += before.turns
            self.starts += before.starts
            self.earlier += before.earlier
            # A tool changes a copy of its state, so that samples can begin with the same one.
            self.tool_states = list(map(dict, before.tool_states))
        self.old_turns = len(self.turns)
        # Chunks of the slot that are not prefilled yet; not read over pages. The host counts them, because reading the
        # device's state would wait for the device.
        self.chunks_left = 0

    def enter(self, slot: int, pages: OwnedPages) -> None:
        """Begins the first turn, after the prefix, in a slot."""
        self.slot = slot
        self.pages = pages
        # Author and log-prob of a token are recorded when it arrives; neither is derived from text later.
        self.tokens: list[int] = [int(token) for token in self.prefix.tokens]
        self.source = [PROMPT] * len(self.tokens)
        self.logp = [0.0] * len(self.tokens)
        before = self.request.before
        if before is not None:
            self.source = before.source.tolist()
            self.logp = before.logp.tolist()
            if before.kept is not None:
                self.kept = [before.kept]
        self.expect_turn()

    def expect_turn(self) -> None:
        """Lets a turn begin at the next token: resets the stop matcher and `turn_start`."""
        self.matcher = StopMatcher(self.env.codec.token_bytes, self.env.stops)
        self.turn_start = len(self.tokens)

    def record_turn(self, text: str, call: ToolCall | None = None, closed: bool = True) -> None:
        """Records the turn in progress, whose last token has arrived; arguments as of `Turn`."""
        turn = Turn(
            text,
            call,
            closed,
            len(self.earlier),
            self.turn_start,
            len(self.tokens),
            self.request.temperature,
        )
        self.turns.append(turn)
        self.tool_states.append(dict(self.tool_state))
        self.starts.append(self.turn_start)

    @property
    def tool_state(self) -> dict[str, Any]:
        """Tool name → what the tool stores for this rollout now."""
        return self.tool_states[-1]

    @property
    def is_last_turn(self) -> bool:
        """Whether the turn in progress is the last one that the limits allow."""
        return len(self.turns) - self.old_turns + 1 >= self.env.limits.max_turns

    def observation(self, call: ToolCall) -> Int[np.ndarray, ' tokens']:
        """Returns the ids, int32, of the reply to a call, that of the last turn."""
        calls = [turn.call for turn in self.turns if turn.call is not None]
        number = sum(each.tool == 'search' and each.is_valid for each in calls)
        return self.env.observation(call, number)

    def turn_limit(self, context: int) -> int:
        """Length at which the turn in progress is cut."""
        return self.request.turn_limit(self.turn_start, context)

    def append(self, ids: Sequence[int], source: int, logp: Sequence[float]) -> None:
        """Adds tokens of one author."""
        self.tokens += ids
        self.source += [source] * len(ids)
        self.logp += logp

    def end_context(self, start: int, retained: list[int], ended: Trajectory) -> None:
        """Starts a new context of the first `start` tokens and the ids `retained` of the last turn.

        Stores `ended`, the trajectory of the old context, in `earlier`. Policy tokens of the old context become
        PROMPT, so no token is trained on twice.
        """
        self.earlier.append(ended)
        prefix_source = []
        for source in self.source[:start]:
            prefix_source.append(PROMPT if source == POLICY else source)
        self.tokens = self.tokens[:start] + retained
        self.source = prefix_source + [PROMPT] * len(retained)
        self.logp = [0.0] * len(self.tokens)
        self.kept = []

    def trajectory(self, finish: str, experts: np.ndarray | None) -> Trajectory:
        """Returns the record of the current context alone, without turns; arguments as of `Trajectory`."""
        return Trajectory(
            tokens=np.asarray(self.tokens, np.int32),
            source=np.asarray(self.source, np.int8),
            logp=np.asarray(self.logp, np.float32),
            turns=(),
            finish=finish,
            weights=self.request.weights,
            version=self.request.version,
            identity=self.identity,
            experts=experts,
            kept=np.concatenate(self.kept) if self.kept else None,
        )
