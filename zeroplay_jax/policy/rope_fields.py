"""Reads the rotary embedding of a config.json."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from zeroplay_jax.policy import rope
from zeroplay_jax.policy.config_fields import OTHER_CHECKPOINT, Family, Fields

_SCALINGS = {'linear': rope.Linear, 'llama3': rope.Llama3, 'yarn': rope.Yarn}
_TYPES = ('default', *_SCALINGS)
_ORIGINAL = 'original_max_position_embeddings'
_LAYER_TYPES = ('full_attention', 'sliding_attention')
# `finetuned` tells how a checkpoint was made.
_COMMON_FIELDS = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor', 'finetuned'}


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

    Where several places state a parameter, the one that `transformers` goes by counts.

    Raises:
      CheckpointError: the decoder does not implement it.
    """
    if family.full_every:
        full, sliding = _sections_by_layer_type(fields, family)
        default_sliding_theta = family.sliding_theta or family.rope_theta
    else:
        older = fields.section('rope_scaling')
        full = older if older.values else fields.section('rope_parameters')
        # A length at the top level counts before that of the object.
        original = fields.get(_ORIGINAL)
        if original is not None and _kind(full) in ('llama3', 'yarn'):
            full = dataclasses.replace(full, values=full.values | {_ORIGINAL: original})
        sliding = full
        default_sliding_theta = fields.positive_float('rope_theta', family.rope_theta)
    theta = _theta(full, fields.positive_float('rope_theta', family.rope_theta))
    sliding_theta = _theta(
        sliding, fields.positive_float('rope_local_base_freq', default_sliding_theta)
    )
    max_positions = fields.positive_int('max_position_embeddings')
    scaling = _scaling(full, max_positions)
    sliding_scaling = _scaling(sliding, max_positions)
    # ModelConfig has one scaling; sliding layers may lack it.
    if sliding_scaling not in (None, scaling):
        raise fields.error(
            'rope_parameters: sliding layers must be unscaled or scaled as the full ones'
        )
    scale_sliding = sliding_scaling is not None or scaling is None
    return Rope(theta, sliding_theta, scaling, scale_sliding)


def _sections_by_layer_type(fields: Fields, family: Family) -> tuple[Fields, Fields]:
    """Returns the rotary parameters of the layers with full attention, and of those with a sliding window.

    `rope_parameters` has one object for each type; the older `rope_scaling` is added to that of full attention.

    Raises:
      CheckpointError: the parameters mean different things to different versions of `transformers`.
    """
    newer = fields.section('rope_parameters')
    for name in newer.values:
        if name not in _LAYER_TYPES:
            raise fields.error(
                f'rope_parameters.{name} has no effect in {family.architecture}',
                fix='write it into rope_parameters.full_attention or rope_parameters.sliding_attention',
            )
    full = newer.section('full_attention')
    sliding = newer.section('sliding_attention')
    older = fields.section('rope_scaling')
    if 'type' in older.values and 'rope_type' not in older.values:
        raise fields.error(
            f'rope_scaling.type is not read by every version of transformers in {family.architecture}',
            fix='name it rope_type',
        )
    if older.values:
        full = dataclasses.replace(older, values=full.values | older.values)
    # Without a base for sliding layers, the one at the top level counts for them in some versions only.
    stated_theta = fields.positive_float('rope_theta', family.rope_theta)
    is_ambiguous = not family.sliding_theta and sliding.get('rope_theta') is None
    if is_ambiguous and stated_theta != family.rope_theta:
        raise fields.error(
            f'rope_theta={stated_theta:g} is not read alike by all versions of transformers',
            fix='write rope_parameters.full_attention.rope_theta and rope_parameters.sliding_attention.rope_theta',
        )
    return full, sliding


def _theta(section: Fields, default: float) -> float:
    """Returns the base of the frequencies; CheckpointError if it is not above 1."""
    theta = section.positive_float('rope_theta', default)
    if theta <= 1:
        raise section.error(f'{section.prefix}rope_theta={theta} must exceed 1')
    return theta


def longest_context(fields: Fields, rotary: Rope) -> tuple[int, int]:
    """Returns (max_position_embeddings, the positions that the scaling extends them to), in tokens."""
    stated = fields.positive_int('max_position_embeddings')
    if rotary.scaling is None:
        return stated, stated
    # Folders state the length before or after the extension.
    original = getattr(rotary.scaling, _ORIGINAL, stated)
    return stated, max(stated, int(rotary.scaling.factor * original))


def _kind(section: Fields) -> Any:
    """Returns the rope type that an object states in either spelling."""
    return section.get('rope_type') or section.get('type') or 'default'


def _scaling(section: Fields, max_positions: int) -> rope.Scaling | None:
    """Returns the scaling that one object of rotary parameters describes.

    Args:
      section: the object.
      max_positions: default of `original_max_position_embeddings`.
    """
    kind = _kind(section)
    if kind not in _TYPES:
        raise section.error(
            f'{section.prefix}rope_type={kind!r} is not supported (only {", ".join(_TYPES)})',
            OTHER_CHECKPOINT,
        )
    _check_rope_fields(section, kind)
    if kind == 'default':
        return None
    factor = section.positive_float('factor')
    if kind == 'linear':
        return rope.Linear(factor)
    # Older folders name the original length only in max_position_embeddings.
    original = section.positive_int(_ORIGINAL, max_positions)
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
            raise section.error(
                f'{section.prefix}{name} is not supported with rope type {kind!r}', OTHER_CHECKPOINT
            )
    rotary_share = section.get('partial_rotary_factor')
    if rotary_share not in (None, 1):
        raise section.error(
            f'{section.prefix}partial_rotary_factor={rotary_share!r} is not supported (only 1)',
            OTHER_CHECKPOINT,
        )
