"""From scored rollouts to the packed batch of one optimiser step, according to the settings of a role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zeroplay_jax.learner.packing import pack
from zeroplay_jax.objectives import advantages, aggregation
from zeroplay_jax.selfplay.row_metrics import Stats, rows_per_context
from zeroplay_jax.types import POLICY, Batch, Row


def set_advantages(rows: Sequence[Row], settings: Any, group_size: int | None = None) -> Stats:
    """Fills in `Row.advantage` from the rewards of each group; returns statistics as (sum, count).

    Args:
      settings: `config.<role>`.
      group_size: required rows per group, which catches prompts that got the same key by mistake;
        None: any.
    """
    values, stats = advantages.group_advantages(
        np.array([row.reward for row in rows], np.float64),
        np.array([row.group for row in rows], np.int64),
        baseline=settings.baseline,
        scale=settings.scale,
        ddof=settings.std_ddof,
        singleton=settings.singleton,
        valid=np.array([row.drop is None for row in rows], bool),
        lengths=np.array([row.trajectory.policy_tokens for row in rows], np.int64),
        group_size=group_size,
    )
    for row, value in zip(rows, values):
        row.advantage = float(value)
    return stats


def pack_rows(
    rows: Sequence[Row],
    settings: Any,
    micro_shape: tuple[int, int],
    distill_coef: float = 0.0,
    teacher_tokens: int = 0,
) -> list[Batch]:
    """Micro-batches of one optimiser step, from rows with advantages.

    Args:
      settings: `config.<role>`.
      micro_shape: (B, L) of a micro-batch.
      distill_coef: weight of the distillation term.
      teacher_tokens: length of a packed teacher row; 0 without a teacher.
    """
    valid = rows_per_context([row for row in rows if row.drop is None])
    lengths = np.array([np.sum(row.trajectory.source == POLICY) for row in valid], np.int64)
    # Rows of advantage 0 have no policy gradient, but they count in the mean, and KL, entropy
    # and distillation act on them.
    keeps_all = (
        settings.kl_coef or settings.entropy_coef or distill_coef or not settings.skip_uninformative
    )
    trained = [row for row in valid if keeps_all or row.advantage]
    distilled_tokens = 0
    for length, row in zip(lengths, valid):
        if row.teacher_prompt is not None:
            distilled_tokens += length
    if settings.aggregation == 'constant':
        denominator = settings.constant_norm * len(valid)
    else:
        denominator = aggregation.denominator(lengths, settings.aggregation)
    micro_rows, tokens = micro_shape
    return pack(
        trained,
        micro_rows=micro_rows,
        tokens=tokens,
        mode=settings.aggregation,
        total=denominator,
        teacher_tokens=teacher_tokens,
        teacher_total=float(distilled_tokens),
    )
