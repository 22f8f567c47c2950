"""DSPO against earlier solvers: answers are paid relative to those of snapshots, and to a baseline that is a state."""

import asyncio

from zeroplay_jax.recipes import dspo
from zeroplay_jax.selfplay.answers import final_answer, score
from zeroplay_jax.selfplay.recipe import RoleSpec

RIVALS = ('past', 'best')


class Recipe(dspo.Recipe):
    def __init__(self, config, library):
        super().__init__(config, library)
        self.baseline = {'reward': 0.0, 'steps': 0}

    @classmethod
    def roles(cls, config):
        past = RoleSpec('past', 'solver', weights_from='solver@1')
        best = RoleSpec('best', 'solver', weights_from='solver@best')
        return (*super().roles(config), past, best)

    async def episode(self, context, step, task):
        outcome = await super().episode(context, step, task)
        asks = []
        for number, role in enumerate(RIVALS):
            asks.append(context.ask(role, (*task.identity, 1, number), question=task.payload.text))
        beaten = 0.0
        for number, (rival,) in enumerate(await asyncio.gather(*asks)):
            identity = (*task.identity, 2, number)
            beaten += await score(context, 'em', identity, task.payload, final_answer(rival))
        for row in outcome.rows:
            row.info.details['versions'] = dict(context.run.versions)
            row.info.details['baseline'] = self.baseline['reward']
            row.reward *= 1 - 0.25 * beaten + self.baseline['reward']
            # All rewards of a question differ, so that every step trains.
            row.reward -= row.trajectory.policy_tokens / 1000 + row.trajectory.identity[-1] / 100
        return outcome

    def after_step(self, step, outcomes):
        rewards = [row.reward for outcome in outcomes for row in outcome.rows]
        mean = sum(rewards) / max(len(rewards), 1)
        old = self.baseline
        self.baseline = {'reward': 0.5 * old['reward'] + 0.5 * mean, 'steps': old['steps'] + 1}

    def state(self):
        return {'baseline': self.baseline}

    def restore(self, state):
        self.baseline = state['baseline']

    async def answer(self, context, question, identity):
        (draft,) = await context.ask('past', (*identity, 0), question=question.text)
        if final_answer(draft):
            return draft
        (answer,) = await context.ask('solver', (*identity, 1), question=question.text)
        return answer
