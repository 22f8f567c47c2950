"""Types that the objectives share: arrays of JAX or NumPy, and statistics."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Losses are called with JAX arrays inside jit and with NumPy arrays by tests and notebooks.
AnyArray: TypeAlias = Array | np.ndarray

# Of the tokens of packed rows, [B, T]: values, which tokens are trained, and the rollout of each (1, 2, …; 0: none).
PerToken: TypeAlias = Float[AnyArray, 'batch length']
TokenMask: TypeAlias = Bool[AnyArray, 'batch length']
Segments: TypeAlias = Int[AnyArray, 'batch length']
# Values that a device computed.
DevicePerToken: TypeAlias = Float[Array, 'batch length']

# A statistic is a pair (sum, count). Sums and counts of micro-batches, hosts and steps add up, which means do not;
# the division happens once, when a metric is logged.
Stats: TypeAlias = dict[str, tuple[float, float]]

# The same on the device, before jax.device_get: float32 scalars without gradient.
DeviceStats: TypeAlias = dict[str, tuple[Float[Array, ''], Float[Array, '']]]
