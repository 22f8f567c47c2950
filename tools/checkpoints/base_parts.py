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
from tools.checkpoints.demo import FORMS
from tools.checkpoints.stages import Stage
from zeroplay_jax.rollout.prompts import Prompt

LAYERS = 4
# The roles' prompts with the number of hops before the words that differ between roles and parts: what attention reads
# at the number is then equal in both, and a number that only a part has shown works in a role. Self-play from the
# start needs them too (config.prompts).
NUMBER_FIRST = {
    'proposer': Prompt('{hops} hops. Write a question.\nDocument: {document}'),
    'proposer_from_answer': Prompt('{hops} hops. Write a question.\nAnswer: {answer}'),
    'challenger': Prompt('{hops} hops. Write a task.\nDocument: {document}'),
}
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
        saved=True,
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
        saved=True,
        folder='base',
    ),
)


def main() -> None:
    """Parses the command line and trains."""
    FORMS.update(NUMBER_FIRST)
    out = base_model.MINI / 'parts'
    args = base_model.parse_arguments(
        'tools.checkpoints.base_parts', __doc__, 'walking/ and base/', out
    )
    base_model.build(args.out, args.seed, STAGES, parts.ROLES, LAYERS)


if __name__ == '__main__':
    main()
