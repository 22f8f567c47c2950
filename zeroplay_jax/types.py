"""Host records of the data flow, in order: Task → Request → Trajectory → Row → Batch (learner/batch.py).

Array shapes: T tokens and U turns of one trajectory.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# Of `retrieval`, which stands alone, so that its errors are user errors.
from zeroplay_jax.retrieval.types import UserError as UserError
from zeroplay_jax.retrieval.types import first_line as first_line

# Labels of the author of a token. Loss masks and metrics derive from this label alone.
PROMPT, POLICY, ENV = 0, 1, 2

Json = Mapping[str, Any]


class TrainingStopped(Exception):
    """A run stopped early or trained no policy: commands print its one line and exit with `status`.

    Attributes:
      status: 3 if nothing was trained, 4 after an alarm (`run.outcome`).
    """

    def __init__(self, line: str, status: int = 3):
        super().__init__(line)
        self.status = status


class Preempted(Exception):
    """SIGTERM asked the run to end: commands print its one line and exit with status 75."""


class TaskDropped(Exception):
    """Raised to end an episode that cannot be run; `reason` is its code in the metrics."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with accepted answers, or an open task with rubrics.

    Attributes:
      text: the question or task as the solver reads it.
      answers: accepted answers; empty for an open task.
      hops: number of facts that have to be found to answer it (of searches, for an open task); 0: unknown.
      rubrics: grading criteria of an open task, each {'text', 'priority'}.
      path: record of the question's construction (recipes/proposing.py), for a distillation teacher.
      unique_key: the pool keeps one question per non-empty key (SCOPE: the source document).
      solve_rate: measured share of solver rollouts that answer it, in [0, 1].
      origin: JSON-able provenance for the logs only (document, task identity, source file, …).
    """

    text: str
    answers: tuple[str, ...] = ()
    hops: int = 1
    rubrics: tuple[Json, ...] = ()
    path: Json | None = None
    unique_key: str = ''
    solve_rate: float | None = None
    origin: Json = dataclasses.field(default_factory=dict)

    @property
    def is_open_task(self) -> bool:
        """Whether answers are graded by rubrics instead of compared with accepted answers."""
        return bool(self.rubrics)

    def to_json(self) -> dict[str, Any]:
        """Returns the record of logs, input files and checkpoints; optional fields only where they are set.

        `unique_key` is stored as 'only'. The fields of `origin` are stored beside the others; none may have the name of
        another field, because `from_json` tells them apart by name.
        """
        record: dict[str, Any] = {'question': self.text, 'answers': list(self.answers)}
        if self.hops:
            record['hops'] = self.hops
        if self.rubrics:
            record['rubrics'] = [dict(rubric) for rubric in self.rubrics]
        if self.path is not None:
            record['path'] = self.path
        if self.unique_key:
            record['only'] = self.unique_key
        if self.solve_rate is not None:
            record['solve_rate'] = self.solve_rate
        return record | dict(self.origin)

    @classmethod
    def from_json(cls, record: Json) -> Question:
        """Inverse of `to_json`; unknown fields become `origin`. Only 'question' is required."""
        fields = ('question', 'answers', 'hops', 'rubrics', 'path', 'only', 'solve_rate')
        origin = {name: value for name, value in record.items() if name not in fields}
        return cls(
            text=record['question'],
            answers=tuple(record.get('answers', ())),
            hops=record.get('hops', 0),
            rubrics=tuple(record.get('rubrics', ())),
            path=record.get('path'),
            unique_key=record.get('only', ''),
            solve_rate=record.get('solve_rate'),
            origin=origin,
        )


@dataclasses.dataclass(frozen=True)
class Task:
    """The input of one episode of a recipe, before any token exists.

    Attributes:
      identity: integers that name this task uniquely within a run (step number, index within the step). All
        randomness of the episode derives from them, so scheduling cannot change the samples.
      payload: the recipe's input for the episode: a `Question`, another record with `to_json()` for the task
        log, or a dict.
      external: whether a question or answer in the payload was supplied from outside the run.
    """

    identity: tuple[int, ...]
    payload: Any
    external: bool = False


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One tool call of the policy and its outcome.

    Attributes:
      tool: name as the policy wrote it; '' where the call could not be parsed.
      arguments: arguments that passed the tool's schema; None for a call that could not be parsed or was refused.
      text: the result, or the explanation of the error, as text, before it is cut to `rollout.observation_tokens`.
      documents: retrieved passages {'id', 'title', 'text', 'score'}, best first, one tuple per query.
      error: reason code of a call that could not be parsed, was refused, failed or timed out.
    """

    tool: str
    arguments: Json | None
    text: str = ''
    documents: tuple[tuple[Json, ...], ...] = ()
    error: str | None = None

    @property
    def queries(self) -> list[str]:
        """Queries of a call of a search tool: its argument `query_list` or `query`; none for other calls."""
        arguments = self.arguments or {}
        queries = arguments.get('query_list', arguments.get('query', []))
        return [queries] if isinstance(queries, str) else list(queries)

    @property
    def is_tool_failure(self) -> bool:
        """Whether the tool failed or was too slow, for which the policy is not to blame."""
        return self.error in ('failed', 'timeout')

    @property
    def is_valid(self) -> bool:
        """Whether the call was parsed and its arguments fit the tool, whatever the tool returned."""
        return self.arguments is not None


