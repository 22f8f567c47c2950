"""SSP: one policy hides an answer in a question and, as solver, finds it again; every step trains both.

The proposer gets an answer and searches backwards for a question. A rule gate rejects unusable
questions. An answerability check asks the policy to answer from the passages that the proposer
read, mixed with passages of other proposers, without searching: a question that is not answered in
this way is ambiguous or unfounded. Accepted questions are solved n times. The proposer is rewarded
with the share of rollouts that fail (SSP alg. 1), the solver for its answers. `config.ssp.fill`
determines what replaces rejected questions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from zeroplay_jax.objectives import format_scores, rewards
from zeroplay_jax.recipes import solving
from zeroplay_jax.recipes.datasets import (
    HiddenAnswer,
    hidden_answers,
    numbered_tasks,
    simultaneous,
)
from zeroplay_jax.rollout.foreign_text import passages_text
from zeroplay_jax.selfplay.answers import final_answer, group_of, retrieved_passages, score
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import in_epochs
from zeroplay_jax.settings.kinds import NonNegativeInt, PositiveInt, Problem, Section
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
    identity_rng,
)

# Thresholds of the released code (`format_scores.ssp_gate`), which the paper does not have.
_CODE_GATE: dict[str, Any] = dict(
    chars=(10, 1000), words=10, searches=2, distinct=True, whole_words=False
)


class Settings(Section):
    """Settings of SSP."""

    answerability_check: bool = True
    """Check that the proposer's passages answer its question."""
    checker: Literal['policy', 'judge'] = 'policy'
    """Who answers in that check (paper: policy; code: judge)."""
    noise: NonNegativeInt = 4
    """Passages of other proposers that are mixed in."""
    noise_unit: Literal['document', 'trajectory'] = 'document'
    """trajectory: all passages of so many other proposers (code)."""
    code_gate: bool = False
    """The code's stricter rule gate."""
    strict_format: bool = False
    """No reward if a turn has text outside tags or a tag that is not closed (paper)."""
    fill: Literal['pad', 'resample', 'replay_full', 'replay_reset'] = 'pad'
    """Replacement for rejected questions: pad: none; resample: new answers; replay_full, replay_reset: earlier
    questions."""
    fill_period: PositiveInt = 10
    """replay_reset: steps after which earlier questions are forgotten."""
    fill_rounds: PositiveInt = 5
    """resample: further rounds per step."""
    invalid_reward: float = 0.0
    """Reward of a rejected proposal (−0.1: the paper's penalty variant)."""
    first_update: Literal['solver', 'proposer'] = 'solver'
    """Role that is updated first."""


