"""What the host reads of an update: whether there is anything to train on, and the statistics of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.objectives.types import Stats


def any_weight(batches: Sequence[Batch]) -> bool:
    """Returns whether any token of the batches adds to the loss, in any process."""
    has_weight = False
    for batch in batches:
        # Weights are 0 at prompts, at retrieved passages and in the empty rows that fill up a micro-batch.
        has_weight |= bool(batch.weight.any())
        if batch.teacher is not None:
            has_weight |= bool(batch.teacher.weight.any())
    # The rows of one process may all be empty; the decision must be the same in all of them.
    if jax.process_count() > 1:
        return bool(multihost_utils.process_allgather(np.array(has_weight)).any())
    return has_weight


def host_statistics(device_stats: Any, gradient_norm: jax.Array) -> Stats:
    """Returns the statistics of an update as floats, 'gradient_norm' and 'skipped_updates' among them; waits for it."""
    # All values are fetched in one transfer, because each transfer waits for the device.
    host_stats, host_norm = jax.device_get((device_stats, gradient_norm))
    stats = {}
    for name, (value_sum, count) in host_stats.items():
        stats[name] = (float(value_sum), float(count))
    # The sum over tokens is the batch's loss already: the weights contain the denominator.
    loss_sum, _ = stats['loss']
    stats['loss'] = (loss_sum, 1.0)

    # A norm of infinity or NaN would make the mean of the metric useless, so it gets count 0, and the update counts
    # as skipped (`role_update` did not apply it).
    if np.isfinite(host_norm):
        stats['gradient_norm'] = (float(host_norm), 1.0)
        stats['skipped_updates'] = (0.0, 1.0)
    else:
        stats['gradient_norm'] = (0.0, 0.0)
        stats['skipped_updates'] = (1.0, 1.0)
    return stats
