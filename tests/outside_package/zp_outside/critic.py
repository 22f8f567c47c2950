"""A game of three: a proposer asks, a solver drafts answers, a critic reads a draft and answers anew.

All three are trained in every step. The proposer is paid for questions that the solver sometimes answers, the solver
for right answers, and the critic for right answers, more where the draft was wrong.
"""

import asyncio
from typing import Annotated

from pydantic import Field

from zeroplay_jax.objectives import rewards
from zeroplay_jax.recipes import proposing, solving
from zeroplay_jax.recipes.datasets import DocumentSampler, simultaneous
from zeroplay_jax.selfplay.answers import final_answer, group_of, score
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.settings.kinds import NonNegativeFloat, Problem, Section
from zeroplay_jax.types import Outcome, Row, RowInfo, Task, TaskDropped

# Groups of one document: its proposals, then the drafts of each proposal.
_GROUPS_PER_DOCUMENT = 1 << 10
_DRAFTS_PER_PROPOSAL = 8


class Settings(Section):
    """Settings of the game with a critic."""

    drafts: Annotated[int, Field(ge=1, le=_DRAFTS_PER_PROPOSAL)] = 1
    """Drafts per question that the critic reads."""
    improvement: NonNegativeFloat = 0.5
    """Bonus of the critic for a right answer where the draft was wrong."""
    search_budget: Annotated[int, Field(ge=1)] = 2
    """Searches per rollout."""


class Recipe(RecipeBase):
    """Proposer, solver and critic with separate weights."""

    settings = {'critic_game': Settings}
    prompts = {
        'proposer': 'Write a question of {hops} hops.\nDocument: {document}',
        'critic': 'Question: {question}\nDraft: {draft}',
    }

    def __init__(self, config, library):
        super().__init__(config, library)
        self.documents = DocumentSampler(config, library)

    @classmethod
    def roles(cls, config):
        return (
            RoleSpec('proposer', 'proposer'),
            RoleSpec('solver', 'solver'),
            RoleSpec('critic', 'critic'),
        )

    @classmethod
    def check(cls, config):
        drafts = config.critic_game.drafts
        if drafts > config.solver.samples:
            text = (
                f'the solver writes {config.solver.samples} (solver.samples); give at most as many'
            )
            yield Problem('critic_game.drafts', text)

    def phases(self):
        return simultaneous(
            self.config, self.config.proposer.steps, ('proposer', 'solver', 'critic')
        )

    def tasks(self, step, pool, cursor):
        # One round of documents per step; dropped ones are not replaced.
        if cursor.round > 0:
            return []
        return self.documents.tasks(step, self.config.proposer.batch)

    async def episode(self, context, step, task):
        samples = self.config.proposer.samples
        proposals = await proposing.propose(context, 'proposer', task, samples, show_document=True)
        games = [self._game(context, task, number, p) for number, p in enumerate(proposals)]
        rows = []
        for game_rows in await asyncio.gather(*games):
            rows += game_rows
        return Outcome(rows)

    async def _game(self, context, task, number, proposal):
        """The rows of all roles for one proposal."""
        row = proposing.proposal_row('proposer', task, proposal)
        # All roles share one number space: every group of the step needs a key of its own.
        row.group = group_of(task.identity) * _GROUPS_PER_DOCUMENT
        row.reward = self.config.reward.format_weight * proposal.format['raw']
        if proposal.rejected:
            return [row]
        question = proposing.question_record(task, proposal)
        # The identity ending in 0 is the proposer's own request.
        attempt = Task((*task.identity, number + 1), question)
        try:
            drafts = await solving.solver_rows(context, self.config, 'solver', attempt, question)
        except TaskDropped as drop:
            # The question is too long to be asked; the proposal still counts in its group.
            row.info.rejected = drop.reason
            return [row]
        solved = sum(draft.reward for draft in drafts)
        row.reward += rewards.difficulty(solved, len(drafts), self.config.reward.difficulty)
        first_group = row.group + 1 + number * (1 + _DRAFTS_PER_PROPOSAL)
        for draft in drafts:
            draft.group = first_group
        reviews = [
            self._reviews(context, attempt, index, draft, first_group + 1 + index)
            for index, draft in enumerate(drafts[: self.config.critic_game.drafts])
        ]
        rows = [row, *drafts]
        for review_rows in await asyncio.gather(*reviews):
            rows += review_rows
        return rows

    async def _reviews(self, context, attempt, index, draft, group):
        """The critic's rollouts on one draft."""
        question = attempt.payload
        identity = (*attempt.identity, index + 1)
        try:
            trajectories = await context.ask(
                'critic',
                identity,
                self.config.critic.samples,
                question=question.text,
                draft=final_answer(draft.trajectory) or 'none',
            )
        except TaskDropped:
            # A draft too long for the critic's prompt is not reviewed.
            return []
        rows = []
        for trajectory in trajectories:
            answer = final_answer(trajectory)
            value = await score(context, self.config.reward.answer, identity, question, answer)
            bonus = self.config.critic_game.improvement * value * (1 - draft.reward)
            info = RowInfo(question=question, answer=answer, score=value)
            parts = {'right': value, 'improvement': bonus}
            rows.append(Row('critic', trajectory, value + bonus, group, parts, info=info))
        return rows
