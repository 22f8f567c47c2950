"""π-Play: Dr. Zero's game, in which a teacher that knows how a question was made teaches the solver.

The examiner (proposer) records for every question its path from a document to the answer. A
teacher, an exponential moving average of the solver, reads the question with that path and
predicts every token that the solver wrote (π-Play eqs. 9 and 11). The solver learns from its reward
and from the teacher (eqs. 7 and 8).

Distillation belongs to the engine: `solver.distill_top_k` turns it on. Otherwise this recipe differs from Dr. Zero
only in always recording the path.
"""

from __future__ import annotations

from zeroplay_jax.recipes import drzero


class Recipe(drzero.Recipe):
    """Dr. Zero with paths in all questions, also for ablations that do not distil."""

    distillable_roles = ('solver',)
    # The pool's records must be the same with and without distillation, or the ablation would compare different runs.
    always_records_path = True
