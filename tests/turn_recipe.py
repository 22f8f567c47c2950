"""SSP whose solver also earns the search that reads the answer, as in examples/turn_credit.

Every rollout earns another amount: those of a short run are alike, and groups of equal rewards teach nothing.
"""

from examples.turn_credit.recipe import evidence_gains
from zeroplay_jax.recipes import ssp
from zeroplay_jax.types import identity_rng


class Recipe(ssp.Recipe):
    turn_reward_roles = ('solver',)

    async def episode(self, context, step, task):
        outcome = await super().episode(context, step, task)
        for row in outcome.rows:
            if row.role == 'solver':
                amount = identity_rng(self.config.seed, *row.trajectory.identity).random()
                gains = evidence_gains(row.trajectory, row.info.question.answers)
                row.turn_rewards = amount * gains
        return outcome
