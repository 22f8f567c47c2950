"""Reads the rotary embedding of a config.json."""

from __future__ import annotations

import dataclasses
import math

from zeroplay_jax.policy import rope
from zeroplay_jax.policy.config_fields import Fields
from zeroplay_jax.policy.family_table import Family

_SCALINGS = {'linear': rope.Linear, 'llama3': rope.Llama3, 'yarn': rope.Yarn}
_TYPES = ('default', *_SCALINGS)
_COMMON_FIELDS = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor'}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of a model; the fields are those of ModelConfig.

    Attributes:
      theta: base of the frequencies.
      sliding_theta: the same for layers with a sliding window.
      scaling: extension to longer contexts, if any.
      scale_sliding: whether the scaling applies to layers with a sliding window.
    """

    theta: float
    sliding_theta: float
    scaling: rope.Scaling | None
    scale_sliding: bool


def read_rope(fields: Fields, family: Family) -> Rope:
    """Returns the rotary embedding that config.json describes, in either spelling.

    Raises:
      CheckpointError: the decoder does not implement it.
    """
    newer = fields.section('rope_parameters')
    older = fields.section('rope_scaling')
    if 'full_attention' in newer.values or 'sliding_attention' in newer.values:
        full = newer.section('full_attention')
        sliding = newer.section('sliding_attention')
    else:
        full = older if older.values else newer
        sliding = full
        if not family.scale_sliding:
            # A single object describes the layers with full attention; sliding layers share at most its theta.
            shared = {} if family.sliding_theta else {'rope_theta': full.get('rope_theta')}
            sliding = Fields(full.path, shared, full.prefix)
    default_theta = fields.positive_float('rope_theta', family.rope_theta)
    default_sliding_theta = default_theta
    if family.sliding_theta:
        default_sliding_theta = fields.positive_float('rope_local_base_freq', family.sliding_theta)
    theta = full.positive_float('rope_theta', default_theta)
    sliding_theta = sliding.positive_float('rope_theta', default_sliding_theta)
    max_positions = fields.get('max_position_embeddings')
    scaling = _scaling(full, max_positions)
    sliding_scaling = _scaling(sliding, max_positions)
    # ModelConfig has one scaling; sliding layers may lack it.
    if sliding_scaling not in (None, scaling):
        raise fields.error(
            'rope_parameters: sliding layers must be unscaled or scaled as the full ones'
        )
    scale_sliding = sliding_scaling is not None or scaling is None
    return Rope(theta, sliding_theta, scaling, scale_sliding)


def _scaling(section: Fields, max_positions: int | None) -> rope.Scaling | None:
    """Returns the scaling that one object of rotary parameters describes.

    Args:
      section: the object.
      max_positions: default of `original_max_position_embeddings`.
    """
    kind = section.get('rope_type') or section.get('type') or 'default'
    if kind not in _TYPES:
        raise section.error(
            f'{section.prefix}rope_type={kind!r} is not supported (only {", ".join(_TYPES)})'
        )
    _check_rope_fields(section, kind)
    if kind == 'default':
        return None
    factor = section.positive_float('factor')
    if kind == 'linear':
        return rope.Linear(factor)
    # Older folders name the original length only in max_position_embeddings.
    original = section.positive_int('original_max_position_embeddings', max_positions)
    if kind == 'llama3':
        low = section.positive_float('low_freq_factor')
        high = section.positive_float('high_freq_factor')
        if high <= low:
            raise section.error(
                f'{section.prefix}high_freq_factor={high} must exceed low_freq_factor={low}'
            )
        return rope.Llama3(factor, low, high, original)
    # YaRN §3.4: sqrt(1/t) = 0.1 ln(s) + 1 for a context s times as long.
    recommended = 0.1 * math.log(max(factor, 1.0)) + 1
    return rope.Yarn(
        factor,
        original,
        attention_factor=section.positive_float('attention_factor', recommended),
        beta_fast=section.positive_float('beta_fast', 32.0),
        beta_slow=section.positive_float('beta_slow', 1.0),
        truncate=section.boolean('truncate', True),
    )


def _check_rope_fields(section: Fields, kind: str) -> None:
    """Raises CheckpointError for a field that the rope type does not have, or a partial rotation.

    Such a field would be ignored silently. Null counts as absent.
    """
    supported = set(_COMMON_FIELDS)
    if kind in _SCALINGS:
        # The fields of these classes have the names of config.json.
        supported |= {field.name for field in dataclasses.fields(_SCALINGS[kind])}
    for name in sorted(section.values):
        if name not in supported and section.get(name) is not None:
            raise section.error(f'{section.prefix}{name} is not supported with rope type {kind!r}')
    rotary_share = section.get('partial_rotary_factor')
    if rotary_share not in (None, 1):
        raise section.error(
            f'{section.prefix}partial_rotary_factor={rotary_share!r} is not supported (only 1)'
        )
