"""Trains a start that was shown two hops: `python -m tools.checkpoints.base_parts [--out FOLDER] [--seed 0]`.

Its roles were shown chains of at most two hops, without errors; parts of their work, each under a prompt of its own,
were shown with up to six (`parts.py`). The parts come first: added to a policy that has learnt the roles, they would
not change how it plays them. How much of them stays in the last stage decides how far the solver reaches beyond what it
was shown (greedy exact match on 60 questions per hop count, one seed each):

    share of the parts    1 hop     2     3     4     5     6
    0                      1.00   .98   .05   .05   .02   .08
    .05                     .98  1.00   .28   .13   .18   .13
    .33                    1.00  1.00   .93   .48   .38   .33

These rows had other prompts of `walk` and `walk_back`, and a last stage of 320, 300 and 400 steps; that of the first
row had 6 rows of 512 tokens. With the prompts and shares of today nothing was trained to the end, and no folder is in
the repository.

All randomness derives from (seed, stage, step), and stages have a fixed number of steps: the same seed on the same
machine gives the same files.
"""

from __future__ import annotations

from tools.checkpoints import base_model, parts
from tools.checkpoints.stages import Stage

LAYERS = 4
STAGES = (
    Stage(
        # Short rows: a passage, a question.
        'copying',
        steps=900,
        rows=11,
        tokens=96,
        adam_rate=5e-3,
        decay_share=0.0,
        context_weight=0.25,
        shares={'copy': 0.34, 'passage': 0.36, 'restate': 0.1, 'ask': 0.1, 'resolve': 0.1},
    ),
    Stage(
        # Long rows: six searches and what they return.
        'walking',
        steps=260,
        rows=4,
        tokens=768,
        adam_rate=4e-3,
        decay_share=0.0,
        context_weight=0.2,
        saved=True,
        shares={
            'reading': 0.2,
            'retelling': 0.15,
            'restate': 0.1,
            'ask': 0.1,
            'walk_to_goal': 0.2,
            'walk': 0.15,
            'walk_back': 0.05,
            'trace': 0.05,
        },
    ),
    # All roles with the shares of `parts.ROLES`.
    Stage(
        'roles',
        steps=300,
        rows=4,
        tokens=768,
        adam_rate=3e-3,
        decay_share=0.35,
        saved=True,
        folder='base',
    ),
)


def main() -> None:
    """Parses the command line and trains."""
    out = base_model.MINI / 'parts'
    args = base_model.parse_arguments(
        'tools.checkpoints.base_parts', __doc__, 'walking/ and base/', out
    )
    base_model.build(args.out, args.seed, STAGES, parts.ROLES, LAYERS)


if __name__ == '__main__':
    main()
