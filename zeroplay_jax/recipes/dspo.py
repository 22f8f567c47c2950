"""DSPO: one agent on given questions, sequence-level policy gradients, and a dynamic filter.

There is no self-play: questions come from a file, or from the training worlds, and count as external. A
question whose rollouts all earn the same has no gradient. With `filter_groups` the engine leaves it out and draws
further rounds of questions, each a whole batch, until enough are informative: `fill_rounds` rounds at most, the first
one included (DSPO eq. 9).
"""

from __future__ import annotations

import logging

from zeroplay_jax.objectives.registry import BUILT_IN_LOSSES
from zeroplay_jax.recipes import solving
from zeroplay_jax.recipes.datasets import (
    dataset_tasks,
    training_questions,
)
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Outcome


class Recipe(RecipeBase):
    """A solver on given questions."""

    input_files = ('questions',)
    # A prepared corpus (NQ, HotpotQA, …) comes without questions to train on.
    needed_file = 'questions'
    has_pool = False
    filterable_roles = ('solver',)

    def __init__(self, config: Config, library):
        super().__init__(config, library)
        self._questions = training_questions(config, library)
        # This is a warning and not an error: strictly on-policy DSPO is a valid baseline, in which the clip
        # settings have no effect.
        properties = BUILT_IN_LOSSES.get(config.solver.loss)
        has_sequence_ratio = properties is not None and not properties.ratio_per_token
        if has_sequence_ratio and config.solver.minibatches == 1:
            logging.warning(
                'config.solver.minibatches=1: with one update per batch the sequence ratio is 1 and '
                'never clipped; DSPO is then a per-sequence REINFORCE. Give 2 or more to use it.'
            )

    @classmethod
    def roles(cls, config: Config):
        """Returns the only role."""
        return (RoleSpec('solver', 'solver'),)

    def phases(self):
        """Returns one phase of solver steps per iteration."""
        steps = self.config.solver.steps
        # Several phases rather than one: surplus groups of the filter are discarded between them,
        # which bounds the age of the rollouts that are trained on.
        iterations = range(self.config.schedule.iterations)
        return [Phase('solver', steps, ('solver',), iteration) for iteration in iterations]

    def tasks(self, step, pool, cursor):
        """Returns tasks on the next questions of the dataset."""
        return dataset_tasks(self.config, self._questions, step, cursor)

    async def episode(self, context, step, task):
        """Runs the solver on one question; returns all rollouts as rows."""
        rows = await solving.solver_rows(context, self.config, 'solver', task, task.payload)
        return Outcome(rows)
