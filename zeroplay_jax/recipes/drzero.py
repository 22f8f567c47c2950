"""Dr. Zero: a proposer asks about documents, a solver answers by searching, and they are trained in turns.

An iteration trains the proposer against the frozen solver, generates a set of questions, and trains
the solver on them. The proposer is rewarded for questions that the solver answers sometimes but not
always (Dr. Zero eq. 4) and for their form. Its advantages are relative to all proposals of the same
hop count (HRPO, eq. 3), the solver's to all answers to the same question (GRPO, eq. 5).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Literal

from zeroplay_jax.objectives import rewards
from zeroplay_jax.recipes import proposing, solving
from zeroplay_jax.recipes.datasets import (
    DocumentSampler,
    alternate,
    check_generation,
    tasks_in_turns,
)
from zeroplay_jax.recipes.proposing import Proposal
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.settings.kinds import Problem, Section
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Outcome, Question, Row, Task, TaskDropped

# `check_hop_groups` suggests no larger `proposer.batch`.
_LARGEST_SUGGESTED_BATCH = 10_000
# Words of a question of the pool, which is cut, as in Dr. Zero's code.
_QUESTION_WORDS = 50


class Settings(Section):
    """Settings of Dr. Zero and π-Play."""

    group: Literal['hop', 'prompt'] = 'hop'
    """The proposer's advantage groups: hop counts (HRPO) or prompts (GRPO)."""
    labels: Literal['proposer', 'majority'] = 'proposer'
    """What counts as right: the proposer's answer, or the most frequent one of the solver's rollouts (SQLM, R-Zero)."""
    separate_format: bool = False
    """True (paper): the parts of the form count one by one, and questions that contain their answer are asked. False
    (code): all or nothing, and they are not asked."""


