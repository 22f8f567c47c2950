"""Trains a start that was shown two hops: `python -m tools.checkpoints.base_parts [--out FOLDER] [--variant NAME]`.

Its roles were shown chains of at most two hops, without errors; parts of their work, each under a prompt of its own,
were shown with up to six (`parts.py`). The parts come first, and few of them stay beside the roles: how much of
restating and of walking to a goal stays in the last stage decides how far the solver reaches beyond what it was shown
(greedy exact match on 60 questions per hop count, one seed each). With most of the parts last it needs no self-play
(`--variant 'parts last'`: .85 with three and four hops). Without walking, or without asking, self-play
teaches nothing (seed 0 each, benchmarks/results/starts.tsv).

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

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from tools.checkpoints import base_model, parts
from tools.checkpoints.demo import FORMS, Role, forms
from tools.checkpoints.stages import Stage

LAYERS = 4
# Stages, and the roles of their mixtures.
Setting = tuple[tuple[Stage, ...], dict[str, Role]]
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


def _without(*names: str) -> Setting:
    """Returns the stages and roles without some parts; the shares of the others grow in proportion."""
    stages = []
    for stage in STAGES:
        shares = {name: share for name, share in stage.shares.items() if name not in names}
        stages.append(dataclasses.replace(stage, shares=shares))
    roles = {name: role for name, role in parts.ROLES.items() if name not in names}
    return tuple(stages), roles


def _without_redundancy() -> Setting:
    """Returns the stages and roles without redundant searches in the demonstrations."""
    roles = dict(parts.ROLES)
    for name in ('solver', 'solver_with_path', 'proposer'):
        generator: Any = roles[name].write
        write = functools.partial(generator, redundant=0.0)
        roles[name] = dataclasses.replace(roles[name], write=write)
    return STAGES, roles


def _parts_last() -> Setting:
    """Returns an order in which 200 steps of the roles alone come before the parts of the second stage.

    Every role and part takes as many steps as in STAGES; rates and weights are those of the last stage.
    """
    copying, walking, last = STAGES
    alone = 200
    role_shares = {name: role.share for name, role in parts.ROLES.items()}
    roles_alone = {name: share for name, share in role_shares.items() if name not in walking.shares}
    # Name → steps that it takes of a stage.
    counts = _steps_of(last.steps, role_shares)
    for name, steps in _steps_of(walking.steps, walking.shares).items():
        counts[name] += steps
    for name, steps in _steps_of(alone, roles_alone).items():
        counts[name] -= steps
    first = dataclasses.replace(
        last, steps=alone, shares=roles_alone, decay_share=0.0, saved=False, folder=''
    )
    steps = last.steps + walking.steps - alone
    decay_share = last.decay_share * last.steps / steps
    second = dataclasses.replace(
        last, name='roles and parts', steps=steps, shares=counts, decay_share=decay_share
    )
    return (copying, first, second), parts.ROLES


def _steps_of(steps: int, shares: Mapping[str, float]) -> dict[str, float]:
    """Returns name → its share of the steps."""
    total = sum(shares.values())
    return {name: steps * share / total for name, share in shares.items()}


# Starts that lack one thing, or have the parts last (benchmarks/results/starts.tsv); '' is the start of the package.
VARIANTS: dict[str, Callable[[], Setting]] = {
    '': lambda: (STAGES, parts.ROLES),
    'no restating': lambda: _without('restate', 'resolve'),
    'no asking': lambda: _without('ask', 'ask_at_end'),
    'no walking': lambda: _without('walk_to_goal', 'walk', 'walk_back', 'trace'),
    'no redundant searches': _without_redundancy,
    'parts last': _parts_last,
}


def main() -> None:
    """Parses the command line and trains."""
    FORMS.update(forms('numbered'))
    out = base_model.MINI / 'parts'
    parser = base_model.make_parser(
        'tools.checkpoints.base_parts', __doc__, 'walking/ and base/', out
    )
    parser.add_argument(
        '--variant',
        choices=VARIANTS,
        default='',
        help='a start that lacks one thing, or with parts last',
    )
    args = parser.parse_args()
    if args.variant and args.out == out:
        parser.error(f'--variant needs --out: {out} is the start of the package')
    stages, roles = VARIANTS[args.variant]()
    base_model.build(args.out, args.seed, stages, roles, LAYERS, len(parts.ROLE_HOPS))


if __name__ == '__main__':
    main()
