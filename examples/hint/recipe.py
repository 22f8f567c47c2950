"""A role that writes hints, paid by how much a hint raises the solver's probability of the accepted answer.

After the hint δ of G-Zero (arXiv 2605.09959): δ = mean over the answer's tokens of log π(token | question, hint) −
log π(token | question). Nothing is sampled for it. A hint that contains the answer earns nothing.
"""

import asyncio

import numpy as np

from zeroplay_jax.objectives.answers import sub_exact_match
from zeroplay_jax.recipes import dspo
from zeroplay_jax.selfplay.answers import group_of
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.types import Outcome, Row, RowInfo

HINT = '{question} (Hint: {hint})'


class Recipe(dspo.Recipe):
    """A solver on given questions, and a role that helps it."""

    prompts = {
        'hinter': 'Write a hint, without the answer, as <hint>…</hint>. Question: {question}'
    }

    @classmethod
    def roles(cls, config):
        """Returns the solver and the role that writes hints, which has weights and a config section of its own."""
        return (*super().roles(config), RoleSpec('hinter', 'hinter', ('hint',), tools=()))

    def phases(self):
        """Returns one phase per iteration, whose steps train both roles."""
        steps = self.config.solver.steps
        iterations = range(self.config.schedule.iterations)
        return [Phase('solver', steps, ('hinter', 'solver'), number) for number in iterations]

    async def episode(self, context, step, task):
        """Runs both roles on one question; returns all rollouts as rows."""
        hinted, solved = await asyncio.gather(
            self._hints(context, task), super().episode(context, step, task)
        )
        return Outcome([*hinted, *solved.rows])

    async def _hints(self, context, task):
        question, samples = task.payload, self.config.hinter.samples
        identity = (*task.identity, 1)
        rollouts = await context.ask('hinter', identity, samples, question=question.text)
        # Of several accepted answers the first is what most people write.
        answer = question.answers[0]
        # The whole turn, so that a policy that does not know the tag yet has something to learn from.
        hints = [rollout.turns[-1].text for rollout in rollouts]
        # The first text is the question alone.
        texts = [question.text]
        texts += [HINT.format(question=question.text, hint=hint) for hint in hints]
        pending = []
        for number, text in enumerate(texts):
            pending.append(
                context.log_probs('solver', (*identity, number), [answer], question=text)
            )
        means = [float(np.mean(logp)) for (logp,) in await asyncio.gather(*pending)]
        rows = []
        for rollout, hint, mean in zip(rollouts, hints, means[1:], strict=True):
            delta = mean - means[0]
            is_paid = not sub_exact_match(hint, question.answers)
            info = RowInfo(question=question, details={'hint': hint})
            parts = {'delta': delta}
            reward = delta if is_paid else 0.0
            row = Row('hinter', rollout, reward, group_of(task.identity), parts, info=info)
            rows.append(row)
        return rows