@dataclasses.dataclass(frozen=True)
class Turn:
    """One assistant turn and the reply of the environment.

    Attributes:
      text: the policy's text, cut after the stop string that ended the turn.
      call: the tool call that ended the turn; None for a final turn, or one whose call was not run
        because no turn was left.
      closed: whether a stop string or an end token ended the turn; False if it reached its limit of tokens.
      context: index in `Trajectory.contexts` of the context in which it was sampled.
      start, stop: its sampled tokens are those of that context from `start` up to and without `stop`; 0 and 0 where
        nothing recorded them.
      temperature: with which they were sampled.
    """

    text: str
    call: ToolCall | None = None
    closed: bool = True
    context: int = 0
    start: int = 0
    stop: int = 0
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Token-exact record of one rollout.

    Attributes:
      tokens: int32 [T], every token of the current context exactly as the model saw it; others are in `earlier`.
      source: int8 [T], PROMPT, POLICY or ENV.
      logp: float32 [T], behaviour log-prob under the temperature-scaled softmax (temperature 0: at
        temperature 1); 0 where source is not POLICY.
      turns: the assistant turns in order.
      finish: why the rollout ended. 'answer': with a terminal tag of its role, whatever the tag's name; 'malformed':
        with such a tag inside an unclosed call; 'eos': with an end token; 'turn_tokens', 'turns', 'response_tokens' or
        'context': at the limit of a turn's tokens, of turns, of all tokens behind the prompt, or of the slot's tokens.
        'continued': a context in `earlier`, which a cut ended. 'failed': the server of the policy gave no reply.
      weights: name of the weights that sampled it, '' if it was dropped.
      version: version of those weights (`WeightStore.publish`).
      identity: the request's identity plus the sample index.
      earlier: the contexts before each cut (`rollout.drop_thinking`, `RolloutContext.go_on(keep=…)`), as trajectories
        without turns. Policy tokens of an earlier context are PROMPT in later ones, so every sampled token is labelled
        POLICY exactly once.
      starts: first position in `tokens` of every turn; −1 of a turn that was cut from this context.
      tool_states: tool name → what the tool stores for this rollout, before each turn's call and at the end; a
        continuation needs them. In this process only.
      after_failure: whether a tool failed in the context of another rollout that is the prompt of this one.
      experts: int8 or int16 [T, choices], the experts that computed every token (policy/experts.py), −1 where none is
        recorded; None of a dense model. Complete when the episodes have ended.
      kept: int32 [N, 2], (position, id) of the ids that the tokens were drawn from (`config.<role>.top_p` and `top_k`),
        in the order of positions. A token without any was drawn from all ids; None: all tokens were.
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
    starts: tuple[int, ...] = ()
    tool_states: tuple[Mapping[str, Any], ...] = dataclasses.field(
        default=({},), repr=False, compare=False
    )
    after_failure: bool = False
    experts: np.ndarray | None = None
    kept: np.ndarray | None = None

    def __post_init__(self):
        same_length = self.tokens.shape == self.source.shape == self.logp.shape
        if not same_length or self.tokens.ndim != 1:
            raise ValueError(
                f'trajectory {self.identity}: tokens {self.tokens.shape}, source '
                f'{self.source.shape} and logp {self.logp.shape} must be one-dimensional and '
                'equally long'
            )

    @property
    def contexts(self) -> tuple[Trajectory, ...]:
        """All contexts of the rollout in order, this one last; none of them has earlier ones."""
        if not self.earlier:
            return (self,)
        return (*self.earlier, dataclasses.replace(self, earlier=()))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the rollout's prompt, with which all its contexts begin."""
        # In later contexts the retained turns are PROMPT as well.
        return int(np.argmax(self.contexts[0].source != PROMPT))

    @property
    def policy_tokens(self) -> int:
        """Sampled tokens in all contexts."""
        return sum(int(np.sum(context.source == POLICY)) for context in (*self.earlier, self))

    @property
    def calls(self) -> list[ToolCall]:
        """All tool calls in order, those that could not be run included."""
        return [turn.call for turn in self.turns if turn.call is not None]

    def calls_of(self, tool: str) -> list[ToolCall]:
        """Valid calls of one tool in order, failed ones included."""
        return [call for call in self.calls if call.tool == tool and call.is_valid]

    @property
    def valid_calls(self) -> int:
        """Number of valid tool calls of any tool."""
        return sum(call.is_valid for call in self.calls)

    @property
    def failed_calls(self) -> int:
        """Number of tool calls with an error: not parsed, refused, failed or timed out."""
        return sum(call.error is not None for call in self.calls)

    @property
    def has_tool_failure(self) -> bool:
        """Whether a tool failed or was too slow, here or in what became the prompt."""
        return self.after_failure or any(call.is_tool_failure for call in self.calls)


