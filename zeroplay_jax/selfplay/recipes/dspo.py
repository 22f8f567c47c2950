"""DSPO: one agent, given questions, sequence-level policy gradients, and batches without groups that say nothing.

No self-play: questions come from a file (or, in miniature, from the training worlds) and count as outside questions.
A question whose rollouts all earn the same teaches nothing; the engine's filter leaves it out and asks on until the
batch is full (DSPO eq. 9), in the order of issue, so that quick answers are not preferred.
"""

from __future__ import annotations

from absl import logging

from zeroplay_jax.selfplay import solving
from zeroplay_jax.selfplay.corpus import Corpus
from zeroplay_jax.selfplay.engine import Draw, Phase, Step
from zeroplay_jax.selfplay.inputs import Deck, deck_tasks, questions
from zeroplay_jax.selfplay.roles import Seat, Table, TaskDropped
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import Outcome, Task

SEATS = (Seat('solver', 'solver'),)
TRAINED = ('solver',)


class Recipe:
    """The training run; `config` is the run's, `corpus` what is searched."""

    def __init__(self, config, corpus: Corpus):
        self.config, self._deck = config, Deck(questions(config, corpus), config.seed)
        if config.solver.loss == 'sequence_pg' and config.solver.minibatches == 1:
            logging.warning(
                'config.solver.minibatches=1: with one update per batch the sequence ratio is 1 and never clipped; '
                'DSPO is then a per-sequence REINFORCE. Give 2 or more to use it.'
            )

    def phases(self) -> list[Phase]:
        """Steps of one kind; iterations only number them."""
        return [
            Phase('solver', self.config.solver.steps, ('solver',), i)
            for i in range(self.config.schedule.iterations)
        ]

    def tasks(self, step: Step, pool: TaskPool, draw: Draw) -> list[Task]:
        """The next questions of the deck."""
        return deck_tasks(self.config, self._deck, step, draw)

    async def episode(self, table: Table, step: Step, task: Task) -> Outcome:
        """All rollouts on one question."""
        try:
            return Outcome(await solving.rows(table, self.config, task, task.payload))
        except TaskDropped as drop:
            return Outcome(drop=drop.reason)
