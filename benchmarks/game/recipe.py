"""A proposer whose best choice is known: it picks a document, whose questions a fixed solver answers by chance.

A document is a token. The solver answers questions about token t with the probability (t mod 21)/20, independently in
each of its rollouts, so that the expected reward of a choice is a polynomial of that probability. Everything else is
the engine's: the rollout, the group, its advantages, the loss and the update.
"""

from __future__ import annotations

import numpy as np

from zeroplay_jax.objectives import rewards
from zeroplay_jax.selfplay.answers import group_of
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.types import Outcome, Row, Task, identity_key

ROLE = 'proposer'
# The solver's chances, by class of documents.
CHANCES = np.linspace(0.0, 1.0, 21)

# Names of these in metrics.
NAMES = tuple(f'chance_{chance:.2f}' for chance in CHANCES)


class Recipe(RecipeBase):
    """A trained proposer and a solver that is a die."""

    prompts = {ROLE: '?'}
    has_pool = False
    evaluated_role = ROLE

    @classmethod
    def roles(cls, config):
        """Returns the proposer, whose groups are batches: there is one number of hops."""
        return (RoleSpec(ROLE, ROLE, tools=(), groups_span_prompts=True),)

    def phases(self):
        """Returns one phase."""
        return [Phase(ROLE, self.config[ROLE].steps, (ROLE,))]

    def tasks(self, step, pool, cursor):
        """Returns one task per prompt of the batch."""
        if cursor.round:
            return []
        settings = self.config[ROLE]
        return [Task((step.number, index), {}) for index in range(settings.batch)]

    async def episode(self, context, step, task):
        """Returns the choices of one prompt with the rewards of the questions that follow."""
        reward = self.config.reward
        trajectories = await context.ask(ROLE, task.identity, self.config[ROLE].samples)
        # As in the papers: one rollout per document is compared with the batch (HRPO), several with each other.
        group = 0 if len(trajectories) == 1 else group_of(task.identity)
        rows = []
        for sample, trajectory in enumerate(trajectories):
            chosen = int(trajectory.tokens[-1]) % len(CHANCES)
            seed = identity_key(self.config.seed, (*task.identity, sample, 1))
            solved = np.random.default_rng(seed).binomial(reward.solves, CHANCES[chosen])
            score = rewards.difficulty(int(solved), reward.solves, reward.difficulty, reward.target)
            shares = {name: float(index == chosen) for index, name in enumerate(NAMES)}
            rows.append(Row(ROLE, trajectory, score, group, parts=shares))
        return Outcome(rows)
