"""The recipe of docs/recipes.md with a judge that learns, whose solver also earns the search that reads the answer.

Every rollout of the solver earns another amount: those of a short run are alike, and groups of equal rewards teach
nothing.
"""

import pathlib
import re

from examples.turn_credit.recipe import evidence_gains
from zeroplay_jax.types import identity_rng

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'recipes.md'
BLOCKS = re.findall(r'^```python\n(.*?)^```', PAGE.read_text(encoding='utf-8'), re.M | re.S)
names = {'__name__': __name__}
exec(next(text for text in BLOCKS if 'judge_roles =' in text), names)


class Recipe(names['Recipe']):
    turn_reward_roles = ('solver',)

    async def episode(self, context, step, task):
        outcome = await super().episode(context, step, task)
        for row in outcome.rows:
            if row.role == 'solver':
                amount = identity_rng(self.config.seed, *row.trajectory.identity).random()
                gains = evidence_gains(row.trajectory, row.info.question.answers)
                row.turn_rewards = amount * gains
                # The last turn, which is no search, is worth something, too.
                row.reward += amount
        return outcome
