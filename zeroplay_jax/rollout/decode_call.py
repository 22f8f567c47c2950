"""A decode call that the host has not read yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool

from zeroplay_jax.rollout.requests import ActiveRollout
from zeroplay_jax.rollout.slot_programs import DecodeChunk


class DecodeCall:
    """A chunk on the device, and the turns that it decodes.

    The host may start a call before it has read the one before, in which some of these turns end. The device does not
    know that, because the host searches the stop strings: it decodes such a row further, and the slot may have another
    rollout when the call is read.

    Args:
      chunk: device arrays.
      rollouts: the rollout in every slot, at the start of the call.
    """

    def __init__(self, chunk: DecodeChunk, rollouts: Sequence[ActiveRollout | None]):
        self._chunk = chunk
        self._rollouts = list(rollouts)
        # Numbers of their turns.
        self._turns = [len(rollout.turns) if rollout else 0 for rollout in rollouts]

    def read(self, rollouts: Sequence[ActiveRollout | None]) -> DecodeChunk:
        """Waits for the device; returns the chunk as numpy arrays, with 0 tokens in the rows of turns that are over.

        Args:
          rollouts: the rollout in every slot now.
        """
        # All arrays are fetched in one transfer, because each transfer waits for the device.
        chunk = jax.device_get(self._chunk)
        is_current = self._is_current(rollouts)
        cached = chunk.cached
        if cached is not None:
            cached = np.where(is_current, cached, 0)
        return dataclasses.replace(chunk, count=np.where(is_current, chunk.count, 0), cached=cached)

    def _is_current(self, rollouts: Sequence[ActiveRollout | None]) -> Bool[np.ndarray, ' slots']:
        """Returns in which slots the turn is still in progress."""
        is_current = np.zeros(len(self._rollouts), bool)
        for slot, rollout in enumerate(self._rollouts):
            if rollout is not None and rollout is rollouts[slot] and rollout.is_running:
                is_current[slot] = len(rollout.turns) == self._turns[slot]
        return is_current
