"""Roles at run time, the episodes of a step, and the context in which these ask roles for rollouts."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from zeroplay_jax.rollout import continuing
from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.prompts import OPTIONAL_FIELDS, Prompt
from zeroplay_jax.rollout.requests import NEWEST, Request
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.scoring import ScoreRequest
from zeroplay_jax.runtime.hosts import Hosts, sums
from zeroplay_jax.selfplay.judge import Judge
from zeroplay_jax.selfplay.rows import from_bytes, to_bytes
from zeroplay_jax.selfplay.schedule import BatchCursor, Step
from zeroplay_jax.settings.rollouts import ALL_IDS
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.types import Json, Outcome, Row, Task, TaskDropped, Trajectory, UserError

# Replays of a rollout whose tool failed, with `rollout.failed=retry`.
REPLAYS = 2
# The identity of a replay has this number and more, which no recipe gives to a request.
_REPLAY = 1 << 20
# Default of `Role.prompt_tokens`: no limit but that of the slot.
_NO_LIMIT = 1 << 30


@dataclasses.dataclass(frozen=True)
class Role:
    """A role of a recipe at run time.

    Attributes:
      name: name in metrics and logs.
      weights: name of its weights (a slot pool of the scheduler).
      prompt: name of its prompt.
      env: tools, limits and the tags that end its rollouts.
      temperature: temperature of its rollouts unless a request sets another; 0 is greedy.
      truncation: as of `Request`.
      prompt_tokens: largest allowed length of a prompt, in tokens.
    """

    name: str
    weights: str
    prompt: str
    env: Environment
    temperature: float = 1.0
    prompt_tokens: int = _NO_LIMIT
    truncation: tuple[float, int] = ALL_IDS

    def with_tools(self, tools: Mapping[str, Tool]) -> Role:
        """Returns the role with its tools replaced by those of the same names in `tools` (over other documents)."""
        # Names stay the same, so that prompts and the syntax of calls do not change with the corpus.
        role_tools = {name: tools[name] for name in self.env.tools}
        env = dataclasses.replace(self.env, tools=role_tools)
        return dataclasses.replace(self, env=env)


@dataclasses.dataclass(eq=False)
class Episodes:
    """Episodes that run together: those of a training step, or of an evaluation.

    Attributes:
      versions: name of weights → version that its rollouts are sampled with; the newest where none is named.
      number: number of the step.
      cursor: position at which its first round was drawn.
      pool_size, pool_drops: `QuestionPool.questions` (their number) and `drops` when its first round was drawn.
      recipe_state: state of the recipe at that moment; None: it has none.
      recipe: the recipe with that state, which makes its tasks and runs their episodes; None before its episodes begin.
      step: the step; None before its episodes begin.
      tasks: its tasks, of all rounds so far.
      outcomes: outcomes of the rounds that have ended.
      rollouts: rollouts that its episodes asked for in this process.
      replays: those that were sampled anew, because a tool failed.
      scored_texts, scored_tokens: texts whose log-probs they asked for in this process; their tokens, and those of the
        contexts.
      continued: identities of rollouts of which another one is the continuation; they cannot be rows.
      requests: role and identity of every request of its episodes in this process.
    """

    versions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    number: int = 0
    cursor: BatchCursor = BatchCursor()
    pool_size: int = 0
    pool_drops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    recipe_state: Json | None = None
    recipe: Any = None
    step: Step | None = None
    tasks: list[Task] = dataclasses.field(default_factory=list)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    rollouts: int = 0
    replays: int = 0
    scored_texts: int = 0
    scored_tokens: int = 0
    continued: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    requests: set[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=set)

    @property
    def rows(self) -> list[Row]:
        """The rows of all outcomes."""
        rows: list[Row] = []
        for outcome in self.outcomes:
            rows += outcome.rows
        return rows

    def state(self) -> Json:
        """Returns what is needed to draw the first round again, sampled by the same weights."""
        names = ('number', 'pool_size', 'pool_drops', 'versions', 'recipe_state')
        cursor = dataclasses.asdict(self.cursor)
        return {name: getattr(self, name) for name in names} | {'cursor': cursor}

    @classmethod
    def of_state(cls, state: Json) -> Episodes:
        """Returns the episodes of a `state`, which have not begun."""
        return cls(**{**state, 'cursor': BatchCursor(**state['cursor'])})


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """Roles that share a scheduler, bound to the episodes of a step; these get their rollouts from it.

    Attributes:
      scheduler: runs the rollouts.
      roles: roles by name.
      prompts: prompts by name.
      judge: the judge of `config.judge`; None if the context needs no verdicts.
      hosts: the processes that share the episodes of a step.
      episodes: those that ask for rollouts here.
      replays: largest number of replays of a rollout whose tool failed.
      model: at a server, in place of the weights of all roles of an evaluation; None: there is none.
    """

    scheduler: Scheduler
    roles: dict[str, Role]
    prompts: Mapping[str, Prompt]
    judge: Judge | None = None
    hosts: Hosts = dataclasses.field(default_factory=Hosts)
    episodes: Episodes = dataclasses.field(default_factory=Episodes)
    replays: int = 0
    # A `ServedModel`, whose module comes after this one.
    model: Any = None

    def bound(self, episodes: Episodes | None = None) -> RolloutContext:
        """Returns the context of other episodes, with a judge that counts their judgements; None: of an evaluation."""
        context = dataclasses.replace(self, episodes=episodes or Episodes())
        if self.judge is None:
            return context
        return dataclasses.replace(context, judge=self.judge.bound(context))

    def gather_judge_stats(self) -> collections.Counter[str]:
        """Returns counts of these episodes' judgements (`Judge.stats`), summed over processes; empty without a judge.

        All processes must call it.

        Raises:
          UserError: too many of these judgements failed (`config.judge.max_failure_rate`).
        """
        local = self.judge.stats if self.judge else collections.Counter()
        # Counts of 0 are left out.
        total = sums(self.hosts.gather(+local))
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
        self.start_episodes(episodes)
        return self.await_episodes(list(episodes), on_episode_end)

    def start_episodes(
        self, episodes: Mapping[tuple[int, ...], Callable[[], Coroutine[Any, Any, Outcome]]]
    ) -> None:
        """Starts this process's share of episodes; they run during the next `await_episodes`, of any context."""
        coroutines = []
        for identity, make_episode in episodes.items():
            # Coroutines of other processes are not created, because one that is never awaited causes a warning.
            if self.hosts.owns(identity):
                coroutines.append(make_episode())
        self.scheduler.start(self.episodes, coroutines)

    def await_episodes(
        self,
        identities: Sequence[tuple[int, ...]],
        on_episode_end: Callable[[], None],
        has_others: bool = False,
    ) -> list[Outcome]:
        """Waits for the episodes that were started; returns their outcomes as `run_episodes` does.

        Args:
          identities: of all episodes that were started since the last call, those of other processes included.
          on_episode_end: called after each episode of this process.
          has_others: whether episodes of another step are in progress, in any process. They continue while this
            process waits for the others.
        """
        if self.hosts.count == 1:
            return self.scheduler.wait(self.episodes, on_episode_end)

        meeting = self.hosts.meeting() if has_others else None

        def run_local() -> bytes:
            if meeting is None:
                return to_bytes(self.scheduler.wait(self.episodes, on_episode_end))
            try:
                outcomes = self.scheduler.wait(self.episodes, on_episode_end, meeting.is_complete)
                return to_bytes(outcomes)
            finally:
                # After an error as well: the other processes must not wait for this one.
                meeting.arrive()

        # An exception is raised everywhere before any process waits for the rows of the failed one.
        message = self.hosts.run_on_all(run_local)
        if meeting is not None:
            meeting.close()
        # This process reads its outcomes back, too, so that all processes compute with equal ones.
        outcomes = [iter(from_bytes(message)) for message in self.hosts.gather_bytes(message)]
        # The order of `identities` is the same on all processes; the order of completion is not.
        return [next(outcomes[self.hosts.owner(identity)]) for identity in identities]

    def prompt_ids(
        self, role: str, prompt: str = '', **fields: object
    ) -> Int[np.ndarray, ' tokens']:
        """Returns the ids, int32 [tokens], of a prompt for a role; none for a model at a server.

        Args:
          prompt: name of the prompt; '': the role's own.
          fields: values of `Prompt.inputs`; they are encoded as untrusted text.

        Raises:
          UserError: the prompt lacks one of the fields, or has others.
        """
        asked_role = self.roles[role]
        name = prompt or asked_role.prompt
        inputs = self.prompts[name].inputs
        if not set(inputs) <= fields.keys() <= {*inputs, *OPTIONAL_FIELDS}:
            raise UserError(
                f'role {role}: the prompt {name!r} has the fields {", ".join(inputs) or "none"}, and the recipe gives '
                f'{", ".join(fields) or "none"}; give these fields, or write the others into the prompt in braces'
            )
        if self.model is not None:
            return np.zeros(0, np.int32)
        return asked_role.env.prompt_ids(self.prompts[name], **fields)

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
          temperature: None: the role's, which is 0 (greedy) if it is not trained.
          prompt: name of the prompt; '': the role's own.
          fields: as of `prompt_ids`; none of them can have the name of an argument.

        Raises:
          TaskDropped('prompt_too_long'): the prompt is longer than `Role.prompt_tokens`.
          UserError: the prompt has other fields, or a second request of the step has this role and identity; several
            samples at temperature 0; a server does not answer.
        """
        asked_role = self.roles[role]
        template = self.prompts[prompt or asked_role.prompt]
        ids = self.prompt_ids(role, prompt, **fields)
        request = self._request(role, identity, ids, samples, temperature)
        # A message between searches counts them.
        if template.searched and 'hops' in fields:
            searched = int(str(fields['hops'])), template.searched
            request = dataclasses.replace(
                request, env=dataclasses.replace(request.env, searched=searched)
            )
        if self.model is not None:
            messages = request.env.messages(template, **fields)
            return await self.model.sample(self.scheduler, request, messages)
        # Prompts are never truncated: cutting one from the left, as Search-R1 does, may remove the question.
        if len(ids) > asked_role.prompt_tokens:
            raise TaskDropped('prompt_too_long')
        return await self._send(role, request)

    async def go_on(
        self,
        role: str,
        identity: tuple[int, ...],
        rollout: Trajectory,
        keep: Collection[int] | None = None,
        note: str = '',
        temperature: float | None = None,
    ) -> Trajectory:
        """Returns a rollout with further turns, by a role of the same weights; `rollout` can be no row any more.

        The context is made of its ids. If its last turn ended with a call whose result it has not read, the call is run
        and its result follows. Limits count from here on. Tools keep what they stored.

        Args:
          identity: as of `ask`.
          rollout: a rollout of these episodes.
          keep: its turns that stay in the context, with what was replied to each (rollout/continuing.py); None: all.
            What was sampled in the old context is trained there.
          note: message to the role at the end of the context, foreign text without gradient; '' for none.
          temperature: None: that of the rollout.

        Raises:
          TaskDropped('context_full'): the context, with its note, fills a slot.
          UserError: the rollout cannot go on like this, or has gone on already; `identity` as in `ask`.
        """
        request = self._request(role, identity, rollout.tokens, 1, temperature)
        request = await self._behind(request, continuing.cut(rollout, keep), note)
        before = request.before
        assert before is not None
        version = request.version
        if version == NEWEST:
            version = self.scheduler.weights.newest[request.weights]
        if (before.weights, before.version) != (request.weights, version):
            raise UserError(
                f'rollout {before.identity} is of the weights {before.weights!r} and cannot go on as role {role}; give '
                'a role of these weights, or fork it'
            )
        if before.identity in self.episodes.continued:
            raise UserError(
                f'rollout {before.identity} goes on twice, so that its tokens would be trained twice; fork it instead'
            )
        # What follows is trained together with these turns.
        if temperature is None:
            request = dataclasses.replace(request, temperature=before.turns[-1].temperature)
        self.episodes.continued.add(before.identity)
        (more,) = await self._send(role, request)
        return more

    async def fork(
        self,
        role: str,
        identity: tuple[int, ...],
        rollout: Trajectory,
        samples: int = 1,
        keep: Collection[int] | None = None,
        note: str = '',
        temperature: float | None = None,
    ) -> list[Trajectory]:
        """Returns rollouts of a role whose prompt is the context of a rollout; that stays a rollout by itself.

        Each has and trains its own turns alone. The prompt is prefilled once for all of them, and anew: `rollout` has
        given its slot and pages to another one when it ended. Tools keep what they stored up to its last turn.

        Args and errors: those of `go_on`, but for samples and temperature, which are those of `ask`.
        """
        request = self._request(role, identity, rollout.tokens, samples, temperature)
        request = await self._behind(request, continuing.cut(rollout, keep), note)
        assert request.before is not None
        before = continuing.as_prompt(request.before)
        return await self._send(role, dataclasses.replace(request, before=before))

    def _request(
        self,
        role: str,
        identity: tuple[int, ...],
        prompt: Int[np.ndarray, ' tokens'],
        samples: int,
        temperature: float | None,
    ) -> Request:
        """Returns a request of a role with its own settings; raises UserError for no samples, and for equal ones."""
        asked_role = self.roles[role]
        if samples < 1:
            raise UserError(f'role {role}: samples is {samples!r}; give 1 or more')
        if samples > 1 and temperature is None and not asked_role.temperature:
            raise UserError(
                f'role {role}: samples at temperature 0 are equal, and a role that is not trained has no other one; '
                'give a temperature'
            )
        return Request(
            weights=asked_role.weights,
            prompt=prompt,
            identity=identity,
            env=asked_role.env,
            samples=samples,
            temperature=asked_role.temperature if temperature is None else temperature,
            truncation=asked_role.truncation,
            version=self.episodes.versions.get(asked_role.weights, NEWEST),
            owner=self.episodes,
        )

    async def _send(self, role: str, request: Request) -> list[Trajectory]:
        """Returns the rollouts of a request, replayed where a tool failed."""
        # Evaluations give the questions of every set the same numbers.
        if self.episodes.step is not None:
            name = role, request.identity
            if name in self.episodes.requests:
                raise UserError(
                    f'role {role} is asked twice with the identity {request.identity}, so that both requests would '
                    "sample the same numbers; put a number of its own behind the task's identity for each"
                )
            self.episodes.requests.add(name)
        self.episodes.rollouts += request.samples
        rollouts = await self.scheduler.rollout(request)
        # A failure before the request cannot be sampled anew.
        if self.replays and not (request.before is not None and request.before.has_tool_failure):
            pending = [self._replayed(request, number, one) for number, one in enumerate(rollouts)]
            rollouts = await asyncio.gather(*pending)
        return rollouts

    async def _replayed(self, request: Request, sample: int, rollout: Trajectory) -> Trajectory:
        """Returns a rollout, or the first replay of it whose tools worked; if there is none, the last one.

        A replay has randomness of its own, and takes the place and the identity of the rollout.
        """
        identity = rollout.identity
        for number in range(self.replays):
            if not rollout.has_tool_failure:
                break
            self.episodes.replays += 1
            replay_identity = (*request.identity, sample, _REPLAY + number)
            again = dataclasses.replace(request, identity=replay_identity, samples=1)
            (replay,) = await self.scheduler.rollout(again)
            rollout = dataclasses.replace(replay, identity=identity)
        return rollout

    async def log_probs(
        self,
        role: str,
        identity: tuple[int, ...],
        texts: Sequence[str],
        prompt: str = '',
        **fields: object,
    ) -> list[Float[np.ndarray, ' tokens']]:
        """Returns the log-probs, float32 [tokens] in nats, that a role gives to the tokens of texts behind a prompt.

        A text is encoded as a turn: tags of the role are tokens of the policy, all else is foreign text, without
        control tokens. The temperature is 1, whatever the role's. Nothing is sampled, so the identity decides the order
        of service alone. The prompt is computed once for all texts.

        Args: those of `ask`.

        Raises:
          TaskDropped('context_full'): prompt and longest text do not fit into a slot; what does not catch it loses the
            whole episode.
          UserError: the prompt has other fields.
        """
        return await self._log_probs(role, identity, texts, self.prompt_ids(role, prompt, **fields))

    async def log_probs_after(
        self,
        role: str,
        identity: tuple[int, ...],
        texts: Sequence[str],
        rollout: Trajectory,
        keep: Collection[int] | None = None,
        note: str = '',
    ) -> list[Float[np.ndarray, ' tokens']]:
        """Returns what `log_probs` does behind the context of a rollout; `keep` and `note` are those of `go_on`."""
        before = continuing.cut(rollout, keep)
        ids = before.tokens
        if note:
            ids = np.append(ids, continuing.note_ids(before, self.roles[role].env, note))
        return await self._log_probs(role, identity, texts, ids)

    async def _log_probs(
        self,
        role: str,
        identity: tuple[int, ...],
        texts: Sequence[str],
        context_ids: Int[np.ndarray, ' tokens'],
    ) -> list[Float[np.ndarray, ' tokens']]:
        """Returns the log-probs of texts behind these tokens."""
        if isinstance(texts, str):
            raise UserError(
                f'log_probs takes a list of texts, not the text {texts!r}; put it in [ ]'
            )
        self._check_has_weights()
        env, weights = self.roles[role].env, self.roles[role].weights
        text_ids = [np.asarray(env.turn_ids(text), np.int32) for text in texts]
        scheduler = self.scheduler
        longest = max(map(len, text_ids), default=0)
        if not 0 < len(context_ids) <= scheduler.pools[weights].context - longest:
            raise TaskDropped('context_full')
        self.episodes.scored_texts += len(texts)
        self.episodes.scored_tokens += len(context_ids) + sum(map(len, text_ids))
        newest = scheduler.weights.newest[weights]
        version = self.episodes.versions.get(weights, newest)
        return await scheduler.log_probs(
            ScoreRequest(weights, version, context_ids, text_ids, identity, self.episodes)
        )

    def _check_has_weights(self) -> None:
        """Raises UserError for a model at a server."""
        if self.model is not None:
            raise UserError(
                'the policy is a model at a server, which has no tokens to go on from or to score; give a checkpoint '
                'folder'
            )

    async def _behind(self, request: Request, before: Trajectory, note: str) -> Request:
        """Returns a request behind a rollout and a reply to it: the note, or the result of its last call."""
        self._check_has_weights()
        env = request.env
        call, is_run = continuing.open_call(before, env)
        reply: Any = ()
        if note:
            reply = continuing.note_ids(before, env, note)
        elif call is not None:
            request = dataclasses.replace(request, before=before)
            rollout, reply = await self.scheduler.reply(request, call, is_run)
            before = dataclasses.replace(
                before, turns=tuple(rollout.turns), tool_states=tuple(rollout.tool_states)
            )
        # Nor can a turn go on that a limit has cut: its stop strings may begin before the cut.
        elif continuing.ends_in_turn(before):
            raise UserError(
                f'rollout {before.identity} has ended, and a turn would follow its last one directly; give a note, '
                'or keep the turns before'
            )
        before = continuing.replied(before, env, reply)
        if len(before.tokens) >= self.scheduler.pools[request.weights].context:
            raise TaskDropped('context_full')
        return dataclasses.replace(request, prompt=before.tokens, before=before)