class Recipe(RecipeBase):
    """Proposer and solver with separate weights.

    Attributes:
      documents: what tasks on documents are drawn from (`datasets.DocumentSampler`).
      always_records_path: whether questions of the pool have their construction path also if the solver does not
        distil.
    """

    settings = {'drzero': Settings}
    further_prompts = (*RecipeBase.further_prompts, 'proposer.without_document')
    input_files = ('documents',)
    filterable_roles = ('solver',)
    always_records_path = False

    def __init__(self, config: Config, library):
        super().__init__(config, library)
        self.documents = DocumentSampler(config, library, self.phases)

    @classmethod
    def roles(cls, config: Config):
        """Returns two trained roles; under HRPO the proposer's advantage groups span prompts."""
        by_hop = config.drzero.group == 'hop'
        return (
            RoleSpec('proposer', 'proposer', groups_span_prompts=by_hop),
            RoleSpec('solver', 'solver'),
        )

    @classmethod
    def check(cls, config: Config):
        """Refuses hop counts with a single proposal, a window without measured solve rates, and mixed labels."""
        yield from check_hop_groups(config)
        yield from check_generation(config)
        if config.drzero.labels == 'majority' and config.solver.distill_top_k:
            text = "the teacher would read the proposer's answer, which is not the label; set it to proposer"
            yield Problem('drzero.labels', text)
        # Without measured solve rates the window would accept all questions.
        is_full_window = tuple(config.pool.window) == (0.0, 1.0)
        if not is_full_window and not config.pool.measure:
            text = 'solve rates are not measured; give pool.measure solver rollouts per question'
            yield Problem('pool.window', text)

    def phases(self):
        """Returns iterations × (proposer, generate, solver)."""
        return alternate(self.config)

    def tasks(self, step, pool, cursor):
        """Returns tasks on documents, with hop counts in the exact ratio; for the solver, on questions of the pool."""
        return tasks_in_turns(self.config, self.documents, step, pool, cursor)

    async def episode(self, context, step, task):
        """Runs one task: proposals if the phase trains the proposer, a question for the pool if it trains no role, or
        answers of the solver."""
        if 'proposer' in step.phase.trains:
            return await self._propose(context, task)
        if not step.phase.trains:
            return await self._generate(context, task)
        question: Question = task.payload
        # With labels='majority', a question of the pool has no answer unless it was measured.
        rows = await solving.solver_rows(
            context, self.config, 'solver', task, question, by_majority=not question.answers
        )
        return Outcome(rows)

    async def proposals(self, context, task: Task, samples: int) -> list[Proposal]:
        """Returns `samples` proposals on the document of a task, with the recipe's settings."""
        return await proposing.propose(
            context,
            'proposer',
            task,
            samples,
            show_document=self.config.schedule.initial_document,
            separate_format=self.config.drzero.separate_format,
        )

    async def _propose(self, context, task: Task) -> Outcome:
        """Runs a task of a phase that trains the proposer: returns proposals with rewards for difficulty and form."""
        proposals = await self.proposals(context, task, self.config.proposer.samples)
        pending = []
        for number, proposal in enumerate(proposals):
            identity = (*task.identity, number)
            question = proposal.rejected or self._asked_question(proposal)
            pending.append(self._measure(context, identity, question, self.config.reward.solves))
        # All proposals are attempted concurrently, so that the slots stay busy.
        measured_questions = await asyncio.gather(*pending)
        pairs = zip(proposals, measured_questions, strict=True)
        return Outcome([self._proposal_row(task, *pair) for pair in pairs])

    def _proposal_row(
        self, task: Task, proposal: Proposal, measured: tuple[Question, int, int] | str
    ) -> Row:
        """Returns the row of a proposal with its reward.

        Args:
          measured: what `_measure` returned for the question, with `reward.solves` rollouts.
        """
        settings = self.config.reward
        row = proposing.proposal_row('proposer', task, proposal)
        # Parts of the form are rewarded although others are missing, if the score has separate parts; otherwise it is 0
        # then.
        format_reward = settings.format_weight * proposal.format['raw']
        row.parts['format'] = format_reward * proposal.earns_form
        row.parts['difficulty'] = 0.0
        if isinstance(measured, str):
            row.info.rejected = measured
            row.drop = measured if measured in solving.LOST else None
        else:
            question, solve_count, attempts = measured
            # What counted as right, for the logs; the proposer's own answer is in the text of its rollout.
            record = proposing.question_record(task, proposal)
            row.info.question = dataclasses.replace(record, answers=question.answers)
            row.info.solve_count = solve_count
            row.parts['difficulty'] = rewards.difficulty(
                solve_count, attempts, settings.difficulty, settings.target
            )
        # Dr. Zero eq. 4: difficulty, which is 0 if all or none of the rollouts solve the question, plus format.
        row.reward = row.parts['format'] + row.parts['difficulty']
        if self.config.drzero.group == 'hop':
            # HRPO (eq. 3) compares proposals of one hop count, because higher hop counts earn less.
            row.group = task.payload.hops
        return row

    def _asked_question(self, proposal: Proposal) -> Question:
        """Returns the question that a proposal puts to the solver, without answers if the majority decides.

        Args:
          proposal: has a question and an answer, i.e. it was not rejected.
        """
        # `str` tells the type checker that neither is None.
        answers = () if self.config.drzero.labels == 'majority' else (str(proposal.answer),)
        return Question(str(proposal.question), answers)

    async def _measure(
        self, context, identity: tuple[int, ...], question: Question | str, attempts: int
    ) -> tuple[Question, int, int] | str:
        """Returns a question with its label, and how many solver rollouts are right by it, of how many that count.

        Or why nothing is known of it: it is a reason and no question, is too long for the solver, or all rollouts are
        lost (`solving.LOST`).
        """
        if isinstance(question, str):
            return question
        try:
            labelled, scored = await solving.attempts(
                context,
                self.config,
                'solver',
                (*identity, 1),
                question,
                attempts,
                by_majority=not question.answers,
            )
            return labelled, *solving.solve_count(scored)
        except TaskDropped as drop:
            # Caught here, because the other proposals on the document must stay.
            return drop.reason

    async def _generate(self, context, task: Task) -> Outcome:
        """Runs a task of a phase that trains no role: returns at most one question for the pool.

        With `pool.measure`, the question's solve rate must lie in `pool.window`.
        """
        settings = self.config.pool
        proposals = await self.proposals(context, task, settings.samples)
        rows = [proposing.proposal_row('proposer', task, proposal) for proposal in proposals]
        # Chosen by form and not by difficulty, as in Dr. Zero's code: difficulty would cost rollouts for every
        # proposal. Those that can be asked are better, then those with a better form. On ties the first is taken.
        best = max(proposals, key=lambda each: (each.rejected is None, each.format['raw']))
        if best.rejected:
            return Outcome(rows, drop=best.rejected)
        words = str(best.question).split()[:_QUESTION_WORDS]
        asked = dataclasses.replace(self._asked_question(best), text=' '.join(words))
        question = dataclasses.replace(
            self.pool_question(task, best), text=asked.text, answers=asked.answers
        )
        if settings.measure:
            measured = await self._measure(context, task.identity, asked, settings.measure)
            if isinstance(measured, str):
                return Outcome(rows, drop=measured)
            labelled, solve_count, attempts = measured
            if not labelled.answers:
                return Outcome(rows, drop='no_majority')
            solve_rate = solve_count / attempts
            low, high = settings.window
            if not low <= solve_rate <= high:
                return Outcome(rows, drop='outside_window')
            question = dataclasses.replace(
                question, answers=labelled.answers, solve_rate=solve_rate
            )
        return Outcome(rows, questions=[question])

    def pool_question(self, task: Task, proposal: Proposal) -> Question:
        """Returns the pool's record of a question, with its construction path if the solver distils."""
        question = proposing.question_record(task, proposal)
        # A path holds whole passages; without a teacher it would only enlarge checkpoints and logs.
        if not self.config.solver.get('distill_top_k') and not self.always_records_path:
            return question
        path = proposing.path_of(
            proposal.trajectory, task.payload, question.text, proposal.answer or ''
        )
        return dataclasses.replace(question, path=path)


def check_hop_groups(config: Config) -> Iterator[Problem]:
    """Yields a batch in which some hop count has fewer than two proposals, which HRPO cannot compare."""
    proposer = config.proposer
    is_relative = proposer.baseline in ('mean', 'loo') or proposer.scale == 'std'
    # With singleton='raw' (Dr. Zero's code) the reward itself is the advantage of a lone proposal, so the
    # user has chosen to train on it without a comparison.
    if config.drzero.group != 'hop' or not is_relative or proposer.singleton == 'raw':
        return
    ratio = tuple(config.schedule.hop_ratio)
    if _smallest_hop_group(ratio, proposer.batch, proposer.samples) >= 2:
        return
    problem = f'a hop count of schedule.hop_ratio={ratio} gets fewer than 2 rollouts to compare'
    fix = 'choose less uneven shares'
    # Batch sizes are tried one by one: `stratify` rounds, so there is no simple formula.
    for batch in range(proposer.batch, _LARGEST_SUGGESTED_BATCH):
        if _smallest_hop_group(ratio, batch, proposer.samples) >= 2:
            fix = f'give {batch} or more'
            break
    yield Problem('proposer.batch', f'{problem}; {fix}, or leave the rare hop count out')


def _smallest_hop_group(ratio: tuple[float, ...], batch: int, samples: int) -> int:
    """Returns the number of proposals of the rarest hop count with a share above 0, for `batch` documents."""
    documents = rewards.stratify(ratio, batch)
    return samples * min(count for count, share in zip(documents, ratio) if share)
