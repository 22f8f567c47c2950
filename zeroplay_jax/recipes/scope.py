"""SCOPE: a challenger sets open tasks, a solver does them, and the frozen initial policy judges both by rubrics.

A task comes from a document and the passages that the challenger found from there. The judge
checks two gates (its entities can be found; it is about its document), writes rubrics from that
document, and grades every answer item by item. The challenger earns format plus, past the gates, the closeness of the
solver's mean score to a target (SCOPE eqs. 4 and 5); the solver earns its score, discounted by
length, plus format and searching (eqs. 6 and 7). Roles take turns, as in Dr. Zero.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

from zeroplay_jax.data import files
from zeroplay_jax.objectives import format_scores, rewards
from zeroplay_jax.recipes import solving
from zeroplay_jax.recipes.datasets import (
    DocumentSampler,
    SeedDocument,
    alternate,
    check_generation,
    dataset_tasks,
    tasks_in_turns,
)
from zeroplay_jax.recipes.proposing import origin_of
from zeroplay_jax.rollout.prompts import document_text, documents_text
from zeroplay_jax.selfplay.answers import (
    final_answer,
    grade,
    group_of,
    mean,
    retrieved_passages,
)
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.settings.kinds import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Problem,
    Section,
    requires,
)
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import (
    Json,
    Outcome,
    Question,
    Row,
    RowInfo,
    Task,
    TaskDropped,
    Trajectory,
    Turn,
)

# SCOPE's task types (appendix H) as the challenger reads them; any other name is used as it is.
TASK_TYPES = {
    '': 'an explanation, a comparison, a summary or a plan',
    'long_form_qa': 'one question about how or why something works or happened, to be answered in connected prose',
    'summarisation': 'a summary, or what is known put into another form',
    'planning': 'a plan that can be acted on, with steps, times or milestones',
    'writing': 'a formal text with an introduction, a body and a conclusion, such as an essay or a report',
}


class Settings(Section):
    """Settings of SCOPE."""

    gates: bool = True
    """Check both quality gates."""
    relevant_to: Literal['source', 'evidence'] = 'source'
    """What a task has to be about, and rubrics come from: its source document (paper), or also the passages found."""
    searches_below_hops: Annotated[int, requires(lambda x: x in (0, 1), 'give 0 or 1')] = 0
    """How many fewer searches than hops are required."""
    code_format: bool = False
    """Format scores of the released code, not the paper's."""
    search_weight: NonNegativeFloat = 0.1
    """Weight of searching in the solver's reward."""
    length_factor: bool = True
    """Discount long answers."""
    soft_length: NonNegativeInt = 1024
    """Tokens up to which answers are not discounted."""
    hard_length: PositiveInt = 2048
    """Tokens from which answers are worth almost nothing."""


@dataclasses.dataclass
class Challenge:
    """A challenger's rollout with the verdicts of the judge and the scores of the solver.

    Attributes:
      trajectory: the rollout.
      task: text of its open task; None if there is none.
      format: format score 'raw' and its parts (`format_scores.scope_challenger_format`).
      rejected: reason code of an open task that is not given to the solver or got no score; None for others.
      rubrics: rubrics that the judge wrote.
      scores: scores in [0, 1] of the solver's answers that could be graded.
    """

    trajectory: Trajectory
    task: str | None
    format: dict[str, float]
    rejected: str | None = None
    rubrics: list[dict[str, str]] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)

    @property
    def score(self) -> float | None:
        """Mean of `scores`; None if no answer could be graded."""
        return mean(self.scores) if self.scores else None


def _kind(seed: SeedDocument) -> str:
    """Returns the kind of task that is asked for, in words."""
    return TASK_TYPES.get(seed.task_type, seed.task_type)


