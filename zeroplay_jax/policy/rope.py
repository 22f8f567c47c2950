"""Rotary position embedding and its extensions to longer contexts.

Rotary position embedding (Su et al. 2021, arXiv:2104.09864) rotates pairs of channels by the angle
position · frequency. Linear interpolation divides all frequencies by `factor`. Llama 3.1 and YaRN divide those that
complete few turns within the original context length, keep those that complete many, and interpolate linearly in
between.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy.attention import AnyArray

# A number for every channel pair.
PerPair: TypeAlias = Float[Array, ' pairs']
# cos and sin of the rotation angles of every channel pair.
Angles: TypeAlias = tuple[
    Float[Array, 'batch length 1 pairs'],
    Float[Array, 'batch length 1 pairs'],
]


@dataclasses.dataclass(frozen=True)
class Linear:
    """Linear interpolation (Chen et al. 2023, arXiv:2306.15595): divides every frequency by `factor`."""

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def unscaled_share(self, frequency: PerPair, theta: float) -> PerPair:
        """Returns the unscaled share of every frequency: 0."""
        return jnp.zeros_like(frequency)


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Scaling of Llama 3.1: interpolates linearly in the number of turns. Fields as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor: ClassVar[float] = 1.0

    def unscaled_share(self, frequency: PerPair, theta: float) -> PerPair:
        """Returns the unscaled share of every frequency.

        It is 1 above `high_freq_factor` turns within the original context and 0 below `low_freq_factor` turns.
        """
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        turn_range = self.high_freq_factor - self.low_freq_factor
        return jnp.clip((turns - self.low_freq_factor) / turn_range, 0, 1)


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, §3.2 and §3.4). Fields as in config.json.

    `attention_factor` multiplies cos and sin, and therefore the attention scores by its square (the paper's
    temperature 1/t).
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def unscaled_share(self, frequency: PerPair, theta: float) -> PerPair:
        """Returns the unscaled share of every frequency.

        It is 1 above `beta_fast` turns within the original context and 0 below `beta_slow` turns.
        """
        pairs = frequency.shape[0]

        def pair_with_turns(turns):
            """Returns the fractional index of the channel pair that completes this number of turns."""
            log_ratio = math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
            return pairs * log_ratio / math.log(theta)

        low = pair_with_turns(self.beta_fast)
        high = pair_with_turns(self.beta_slow)
        # The paper interpolates in the number of turns; its published code, and the checkpoints trained with it,
        # interpolate in the index of the pair, by default between whole indices.
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        # The bound is the last channel, not the last pair, as in the published code.
        high = min(high, 2 * pairs - 1)
        # The two may coincide. Where the bound is below `low`, the published code divides by a negative number.
        span = high - low or 1e-3
        pair = jnp.arange(pairs, dtype=jnp.float32)
        scaled_share = (pair - low) / span
        return 1 - jnp.clip(scaled_share, 0, 1)


Scaling: TypeAlias = Linear | Llama3 | Yarn


def cos_sin(
    positions: Int[AnyArray, 'batch length'],
    head_dim: int,
    theta: float,
    scaling: Scaling | None = None,
) -> Angles:
    """Returns cos and sin of the rotation angles, float32, for all head_dim / 2 channel pairs.

    Args:
      positions: position of every token within its sequence.
      head_dim: channels of a head that are rotated.
      theta: base of the frequencies.
      scaling: extension to longer contexts, if any.
    """
    pairs = head_dim // 2
    # θ_i = theta^(-2i/d) (RoFormer §3.2.2), for the pairs i = 0 … d/2 - 1.
    exponent = -jnp.arange(pairs, dtype=jnp.float32) / pairs
    frequency = theta**exponent
    if scaling:
        unscaled = scaling.unscaled_share(frequency, theta)
        # The mean of `frequency` and `frequency / factor`, weighted by the unscaled share.
        multiplier = unscaled + (1 - unscaled) / scaling.factor
        frequency = frequency * multiplier
    # Computed in float32 also for bfloat16 activations: bfloat16 cannot represent positions above 256 exactly.
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jax.lax.platform_dependent(angle, cpu=_stored_cos_sin, default=_cos_sin)
    if scaling:
        cos = cos * scaling.attention_factor
        sin = sin * scaling.attention_factor
    return cos, sin


def _cos_sin(angle):
    return jnp.cos(angle), jnp.sin(angle)


def _stored_cos_sin(angle):
    """Returns cos and sin as arrays that XLA's CPU backend stores.

    It would otherwise fuse them into every use: they were computed again in every layer, for every head and once more
    for the gradient, and the rotation took four times as long (JAX 0.10.2). It fuses nothing out of a loop. The loop
    computes both twice, which is little beside that.
    """

    def compute(_, is_cos):
        return None, jnp.where(is_cos, jnp.cos(angle), jnp.sin(angle))

    _, (cos, sin) = jax.lax.scan(compute, None, jnp.array([True, False]))
    return cos, sin


def rotate(
    x: Float[Array, 'batch length heads head_dim'],
    angles: Angles,
) -> Float[Array, 'batch length heads head_dim']:
    """Returns queries or keys rotated by their positions.

    Args:
      x: queries or keys before the rotation.
      angles: result of `cos_sin`; channels beyond its pairs are not rotated.
    """
    cos, sin = angles
    rotated_channels = 2 * cos.shape[-1]
    if rotated_channels < x.shape[-1]:
        parts = rotate(x[..., :rotated_channels], angles), x[..., rotated_channels:]
        return jnp.concatenate(parts, -1)
    # A pair is (i, i + head_dim / 2), as in the Hugging Face checkpoints, not the paper's (2i, 2i + 1).
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    rotated = jnp.concatenate([rotated_first, rotated_second], -1)
    return rotated.astype(x.dtype)