@dataclasses.dataclass
class RowInfo:
    """Details of a scored rollout for metrics and the trajectory log.

    Attributes:
      question: the question or open task that the rollout answers, or the one that it proposed.
      answer: the solver's final answer.
      answer_tokens: its length in tokens, for a metric, where a recipe counts them (SCOPE).
      score: the answer's score in [0, 1], before penalties; None if it could not be graded. In SCOPE a
        proposal has one too: the mean over its answers.
      valid: whether a proposal passed its recipe's checks (Dr. Zero, π-Play: format only; SCOPE: it
        also got a score); None for other roles.
      solve_count: how many solver rollouts answered a proposed question.
      rejected: reason code of a proposal that was not asked, or got no score.
      privileged_cut: 1.0 if the teacher's prompt was too long before any cut, else 0.0; None without distillation.
      details: further JSON-able values for the log; no code of the engine reads them.
    """

    question: Question | None = None
    answer: str | None = None
    answer_tokens: int | None = None
    score: float | None = None
    valid: bool | None = None
    solve_count: int | None = None
    rejected: str | None = None
    privileged_cut: float | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_proposal(self) -> bool:
        """Whether the rollout proposed a question or a task, instead of answering one."""
        return self.valid is not None

    def to_json(self) -> dict[str, Any]:
        """The record of the trajectory log; unset fields are left out."""
        record = {}
        if self.question is not None:
            record = self.question.to_json()
            # A proposal without a question has none in the log, rather than an empty one.
            record['question'] = self.question.text or None
        fields = {
            'answer_given': self.answer,
            'score': self.score,
            'valid': self.valid,
            'solved': self.solve_count,
            'rejected': self.rejected,
            'privileged_cut': self.privileged_cut,
        }
        record |= {name: value for name, value in fields.items() if value is not None}
        return record | self.details


@dataclasses.dataclass
class Row:
    """A scored rollout, the unit of learning.

    Attributes:
      role: the role that produced it.
      trajectory: the rollout.
      reward: of the outcome, a number up to 1e18; one that is not finite is left out with its row.
      parts: name → value of what the reward is composed of (answer, format, …), for metrics and logs only.
      group: integer key of the group that its advantage is relative to (question, hop count, …): for the rollouts of
        one prompt `answers.group_of(task.identity)`.
      drop: reason code when the row must not be trained on, else None.
      info: details for metrics and logs.
      turn_rewards: float64 [U], what each turn earned beside the outcome; NaN: this turn nothing; None: no turn.
      advantage: set by `groups.set_advantages`: a number, or float64 [U], one per turn; None after an update in which a
        value network gave one to every token.
      teacher_prompt: int32 [P], the teacher's prompt in place of the student's; None if the row is not distilled.
    """

    role: str
    trajectory: Trajectory
    reward: float
    group: int
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    drop: str | None = None
    info: RowInfo = dataclasses.field(default_factory=RowInfo)
    turn_rewards: np.ndarray | None = None
    advantage: float | np.ndarray | None = 0.0
    teacher_prompt: np.ndarray | None = None

    @property
    def is_informative(self) -> bool:
        """Whether it has an advantage other than 0."""
        return bool(np.any(self.advantage))

    @property
    def teacher_tokens(self) -> int:
        """Length of the teacher's prompt; 0 if the row is not distilled."""
        return 0 if self.teacher_prompt is None else len(self.teacher_prompt)


@dataclasses.dataclass
class Outcome:
    """Result of one episode. With neither rows nor questions its task is dropped as 'no_rollout'.

    Attributes:
      rows: scored rollouts, also of a task that is dropped.
      questions: questions for the pool.
      drop: reason code of a task that could not be run or gave no question, else None.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    questions: list[Question] = dataclasses.field(default_factory=list)
    drop: str | None = None


def identity_key(seed: int, identity: tuple[int, ...]) -> np.ndarray:
    """Returns the key data of a random stream, uint32 [2] (threefry): a pure function of seed and identity."""
    text = ','.join(str(int(number)) for number in (seed, *identity))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint32).copy()


def identity_rng(seed: int, *identity: int) -> np.random.Generator:
    """Returns a new host random generator whose stream is a pure function of seed and identity."""
    return np.random.default_rng(identity_key(seed, identity))
