"""A stage of supervised training, and the stages of the checkpoints for the miniature world."""

from __future__ import annotations

import dataclasses
from typing import Any

from tools.checkpoints import demos
from tools.checkpoints.demo import OBSERVATION_TOKENS


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training stage.

    Attributes:
      name: name of the stage.
      steps: optimiser steps.
      rows: rows of a packed batch.
      tokens: tokens of a row; longer episodes are skipped.
      muon_rate: peak learning rate of Muon.
      adam_rate: peak learning rate of AdamW.
      decay_share: final share of the steps in which the learning rates fall to a twentieth.
      context_weight: weight in the loss of the mean over the tokens that the policy does not write; the mean over those
        that it writes has weight 1.
      saved: whether a checkpoint folder is written after the stage.
      folder: name of this folder; '': the name of the stage.
      errors: deliberate errors in the demonstrations, in the type that the roles take (`demos.ErrorRates`,
        `english_demos.EnglishSetting`).
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
    saved: bool = False
    folder: str = ''
    errors: Any = demos.ErrorRates()
    observation_tokens: int = OBSERVATION_TOKENS
    shares: dict[str, float] = dataclasses.field(default_factory=dict)


# The stages of base_model.py; base_english.py has its own.
STAGES = (
    # Without copying and reading first, the roles take several times as many steps to learn.
    Stage(
        # Short rows: a passage and its copy.
        'copying',
        steps=1000,
        rows=16,
        tokens=64,
        adam_rate=5e-3,
        decay_share=0.0,
        context_weight=0.25,
        shares={'copy': 0.45, 'passage': 0.55},
    ),
    Stage(
        # Longer rows: three passages and their facts.
        'reading',
        steps=300,
        rows=6,
        tokens=320,
        adam_rate=4e-3,
        decay_share=0.0,
        context_weight=0.2,
        shares={'reading': 0.35, 'retelling': 0.3, 'solver': 0.35},
    ),
    # All roles with the shares of `demos.ROLES`.
    Stage('clean', steps=600, adam_rate=3e-3, decay_share=0.35, saved=True),
    # Continues from the clean parameters with lower rates: it unlearns some skill but keeps the format.
    Stage(
        'base',
        steps=220,
        muon_rate=0.005,
        adam_rate=5e-4,
        decay_share=0.4,
        saved=True,
        errors=demos.ErrorRates(
            early_answer=0.65, wrong_fact=0.75, no_think=0.4, wrong_hops=0.35, malformed=0.15
        ),
        shares={
            'reading': 0.03,
            'solver': 0.35,
            'solver_with_path': 0.09,
            'proposer': 0.33,
            'proposer_from_answer': 0.08,
            'answer_from_documents': 0.05,
            'challenger': 0.035,
            'task_solver': 0.035,
        },
    ),
)
