"""Trains the checkpoints for open tasks (SCOPE): `python -m zeroplay_jax.mini.base_open [--out FOLDER] [--seed 0]`.

Training starts from the weights of `mini/clean` and is supervised, on the demonstrations of `mini/open_demos.py`, in
two stages: demonstrations without errors, which gives `open/clean/`, an upper bound for self-play; and demonstrations
with deliberate errors (`open_demos.OpenErrors`), which gives `open/base/`, the start of self-play. Each folder also
contains its training log and the hashes of its files.

The same seed on the same machine gives the same files.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from zeroplay_jax.mini import base_model, batches, open_demos, supervised
from zeroplay_jax.mini.open_demos import OpenErrors
from zeroplay_jax.mini.stages import Stage

START = base_model.HERE / 'clean'
STAGES = (
    # Mostly open tasks; small shares of the other roles, so that answering questions and reading stay.
    Stage(
        'open',
        steps=320,
        decay_share=0.5,
        saved=True,
        folder='clean',
        errors=OpenErrors(),
        shares={
            'challenger': 0.25,
            'task_solver': 0.45,
            'retelling': 0.06,
            'reading': 0.04,
            'solver': 0.14,
            'proposer': 0.06,
        },
    ),
    # As the stage 'base' of `stages.py`: lower rates, so that some skill is unlearnt and the format is kept.
    Stage(
        'open_base',
        steps=160,
        muon_rate=0.005,
        adam_rate=5e-4,
        decay_share=0.4,
        saved=True,
        folder='base',
        errors=OpenErrors(
            early_answer=0.65,
            # The next two are rare: challengers search and state facts in the same words, and their errors give tasks
            # the rubrics of another entity.
            wrong_fact=0.2,
            early_description=0.35,
            incomplete=0.6,
            verbose=0.3,
            nameless=0.35,
        ),
        shares={
            'task_solver': 0.35,
            'challenger': 0.43,
            'solver': 0.15,
            'retelling': 0.04,
            'reading': 0.03,
        },
    ),
)


def build(out: pathlib.Path, seed: int, stages: Sequence[Stage] = STAGES) -> None:
    """Trains all stages and writes `out`/<folder> for each saved one, replacing existing folders."""
    libraries = list(
        batches.libraries(seed, 'train', base_model.LIBRARY_COUNT, base_model.WORLDS_PER_LIBRARY)
    )

    def diagnose_held_out(stage, config, params, codec):
        return base_model.diagnose(config, params, codec, seed, open_demos.ROLES, OpenErrors())

    supervised.train_checkpoints(
        stages, START, open_demos.ROLES, libraries, seed, diagnose_held_out, out, start=START
    )


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(
        prog='python -m zeroplay_jax.mini.base_open',
        description=__doc__.split('\n')[0],
        epilog='example:\n  python -m zeroplay_jax.mini.base_open --out again',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--out',
        type=pathlib.Path,
        default=base_model.HERE / 'open',
        help='folder for clean/ and base/; by default the ones of the repository are replaced',
    )
    parser.add_argument('--seed', type=int, default=0, help='seed of the episodes (0)')
    args = parser.parse_args()
    build(args.out, args.seed)


if __name__ == '__main__':
    main()
