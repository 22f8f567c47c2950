"""π-Play: Dr. Zero's game, in which the way a question was made teaches its solver.

The examiner (proposer) leaves with every question the path it took from a document to the answer. A teacher, an
exponential moving average of the solver, reads the question with that path and says how it would have gone on at
every token that the solver wrote (π-Play eqs. 9 and 11); the solver learns from its reward and from the teacher
(eqs. 7 and 8).

Nothing of that is particular to this recipe: `solver.distill_top_k` turns distillation on for any game that hands a
path along with its questions, and so this one differs from Dr. Zero only in always doing so.
"""

from __future__ import annotations

from zeroplay_jax.selfplay import proposals
from zeroplay_jax.selfplay.recipes import drzero
from zeroplay_jax.types import Task

SEATS, TRAINED = drzero.SEATS, drzero.TRAINED


class Recipe(drzero.Recipe):
    """The game; its questions always carry their path, for the log and for ablations that do not distil."""

    def record(self, task: Task, proposal: proposals.Proposal) -> dict:
        """What the pool keeps of a question."""
        return proposals.record(task, proposal) | {'path': proposals.path(task, proposal)}
