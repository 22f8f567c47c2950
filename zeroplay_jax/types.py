"""What flows through the system, one way: Task → Request → Trajectory → Row → Batch.

Shapes: T tokens of one trajectory, B packed rows, L tokens of a row. Everything here is host data (NumPy).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# Who wrote a token. Loss masks and metrics derive from this label and from nothing else.
PROMPT, POLICY, ENV = 0, 1, 2

Json = Mapping[str, Any]


class UserError(ValueError):
    """Something the user can mend; `main` prints its one line and no traceback."""


class TaskDropped(Exception):
    """Ends an episode that cannot be played; `reason` is its code in the metrics."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Task:
    """One item of a game, before any token exists.

    Attributes:
      identity: integers that name this item uniquely within a run (step number, index). All
        randomness of the episode derives from them, so scheduling can change and samples cannot.
      payload: what the recipe needs, JSON-able (a document and a hop count, or a question and its answers).
      outside: whether a question or answer in it was made by nobody in this run.
    """

    identity: tuple[int, ...]
    payload: Json
    outside: bool = False


@dataclasses.dataclass(frozen=True)
class Turn:
    """One assistant turn and what the environment replied.

    Attributes:
      text: the policy's text, cut just after the stop string that ended the turn.
      queries: search queries of a well-formed call; empty otherwise.
      documents: per query the passages shown, each {'id', 'title', 'text', 'score'}.
      error: reason code of a malformed or failed call, or None.
      closed: whether a stop string or an end token ended the turn (False: it ran out of tokens).
    """

    text: str
    queries: tuple[str, ...] = ()
    documents: tuple[tuple[Json, ...], ...] = ()
    error: str | None = None
    closed: bool = True


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Token-exact record of one rollout.

    Attributes:
      tokens: int32 [T], every token of the episode exactly as the model saw it.
      source: int8 [T], PROMPT, POLICY or ENV.
      logp: float32 [T], behaviour log-prob of the temperature-scaled softmax; 0 where source is not POLICY.
      turns: the assistant turns in order.
      finish: 'answer' | 'malformed' | 'eos' | 'turn_tokens' | 'turns' | 'context' – why the rollout ended.
      weights: which weights sampled it; version: how often those had been published.
      identity: the request's identity plus the sample index.
      earlier: where thoughts leave the context at the end of their turn, the contexts before each such cut, as
        trajectories without turns. What the policy wrote there is PROMPT in the later ones: every token that it
        sampled is labelled POLICY once.
    """

    tokens: np.ndarray
    source: np.ndarray
    logp: np.ndarray
    turns: tuple[Turn, ...]
    finish: str
    weights: str
    version: int
    identity: tuple[int, ...]
    earlier: tuple[Trajectory, ...] = ()

    def __post_init__(self):
        if not self.tokens.shape == self.source.shape == self.logp.shape or self.tokens.ndim != 1:
            raise ValueError(
                f'trajectory {self.identity}: tokens {self.tokens.shape}, source {self.source.shape} and '
                f'logp {self.logp.shape} must be one-dimensional and equally long'
            )

    @property
    def segments(self) -> tuple[Trajectory, ...]:
        """All contexts of the rollout in order, this one last."""
        return (*self.earlier, self)

    @property
    def policy_tokens(self) -> int:
        """Tokens that the policy wrote, in all contexts."""
        return sum(int(np.sum(part.source == POLICY)) for part in self.segments)

    @property
    def calls(self) -> int:
        """Well-formed tool calls."""
        return sum(bool(turn.queries) for turn in self.turns)

    @property
    def errors(self) -> int:
        """Malformed or failed tool calls."""
        return sum(turn.error is not None for turn in self.turns)


@dataclasses.dataclass
class Row:
    """A trajectory with what the game says about it; the unit of learning.

    Attributes:
      role: which role produced it.
      reward: scalar, the sum that the estimator sees; parts: its named parts.
      group: integer key of the group that its advantage is relative to (question, hop count, …).
      drop: reason code when the row must not be trained on, else None.
      info: JSON-able details for the trajectory log (question, answers, …).
      advantage: filled in by the estimator.
      teacher_prompt: int32 [P], what the teacher reads in place of the prompt; None where nothing is distilled.
    """

    role: str
    trajectory: Trajectory
    reward: float
    group: int
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    drop: str | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    advantage: float = 0.0
    teacher_prompt: np.ndarray | None = None


@dataclasses.dataclass
class Outcome:
    """What one episode yields: rows to learn from, questions for the pool, counters."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    questions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    drop: str | None = None


@dataclasses.dataclass(frozen=True)
class TeacherBatch:
    """The same rollouts behind the teacher's prompts; row b holds those of row b of the student's batch.

    Attributes:
      tokens, positions, segment: int32 [B, M], as in `Batch`.
      place: int32 [B, L], where in the teacher's row the token at a student's place stands; 0 where it has none.
      weight: float32 [B, L], the token's weight in the distillation loss, its denominator included.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment: np.ndarray
    place: np.ndarray
    weight: np.ndarray


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows: several trajectories share a row of L tokens, told apart by `segment`.

    Attributes (all [B, L]; label arrays refer to the token at that place, which the place before predicts):
      tokens: int32, 0 where empty.   positions: int32, restarting at 0 in every segment.
      segment: int32, 1, 2, … per row; 0 where empty.   mask: bool, True on tokens to learn from (source POLICY).
      old_logp: float32, log-probs that ratios are taken against: the sampler's, or the trainer's own before the
        first update of a batch.   sampler_logp: float32, the sampler's.   advantage: float32.
      weight: float32, the token's weight in the loss; the global denominator is already in it.
      teacher: the teacher's view of the rows, or None.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment: np.ndarray
    mask: np.ndarray
    old_logp: np.ndarray
    sampler_logp: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    teacher: TeacherBatch | None = None

    @classmethod
    def blank(cls, shape: tuple[int, int], teacher_tokens: int = 0) -> Batch:
        """Zeros of a shape (B, L), with a teacher's view of M = `teacher_tokens` where that is not 0."""
        ints = lambda width=shape[1]: np.zeros((shape[0], width), np.int32)
        floats = lambda: np.zeros(shape, np.float32)
        m = teacher_tokens
        teacher = TeacherBatch(ints(m), ints(m), ints(m), ints(), floats()) if m else None
        return cls(
            ints(),
            ints(),
            ints(),
            np.zeros(shape, bool),
            floats(),
            floats(),
            floats(),
            floats(),
            teacher,
        )


def identity_key(seed: int, identity: tuple[int, ...]) -> np.ndarray:
    """Key data of a random stream as a pure function of identity: uint32 [2] (threefry)."""
    text = ','.join(str(int(x)) for x in (seed, *identity))
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint32).copy()


def identity_rng(seed: int, *identity: int) -> np.random.Generator:
    """A host random generator whose stream is a pure function of identity."""
    return np.random.default_rng(identity_key(seed, identity))
