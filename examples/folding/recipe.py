"""A solver that replaces what it has read by its own summary whenever its turns are used up.

After Context-Folding (arXiv 2510.11967) and AREX (arXiv 2607.21461). One rollout has several contexts: the one that it
searched in, the same one with the summary at its end, and the next one, which begins with the summary.
"""

import asyncio

from zeroplay_jax.recipes import dspo
from zeroplay_jax.selfplay.answers import final_answer, group_of, score
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.settings.kinds import PositiveInt, Section
from zeroplay_jax.types import Outcome, Row, RowInfo, TaskDropped

SUM_UP = 'Sum up in a few words what you know about the question.'
GO_ON = 'Go on with the question.'


class Settings(Section):
    """Settings of the folds."""

    folds: PositiveInt = 2
    """Most summaries of a rollout."""


class Recipe(dspo.Recipe):
    """A solver on given questions, whose context folds."""

    settings = {**dspo.Recipe.settings, 'folding': Settings}

    @classmethod
    def roles(cls, config):
        """Returns the solver and, without tools, the same weights that write its summaries."""
        summariser = RoleSpec(
            'summariser', 'solver', terminal_tags=('summary',), tools=(), weights_from='solver'
        )
        return (*super().roles(config), summariser)

    async def episode(self, context, step, task):
        """Runs the rollouts of one question; returns them as rows."""
        samples = range(self.config.solver.samples)
        rollouts = [
            self.rollout(context, (*task.identity, sample), task.payload) for sample in samples
        ]
        rows = []
        for sample, rollout in enumerate(await asyncio.gather(*rollouts)):
            answer = final_answer(rollout)
            metric = self.config.reward.answer
            identity = (*task.identity, sample)
            value = await score(context, metric, identity, task.payload, answer)
            info = RowInfo(question=task.payload, answer=answer, score=value)
            drop = 'ungraded' if value is None else None
            reward = value or 0.0
            row = Row('solver', rollout, reward, group_of(task.identity), {metric: reward}, drop)
            row.info = info
            rows.append(row)
        return Outcome(rows)

    async def answer(self, context, question, identity):
        """Answers in evaluations as in training."""
        return await self.rollout(context, identity, question)

    async def rollout(self, context, identity, question):
        """Returns one rollout, folded as often as it needs and may."""
        (rollout,) = await context.ask('solver', (*identity, 0), question=question.text)
        for fold in range(1, self.config.folding.folds + 1):
            if rollout.finish != 'turns':
                break
            try:
                summary = await context.go_on(
                    'summariser', (*identity, fold, 0), rollout, note=SUM_UP
                )
            except TaskDropped:
                # The slot is full: the rollout ends as it is.
                break
            last = len(summary.turns) - 1
            rollout = await context.go_on(
                'solver', (*identity, fold, 1), summary, keep=[last], note=GO_ON
            )
        return rollout
