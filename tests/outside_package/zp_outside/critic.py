"""A game of two: a solver drafts answers, a critic reads a draft and answers anew. Both are paid for right answers."""

from typing import Annotated

from pydantic import Field

from zeroplay_jax.recipes import dspo
from zeroplay_jax.selfplay.answers import final_answer, group_of, score
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.settings.kinds import Section
from zeroplay_jax.types import Row, RowInfo

_MOST_DRAFTS = 8


class Settings(Section):
    """Settings of the game with a critic."""

    drafts: Annotated[int, Field(ge=1, le=_MOST_DRAFTS)] = 1
    """Drafts per question that the critic reads."""


class Recipe(dspo.Recipe):
    """Solver and critic with separate weights."""

    settings = {'critic_game': Settings}
    prompts = {'critic': 'Question: {question}\nDraft: {draft}'}

    @classmethod
    def roles(cls, config):
        return (*super().roles(config), RoleSpec('critic', 'critic'))

    def phases(self):
        return [Phase('solver', self.config.solver.steps, ('solver', 'critic'))]

    async def episode(self, context, step, task):
        outcome = await super().episode(context, step, task)
        for number, draft in enumerate(outcome.rows[: self.config.critic_game.drafts]):
            outcome.rows += await self._reviews(context, task, number, draft)
        return outcome

    async def _reviews(self, context, task, number, draft):
        """The critic's rollouts on one draft, which are a group."""
        # The identity of the task is that of the solver's request.
        identity, question = (*task.identity, number + 1), task.payload
        fields = {'question': question.text, 'draft': final_answer(draft.trajectory) or 'none'}
        samples = self.config.critic.samples
        rows = []
        for trajectory in await context.ask('critic', identity, samples, **fields):
            answer = final_answer(trajectory)
            value = await score(context, self.config.reward.answer, identity, question, answer)
            group = group_of(task.identity) * _MOST_DRAFTS + number
            info = RowInfo(question=question, answer=answer, score=value)
            rows.append(Row('critic', trajectory, value, group, {'right': value}, info=info))
        return rows