class Recipe(RecipeBase):
    """Proposer, solver and checker; configs/ssp.py lets proposer and solver share their weights."""

    settings = {'ssp': Settings}
    input_files = ('answers',)
    needed_file = 'answers'
    has_pool = False

    def __init__(self, config: Config, library):
        super().__init__(config, library)
        self._answers = hidden_answers(config, library)

    @classmethod
    def roles(cls, config: Config):
        """Returns proposer, solver and checker; the checker is the solver without tools, limited to one turn."""
        return (
            RoleSpec('proposer', 'proposer.from_answer', terminal_tags=('question',)),
            RoleSpec('solver', 'solver'),
            RoleSpec('checker', 'checker', weights_from='solver', tools=()),
        )

    @classmethod
    def check(cls, config: Config):
        """Refuses a judge that cannot read."""
        judge_answers = config.ssp.answerability_check and config.ssp.checker == 'judge'
        if judge_answers and config.judge.kind == 'rule':
            text = 'the judge is a rule, which cannot read; set judge.kind to endpoint or policy'
            yield Problem('ssp.checker', text)

    @classmethod
    def judgements(cls, config: Config):
        """Adds the answers of the answerability check."""
        names = super().judgements(config)
        is_checker = config.ssp.answerability_check and config.ssp.checker == 'judge'
        return (*names, 'answer') if is_checker else names

    def phases(self):
        """Returns a schedule in which both roles are trained in every step."""
        settings = self.config.ssp
        # The solver is first, as in the paper (alg. 1); the released code updates the proposer first.
        is_proposer_first = settings.first_update == 'proposer'
        roles = ('proposer', 'solver') if is_proposer_first else ('solver', 'proposer')
        period = settings.fill_period if settings.fill == 'replay_reset' else 0
        return simultaneous(self.config, self.config.solver.steps, roles, period)

    def tasks(self, step, pool, cursor):
        """Returns tasks on a batch of answers; in later rounds on further answers or earlier questions (`ssp.fill`)."""
        settings = self.config.ssp
        if cursor.round == 0:
            return self._answer_tasks(step, cursor, self.config.proposer.batch)
        if not cursor.missing:
            return []
        if settings.fill == 'resample' and cursor.round <= settings.fill_rounds:
            # A round draws as many answers as groups are missing. A batch that is incomplete after the last
            # round stays so: SSP's code duplicates valid questions instead, which doubles their weight.
            return self._answer_tasks(step, cursor, cursor.missing)
        if settings.fill.startswith('replay') and cursor.round == 1:
            # The pool is shuffled in every step: the step's number takes the place of the iteration. It holds the
            # questions of earlier steps only: those of this step are added after its last round.
            questions = pool.batch(self.config.seed, step.number, 0, cursor.missing)
            return numbered_tasks(step, questions, first=cursor.drawn_in_step)
        return []

    def _answer_tasks(self, step, cursor, count: int) -> list[Task]:
        """Returns tasks on the next `count` answers of the dataset; every phase begins at the first answer again.

        The noise of each comes from the tasks after it in the step; after the last task the first one follows.
        """
        # Tasks of earlier rounds count as neighbours, so that a round of one task has noise as well.
        total = cursor.drawn_in_step + count
        settings = self.config.ssp
        # Not every neighbour has a passage that is no evidence, so documents may come from any of them.
        neighbours = total - 1 if settings.noise else 0
        if settings.noise_unit == 'trajectory':
            neighbours = min(settings.noise, neighbours)
        answers = in_epochs(self._answers, cursor.external, count, self.config.seed)
        hidden = []
        for number, answer in enumerate(answers, cursor.drawn_in_step):
            # The next tasks are as good as random ones, because answers are in random order already.
            following = range(number + 1, number + 1 + neighbours)
            noise_from = tuple((step.number, index % total) for index in following)
            hidden.append(dataclasses.replace(answer, noise_from=noise_from))
        return numbered_tasks(step, hidden, first=cursor.drawn_in_step, external=True)

    async def episode(self, context, step, task):
        """Runs one task: hides an answer, checks the question and solves it; or solves an earlier question again."""
        try:
            if isinstance(task.payload, Question):
                return Outcome(await self._solve(context, task, task.payload))
            return await self._propose_and_solve(context, task)
        finally:
            # Checks of other episodes wait for this episode's passages. If it failed before sharing them, it
            # shares none; otherwise this call has no effect.
            context.hosts.share(task.identity, [])

    async def _propose_and_solve(self, context, task: Task) -> Outcome:
        """Returns proposals that hide one answer, and the solver's rollouts on those that pass both checks."""
        hidden: HiddenAnswer = task.payload
        proposals = await context.ask(
            'proposer',
            (*task.identity, 0),
            self.config.proposer.samples,
            hops=hidden.hops,
            answer=hidden.answer,
        )
        # The passages that a proposer read are noise for the checks of other episodes. They are shared before
        # any check: two episodes whose checks wait for each other would never end.
        passages = []
        for trajectory in proposals:
            passages += retrieved_passages(trajectory)
        context.hosts.share(task.identity, passages)
        proposer_rows: list[Row] = []
        solver_rows: list[Row] = []
        questions: list[Question] = []
        rejections = []
        for number, trajectory in enumerate(proposals):
            question = self._question(task, trajectory)
            reason, attempts = await self._try_question(context, task, number, trajectory, question)
            proposer_rows.append(self._proposer_row(task, trajectory, question, reason, attempts))
            if reason is None:
                questions.append(question)
                solver_rows += attempts
            else:
                rejections.append(reason)
        drop = None if questions else rejections[0]
        return Outcome(proposer_rows + solver_rows, questions, drop)

    def _question(self, task: Task, trajectory: Trajectory) -> Question:
        """Returns the question of a rollout, with '' as its text if there is none; its answer is the hidden one."""
        hidden: HiddenAnswer = task.payload
        text = final_answer(trajectory, 'question')
        origin = {'task': list(task.identity), **hidden.origin}
        return Question(text or '', (hidden.answer,), hidden.hops, origin=origin)

    async def _try_question(
        self, context, task: Task, number: int, trajectory: Trajectory, question: Question
    ) -> tuple[str | None, list[Row]]:
        """Checks a question and, if it is accepted, solves it.

        Args:
          number: index of the question among the proposals of the task.

        Returns:
          Why the question is rejected, or None; the solver's rows, [] for a rejected question.
        """
        reason = self._rule_gate(trajectory, question)
        attempts: list[Row] = []
        try:
            if reason is None and self.config.ssp.answerability_check:
                reason = await self._answerability(context, task, number, trajectory, question)
            if reason is None:
                solver_task = Task((*task.identity, 1, number), question)
                attempts = await self._solve(context, solver_task, question)
        except TaskDropped as drop:
            return drop.reason, []
        if number > 0:
            # The questions of one answer are separate groups. The first one has the key of its task; the
            # others get negative keys, which cannot collide with those of tasks.
            samples = self.config.proposer.samples
            for row in attempts:
                row.group = -(group_of(task.identity) * samples + number)
        return reason, attempts

    async def _solve(self, context, task: Task, question: Question) -> list[Row]:
        """Returns the solver's rollouts on a question as rows."""
        strict = self.config.ssp.strict_format
        return await solving.solver_rows(
            context, self.config, 'solver', task, question, strict_format=strict
        )

    def _rule_gate(self, trajectory: Trajectory, question: Question) -> str | None:
        """Returns why a question is rejected ('unfinished', 'format', or a code of `ssp_gate`); else None."""
        if trajectory.finish != 'answer':
            return 'unfinished'
        texts = [turn.text for turn in trajectory.turns]
        if self.config.ssp.strict_format and not format_scores.ssp_format(texts):
            return 'format'
        # Queries of failed searches do not count.
        queries = []
        for call in trajectory.calls_of('search'):
            if call.error is None:
                queries += call.queries
        thresholds = _CODE_GATE if self.config.ssp.code_gate else {}
        text = question.text or None
        return format_scores.ssp_gate(text, list(question.answers), queries, **thresholds)

    async def _answerability(
        self, context, task: Task, number: int, trajectory: Trajectory, question: Question
    ) -> str | None:
        """Asks the checker to answer the question from the passages that the proposer read, mixed with noise.

        Returns:
          None if it gives the accepted answer, else 'unanswerable'.

        Raises:
          TaskDropped: the prompt is too long even without noise, or the judge failed.
        """
        hidden: HiddenAnswer = task.payload
        read_passages = retrieved_passages(trajectory)
        read_ids = {passage['id'] for passage in read_passages}
        rng = identity_rng(self.config.seed, *task.identity, 2)
        noise = await self._noise(context, hidden, read_ids, rng)
        # A server is no role, and its limit is not known here.
        checker = 'judge' if self.config.ssp.checker == 'judge' else 'checker'
        limit = context.roles[checker].prompt_tokens if checker in context.roles else None
        while True:
            # Shuffled: the position of a passage must not show whether its proposer read it.
            material = read_passages + noise
            shuffled = [material[index] for index in rng.permutation(len(material))]
            # The layout does not follow config.tools.syntax: the built-in checkpoint was trained on this prompt.
            documents = passages_text([shuffled], 'search_r1')
            fields = dict(documents=documents, question=question.text)
            # If the prompt is too long, noise is dropped, one passage at a time. If it is too long even
            # without noise, `ask` raises below.
            if not noise or limit is None:
                break
            ids = context.prompt_ids(checker, 'checker', **fields)
            if len(ids) <= limit:
                break
            noise = noise[:-1]
        identity = (*task.identity, 2, number)
        if checker == 'judge':
            answer = await context.judge.answer(identity, question.text, documents)
        else:
            # Temperature 0, because acceptance must not depend on a lucky sample.
            (reply,) = await context.ask('checker', identity, 1, 0.0, **fields)
            answer = final_answer(reply)
        identity = (*task.identity, 3, number)
        value = await score(context, self.config.reward.answer, identity, question, answer)
        # A missing verdict rejects the question. SSP's code accepts one whose check raises an error, so a
        # failing judge admits unchecked questions.
        return None if value is not None and value >= 0.5 else 'unanswerable'

    async def _noise(
        self, context, hidden: HiddenAnswer, read_ids: set, rng: np.random.Generator
    ) -> list[Json]:
        """Waits for passages of the episodes in `hidden.noise_from`; returns those that are mixed in.

        They are `ssp.noise` single ones, each drawn at random from another episode, or all of every episode.
        """
        is_single = self.config.ssp.noise_unit == 'document'
        noise: list[Json] = []
        # A passage that both proposers read is evidence and not noise.
        known_ids = set(read_ids)
        for identity in hidden.noise_from:
            passages = await context.hosts.await_shared(tuple(identity))
            unread = [passage for passage in passages if passage['id'] not in known_ids]
            if is_single and unread:
                unread = [unread[rng.integers(len(unread))]]
                # Two neighbours may have read the same passage; it is mixed in once.
                known_ids.add(unread[0]['id'])
            noise += unread
            if is_single and len(noise) == self.config.ssp.noise:
                break
        return noise

    def _proposer_row(
        self,
        task: Task,
        trajectory: Trajectory,
        question: Question,
        reason: str | None,
        attempts: list[Row],
    ) -> Row:
        """Returns the row of a proposal with its reward.

        Args:
          reason: reason code of a rejected question, or None.
          attempts: the solver's rows on the question; [] if it was rejected.
        """
        settings = self.config.reward
        # Attempts without a score are left out of the solve rate and do not count as failures.
        scores = [row.info.score or 0.0 for row in attempts if row.drop is None]
        info = RowInfo(question=question, valid=reason is None, rejected=reason)
        reward = self.config.ssp.invalid_reward
        drop = reason if reason in solving.LOST else None
        if reason is None:
            info.solve_count = sum(value >= 0.5 for value in scores)
            if scores:
                # The difficulty 'one_minus' is SSP's 1 − solve rate (alg. 1): zero-sum with the solver's reward.
                reward = rewards.difficulty(
                    sum(scores), len(scores), settings.difficulty, settings.target
                )
            else:
                # No attempt has a score: the value of the question is unknown.
                drop = attempts[0].drop
        group = group_of(task.identity)
        return Row('proposer', trajectory, reward, group, {'hard': reward}, drop, info)
