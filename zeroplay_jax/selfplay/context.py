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
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.types import Json, Outcome, Row, Task, TaskDropped, Trajectory, UserError

# Replays of a rollout whose tool failed, with `rollout.failed=retry`.
REPLAYS = 2
# The identity of a replay has this number and more, which no recipe gives to a request.
_REPLAY = 1 << 20
# Default of `Role.prompt_tokens`: no limit but that of the slot.
_NO_LIMIT = 1 << 30
_SERVED = 'the policy is a model at a server, which cannot do this; give a checkpoint folder'


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


@dataclasses.dataclass(eq=False)
class StepRun:
    """Episodes that run together: those of a training step, or of an evaluation.

    Attributes:
      versions: name of weights → version that plays these episodes; the newest where none is named.
      number: number of the step.
      cursor: position at which its first round was drawn.
      pool_size, pool_drops: `TaskPool.questions` (their number) and `drops` when its first round was drawn.
      recipe_state: state of the recipe at that moment; None: it has none.
      player: the recipe with that state, which makes its tasks and plays them; None before its episodes begin.
      step: the step; None before its episodes begin.
      tasks: its tasks, of all rounds so far.
      outcomes: outcomes of the rounds that have ended.
      rollouts: rollouts that its episodes asked for in this process.
      replays: those that were played anew, because a tool failed.
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
    player: Any = None
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
        """Returns what is needed to draw the first round again, played by the same weights."""
        return {
            'step': self.number,
            'cursor': dataclasses.asdict(self.cursor),
            'pool_size': self.pool_size,
            'pool_drops': dict(self.pool_drops),
            'versions': dict(self.versions),
            'recipe_state': self.recipe_state,
        }

    @classmethod
    def of_state(cls, state: Json) -> StepRun:
        """Returns the run of a `state`, whose episodes have not begun."""
        cursor = BatchCursor(**state['cursor'])
        return cls(
            state['versions'],
            state['step'],
            cursor,
            state['pool_size'],
            state['pool_drops'],
            state['recipe_state'],
        )


def _check_varied(name: str, role: Role, samples: int, temperature: float | None) -> None:
    """Raises UserError for several samples of a role that are all equal."""
    if samples > 1 and temperature is None and not role.temperature:
        raise UserError(
            f'role {name}: samples at temperature 0 are equal, and a role that is not trained has no other one; give '
            'ask a temperature'
        )


def _check_options(
    after: object, keep: object, note: object, fields: Collection[str], samples: int = 1
) -> None:
    """Raises UserError for options of `RolloutContext.ask` that nothing would read, or that would be read wrong."""
    if samples < 1 or not isinstance(note, str):
        raise UserError(
            f'samples is {samples!r} and note {note!r}; samples must be 1 or more, and note a text'
        )
    if after is None and (note or keep is not None):
        raise UserError(
            'keep and note are read with after=ROLLOUT alone; give it, or another name to a field of the prompt'
        )
    if after is not None and fields:
        raise UserError(
            f'nothing reads {", ".join(fields)} with after=ROLLOUT, which has no prompt; say it in a note'
        )


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """Roles that share a scheduler, bound to the episodes of a step; these get their rollouts from it.

    Attributes:
      scheduler: runs the rollouts.
      roles: roles by name.
      prompts: prompts by name.
      judge: the judge of `config.judge`; None if the context needs no verdicts.
      hosts: the processes that share the episodes of a step.
      run: the episodes that ask for rollouts here.
      replays: largest number of replays of a rollout whose tool failed.
      model: at a server, plays all roles of an evaluation in place of the scheduler's weights; None: there is none.
    """

    scheduler: Scheduler
    roles: dict[str, Role]
    prompts: Mapping[str, Prompt]
    judge: Judge | None = None
    hosts: Hosts = dataclasses.field(default_factory=Hosts)
    run: StepRun = dataclasses.field(default_factory=StepRun)
    replays: int = 0
    # A `ServedModel`, whose module comes after this one.
    model: Any = None

    def bound(self, run: StepRun | None = None) -> RolloutContext:
        """Returns the context of other episodes, with a judge that counts their judgements; None: of an evaluation."""
        context = dataclasses.replace(self, run=run or StepRun())
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
        self.scheduler.start(self.run, coroutines)

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
            return self.scheduler.wait(self.run, on_episode_end)

        meeting = self.hosts.meeting() if has_others else None

        def run_local() -> bytes:
            if meeting is None:
                return to_bytes(self.scheduler.wait(self.run, on_episode_end))
            try:
                outcomes = self.scheduler.wait(self.run, on_episode_end, meeting.is_complete)
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
        *,
        after: Trajectory | None = None,
        keep: Collection[int] | None = None,
        note: str = '',
        **fields: object,
    ) -> list[Trajectory]:
        """Returns `samples` rollouts of a role, in sample order: on a prompt, or `after` a rollout.

        After a rollout, the context is made of its ids. If its last turn ended with a call whose result it has not
        read, the call is run and its result follows. One sample is that rollout, which goes on: it has the turns and
        the trained tokens of both, and `after` cannot be a row any more. Several samples are forks, for which the
        context is a prompt, so that each has and trains its own turns alone, and `after` stays a rollout by itself; so
        does one sample of other weights. The prompt of forks is prefilled once for all of them, and anew: `after` has
        given its slot and pages to another rollout when it ended. Limits count from here on. Tools keep what they
        stored, in forks up to the last turn of their prompt.

        Args:
          identity: names the request within the run; all randomness derives from it, so it must be unique.
          temperature: None: that of `after` where it goes on, else the role's, 0 (greedy) if it is not trained.
          prompt: name of the prompt; '': the role's own. Not read with `after`.
          after: a rollout of these episodes.
          keep: turns of it that stay in the context, with what was replied to each (rollout/continuing.py); None: all.
            What was sampled in the old context is trained there.
          note: message to the role at the end of the context, foreign text without gradient; '' for none.
          fields: as of `prompt_ids`; none of them can have the name of an argument.

        Raises:
          TaskDropped('prompt_too_long'): the prompt is longer than `Role.prompt_tokens`.
          TaskDropped('context_full'): the context, with its note, fills a slot.
          UserError: `after` cannot go on like this, nothing reads `keep`, `note` or a field, or a second request of the
            step has this role and identity; several samples at temperature 0; a server does not answer.
        """
        asked_role = self.roles[role]
        env = asked_role.env
        searched = self.prompts[prompt or asked_role.prompt].searched
        # A message between searches counts them; a rollout that goes on needs it again.
        read = {'hops'} if searched else set()
        _check_options(after, keep, note, fields.keys() - read, samples)
        _check_varied(role, asked_role, samples, temperature)
        if searched and 'hops' in fields:
            env = dataclasses.replace(env, searched=(int(str(fields['hops'])), searched))
        request = Request(
            weights=asked_role.weights,
            prompt=self.prompt_ids(role, prompt, **fields) if after is None else after.tokens,
            identity=identity,
            env=env,
            samples=samples,
            temperature=asked_role.temperature if temperature is None else temperature,
            version=self.run.versions.get(asked_role.weights, NEWEST),
            run=self.run,
        )
        if self.model is not None:
            if after is not None:
                raise UserError(f'ask(after=…): {_SERVED}')
            messages = env.messages(self.prompts[prompt or asked_role.prompt], **fields)
            return await self.model.play(self.scheduler, request, messages)
        if after is not None:
            request = await self._going_on(request, continuing.cut(after, keep), note)
        # Prompts are never truncated: cutting one from the left, as Search-R1 does, may remove the question.
        elif len(request.prompt) > asked_role.prompt_tokens:
            raise TaskDropped('prompt_too_long')
        before = request.before
        # What follows is trained together with these turns; forks have none.
        if temperature is None and before is not None and before.turns:
            request = dataclasses.replace(request, temperature=before.turns[-1].temperature)
        self._check_identity(role, identity)
        self.run.rollouts += samples
        rollouts = await self.scheduler.rollout(request)
        # A failure before the request cannot be played anew.
        if self.replays and not (before is not None and before.has_tool_failure):
            pending = [self._replayed(request, number, one) for number, one in enumerate(rollouts)]
            rollouts = await asyncio.gather(*pending)
        return rollouts

    def _check_identity(self, role: str, identity: tuple[int, ...]) -> None:
        """Raises UserError if an earlier request of the step has this role and identity."""
        # Evaluations give the questions of every set the same numbers.
        if self.run.step is not None:
            if (role, identity) in self.run.requests:
                raise UserError(
                    f'role {role} is asked twice with the identity {identity}, so that both requests would sample the '
                    "same numbers; put a number of its own behind the task's identity for each"
                )
            self.run.requests.add((role, identity))

    async def _replayed(self, request: Request, sample: int, rollout: Trajectory) -> Trajectory:
        """Returns a rollout, or the first replay of it whose tools worked; if there is none, the last one.

        A replay has randomness of its own, and takes the place and the identity of the rollout.
        """
        identity = rollout.identity
        for number in range(self.replays):
            if not rollout.has_tool_failure:
                break
            self.run.replays += 1
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
        *,
        after: Trajectory | None = None,
        keep: Collection[int] | None = None,
        note: str = '',
        **fields: object,
    ) -> list[Float[np.ndarray, ' tokens']]:
        """Returns the log-probs, float32 [tokens] in nats, that a role gives to the tokens of texts.

        Each text follows a prompt directly, or the context of a rollout, cut and with a note as in `ask`. It is encoded
        as a turn: tags of the role are tokens of the policy, all else is foreign text, without control tokens. The
        temperature is 1, whatever the role's. Nothing is sampled, so the identity decides the order of service alone.
        The context is computed once for all texts.

        Args: those of `ask`.

        Raises:
          TaskDropped('context_full'): prompt or context and the longest text do not fit into a slot; what does not
            catch it loses the whole episode.
          UserError: as in `ask`.
        """
        _check_options(after, keep, note, fields)
        if isinstance(texts, str):
            raise UserError(
                f'log_probs takes a list of texts, not the text {texts!r}; put it in [ ]'
            )
        if self.model is not None:
            raise UserError(f'log_probs: {_SERVED}')
        asked_role = self.roles[role]
        env, weights = asked_role.env, asked_role.weights
        if after is None:
            context_ids = self.prompt_ids(role, prompt, **fields)
        else:
            before = continuing.cut(after, keep)
            context_ids = before.tokens
            if note:
                context_ids = np.append(context_ids, continuing.note_ids(before, env, note))
        text_ids = [np.asarray(env.turn_ids(text), np.int32) for text in texts]
        scheduler = self.scheduler
        longest = max(map(len, text_ids), default=0)
        if not 0 < len(context_ids) <= scheduler.pools[weights].context - longest:
            raise TaskDropped('context_full')
        self.run.scored_texts += len(texts)
        self.run.scored_tokens += len(context_ids) + sum(map(len, text_ids))
        newest = scheduler.weights.newest[weights]
        version = self.run.versions.get(weights, newest)
        return await scheduler.log_probs(
            ScoreRequest(weights, version, context_ids, text_ids, identity, self.run)
        )

    async def _going_on(self, request: Request, before: Trajectory, note: str) -> Request:
        """Returns a request of what follows a rollout in its context; arguments and errors are those of `ask`."""
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
                f'rollout {before.identity} has ended, and a turn would follow its last one directly; give ask a note, '
                'or keep the turns before'
            )
        before = continuing.replied(before, env, reply, note)
        if len(before.tokens) >= self.scheduler.pools[request.weights].context:
            raise TaskDropped('context_full')
        version = request.version
        if version == NEWEST:
            version = self.scheduler.weights.newest[request.weights]
        is_same_policy = (before.weights, before.version) == (request.weights, version)
        if request.samples > 1 or not is_same_policy:
            before = continuing.as_prompt(before)
        elif before.identity in self.run.continued:
            raise UserError(
                f'rollout {before.identity} goes on twice, so that its tokens would be trained twice; ask once for '
                'samples=2, which are forks'
            )
        else:
            self.run.continued.add(before.identity)
        return dataclasses.replace(request, prompt=before.tokens, before=before)
