"""The example of a league, which also logs its snapshots and baselines and answers with a draft of its past."""

from examples.league import recipe
from zeroplay_jax.selfplay.answers import final_answer


class Recipe(recipe.Recipe):
    async def episode(self, context, step, task):
        outcome = await super().episode(context, step, task)
        for row in outcome.rows:
            row.info.details['versions'] = dict(context.episodes.versions)
            row.info.details['baselines'] = dict(self.baselines)
            # All rewards of a question differ, so that every step trains and moves the baselines.
            cost = row.trajectory.policy_tokens / 1000 + row.trajectory.identity[-1] / 100
            row.parts['beats'] -= cost
            row.reward -= cost
        return outcome

    async def answer(self, context, question, identity):
        (draft,) = await context.ask('past', (*identity, 0), question=question.text)
        if final_answer(draft):
            return draft
        (answer,) = await context.ask('solver', (*identity, 1), question=question.text)
        return answer