class Recipe(RecipeBase):
    """Challenger (role 'proposer') and solver, with the initial policy as judge."""

    settings = {'scope': Settings}
    input_files = ('documents', 'tasks')
    filterable_roles = ('solver',)
    has_open_tasks = True

    def __init__(self, config: Config, library):
        super().__init__(config, library)
        self._given: list[Question] | None = None
        if config.inputs.tasks:
            self._given = files.open_tasks(config.inputs.tasks)
        else:
            self.documents = DocumentSampler(config, library, self.phases)

    @classmethod
    def roles(cls, config: Config):
        """Returns two trained roles. The judge is not among them: `config.judge` chooses it."""
        # The challenger is called 'proposer', so that configs and metrics of all recipes agree.
        return (
            RoleSpec('proposer', 'proposer.task', terminal_tags=('task',)),
            RoleSpec('solver', 'solver.task'),
        )

    @classmethod
    def check(cls, config: Config):
        """Refuses crossed length limits, and a rule that could not follow a task."""
        yield from check_generation(config)
        settings = config.scope
        if settings.soft_length >= settings.hard_length:
            text = f'not below scope.hard_length={settings.hard_length}; give less'
            yield Problem('scope.soft_length', text)
        if config.judge.kind == 'rule' and settings.relevant_to == 'source':
            text = 'the rule (judge.kind) follows the facts from the source through the passages found; give evidence'
            yield Problem('scope.relevant_to', text)

    @classmethod
    def reads_documents(cls, config: Config):
        """Returns whether tasks are proposed about documents of the corpus."""
        return super().reads_documents(config) and not config.inputs.tasks

    @classmethod
    def judgements(cls, config: Config):
        """Returns grades, and those of proposed tasks."""
        proposed = () if config.inputs.tasks else ('rubrics',)
        gates = ('gate',) if config.scope.gates and proposed else ()
        return (*gates, *proposed, 'grade')

    def phases(self):
        """Returns iterations × (challenger, generate, solver); with `inputs.tasks` the solver's alone."""
        phases = alternate(self.config)
        # With tasks from a file nothing is proposed, which is the data-trained baseline of the paper.
        if self.config.inputs.tasks:
            return [phase for phase in phases if phase.trains == ('solver',)]
        return phases

    def tasks(self, step, pool, cursor):
        """Returns tasks on documents, with numbers of searches in the exact ratio; for the solver, on open tasks."""
        if self._given is not None:
            return dataset_tasks(self.config, self._given, step, cursor)
        return tasks_in_turns(self.config, self.documents, step, pool, cursor)

    async def episode(self, context, step, task):
        """Runs one task of any phase: challenges, challenges for the pool, or answers of the solver."""
        if 'proposer' in step.phase.trains:
            challenges = await self._challenges(context, step, task, self.config.proposer.samples)
            return Outcome([self._challenge_row(task, challenge) for challenge in challenges])
        if not step.phase.trains:
            return await self._generate(context, step, task)
        return await self._solve(context, task)

    async def _generate(self, context, step: Step, task: Task) -> Outcome:
        """Runs a task of a phase that trains no role: returns the first open task whose score is in `pool.window`."""
        challenges = await self._challenges(context, step, task, self.config.pool.samples)
        rows = [self._challenge_row(task, challenge) for challenge in challenges]
        low, high = self.config.pool.window
        # As in SCOPE's code, the first open task in the window is taken and not the one closest to the target; the
        # bounds are inclusive.
        for challenge in challenges:
            if challenge.rejected is None and low <= (challenge.score or 0.0) <= high:
                question = self._question(task, challenge)
                origin = {**question.origin, 'score': challenge.score}
                question = dataclasses.replace(question, origin=origin)
                return Outcome(rows, questions=[question])
        return Outcome(rows, drop=challenges[0].rejected or 'outside_window')

    async def _challenges(self, context, step: Step, task: Task, samples: int) -> list[Challenge]:
        """Returns `samples` challenges on the document of a task, judged and, if they pass the gates, tried."""
        seed: SeedDocument = task.payload
        document = ''
        if self.config.schedule.initial_document:
            document = document_text(seed.passage)
        trajectories = await context.ask(
            'proposer',
            (*task.identity, 0),
            samples,
            hops=seed.hops,
            document=document,
            kind=_kind(seed),
            task_type=seed.task_type.replace('_', ' ') or 'any',
        )
        challenges = [self._read(trajectory, seed) for trajectory in trajectories]
        # How many answers of the solver measure a challenge (SCOPE, appendix G).
        filtering = 0 if step.phase.trains else self.config.pool.measure
        attempts = filtering or self.config.reward.solves
        pending = []
        for number, challenge in enumerate(challenges):
            identity = (*task.identity, number)
            pending.append(self._judge_or_reject(context, identity, seed, challenge, attempts))
        # Challenges are judged concurrently, because each needs several judgements one after the other.
        await asyncio.gather(*pending)
        return challenges

    async def _judge_or_reject(
        self, context, identity, seed, challenge: Challenge, attempts: int
    ) -> None:
        """Calls `_judge`; what drops this challenge does not drop the others on its document."""
        try:
            await self._judge(context, identity, seed, challenge, attempts)
        except TaskDropped as drop:
            challenge.rejected = drop.reason

    def _read(self, trajectory: Trajectory, seed: SeedDocument) -> Challenge:
        """Returns a challenger's rollout with its open task and format score, not judged yet."""
        task_text = final_answer(trajectory, 'task')
        # The format score divides by this number, so it is at least 1.
        required_searches = max(seed.hops - self.config.scope.searches_below_hops, 1)
        format_score = format_scores.scope_challenger_format(
            [turn.text for turn in trajectory.turns],
            searches=len(trajectory.calls_of('search')),
            malformed=trajectory.failed_calls,
            expected=required_searches,
            task=task_text,
            code=self.config.scope.code_format,
        )
        rejected = None if task_text else 'no_task'
        return Challenge(trajectory, task_text, format_score, rejected)

    async def _judge(
        self, context, identity, seed: SeedDocument, challenge: Challenge, attempts: int
    ) -> None:
        """Checks the gates, gets rubrics and grades the solver's trial answers to one open task.

        Sets `rejected`, `rubrics` and `scores` of `challenge`.

        Args:
          identity: names the challenge within the run; requests append 1 (gates), 2 (rubrics), 3 (answers), 4 (grades).
          attempts: number of trial answers.

        Raises:
          TaskDropped: a prompt is too long, or the judge failed.
        """
        # The cheapest checks come first. SCOPE's code writes rubrics before its gates, also for tasks that
        # the gates then reject.
        if challenge.rejected:
            return
        assert context.judge is not None
        task_text = str(challenge.task)
        evidence: list[Json] = [seed.passage]
        # A task that drifted away from its source document is still about the passages found on the way.
        if self.config.scope.relevant_to == 'evidence':
            evidence += retrieved_passages(challenge.trajectory)
        relevant_to = documents_text(evidence)
        if self.config.scope.gates:
            for number, gate in enumerate(('entities', 'relevance')):
                gate_identity = (*identity, 1, number)
                # A missing verdict (None) does not pass, as in SCOPE's code.
                if not await context.judge.gate(gate_identity, gate, task_text, relevant_to):
                    challenge.rejected = f'gate_{gate}'
                    return
        # Rubrics come from what the task has to be about (SCOPE, appendix G: from its source document).
        rubrics = await context.judge.rubrics((*identity, 2), task_text, relevant_to, _kind(seed))
        challenge.rubrics = rubrics or []
        if not challenge.rubrics:
            challenge.rejected = 'no_rubrics'
            return
        open_task = Question(task_text, rubrics=tuple(challenge.rubrics))
        trajectories = await context.ask('solver', (*identity, 3), attempts, task=task_text)
        graded = await self._graded(context, identity, open_task, trajectories)
        # An ungraded answer says nothing about the task and is left out; a missing answer has the grade 0.
        challenge.scores = [one.value for one in graded if one.value is not None]
        if not challenge.scores:
            challenge.rejected = graded[0].drop

    async def _graded(
        self, context, identity, open_task: Question, trajectories: Sequence[Trajectory]
    ) -> list[solving.Attempt]:
        """Returns rollouts with the share of the rubrics that each one's answer meets (`grade`)."""
        pending = []
        for number, trajectory in enumerate(trajectories):
            # The 4 separates these judgements from the other requests of this identity, which append 0 to 3.
            judgement = (*identity, 4, number)
            answer = final_answer(trajectory)
            scoring = functools.partial(grade, context, judgement, open_task, answer)
            pending.append(solving.attempt(self.config, trajectory, scoring))
        return await asyncio.gather(*pending)

    def _challenge_row(self, task: Task, challenge: Challenge) -> Row:
        """Returns the row of a challenge, judged or rejected before that, with its reward (SCOPE eq. 4)."""
        reward_settings = self.config.reward
        parts = {f'format_{name}': value for name, value in challenge.format.items()}
        # The form is rewarded whatever the judge says (SCOPE eq. 4), also where it wrote no rubrics. (The released
        # code gives a task without rubrics 0.) The 'format_*' parts are logged, not added.
        parts['format'] = reward_settings.format_weight * challenge.format['raw']
        parts['difficulty'] = 0.0
        passed = challenge.rejected is None and challenge.score is not None
        if passed:
            # `scores` holds the graded answers only, which may be fewer than `reward.solves`.
            parts['difficulty'] = rewards.difficulty(
                sum(challenge.scores),
                len(challenge.scores),
                reward_settings.difficulty,
                reward_settings.target,
            )
        info = RowInfo(
            question=self._question(task, challenge),
            valid=passed,
            score=challenge.score,
            rejected=challenge.rejected,
        )
        return Row(
            role='proposer',
            trajectory=challenge.trajectory,
            reward=parts['format'] + parts['difficulty'],
            group=group_of(task.identity),
            parts=parts,
            # The value of a task is unknown if none of its answers was graded.
            drop=challenge.rejected if challenge.rejected in ('ungraded', *solving.LOST) else None,
            info=info,
        )

    @staticmethod
    def _question(task: Task, challenge: Challenge) -> Question:
        """Returns a challenge as an open task with rubrics and provenance, as it enters the pool and the log."""
        seed: SeedDocument = task.payload
        document = document_text(seed.passage)
        origin = origin_of(task, challenge.trajectory)
        if seed.task_type:
            origin['type'] = seed.task_type
        return Question(
            text=challenge.task or '',
            hops=seed.hops,
            rubrics=tuple(challenge.rubrics),
            # The pool keeps one task per document and iteration, as in SCOPE. The text is part of the key,
            # because several passages of an article share a title.
            unique_key=hashlib.sha256(document.encode()).hexdigest()[:16],
            origin=origin,
        )

    async def _solve(self, context, task: Task) -> Outcome:
        """Runs the solver on one open task; returns all rollouts as rows."""
        open_task: Question = task.payload
        samples = self.config.solver.samples
        trajectories = await context.ask('solver', task.identity, samples, task=open_task.text)
        graded = await self._graded(context, task.identity, open_task, trajectories)
        return Outcome([self._solver_row(context, task, one) for one in graded])

    def _solver_row(self, context, task: Task, graded: solving.Attempt) -> Row:
        """Returns the row of an answer with its reward (SCOPE eq. 6)."""
        settings = self.config.scope
        trajectory, value, drop = graded
        answer = final_answer(trajectory)
        env = context.roles['solver'].env
        # Only the tokens of the answer count (SCOPE eq. 7): thoughts and searches may be long.
        answer_tokens = len(env.codec.encode_plain(answer or ''))
        discount = 1.0
        if settings.length_factor:
            discount = rewards.length_factor(
                answer_tokens, soft=settings.soft_length, hard=settings.hard_length
            )
        # The format score counts searches in all turns but the last, which counts in the search reward although
        # nothing may have been run (SCOPE, appendix F.2).
        *before_last, last = trajectory.turns or (Turn(''),)
        searches = dataclasses.replace(trajectory, turns=tuple(before_last)).calls_of('search')
        last_call = env.read_turn(last.text).call
        is_last_search = last_call is not None and last_call.tool == 'search' and last_call.is_valid
        format_score = format_scores.scope_solver_format(
            [turn.text for turn in trajectory.turns],
            searches=len(searches),
            answer=answer,
            code=settings.code_format,
        )
        parts = {f'format_{name}': part for name, part in format_score.items()}
        # SCOPE eq. 6. The length factor multiplies the score only: a long answer keeps its format
        # and search rewards. `format_*` and 'length_factor' are logged, not added.
        parts['rubrics'] = discount * (value or 0.0)
        parts['length_factor'] = discount
        parts['format'] = self.config.reward.format_weight * format_score['raw']
        searches_paid = len(searches) + is_last_search
        parts['search'] = settings.search_weight * rewards.search_bonus(searches_paid)
        # The order of the terms is fixed, because another order would change the last bits of the sum.
        reward = parts['rubrics'] + parts['format'] + parts['search']
        return Row(
            role='solver',
            trajectory=trajectory,
            reward=reward,
            group=group_of(task.identity),
            parts=parts,
            drop=drop,
            info=RowInfo(
                question=task.payload, answer=answer, answer_tokens=answer_tokens, score=value
            ),
        )
