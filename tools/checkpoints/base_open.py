"""Trains the checkpoint for open tasks (SCOPE): `python -m tools.checkpoints.base_open [--out FOLDER] [--seed 0]`.

Training starts from the weights of `mini/base` and is supervised, in one stage, which gives `open/base/`. The folder
also contains its training log and the hashes of its files. The same seed on the same machine gives the same files.

The roles of open tasks in `demos.py`, in small shares there, are simpler. A policy trained on those fails at tasks that
name their entity by a chain. Two things differ here:

- Before it searches for the described entity, the solver states the fact that names it ('the teacher of Gumu is Lomi'),
  as it does in answers to questions. Without this step it read the value of another relation or repeated the search.
- Chains have up to three steps, as in the held-out tasks. The policy answered longer chains than it was trained on like
  questions, with the name instead of the description.
"""

from __future__ import annotations

import functools

from tools.checkpoints import base_model, demos
from tools.checkpoints.demo import Role
from tools.checkpoints.stages import Stage

# Shares of 0, 1, 2 and 3 steps between the first entity and the described one.
_SOLVER_STEPS = (0.15, 0.3, 0.3, 0.25)
_CHALLENGER_STEPS = (0.1, 0.45, 0.45)
ROLES = demos.ROLES | {
    'challenger': Role(0.04, functools.partial(demos.challenger, hops=_CHALLENGER_STEPS)),
    'task_solver': Role(
        0.04, functools.partial(demos.task_solver, hops=_SOLVER_STEPS, is_stated=True)
    ),
}
STAGES = (
    # Mostly open tasks; small shares of the other roles, so that answering questions and reading stay.
    Stage(
        'open',
        steps=320,
        decay_share=0.5,
        folder='base',
        shares={
            'challenger': 0.25,
            'task_solver': 0.45,
            'retelling': 0.06,
            'reading': 0.04,
            'solver': 0.14,
            'proposer': 0.06,
        },
    ),
)


def main() -> None:
    """Parses the command line and trains."""
    args = base_model.parser('base_open', __doc__, 'open').parse_args()
    base_model.build(args.out, args.seed, STAGES, ROLES, start=base_model.BASE)


if __name__ == '__main__':
    main()
