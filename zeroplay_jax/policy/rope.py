"""Rotary position embedding, and the two ways in which published models stretch it to a longer context.

Letters: B rows, L tokens, d head size. A pair of channels turns by position · frequency; a stretched rotation keeps the
frequencies that turn often within the original context and divides those that hardly turn by `factor`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling; fields as in config.json. Frequencies are blended linearly in their turns."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor: ClassVar[float] = 1.0

    def kept(self, frequency: jax.Array, theta: float) -> jax.Array:
        """Share of every frequency [d/2] that stays as it is: 1 above `high_freq_factor` turns, 0 below the low."""
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        return jnp.clip(
            (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1
        )


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., arXiv:2309.00071, §3.2, §3.4); fields as in config.json. Blended linearly in the channel."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float  # cos and sin are multiplied by it, and so the scores by its square
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def kept(self, frequency: jax.Array, theta: float) -> jax.Array:
        """Share of every frequency [d/2] that stays as it is: 1 above `beta_fast` turns, 0 below `beta_slow`."""
        half = frequency.shape[0]

        def channel(turns):
            return (
                half
                * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
                / math.log(theta)
            )

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        return 1 - jnp.clip(
            (jnp.arange(half, dtype=jnp.float32) - low) / max(high - low, 1e-3), 0, 1
        )


def angles(
    positions: jax.Array, head_dim: int, theta: float, scaling: Llama3 | Yarn | None = None
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of positions int32 [B, L], each float32 [B, L, 1, d/2]."""
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling:
        kept = scaling.kept(frequency, theta)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos, sin


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (i, i + d/2) of x [B, L, heads, d] by angles: (cos, sin), each [B, L, 1, d/2]."""
    cos, sin = angles
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
