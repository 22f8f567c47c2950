"""Trains a start that was shown two hops: `python -m tools.checkpoints.base_parts [--out FOLDER]`.

Its roles were shown chains of at most two hops, without errors; parts of their work, each under a prompt of its own,
were shown with up to six (`parts.py`). The parts come first, and few of them stay beside the roles: how much of
restating and of walking to a goal stays in the last stage decides how far the solver reaches beyond what it was shown
(greedy exact match on 60 questions per hop count, one seed each). With most of the parts last it needs no self-play
(.85 with three and four hops). Without walking, or without asking, self-play teaches nothing (seed 0 each,
benchmarks/results/starts.tsv; these variants can be trained from commit 21656cfd).

    restate, resolve, walk_to_goal    1 hop     2     3     4     5     6
    none                               1.00  1.00   .15   .08   .08   .08
    .0004, .0002, .0006 (these)         .98   .98   .25   .10   .08   .05
    .001, .0005, .0015                 1.00  1.00   .53   .13   .07   .03
    .002, .001, .003                   1.00   .97   .55   .22   .08   .05

A proposer whose prompt has the number of hops behind the words in which part and role differ walked one hop whatever
it was asked: of 320 questions for three or four hops, 282 were right ones of two. Thoughts that count down changed
little (1 of 32 questions for three hops was a right one of three; 5 of 32 with five times the walks). With the number
first (the prompts `numbered`), what attention reads at it is equal in both, so that the part's way of copying and
counting should fit the role from the first step: the proposer searches as often as it is asked (30 of 32), and 12 of 32
questions for three hops are right ones of three.

All randomness derives from (seed, stage, step), and stages have a fixed number of steps: the same seed on the same
machine gives the same files.
"""

from __future__ import annotations

from tools.checkpoints import base_model, parts
from tools.checkpoints.demo import FORMS, forms
from tools.checkpoints.stages import Stage

LAYERS = 4
STAGES = (
    Stage(
        # Short rows: a passage, a question.
        'copying',
        steps=1100,
        rows=11,
        tokens=96,
        adam_rate=5e-3,
        decay_share=0.0,
        context_weight=0.25,
        shares={'copy': 0.41, 'passage': 0.42, 'restate': 0.06, 'ask': 0.06, 'resolve': 0.05},
    ),
    Stage(
        # Long rows: six searches and what they return.
        'walking',
        steps=360,
        rows=4,
        tokens=768,
        adam_rate=4e-3,
        decay_share=0.0,
        context_weight=0.2,
        shares={
            'reading': 0.16,
            'retelling': 0.12,
            'restate': 0.08,
            'ask': 0.04,
            'ask_at_end': 0.07,
            'walk_to_goal': 0.2,
            'walk': 0.22,
            'walk_back': 0.06,
            'trace': 0.05,
        },
    ),
    # All roles with the shares of `parts.ROLES`.
    Stage(
        'roles',
        steps=330,
        rows=4,
        tokens=768,
        adam_rate=3e-3,
        decay_share=0.35,
        folder='base',
    ),
)


def main() -> None:
    """Parses the command line and trains."""
    FORMS.update(forms('numbered'))
    args = base_model.parser('base_parts', __doc__, 'parts').parse_args()
    base_model.build(args.out, args.seed, STAGES, parts.ROLES, LAYERS, len(parts.ROLE_HOPS))


if __name__ == '__main__':
    main()
