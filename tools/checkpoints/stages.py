"""A stage of supervised training."""

from __future__ import annotations

import dataclasses

from tools.checkpoints.demo import OBSERVATION_TOKENS


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training stage.

    Attributes:
      name: name of the stage; episodes of a seed depend on it.
      steps: optimiser steps.
      rows: rows of a packed batch.
      tokens: tokens of a row; longer episodes are skipped.
      muon_rate: peak learning rate of Muon.
      adam_rate: peak learning rate of AdamW.
      decay_share: final share of the steps in which the learning rates fall to a twentieth.
      context_weight: weight in the loss of the mean over the tokens that the policy does not write; the mean over those
        that it writes has weight 1.
      folder: name of the checkpoint folder that is written after the stage; '': none is.
      observation_tokens: longest search result; longer ones are cut.
      shares: role → share of the mixture; if empty, each role has its own (`demo.Role.share`).
    """

    name: str
    steps: int
    rows: int = 6
    tokens: int = 512
    muon_rate: float = 0.02
    adam_rate: float = 2e-3
    decay_share: float = 0.3
    context_weight: float = 0.1
    folder: str = ''
    observation_tokens: int = OBSERVATION_TOKENS
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
