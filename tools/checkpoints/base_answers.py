"""Trains the checkpoint for SSP's claims: `python -m tools.checkpoints.base_answers [--out FOLDER] [--seed 0]`.

SSP proposes questions from answers and checks them with the documents found; `mini/base` has hardly learnt either.
Training starts from the weights of `mini/clean` and is supervised, on the demonstrations of `demos.py`, in two
stages: proposals from answers and their checks, without errors; and demonstrations with deliberate errors, which gives
`answers/base/`. The folder also contains its training log and the hashes of its files.

The same seed on the same machine gives the same files.
"""

from __future__ import annotations

import dataclasses

from tools.checkpoints import base_model, demos
from tools.checkpoints import stages as base_stages
from tools.checkpoints.stages import Stage

# Fewer early answers and wrong facts than in `mini/base`. With as many, solvers hardly ever searched twice, and it was
# chance when a seed learnt to. Wrong facts that the solver is taught also spread to the checks, which have no errors.
_ERRORS = dataclasses.replace(base_stages.STAGES[-1].errors, early_answer=0.35, wrong_fact=0.5)

STAGES = (
    # To read a passage backwards, from a value to its relation and entity, takes long to learn.
    Stage(
        'proposing',
        steps=400,
        decay_share=0.5,
        shares={
            'reading': 0.05,
            'solver': 0.15,
            'proposer_from_answer': 0.5,
            'answer_from_documents': 0.3,
        },
    ),
    # Learning rates as of the stage 'base' of `stages.py`.
    Stage(
        'answers',
        steps=300,
        muon_rate=0.005,
        adam_rate=5e-4,
        decay_share=0.4,
        saved=True,
        folder='base',
        errors=_ERRORS,
        shares={
            'reading': 0.05,
            'solver': 0.3,
            'proposer_from_answer': 0.35,
            'answer_from_documents': 0.3,
        },
    ),
)


def main() -> None:
    """Parses the command line and trains."""
    base_model.main_from_clean(
        'tools.checkpoints.base_answers', __doc__, 'answers', STAGES, demos.ROLES
    )


if __name__ == '__main__':
    main()
