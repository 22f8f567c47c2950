"""Trains the start of `configs/drzero.py:mini`: `python -m tools.checkpoints.base_hops`.

    python -m tools.checkpoints.base_hops [--out FOLDER] [--seed 0]

It differs from `mini/base` in two ways. Every second proposal of its demonstrations omits the question or the answer,
so that a reward for the format has something to teach. And its solver makes fewer errors: from `mini/base`, it is
chance which seeds learn to search a second time, and that hides what the proposals are worth.

Training starts from the weights of `mini/clean` and is supervised, on the demonstrations of `demos.py`, in one
stage with deliberate errors, which gives `hops/base/`. The folder also contains its training log and the hashes of its
files. The same seed on the same machine gives the same files.
"""

from __future__ import annotations

import dataclasses

from tools.checkpoints import base_model
from tools.checkpoints import stages as base_stages

_BASE = base_stages.STAGES[-1]
_ERRORS = dataclasses.replace(_BASE.errors, early_answer=0.35, wrong_fact=0.5, malformed=0.5)

STAGES = (dataclasses.replace(_BASE, name='hops', folder='base', errors=_ERRORS),)


def main() -> None:
    """Parses the command line and trains."""
    folder = base_model.MINI / 'hops'
    base_model.command('base_hops', __doc__, folder, STAGES, start=base_model.CLEAN)


if __name__ == '__main__':
    main()
