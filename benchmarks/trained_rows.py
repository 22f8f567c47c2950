"""Rows for the update benchmarks."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from zeroplay_jax.types import POLICY, PROMPT, Row, Trajectory


def trained_row(
    number: int, tokens: Int32[np.ndarray, ' tokens'], logp: float, advantage: float
) -> Row:
    """Returns a row of role 'policy' in which every token but the first is trained on.

    Args:
      number: identity of the rollout.
      tokens: token ids.
      logp: log-prob of every trained token under the old policy, in nats.
      advantage: of the row.
    """
    source = np.full(len(tokens), POLICY, np.int8)
    # No token before the first one predicts it, so it is not trained on.
    source[0] = PROMPT
    logps = np.where(source == POLICY, logp, 0.0).astype(np.float32)
    trajectory = Trajectory(
        tokens,
        source,
        logps,
        turns=(),
        finish='eos',
        weights='policy',
        version=0,
        identity=(number,),
    )
    return Row('policy', trajectory, reward=0.0, group=0, advantage=advantage)
